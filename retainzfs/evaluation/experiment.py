"""Many replays at once: policies, loads and seeds, over the cores of the machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from statistics import mean
from typing import Any

from retainzfs import placement
from retainzfs.errors import UsageError
from retainzfs.evaluation.simulator import Result, Simulator
from retainzfs.evaluation.workload import FAMILIES
from retainzfs.placement.admission import RULES
from retainzfs.placement.collection import RANKS

# The mean and the least and greatest of these are reported.
FIGURES = tuple(Result.__dataclass_fields__)


@dataclass(frozen=True)
class Setting:
    """One cell of a table.

    `admission` "" is the policy's own: `priced` for `plan`, else `fixed`; `active` and `zone_size`
    0 are the family's.
    """

    policy: str
    family: str = "paper"
    load: float = 0.84
    admission: str = ""
    parameters: tuple[tuple[str, Any], ...] = ()  # of the policy
    active: int = 0
    zone_size: int = 0
    rank: str = "dead-time"

    @property
    def rule(self) -> str:
        if self.admission:
            return self.admission
        return "priced" if self.policy in {"plan", "plan-ahead"} else "fixed"

    @property
    def label(self) -> str:
        """The policy and what is not usual about it."""
        return " ".join([self.policy, *(f"{key}={value}" for key, value in self.parameters)])


@dataclass
class Cell:
    """What the seeds of a setting gave; `results` by seed."""

    setting: Setting
    results: dict[int, Result] = field(default_factory=dict)

    def values(self, figure: str) -> list[float]:
        return [float(getattr(self.results[seed], figure)) for seed in sorted(self.results)]

    def mean(self, figure: str) -> float:
        return mean(self.values(figure))

    def as_json(self) -> dict[str, Any]:
        per_seed = [
            {"seed": seed, **asdict(result)} for seed, result in sorted(self.results.items())
        ]
        means = {figure: self.mean(figure) for figure in FIGURES}
        return {
            **asdict(self.setting),
            "admission": self.setting.rule,
            "mean": means,
            "seeds": per_seed,
        }


def replay(setting: Setting, seed: int) -> Result:
    """One replay. All figures but `decision_us` follow from the arguments.

    Raises UsageError for a family, policy, parameter or rule that does not exist.
    """
    family = FAMILIES.get(setting.family)
    if family is None:
        raise UsageError(f"no family {setting.family!r}; known: {', '.join(FAMILIES)}")
    if setting.rule not in RULES:
        raise UsageError(f"no admission rule {setting.rule!r}; known: {', '.join(RULES)}")
    family = replace(
        family,
        active=setting.active or family.active,
        zone_size=setting.zone_size or family.zone_size,
    )
    workload = family.make(seed, setting.load)
    policy = placement.policy(setting.policy, **dict(setting.parameters))
    rule = RULES[setting.rule]()
    return Simulator(workload, policy, rule, rank=RANKS[setting.rank]).run()


def run(
    settings: Iterable[Setting], seeds: Iterable[int], jobs: int
) -> Iterator[tuple[Setting, int, Result]]:
    """Yield (setting, seed, result) as they are done."""
    with ProcessPoolExecutor(jobs) as pool:
        running = {
            pool.submit(replay, setting, seed): (setting, seed)
            for setting in settings
            for seed in seeds
        }
        for done in as_completed(running):
            yield (*running[done], done.result())


def cells(found: Iterable[tuple[Setting, int, Result]]) -> Mapping[Setting, Cell]:
    """Gather results; the order is that of the first result of each setting."""
    gathered: dict[Setting, Cell] = {}
    for setting, seed, result in found:
        gathered.setdefault(setting, Cell(setting)).results[seed] = result
    return gathered
