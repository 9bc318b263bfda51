"""replay --device: the same workloads through a whole volume on a device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from retainzfs import volume_replay
from retainzfs.errors import UsageError
from retainzfs.evaluation.experiment import Cell, Setting, check_zones
from retainzfs.evaluation.workload import FAMILIES, Workload
from retainzfs.lifetimes import format_size
from retainzfs.replay_target import suited
from retainzfs.volume import Options

Make = Callable[[Setting, int], Workload]


def device_options(command: argparse.ArgumentParser, *, saves: bool = True) -> None:
    command.add_argument(
        "--device",
        metavar="TARGET",
        help="replay through a whole volume, with real bytes, in simulated time: `mem:`, an"
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
            what = "; bent ones are for simulated time" if "+" in setting.family else ""
            known = ", ".join(FAMILIES)
            raise UsageError(f"no family {setting.family!r} for a device; known: {known}{what}")
        active = setting.active or family.active
        size, zones = setting.zone_size or family.zone_size, family.zones
        own = suited(target, zones, active, setting.zone_size)
        if own is not None:
            size, zones, active = own
        check_zones(setting.load, active, size)
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
        _options(setting)
    todo = [(setting, seed, make(setting, seed)) for setting in cells for seed in seeds]
    for setting, seed, workload in todo:
        replayed = volume_replay.replay(target, workload, _options(setting), force=force)
        force = True  # what it holds from now on is ours
        cells[setting].results[seed] = result = replayed.result
        print(
            f"{setting.policy}, load {setting.load:.2f}, seed {seed}: {result.saves_done} of"
            f" {result.saves} saves, {format_size(replayed.verified)} read back",
            file=sys.stderr,
        )
    return cells


def _options(setting: Setting) -> Options:
    """How the volume is mounted. Raises UsageError for what there is not, or in simulation only."""
    if setting.parameters:
        raise UsageError("--set is for simulated time; leave out --device")
    if not setting.to_tails:
        raise UsageError("--reserve-only is for simulated time; leave out --device")
    return Options(policy=setting.policy, admission=setting.rule, rank=setting.rank)
