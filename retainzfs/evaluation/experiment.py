"""Many replays at once: policies, loads and seeds, over the cores of the machine."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from statistics import mean
from typing import Any

from retainzfs import placement
from retainzfs.errors import UsageError
from retainzfs.evaluation import disturbance
from retainzfs.evaluation.measures import Result
from retainzfs.evaluation.simulator import Observer, Simulator
from retainzfs.evaluation.workload import BLOCK, Workload
from retainzfs.placement import Policy, admission, collection
from retainzfs.placement.admission import Rule
from retainzfs.placement.collection import Rank
from retainzfs.zones import DATA_ACTIVE_LEAST

# The mean and the least and greatest of these are reported.
FIGURES = tuple(Result.__dataclass_fields__)

ZONE_LEAST = 64 * BLOCK  # padding would be most of a smaller one


@dataclass(frozen=True)
class Setting:
    """One cell of a table.

    `admission` "" is the policy's usual one (`admission.usual`); `active` and `zone_size`
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
    to_tails: bool = True  # collection may copy into tails

    @property
    def rule(self) -> str:
        return admission.usual(self.admission, self.policy)

    @property
    def label(self) -> str:
        """The policy and what is not usual about it."""
        return " ".join([self.policy, *(f"{key}={_short(it)}" for key, it in self.parameters)])


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass
class Cell:
    """What the seeds of a setting gave; `results` by seed."""

    setting: Setting
    results: dict[int, Result] = field(default_factory=dict)

    def values(self, figure: str) -> list[float]:
        return [float(getattr(self.results[seed], figure)) for seed in sorted(self.results)]

    def mean(self, figure: str) -> float:
        return mean(self.values(figure))

    @property
    def exhausted(self) -> int:
        """Seeds that ran out of space; their other figures are those up to then."""
        return sum(result.saves_done < result.saves for result in self.results.values())

    def as_json(self) -> dict[str, Any]:
        """What cannot be said in JSON is null: the write amplification of no save."""
        per_seed = [
            {"seed": seed, **_finite(asdict(result))}
            for seed, result in sorted(self.results.items())
        ]
        return {
            **asdict(self.setting),
            "admission": self.setting.rule,
            "parameters": _finite(dict(self.setting.parameters)),
            "mean": _finite({figure: self.mean(figure) for figure in FIGURES}),
            "seeds": per_seed,
        }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def check_zones(load: float, active: int, size: int) -> None:
    """Raises UsageError for a load or zones that cannot be."""
    if not 0 < load <= 1:
        raise UsageError(f"a load of {load} is no share of the device; give 0 to 1")
    if active < DATA_ACTIVE_LEAST:
        raise UsageError(f"{active} active zones are too few; data need {DATA_ACTIVE_LEAST}")
    if size % BLOCK or size < ZONE_LEAST:
        raise UsageError(f"zones of {size} bytes: give a multiple of {BLOCK} from {ZONE_LEAST} on")


def workload(setting: Setting, seed: int) -> Workload:
    """Raises UsageError for a family or a load that does not exist, and for impossible zones."""
    family = disturbance.family(setting.family)
    active, size = setting.active or family.active, setting.zone_size or family.zone_size
    check_zones(setting.load, active, size)
    return replace(family, active=active, zone_size=size).make(seed, setting.load)


def ways(setting: Setting) -> tuple[Policy, Rule, Rank]:
    """Policy, admission and choice of victims. Raises UsageError for what does not exist."""
    policy = placement.policy(setting.policy, **dict(setting.parameters))
    return policy, admission.rule(setting.rule), collection.ranking(setting.rank)


def simulator(setting: Setting, seed: int, observer: Observer | None = None) -> Simulator:
    """What replays one seed of a setting. Raises UsageError for anything that does not exist."""
    policy, rule, rank = ways(setting)
    saves = workload(setting, seed)
    return Simulator(saves, policy, rule, rank=rank, to_tails=setting.to_tails, observer=observer)


def check(settings: Iterable[Setting], seeds: Sequence[int]) -> None:
    """Raises UsageError if one of these replays is impossible, without carrying it out."""
    inputs = {}
    for setting in settings:
        ways(setting)
        inputs[setting.family, setting.load, setting.active, setting.zone_size] = setting
    for setting in inputs.values():
        for seed in seeds:
            workload(setting, seed)


def replay(setting: Setting, seed: int) -> Result:
    """One replay. All figures but `decision_us` follow from the arguments.

    Raises UsageError as `simulator` does, and for a load that leaves no room for the anchors.
    """
    return simulator(setting, seed).run()


def run(
    settings: Iterable[Setting], seeds: Sequence[int], jobs: int
) -> Iterator[tuple[Setting, int, Result]]:
    """Yield (setting, seed, result) as they are done, `jobs` at a time."""
    asked = [(setting, seed) for setting in settings for seed in seeds]
    if jobs == 1:
        for setting, seed in asked:
            yield setting, seed, replay(setting, seed)
        return
    with workers(jobs) as pool:
        running = {pool.submit(replay, *one): one for one in asked}
        for done in as_completed(running):
            yield (*running[done], done.result())


@contextmanager
def workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes. Who interrupts this one wants it to end, and has no use for the tracebacks
    of others."""
    deaf = (signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(jobs, initializer=signal.signal, initargs=deaf)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def cells(found: Iterable[tuple[Setting, int, Result]]) -> Mapping[Setting, Cell]:
    """Gather results; the order is that of the first result of each setting."""
    gathered: dict[Setting, Cell] = {}
    for setting, seed, result in found:
        gathered.setdefault(setting, Cell(setting)).results[seed] = result
    return gathered
