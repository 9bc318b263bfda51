"""replay: run placement policies over a workload, in simulated time or through a volume."""

from __future__ import annotations

import argparse
import csv
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from retainzfs import placement
from retainzfs.cli import replay_traces
from retainzfs.cli.output import Progress, check_parent, print_json, print_table, size_argument
from retainzfs.cli.replay_device import (
    check_without_device,
    device_options,
    of_family,
    run_on_device,
)
from retainzfs.errors import UsageError
from retainzfs.evaluation import experiment, pictures, tables
from retainzfs.evaluation.experiment import FIGURES, Cell, Setting
from retainzfs.evaluation.measures import Result
from retainzfs.evaluation.workload import FAMILIES
from retainzfs.placement.admission import RULES
from retainzfs.placement.collection import RANKS

if TYPE_CHECKING:
    from retainzfs.cli.output import Commands

SEEDS: Final = 8
SEEDS_MOST: Final = 10_000
SETTING_COLUMNS: Final = (
    *("family", "policy", "parameters", "load", "admission", "active", "zone_size", "rank"),
)


def add_commands(commands: Commands) -> None:
    command = commands.add_parser(
        "replay",
        help="run placement policies over a workload",
        description="Run placement policies over a synthetic workload, in simulated time or with"
        " --device through a whole volume, and print what they cost: mean and [least-greatest] over"
        " the seeds. Overhead is the time average of dead bytes that are not reset yet (invalid)"
        " and of unused room in zones in use (tail), in zones. In simulated time"
        " zenfs is shown with the best of its mappings and finish thresholds.",
        epilog=f"families: {', '.join(FAMILIES)}. policies: {', '.join(placement.policies())}.",
    )
    workload_options(command)
    policy_options(command)
    device_options(command)
    output_options(command)
    command.set_defaults(run=_replay)
    replay_traces.add_commands(
        command.add_subparsers(title="traces", metavar="ACTION", action=_WithoutOptions)
    )


class _WithoutOptions(argparse._SubParsersAction):  # type: ignore[type-arg]
    """Refuses options in front of an action: it has its own."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        for name, value in vars(namespace).items():
            if value != parser.get_default(name):
                option = name.replace("_", "-")
                parser.error(f"--{option} has to stand behind {values[0]!r}, if it has it")
        super().__call__(parser, namespace, values, option_string)


# Options


def workload_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--family", default="paper", metavar="NAME", help="default %(default)s")
    command.add_argument(
        "--load",
        action="append",
        type=float,
        metavar="SHARE",
        help="share of the data zones that lives at the peak, default 0.84; may be repeated",
    )
    command.add_argument(
        "--seeds",
        type=_seeds,
        default=range(SEEDS),
        metavar="N",
        help=f"how many inputs, or which: 100-119; default {SEEDS}",
    )
    command.add_argument(
        "--active",
        type=int,
        default=0,
        metavar="N",
        help="active zones for data, default the family's",
    )
    command.add_argument(
        "--zone-size",
        type=size_argument,
        default=0,
        metavar="S",
        help="capacity of a zone; generations and device grow with it",
    )


def policy_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help="default plan; may be repeated, ratios are to the first",
    )
    command.add_argument(
        "--admission",
        default="",
        metavar="RULE",
        help=f"{', '.join(RULES)}; default priced for plan and plan-ahead, else fixed",
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of the policy, span=4 or mapping=classes; may be repeated",
    )
    command.add_argument(
        "--rank",
        default="dead-time",
        metavar="NAME",
        help=f"which zone collection empties: {', '.join(RANKS)}; default %(default)s",
    )
    command.add_argument(
        "--reserve-only",
        action="store_true",
        help="collection copies to the zone held back for it, not into tails",
    )


def output_options(command: argparse.ArgumentParser) -> None:
    what = command.add_mutually_exclusive_group()
    what.add_argument(
        "--table",
        action="store_true",
        help="the main table: policies, loads and admission rules, with published figures",
    )
    what.add_argument(
        "--zenfs", action="store_true", help="zenfs with every mapping and finish threshold"
    )
    command.add_argument(
        "--jobs",
        type=int,
        default=0,
        metavar="N",
        help="replays at a time, default one for each processor",
    )
    command.add_argument("--json", action="store_true", help="print seeds and mean as JSON")
    command.add_argument("--csv", type=Path, metavar="FILE", help="write a line for every seed")
    command.add_argument(
        "--pictures", type=Path, metavar="DIR", help="draw PNG pictures (needs matplotlib)"
    )


def _seeds(text: str) -> range:
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of seeds nor a range 8-15")
    seeds = range(int(match[1]), int(match[2]) + 1) if match[2] else range(int(match[1]))
    if not 0 < len(seeds) <= SEEDS_MOST:
        raise argparse.ArgumentTypeError(f"{text!r} are {len(seeds)} seeds; 1 to {SEEDS_MOST} go")
    return seeds


# The command


def _replay(given: argparse.Namespace) -> int:
    if given.table:
        _alone(given)
    asked = tables.main_table() if given.table else settings(given)
    if given.zenfs:
        asked = [v for setting in asked for v in tables.variants(replace(setting, policy="zenfs"))]
    check_outputs(given)
    if given.device is None:
        check_without_device(given)
        answers = tables.answers(asked, run(asked, given.seeds, given.jobs))
    else:
        make = of_family(given.device, given.saves)
        answers = run_on_device(given.device, asked, given.seeds, make, force=given.force)
    report(asked, answers, given)
    return 0


def _alone(given: argparse.Namespace) -> None:
    """The main table has its own policies and loads."""
    names = ("policy", "load", "set", "admission", "active", "zone_size", "reserve_only")
    for name in names:
        if getattr(given, name):
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} has no meaning with --table, which has its own settings")
    if (given.family, given.rank) != ("paper", "dead-time"):
        raise UsageError("--table has its own settings: leave out --family and --rank")


def settings(given: argparse.Namespace) -> list[Setting]:
    """What the options ask for. Raises UsageError."""
    names = ["zenfs"] if given.zenfs else given.policy or ["plan"]
    if given.zenfs and given.policy not in (None, ["zenfs"]):
        raise UsageError("--zenfs shows zenfs only; leave out --policy")
    made = {name: _parameters(name, given.set) for name in names}
    for text in given.set:
        if not any(text.partition("=")[0] in dict(parameters) for parameters in made.values()):
            known = "; ".join(f"{name} has {', '.join(_defaults(name)) or 'none'}" for name in made)
            raise UsageError(f"--set {text}: no such parameter; {known}")
    return [
        Setting(
            name,
            given.family,
            load,
            given.admission,
            parameters,
            given.active,
            given.zone_size,
            given.rank,
            not given.reserve_only,
        )
        for load in dict.fromkeys(given.load or [0.84])
        for name, parameters in made.items()
    ]


def _defaults(policy: str) -> dict[str, Any]:
    """The parameters of a policy, with what they are if not set."""
    made: Any = placement.policy(policy)
    return {f.name: getattr(made, f.name) for f in fields(made) if f.name != "name"}


def _parameters(policy: str, texts: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    """Those of `NAME=VALUE` that the policy knows."""
    defaults = _defaults(policy)
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: give NAME=VALUE")
        if name in defaults:
            found[name] = _value(text, value, defaults[name])
    return tuple(found.items())


def _value(option: str, text: str, default: object) -> Any:
    """`text` as what the default is."""
    if isinstance(default, str):
        return text
    try:
        if isinstance(default, bool):
            return {"0": False, "1": True, "false": False, "true": True}[text.lower()]
        value = int(text) if isinstance(default, int) else float(text)
    except (KeyError, ValueError):
        kind = {bool: "0 or 1", int: "a whole number"}.get(type(default), "a number")
        raise UsageError(f"--set {option}: {text!r} is not {kind}") from None
    if math.isnan(value) or value < 0:
        raise UsageError(f"--set {option}: {text} is no quantity; give 0 or more")
    return value


def check_outputs(given: argparse.Namespace) -> None:
    """Say before the run what would fail after it."""
    if given.jobs < 0:
        raise UsageError(f"--jobs {given.jobs}: give 1 or more")
    check_parent("--csv", given.csv)
    if given.pictures is not None:
        pictures.require()
    for name in ("table", "zenfs", "pictures"):
        if given.device is not None and getattr(given, name):
            raise UsageError(f"--{name} is for simulated time; leave out --device")


def run(asked: Iterable[Setting], seeds: Sequence[int], jobs: int = 0) -> Mapping[Setting, Cell]:
    """Replay all, `jobs` at a time (0: as there are processors); show how far it is on a terminal.

    Raises UsageError before the first replay where a setting is impossible.
    """
    todo = list(dict.fromkeys(variant for setting in asked for variant in tables.variants(setting)))
    experiment.check(todo, seeds)
    progress, total = Progress("replay", str), len(todo) * len(seeds)

    def counted() -> Iterable[tuple[Setting, int, Result]]:
        found = experiment.run(todo, seeds, jobs or len(os.sched_getaffinity(0)))
        for done, one in enumerate(found, 1):
            progress(done, total)
            yield one

    return experiment.cells(counted())


# What it says


def report(
    asked: Sequence[Setting], answers: Mapping[Setting, Cell], given: argparse.Namespace
) -> None:
    if given.csv is not None:
        write_csv(given.csv, answers.values())
    if given.pictures is not None:
        given.pictures.mkdir(parents=True, exist_ok=True)
        pictures.draw_all(list(answers.values()), given.pictures)
    if given.json:
        print_json([_as_json(setting, cell, given) for setting, cell in answers.items()])
        return
    heads = ["POLICY", "LOAD", "ADMISSION", *tables.HEADS]
    rows = [
        [cell.setting.label, f"{setting.load:g}", setting.rule, *tables.columns(cell)]
        for setting, cell in answers.items()
    ]
    if given.table:
        heads += ["PAPER", "DESIGN"]
        for setting, row in zip(answers, rows, strict=True):
            row += [str(tables.paper(setting)) or "-", str(tables.design(setting)) or "-"]
    elif len({setting.label for setting in asked}) > 1 and not given.zenfs:
        heads.insert(3, "RATIO")
        for setting, row in zip(answers, rows, strict=True):
            first = answers[next(s for s in asked if s.load == setting.load)]
            row.insert(3, f"{ratio(answers[setting], first):.2f}")
    print_table(heads, rows, right=" ".join(["LOAD", "RATIO", *tables.HEADS]))


def ratio(cell: Cell, to: Cell) -> float:
    whole = to.mean("overhead_zones")
    return cell.mean("overhead_zones") / whole if whole else math.nan


def _as_json(setting: Setting, cell: Cell, given: argparse.Namespace) -> dict[str, Any]:
    found = cell.as_json()
    if given.table:
        found["paper"] = tables.paper(setting)._asdict()
        found["design"] = tables.design(setting)._asdict()
    return found


def write_csv(path: Path, cells: Iterable[Cell]) -> None:
    """Write a line for every seed. Raises OSError."""
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow([*SETTING_COLUMNS, "seed", *FIGURES])
        for cell in cells:
            said = cell.setting
            words = " ".join(f"{name}={value}" for name, value in said.parameters)
            head = [said.family, said.policy, words, said.load, said.rule]
            head += [said.active, said.zone_size, said.rank]
            for seed, result in sorted(cell.results.items()):
                out.writerow([*head, seed, *(getattr(result, figure) for figure in FIGURES)])
