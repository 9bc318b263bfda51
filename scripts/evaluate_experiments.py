"""The experiments of docs/evaluation.md: what each asks, and the command that shows one of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from retainzfs.evaluation import tables
from retainzfs.evaluation.experiment import Setting
from retainzfs.evaluation.tables import WIDE
from retainzfs.lifetimes import format_size
from retainzfs.placement import admission

ZENFS, EQUAL, RETAINZ, PLAN = (Setting(n) for n in ("zenfs", "equal-epoch", "retainz", "plan"))
BARE = Setting("plan-bare")
FEW = (ZENFS, RETAINZ, WIDE, PLAN)
ZONE_SIZES = (4 << 20, 64 << 20)
ACTIVE = (4, 6, 14, 30)
GRIDS = {"exact": "paper", "4 epochs": "grid4", "16 epochs": "grid16"}
LOADS = (0.70, 0.80, 0.84, 0.90, 0.92, 0.94)
ROBUST = {
    "mixed": 0.80,
    "small": 0.70,
    "large": 0.90,
    "grid4": 0.84,
    "grid16": 0.84,
    "late": 0.80,
    "late-random": 0.80,
    "jitter": 0.80,
    "sizes": 0.80,
    "poisson": 0.80,
    "milestones": 0.80,
}


@dataclass(frozen=True)
class Experiment:
    """Settings that belong together; `answers` are found by them."""

    settings: tuple[Setting, ...]

    @property
    def commands(self) -> list[str]:
        """What prints these figures, a command for all that differ in policy or load only."""
        found: dict[str, tuple[list[str], list[str]]] = {}
        for setting in self.settings:
            policies, loads = found.setdefault(options(setting), ([], []))
            policies.append(f"--policy {setting.policy}")
            loads.append(f"--load {setting.load:g}")
        return [
            " ".join(["retainzfs replay", *dict.fromkeys(policies), *dict.fromkeys(loads), more])
            for more, (policies, loads) in found.items()
        ]

    @property
    def differs(self) -> str:
        """What is added to the commands of the first of a group for this one."""
        one = self.settings[0]
        return options(replace(one, admission="", parameters=())) + f" --load {one.load:g}"


def options(setting: Setting) -> str:
    """The options of the command for a setting, but for policy and load."""
    parts = [] if setting.family == "paper" else [f"--family {setting.family}"]
    if setting.admission:
        parts.append(f"--admission {setting.admission}")
    parts += [f"--set {name}={value:g}" for name, value in setting.parameters]
    if setting.active:
        parts.append(f"--active {setting.active}")
    if setting.zone_size:
        parts.append(f"--zone-size {setting.zone_size >> 20}M")
    if not setting.to_tails:
        parts.append("--reserve-only")
    return " ".join(parts)


def of(policies: Sequence[Setting], **changes: object) -> tuple[Setting, ...]:
    """The same policies under other conditions; a rule is for those without their own."""
    made = (replace(policy, **changes) for policy in policies)  # type: ignore[arg-type]
    return tuple(replace(s, admission="") if s.policy in admission.PRICING else s for s in made)


def pressure(rule: str) -> Experiment:
    policies = (ZENFS, EQUAL, RETAINZ, WIDE, PLAN)
    found = [s for load in LOADS for s in of(policies, load=load, admission=rule)]
    return Experiment(tuple(found))


MAIN = Experiment(tuple(tables.main_table()))
PRESSURE = {rule: pressure(rule) for rule in ("fixed", "common")}
RESERVE_ONLY = Experiment(
    tuple(
        s
        for load, rule in ((0.84, "fixed"), (0.90, "fixed"), (0.90, "common"))
        for tails in (True, False)
        for s in of((ZENFS, RETAINZ), load=load, admission=rule, to_tails=tails)
    ),
)
TERMS = tuple(
    Setting(name)
    for name in ("zenfs", "isolate", "equal-epoch", "no-tail", "no-dbt", "no-span", "retainz")
)
ABLATION = Experiment((*of(TERMS, admission="common"), replace(WIDE, admission="common"), PLAN))
SPAN = Experiment(
    tuple(
        s
        for family, load in (("paper", 0.84), ("late", 0.80), ("paper", 0.90))
        for s in of((Setting("no-span"), RETAINZ), family=family, load=load, admission="common")
    ),
)
SMALL = Experiment(
    of(
        (ZENFS, Setting("no-size-adaptation"), RETAINZ, PLAN),
        family="small",
        load=0.70,
        admission="common",
    ),
)
PRECISION = {
    name: Experiment(of((ZENFS, EQUAL, RETAINZ, BARE, PLAN), family=family, admission="fixed"))
    for name, family in GRIDS.items()
}
ZONES = {
    format_size(size): Experiment(of(FEW, zone_size=size, admission="common"))
    for size in ZONE_SIZES
}
BUDGET = {str(n): Experiment(of(FEW, active=n, admission="common")) for n in ACTIVE}
ROBUSTNESS = {
    family: Experiment(of((*FEW, BARE), family=family, load=load, admission="common"))
    for family, load in ROBUST.items()
}


def every() -> Iterator[Experiment]:
    yield MAIN
    yield from PRESSURE.values()
    yield from (RESERVE_ONLY, ABLATION, SPAN, SMALL)
    for group in (PRECISION, ZONES, BUDGET, ROBUSTNESS):
        yield from group.values()
