"""replay --device: the same workloads through a whole volume on a device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace

from retainzfs import volume_replay
from retainzfs.errors import UsageError
from retainzfs.evaluation.experiment import Cell, Setting
from retainzfs.evaluation.workload import FAMILIES, Workload
from retainzfs.lifetimes import format_size
from retainzfs.replay_target import suited

# Fields of a setting that no volume has, and the options that say them.
SIMULATED = {"parameters": "--set", "to_tails": "--reserve-only"}

Make = Callable[[Setting, int], Workload]


def device_options(command: argparse.ArgumentParser, *, saves: bool = True) -> None:
    command.add_argument(
        "--device",
        metavar="TARGET",
        help="replay through a whole volume, with real bytes, in simulated time: `memory:`, an"
        " image that is made if need be, or a block device. TARGET is formatted for every replay;"
        " what it holds is lost",
    )
    command.add_argument(
        "--force", action="store_true", help="use a TARGET that already holds something"
    )
    if not saves:
        return
    command.add_argument(
        "--saves", type=_count, metavar="N", help="with --device: as many saves, not the family's"
    )


def check_without_device(given: argparse.Namespace) -> None:
    """Raises UsageError for options that mean something with --device only."""
    if given.force or getattr(given, "saves", None):
        raise UsageError("--force and --saves are for replays on a --device")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of saves")
    return int(text)


def of_family(target: str, saves: int | None = None) -> Make:
    """What makes the workload of a setting for a target's zones. Says so when these are others
    than the family's."""
    told: set[str] = set()

    def make(setting: Setting, seed: int) -> Workload:
        family = FAMILIES.get(setting.family)
        if family is None:
            raise UsageError(f"no family {setting.family!r}; known: {', '.join(FAMILIES)}")
        active = setting.active or family.active
        size, zones = setting.zone_size or family.zone_size, family.zones
        own = suited(target, zones, active)
        if own is not None:
            size, zones, active = own
            if setting.zone_size not in (0, size):
                raise UsageError(f"{target}: its zones hold {size} bytes; leave out --zone-size")
        changed = replace(
            family, zone_size=size, zones=zones, active=active, saves=saves or family.saves
        )
        if (zones, active) != (family.zones, setting.active or family.active):
            said = f"{zones} data zones, {active} of them active; loads are of these"
            if said not in told:
                print(f"retainzfs: {target}: {said}", file=sys.stderr)
            told.add(said)
        return changed.make(seed, setting.load)

    return make


def run_on_device(
    target: str, asked: Iterable[Setting], seeds: Sequence[int], make: Make, *, force: bool
) -> dict[Setting, Cell]:
    """Replay every setting and seed on the target, one behind the other.

    Without `force` a target that holds something is refused. Raises UsageError, before anything is
    written, for what a mounted volume cannot choose.
    """
    cells = {setting: Cell(setting) for setting in asked}
    for setting in cells:
        volume_replay.options(setting.policy, volume_replay.EpochClock(), _choices(setting))
    todo = [(setting, seed, make(setting, seed)) for setting in cells for seed in seeds]
    for setting, seed, workload in todo:
        replayed = volume_replay.replay(
            target, workload, setting.policy, _choices(setting), force=force
        )
        force = True  # what it holds from now on is ours
        cells[setting].results[seed] = result = replayed.result
        print(
            f"{setting.policy}, load {setting.load:.2f}, seed {seed}: {result.saves_done} of"
            f" {result.saves} saves, {format_size(replayed.verified)} read back",
            file=sys.stderr,
        )
    return cells


def _choices(setting: Setting) -> dict[str, str]:
    """What a volume is to choose. Raises UsageError for what is the simulator's alone."""
    usual = Setting(setting.policy)
    for field in fields(Setting):
        option = SIMULATED.get(field.name)
        if option and getattr(setting, field.name) != getattr(usual, field.name):
            raise UsageError(f"{option} is for simulated time; leave out --device")
    rule = setting.rule if "admission" in volume_replay.CHOICES else setting.admission
    return {"admission": rule, "rank": "" if setting.rank == usual.rank else setting.rank}
