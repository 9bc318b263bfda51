"""Whether the default policy is ever worse than the one that knows nothing of retirement.

One workload is replayed with the default and with several settings of `zenfs`. Host bytes of the
default are held against the least that any of them writes, and so is overhead. But that can be
bought with copies, so there a setting does not count that writes clearly more than the default.
Nor do figures of replays that ran out of space: they are those of another workload.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from retainzfs import placement
from retainzfs.evaluation.measures import Result
from retainzfs.evaluation.simulator import Simulator
from retainzfs.evaluation.workload import Workload
from retainzfs.placement.admission import RULES
from retainzfs.placement.zenfs import ZenFS

TOLERATED: Final = 1.05  # times the best of zenfs
# Mapping and admission rule of zenfs; these were the best ones, each on some inputs.
BASELINES: Final = (
    ("anchors", "common"),
    ("anchors", "fixed"),
    ("classes", "common"),
    ("medium", "common"),
)


@dataclass(frozen=True)
class Verdict:
    """Ratios are of the default's figure to the best of `zenfs`: 0 if there is none to be held
    against, inf if the default ran out of space where a setting of zenfs did not."""

    default: Result
    baselines: tuple[Result, ...]

    @property
    def completed(self) -> bool:
        """Whether the default made as many saves as any setting of zenfs."""
        return self.default.saves_done >= max(result.saves_done for result in self.baselines)

    @property
    def host_bytes(self) -> float:
        return self._ratio("write_amplification", math.inf)

    @property
    def overhead(self) -> float:
        return self._ratio("overhead_zones", TOLERATED * self.default.write_amplification)

    @property
    def holds(self) -> bool:
        return self.completed and max(self.overhead, self.host_bytes) <= TOLERATED

    def _ratio(self, figure: str, most: float) -> float:
        """`most`: write amplification of the settings that count."""
        whole = [result for result in self.baselines if result.saves_done == result.saves]
        if self.default.saves_done < self.default.saves:
            return math.inf if whole else 0.0
        best = [getattr(r, figure) for r in whole if r.write_amplification <= most]
        return float(getattr(self.default, figure)) / min(best, default=math.inf)


def judge(workload: Workload) -> Verdict:
    """Replay one workload with the default policy and with the settings of zenfs."""
    default = Simulator(workload, placement.policy("plan"), RULES["priced"]()).run()
    baselines = (
        Simulator(workload, ZenFS(mapping=mapping), RULES[rule]()).run()
        for mapping, rule in BASELINES
    )
    return Verdict(default, tuple(baselines))
