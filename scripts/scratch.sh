# shellcheck shell=bash
# For sourcing: $work, a new directory below TMPDIR (or /var/tmp), and $mount, a mount point in it.
# Whatever happens, the script's end unmounts what is mounted there and removes all of it.

work=$(mktemp -d "${TMPDIR:-/var/tmp}/retainzfs.XXXXXX")
mount=$work/mnt
mkdir "$mount"

scratch_clean_up() {
    local status=$? directory
    trap - EXIT
    # Directories are looked up in the list, since a mount without its daemon cannot be asked.
    if grep -qF " $mount " /proc/self/mounts; then
        retainzfs umount "$mount" || fusermount3 -u -z "$mount"
    fi
    while read -r _ directory _; do
        [[ $directory != "$work"/* ]] || umount -l "$directory"
    done </proc/self/mounts
    rm -rf --one-file-system -- "$work"
    [ "$status" = 0 ] || echo "$0: failed with exit code $status" >&2
    exit "$status"
}
trap scratch_clean_up EXIT
trap 'exit 130' INT TERM HUP
