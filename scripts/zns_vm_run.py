"""Run a command in a virtual machine that has zoned devices."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

from zns_vm_kernel import KernelError, cache_directory, kernel
from zns_vm_machine import GaveUp, Machine, MachineError, Namespace, NullBlk, Plan, Watch, stop

TREE = Path(__file__).resolve().parent.parent
FAILED = 125
HIDDEN = (Path("/tmp"), Path("/var/tmp"), Path("/run"))  # temporary filesystems of the guest
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text: str) -> int:
    matched = re.fullmatch(r"([0-9]+)([KMG]?)", text.upper())
    if matched is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: 4096, 24M, 1G")
    return int(matched[1]) * UNITS[matched[2]]


def namespace(text: str) -> Namespace:
    parts = text.split(":")
    if len(parts) != 5:
        raise argparse.ArgumentTypeError(f"{text!r} is not SIZE:ZONE:CAPACITY:MAX_OPEN:MAX_ACTIVE")
    return Namespace(*(size(part) for part in parts[:3]), *(int(part) for part in parts[3:]))


def null_blk(text: str) -> NullBlk:
    parts = text.split(":")
    if len(parts) != 6:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not SIZE:ZONE_MIB:CAPACITY_MIB:MAX_OPEN:MAX_ACTIVE:CONVENTIONAL_ZONES"
        )
    return NullBlk(size(parts[0]) >> 20, *(int(part) for part in parts[1:]))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zns-vm", description=__doc__)
    parser.add_argument("--size", type=size, default="512M")
    parser.add_argument("--zone-size", type=size, default="4M")
    parser.add_argument("--zone-capacity", type=size, default="3M")
    parser.add_argument("--max-open", type=int, default=8)
    parser.add_argument("--max-active", type=int, default=14)
    parser.add_argument("--namespace", type=namespace, action="append", default=[])
    parser.add_argument("--conventional", type=size, action="append", default=[])
    parser.add_argument("--null-blk", type=null_blk, action="append", default=[])
    parser.add_argument("--block-size", type=int, choices=(512, 4096), default=4096)
    parser.add_argument("--kernel", default="6.1")
    parser.add_argument("--modules", default="")
    parser.add_argument("--memory", type=size, default="2G")
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1800.0)
    parser.add_argument("--boots", type=int, default=100)
    parser.add_argument("--share", type=Path)
    parser.add_argument("--console", type=Path)
    parser.add_argument("--cpu", default="max")
    parser.add_argument("--accelerator", default="tcg,thread=multi", help=argparse.SUPPRESS)
    parser.add_argument(
        "--host-options", default="msize=1048576,cache=loose", help=argparse.SUPPRESS
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    return parser


def kept_paths(command: list[str], environment: dict[str, str], directory: Path) -> list[Path]:
    """Find what the command will look for where the guest has temporary filesystems of its own."""
    named = [str(directory), str(TREE), sys.prefix, *command]
    for variable in ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "RETAINZFS_VENV"):
        named += environment.get(variable, "").split(":")
    paths = {Path(os.path.abspath(directory / name)) for name in named if name}
    kept: list[Path] = []
    for path in sorted(paths):
        below = any(path.is_relative_to(hidden) and path != hidden for hidden in HIDDEN)
        inside = any(path.is_relative_to(other) for other in kept)
        if below and not inside and path.exists():
            kept.append(path)
    return kept


def main() -> int:
    given = arguments().parse_args()
    environment = dict(os.environ)
    directory = Path.cwd()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    cache = cache_directory()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="zns-vm.") as scratch:
            first = Namespace(
                given.size, given.zone_size, given.zone_capacity, given.max_open, given.max_active
            )
            plan = Plan(
                kernel=kernel(given.kernel, cache),
                command=given.command,
                environment=environment,
                directory=directory,
                kept=kept_paths(given.command, environment, directory),
                shared=(given.share or Path(scratch)).absolute(),
                zoned=[first, *given.namespace],
                conventional=[Namespace(n) for n in given.conventional],
                null_blks=given.null_blk,
                block_size=given.block_size,
                modules=tuple(given.modules.replace(",", " ").split()),
                memory_mib=given.memory >> 20,
                cpus=given.cpus,
                timeout_s=given.timeout,
                boots=given.boots,
                console=given.console,
                accelerator=given.accelerator,cpu=given.cpu,
                host_options=given.host_options,
            )
            with Machine(plan) as machine:
                watch = Watch(machine)
                try:
                    return watch.run()
                except MachineError:
                    for line in watch.console:
                        print("console:", line.decode(errors="replace"), file=sys.stderr)
                    raise
    except (KernelError, MachineError, OSError) as error:
        print(f"zns-vm: {error}", file=sys.stderr)
        return FAILED
    except GaveUp as error:
        print(f"zns-vm: {error}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
