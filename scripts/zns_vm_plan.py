"""What to boot and what to run: QEMU's command line, and the guest's job as shell text."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from zns_vm_kernel import Kernel

QEMU = "qemu-system-x86_64"
PORTS = ("init", "stdout", "stderr", "control")  # virtio-serial ports, each called zns-vm.NAME
SHARED = "/run/zns-vm/shared"
CONTROL = "/dev/virtio-ports/zns-vm.control"
# Zone commands do not say which namespace they are for; the command before them in the trace does.
TRACED = ("pci_nvme_io_cmd", "pci_nvme_reset_zone", "pci_nvme_zns_zone_reset")

KERNEL_OPTIONS = (
    *("console=ttyS0", "quiet", "mitigations=off", "nokaslr"),
    # A kernel that panics stays there: if it rebooted, that would look like what tests do.
    *("panic=0", "oops=panic"),
    # Where the emulator has to wait for a CPU, time goes in leaps: no reason to give up.
    *("no_timer_check", "nowatchdog", "rcupdate.rcu_cpu_stall_suppress=1"),
)


class Refused(ValueError):
    """A value that the devices cannot have."""


class Namespace(NamedTuple):
    """An NVMe namespace; a conventional one has no zones. A limit of 0 is none."""

    size: int
    zone_size: int = 0
    zone_capacity: int = 0
    max_open: int = 0
    max_active: int = 0

    def check(self, block_size: int) -> None:
        if not self.zone_size:
            if self.size < block_size or self.size % block_size:
                raise Refused(f"{self.size} bytes are no whole blocks of {block_size}")
            return
        check_zones(self.size, self.zone_size, self.zone_capacity)
        if self.zone_size < block_size or self.zone_capacity % block_size:
            raise Refused(f"a zone or its capacity are no whole blocks of {block_size}")
        check_limits(self.max_open, self.max_active, self.size // self.zone_size)


class NullBlk(NamedTuple):
    """A zoned null_blk device, in memory; sizes in MiB. A limit of 0 is none."""

    size_mib: int
    zone_size_mib: int
    capacity_mib: int
    max_open: int
    max_active: int
    conventional_zones: int

    def check(self, block_size: int) -> None:
        check_zones(self.size_mib, self.zone_size_mib, self.capacity_mib)
        zones = self.size_mib // self.zone_size_mib
        if self.conventional_zones >= zones:
            raise Refused(f"{self.conventional_zones} of {zones} zones cannot be conventional")
        check_limits(self.max_open, self.max_active, zones)


def check_zones(size: int, zone_size: int, capacity: int) -> None:
    if zone_size < 1 or zone_size & (zone_size - 1):
        raise Refused(f"the zone size {zone_size} is no power of two, as Linux wants it")
    if size < zone_size or size % zone_size:
        raise Refused(f"a size of {size} is no whole number of zones of {zone_size}")
    if not 0 < capacity <= zone_size:
        raise Refused(f"a zone of {zone_size} cannot have a capacity of {capacity}")


def check_limits(max_open: int, max_active: int, zones: int) -> None:
    if max_open < 0 or max_active < 0 or max(max_open, max_active) > zones:
        raise Refused(f"limits of {max_open} open and {max_active} active of {zones} zones")
    if max_active and max_open > max_active:
        raise Refused(f"{max_open} zones cannot be open when {max_active} may be active")


@dataclass(frozen=True)
class Plan:
    command: list[str]
    environment: Mapping[str, str]
    directory: Path
    kept: list[Path]  # what stays visible below the guest's temporary filesystems
    shared: Path
    zoned: list[Namespace]
    conventional: list[Namespace] = field(default_factory=list)
    null_blks: list[NullBlk] = field(default_factory=list)
    block_size: int = 4096
    modules: tuple[str, ...] = ()
    memory_mib: int = 2048
    cpus: int = 2
    timeout_s: float = 1800.0
    boots: int = 100
    console: Path | None = None

    @property
    def namespaces(self) -> list[Namespace]:
        """Namespaces by number, from 1."""
        return self.zoned + self.conventional

    def check(self) -> None:
        for namespace in self.namespaces:
            namespace.check(self.block_size)
        for null_blk in self.null_blks:
            null_blk.check(self.block_size)


def qemu_command(
    plan: Plan, kernel: Kernel, ports: Mapping[str, int], images: list[int]
) -> list[str]:
    """Return QEMU's command line, given the descriptors that it inherits."""
    command = [QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-M", "pc"]
    # No KVM: where it is there but nested badly, guests hang.
    command += ["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", str(plan.cpus)]
    command += ["-m", f"{plan.memory_mib}M", "-kernel", str(kernel.image)]
    command += ["-initrd", str(kernel.initramfs)]
    command += ["-append", " ".join(KERNEL_OPTIONS)]
    for name, number in ports.items():
        command += ["-chardev", f"socket,id={name},fd={number}"]
    command += ["-serial", "chardev:console", "-mon", "chardev=monitor,mode=control"]
    command += ["-device", "virtio-serial-pci"]
    for name in PORTS:
        command += ["-device", f"virtserialport,chardev={name},name=zns-vm.{name}"]
    for tag, path in (("host", "/"), ("shared", str(plan.shared).replace(",", ",,"))):
        options = f"mount_tag={tag},security_model=none,multidevs=remap"
        command += ["-virtfs", f"local,path={path},{options}"]
    for event in TRACED:
        command += ["-trace", event]
    command += ["-device", "nvme,serial=zns-vm,id=nvme"]
    for number, (namespace, image) in enumerate(zip(plan.namespaces, images, strict=True), start=1):
        command += ["-drive", f"file=/proc/self/fd/{image},if=none,id=ns{number},format=raw"]
        command += ["-device", namespace_device(number, namespace, plan.block_size)]
    return command


def namespace_device(number: int, namespace: Namespace, block_size: int) -> str:
    device = f"nvme-ns,drive=ns{number},bus=nvme,nsid={number}"
    device += f",logical_block_size={block_size},physical_block_size={block_size}"
    if namespace.zone_size:
        device += f",zoned=true,zoned.zone_size={namespace.zone_size}"
        device += f",zoned.zone_capacity={namespace.zone_capacity}"
        device += f",zoned.max_open={namespace.max_open},zoned.max_active={namespace.max_active}"
    return device


def job(plan: Plan, boot: int, end_mark: str) -> str:
    """Return the shell text that the guest's /init reads: what to make, and what to run."""
    split = len(plan.zoned) + 1
    nulls = [f"/dev/nullb{number}" for number in range(len(plan.null_blks))]
    making = (
        f"null_blk {number} {' '.join(map(str, null))} {plan.block_size} || return 1"
        for number, null in enumerate(plan.null_blks)
    )
    environment = {
        **plan.environment,
        "ZNS_VM": "1",
        "ZNS_VM_BOOT": str(boot),
        "ZNS_VM_SHARED": SHARED,
        "ZNS_VM_CONTROL": CONTROL,
    }
    exported = " ".join(shlex.quote(f"{name}={value}") for name, value in environment.items())
    values = {
        "modules": " ".join(plan.modules),
        "zoned_numbers": " ".join(map(str, range(1, split))),
        "conventional_numbers": " ".join(map(str, range(split, len(plan.namespaces) + 1))),
        "null_blks": " ".join(nulls),
        "kept_paths": "".join(f"{path}\n" for path in plan.kept),
        "end_mark": end_mark,
    }
    return "\n".join(
        (
            *(f"{name}={shlex.quote(value)}" for name, value in values.items()),
            "make_null_blks() {",
            *making,
            ":",
            "}",
            "run_command() {",
            # What `env` is given may have names that a shell cannot export.
            f"exec setsid chroot /host /usr/bin/env -i --chdir={shlex.quote(str(plan.directory))} "
            f'{exported} ZNS_VM_ZONED="$zoned" ZNS_VM_CONVENTIONAL="$conventional" '
            f"{shlex.join(plan.command)}",
            "}",
            "",
        )
    )
