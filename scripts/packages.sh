# shellcheck shell=bash
# For sourcing: installs those of the named Debian packages that are missing. Prints to standard error.
#
#   install_packages NAME...

install_packages() {
    local missing=() package as_root=()
    for package in "$@"; do
        [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
            missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" != 0 ]; then
        if ! command -v sudo >/dev/null; then
            echo "${0##*/}: run as root, or install: ${missing[*]}" >&2
            return 1
        fi
        as_root=(sudo)
    fi
    echo "${0##*/}: installing Debian packages: ${missing[*]}" >&2
    "${as_root[@]}" apt-get update -qq >&2 &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
            --no-install-recommends "${missing[@]}" </dev/null >/dev/null && return 0
    echo "${0##*/}: cannot install these Debian packages: ${missing[*]}" >&2
    return 1
}
