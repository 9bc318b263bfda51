"""Guest kernels: Debian's packages, unpacked into a cache with an initramfs that fits each.

A kernel's directory is made under another name and renamed, so that runs at the same time cannot
see half of one. Nothing is installed, and apt's own configuration stays as it is.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

META_PACKAGE = "linux-image-amd64"
IMAGE = "linux-image-"  # begins the names of the packages that hold a kernel
UNUSED_S = 7 * 86400.0
# All that a guest can load; those that are not needed yet cost nothing but their space.
MODULES = (
    *("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "nvme", "fuse"),
    *("null_blk", "configfs", "f2fs", "btrfs", "zonefs", "xfs", "ext4", "loop", "overlay"),
    *("crc32c_generic", "crc32c_intel", "libcrc32c"),
)
INIT = Path(__file__).with_name("zns-vm-init")
BUSYBOX = Path("/bin/busybox")


class KernelError(Exception):
    """A kernel cannot be had."""


class Kernel(NamedTuple):
    version: str
    image: Path
    initramfs: Path


def cache_directory() -> Path:
    named = os.environ.get("ZNS_VM_CACHE")
    if named:
        return Path(named).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "retainzfs" / "zns-vm"


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a program and return what it printed; what it complained about is in the error."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, cwd=cwd, capture_output=True, check=False
    )
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise KernelError(f"{' '.join(map(str, command))}: exit code {done.returncode}: {said}")
    return done.stdout.decode(errors="replace")


def newest_kernel(wanted: str, cache: Path) -> Kernel:
    """Return the newest kernel of this version (or "backports"), fetched if the cache lacks it."""
    cache.mkdir(parents=True, exist_ok=True)
    package, apt = image_package(wanted, cache)
    version = package.removeprefix(IMAGE)
    made = cache / f"{version}-{recipe()}"
    if not made.exists():
        remove_unused(cache)
        with tempfile.TemporaryDirectory(prefix="new.", dir=cache) as scratch:
            build(package, apt, Path(scratch))
            try:
                (Path(scratch) / "made").rename(made)
            except OSError:
                if not made.exists():  # another run was faster
                    raise
    os.utime(made)
    return Kernel(version, made / "kernel", made / "initramfs")


def remove_unused(cache: Path) -> None:
    """Remove what no run has asked for in a while, half-made kernels among it."""
    for entry in cache.glob("*.*"):  # but for apt's lists
        with suppress(FileNotFoundError):
            if time.time() - entry.stat().st_mtime > UNUSED_S:
                shutil.rmtree(entry, ignore_errors=True)


def recipe() -> str:
    """Tell apart what the same kernel was packed with."""
    content = INIT.read_bytes() + BUSYBOX.read_bytes() + Path(__file__).read_bytes()
    return hashlib.sha256(content).hexdigest()[:12]


def image_package(wanted: str, cache: Path) -> tuple[str, list[str]]:
    """Name the package that has this version, with the options that let apt see it."""
    offered = []
    for backports in (False, True):
        apt = backports_options(cache) if backports else []
        package = newest_package(apt)
        version = package.removeprefix(IMAGE)
        if f"{version}.".startswith(f"{wanted}.") or (backports and wanted == "backports"):
            return package, apt
        offered.append(version)
    raise KernelError(f"Debian has no kernel {wanted}, but {' and '.join(offered)}")


def newest_package(apt: Sequence[str]) -> str:
    """Name the package that the meta package stands for; its version is in its name."""
    for updated in (False, True):
        if updated:
            run("apt-get", *apt, "update", "-qq")
        with suppress(KernelError):
            for line in run("apt-cache", *apt, "depends", META_PACKAGE).splitlines():
                if line.strip().startswith(f"Depends: {IMAGE}"):
                    return line.split()[1]
    raise KernelError(f"apt does not know the package {META_PACKAGE}")


def backports_options(cache: Path) -> list[str]:
    """Options that let apt see nothing but bookworm-backports, at the mirror the system uses."""
    own = cache / "apt"
    (own / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (own / "parts").mkdir(exist_ok=True)
    sources = own / "sources.list"
    sources.write_text(f"deb {mirror()} bookworm-backports main\n")
    return [
        *("-o", f"Dir::Etc::SourceList={sources}"),
        *("-o", f"Dir::Etc::SourceParts={own / 'parts'}"),
        *("-o", f"Dir::State::Lists={own / 'lists'}"),
        *("-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache="),
    ]


def mirror() -> str:
    """Return the address that the system itself fetches bookworm from."""
    for line in run("apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)").splitlines():
        site, _, release = line.partition(" ")
        if release == "bookworm":
            return site
    raise KernelError("apt has no source of bookworm, beside which its backports would be")


def build(package: str, apt: Sequence[str], scratch: Path) -> None:
    """Leave a kernel and its initramfs in the directory `made`."""
    sandbox = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
    try:
        run("apt-get", *apt, *sandbox, "download", "-qq", package, cwd=scratch)
    except KernelError:  # the lists are older than the archive
        run("apt-get", *apt, "update", "-qq")
        run("apt-get", *apt, *sandbox, "download", "-qq", package, cwd=scratch)
    [archive] = scratch.glob("*.deb")
    run("dpkg", "-x", archive, scratch / "unpacked")
    version = package.removeprefix(IMAGE)
    made = scratch / "made"
    made.mkdir()
    image = (scratch / "unpacked" / "boot" / f"vmlinuz-{version}").read_bytes()
    (made / "kernel").write_bytes(uncompressed(image))
    pack_initramfs(scratch / "unpacked", version, made / "initramfs")


def uncompressed(image: bytes) -> bytes:
    """Unpack a kernel here, which takes the guest 3 s; QEMU boots an ELF file directly.

    The offsets are those of the x86 boot protocol. What is packed other than with xz is packed
    faster too, and is left to the guest.
    """
    sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (sectors + 1) * 512 + offset
    payload = image[start : start + length - 4]  # its last bytes are the size
    return lzma.decompress(payload) if payload.startswith(b"\xfd7zXZ\0") else image


def pack_initramfs(unpacked: Path, version: str, target: Path) -> None:
    root = unpacked.parent / "root"
    for name in ("bin", "dev", "proc", "sys", "host"):
        (root / name).mkdir(parents=True)
    (root / "sbin").symlink_to("bin")
    shutil.copy(INIT, root / "init")
    shutil.copy(BUSYBOX, root / "bin" / "busybox")
    for applet in run(BUSYBOX, "--list").split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    copy_modules(unpacked, version, root)
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    with target.open("wb") as packed:
        subprocess.run(
            ["cpio", "-o", "-H", "newc", "--quiet", "--owner=0:0"],
            input=names.encode(),
            stdout=packed,
            cwd=root,
            check=True,
        )


def copy_modules(unpacked: Path, version: str, root: Path) -> None:
    """Copy the modules with all that they depend on, uncompressed: busybox loads them sooner."""
    run("depmod", "-b", unpacked, version)
    directory = Path("lib/modules") / version
    wanted = {
        Path(line.split()[1]).relative_to(unpacked)
        for name in MODULES
        for line in run("modprobe", "-d", unpacked, "-S", version, "-D", name).splitlines()
        if line.startswith("insmod ")
    }
    for path in wanted:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(unpacked / path, root / path)
        if path.suffix == ".xz":
            run("xz", "-d", root / path)
    for name in ("modules.order", "modules.builtin", "modules.builtin.modinfo"):
        shutil.copy(unpacked / directory / name, root / directory)
    run("depmod", "-b", root, version)
