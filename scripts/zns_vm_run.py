"""Run a command in a virtual machine that has zoned devices: the command line of it."""

from __future__ import annotations

import argparse
import compileall
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from zns_vm_kernel import Kernel, KernelError, cache_directory, newest_kernel
from zns_vm_machine import Machine, MachineError, Outcome, TimedOut, Watch
from zns_vm_plan import Namespace, NullBlk, Plan, Refused

TREE = Path(__file__).resolve().parent.parent
FAILED, TIMED_OUT = 125, 124
HIDDEN = (Path("/tmp"), Path("/var/tmp"), Path("/run"))  # temporary filesystems of the guest
NAMESPACE = "SIZE:ZONE_SIZE:ZONE_CAPACITY:MAX_OPEN:MAX_ACTIVE"
NULL_BLK = "SIZE:ZONE_MIB:CAPACITY_MIB:MAX_OPEN:MAX_ACTIVE:CONVENTIONAL_ZONES"
# What the device tests want beside the first one: zones that are soon full, few slots, no limits.
SMALL = [
    Namespace(4 << 20, 256 << 10, 256 << 10, 4, 6),
    Namespace(8 << 20, 512 << 10, 256 << 10, 4, 6),
    Namespace(4 << 20, 256 << 10, 256 << 10, 0, 0),
]
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
DESCRIPTION = """
Runs a command as root in a virtual machine that has zoned devices: by default an NVMe ZNS
namespace for a filesystem and small ones for the device tests. The machine is emulated (no KVM),
boots in a few seconds, and runs programs 10 to 20 times slower than this one. It needs Debian 12,
and root to install packages that are missing.
"""
EPILOG = """
The command finds this machine's files, its environment and its working directory, and may change
files; /tmp, /var/tmp and /run are empty, but for what the command line, the working directory,
PATH, PYTHONPATH and VIRTUAL_ENV name in there. It has no network and no standard input, its output
is passed on as it comes, and whatever it leaves running ends with it.

Variables in the guest:
  ZNS_VM               1
  ZNS_VM_BOOT          0, and one more after every reset
  ZNS_VM_ZONED         the zoned devices: --size, every --namespace, every --null-blk
  ZNS_VM_CONVENTIONAL  the devices of --conventional
  ZNS_VM_SHARED        the directory of --share; without a cache, so that a file that was synced is
                       there after a reset (what was written elsewhere shortly before may be lost)
  ZNS_VM_CONTROL       a port for requests, a line each:
    reset [SECONDS]    resets the machine, as if it lost its power, that many seconds later
    counts [WORD]      answers with a line of JSON: what the devices have counted over all boots,
                       {"request": WORD, "zoned": [{"bytes_written": ..., "zones_reset": ...}], ...}
                       exec 3<>"$ZNS_VM_CONTROL"; echo counts >&3; read -r answer <&3

After a reset, and after `echo b >/proc/sysrq-trigger` just as well, the guest boots again and runs
the same command with the next ZNS_VM_BOOT. What the NVMe devices hold survives that, and their
write pointers too; null_blk devices are made anew.

Filesystems (f2fs, btrfs, zonefs, xfs, ext4) load when they are mounted. With kernel 6.12 a null_blk
device gets bad zones by their first sector: /sys/kernel/config/nullb/nullb0/zone_offline and
zone_readonly. Kernels before 6.10 want the scheduler mq-deadline on zoned devices.

Exit code: the command's; 124 after --timeout; 125 when the machine failed; 126 and 127 when the
command cannot be run; 128 and the signal's number when a signal ended this script.
"""


def size(text: str) -> int:
    matched = re.fullmatch(r"([0-9]+)([KMG]?)", text.upper())
    if matched is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 4096, 24M or 1G")
    return int(matched[1]) * UNITS[matched[2]]


def fields(text: str, names: str) -> list[str]:
    given = text.split(":")
    if len(given) != len(names.split(":")) or not all(given):
        raise argparse.ArgumentTypeError(f"{text!r} is not {names}")
    return given


def number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def namespace(text: str) -> Namespace:
    given = fields(text, NAMESPACE)
    return Namespace(*map(size, given[:3]), *map(number, given[3:]))


def null_blk(text: str) -> NullBlk:
    whole, *others = fields(text, NULL_BLK)
    return NullBlk(size(whole) >> 20, *map(number, others))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="zns-vm",
        usage="zns-vm [OPTION...] -- COMMAND [ARGUMENT...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_devices(made.add_argument_group("devices"))
    add = made.add_argument_group("the machine").add_argument
    add(
        "--kernel",
        default="6.1",
        metavar="VERSION",
        help="6.1, or 6.12 of Debian's backports (6.1)",
    )
    add("--modules", default="", metavar="NAMES", help="to load, separated by commas")
    add("--memory", type=size, default="2G", metavar="SIZE", help="(%(default)s)")
    add("--cpus", type=number, default=2, metavar="N", help="(%(default)s)")
    add("--timeout", type=float, default=1800.0, metavar="S", help="for all boots (%(default)g s)")
    add("--boots", type=number, default=100, metavar="N", help="more are an error (%(default)s)")
    add("--share", type=Path, metavar="DIRECTORY", help="ZNS_VM_SHARED (one that is removed)")
    add("--console", type=Path, metavar="FILE", help="for what the guest's kernel says")
    add("--counts", type=Path, metavar="FILE", help="for what the devices have counted in the end")
    made.add_argument("command", nargs="+", help=argparse.SUPPRESS)
    return made


def add_devices(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--size", type=size, default="512M", help="of the first namespace (%(default)s); 0: none")
    add("--zone-size", type=size, default="4M", metavar="SIZE", help="a power of two (%(default)s)")
    add("--zone-capacity", type=size, default="3M", metavar="SIZE", help="(%(default)s)")
    add("--max-open", type=number, default=8, metavar="ZONES", help="(%(default)s); 0: no limit")
    add("--max-active", type=number, default=14, metavar="ZONES", help="(%(default)s); 0: no limit")
    add("--block-size", type=int, choices=(512, 4096), default=4096, help="(%(default)s)")
    for name, made, form, what in (
        (
            "--namespace",
            namespace,
            NAMESPACE,
            "a zoned namespace, not the small ones",
        ),
        ("--conventional", size, "SIZE", "a namespace without zones"),
        ("--null-blk", null_blk, NULL_BLK, "a zoned null_blk device, which is in memory"),
    ):
        add(name, type=made, metavar=form, action="append", default=[], help=f"{what}; repeatable")


def plan(given: argparse.Namespace, directory: Path, temporary: Path) -> Plan:
    """Work out what to boot, and check it before anything is fetched."""
    environment = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    limits = (given.max_open, given.max_active)
    main_namespace = Namespace(given.size, given.zone_size, given.zone_capacity, *limits)
    more = given.namespace or ([] if given.null_blk else SMALL)
    made = Plan(
        command=given.command,
        environment=environment,
        directory=directory,
        kept=kept_paths(given.command, environment, directory),
        shared=(given.share or temporary).absolute(),
        zoned=[*([main_namespace] if given.size else []), *more],
        conventional=[Namespace(each) for each in given.conventional],
        null_blks=given.null_blk,
        block_size=given.block_size,
        modules=tuple(given.modules.replace(",", " ").split()),
        memory_mib=given.memory >> 20,
        cpus=given.cpus,
        timeout_s=given.timeout,
        boots=given.boots,
        console=given.console,
    )
    made.check()
    if not made.shared.is_dir():
        raise Refused(f"{made.shared} is no directory to share")
    return made


def kept_paths(command: list[str], environment: Mapping[str, str], directory: Path) -> list[Path]:
    """Find what the command will look for where the guest has temporary filesystems."""
    named = [str(directory), str(TREE), sys.prefix, *command]
    for variable in ("PATH", "PYTHONPATH", "VIRTUAL_ENV"):
        named += environment.get(variable, "").split(":")
    kept: list[Path] = []
    for path in sorted({Path(os.path.abspath(directory / name)) for name in named if name}):
        hidden = any(path.is_relative_to(top) and path != top for top in HIDDEN)
        if hidden and path.exists() and not any(path.is_relative_to(other) for other in kept):
            kept.append(path)
    return kept


def watched(machine_plan: Plan, kernel: Kernel) -> Outcome:
    with Machine(machine_plan, kernel) as machine:
        watch = Watch(machine)
        try:
            return watch.run()
        except MachineError:
            for line in watch.console:
                print(f"zns-vm: console: {line}", file=sys.stderr)
            raise


def run(given: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="zns-vm.") as temporary:
        made = plan(given, Path.cwd(), Path(temporary))
        # What the guest would compile itself, at a tenth of the speed.
        compileall.compile_dir(TREE / "retainzfs", quiet=2)
        outcome = watched(made, newest_kernel(given.kernel, cache_directory()))
    if given.counts is not None:
        given.counts.write_text(json.dumps(outcome.counts, indent=2) + "\n")
    return outcome.code


class Stopped(Exception):
    """A signal asked this process to end."""


def stop(received: int, frame: FrameType | None) -> None:
    for each in STOPPING:
        signal.signal(each, signal.SIG_IGN)  # let the machine be removed in peace
    raise Stopped(received)


def main() -> int:
    given = parser().parse_args()
    for each in STOPPING:
        signal.signal(each, stop)
    try:
        return run(given)
    except Stopped as stopped:
        [received] = stopped.args
        print(f"zns-vm: stopped by {signal.Signals(received).name}", file=sys.stderr)
        return 128 + int(received)
    except TimedOut as error:
        print(f"zns-vm: {error}", file=sys.stderr)
        return TIMED_OUT
    except (KernelError, MachineError, Refused, OSError) as error:
        print(f"zns-vm: {error}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
