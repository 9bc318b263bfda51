"""Figures that others have published, to stand beside ours.

`PAPER` is from the paper's text (section IV), `DESIGN` from the simulation that the policies were
designed with, on other inputs of the same kind. Overhead in zones; None where nothing was said.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Published(NamedTuple):
    overhead: float | None = None
    write_amplification: float | None = None
    saves: str = ""  # done of 250, where not all were
    p99_ms: float | None = None

    def __str__(self) -> str:
        parts = []
        if self.overhead is not None:
            parts.append(f"{self.overhead:.2f}")
        if self.write_amplification is not None:
            parts.append(f"WA {self.write_amplification:.3f}")
        if self.saves:
            parts.append(f"{self.saves} saves")
        if self.p99_ms is not None:
            parts.append(f"p99 {self.p99_ms} ms")
        return ", ".join(parts)


NOTHING: Final = Published()

# (family, load, admission, policy): "" for an admission that was not said; the policy as
# `Setting.label` has it, zenfs without its mapping.
Key = tuple[str, float, str, str]

PAPER: Final[dict[Key, Published]] = {
    ("paper", 0.84, "fixed", "zenfs"): Published(6.53, 1.165, p99_ms=85.3),
    ("paper", 0.84, "fixed", "retainz"): Published(3.80, 1.003, p99_ms=44.8),
    ("paper", 0.90, "fixed", "zenfs"): Published(saves="40-49"),
    ("paper", 0.90, "fixed", "retainz"): Published(saves="250"),
    ("paper", 0.90, "common", "zenfs"): Published(None, 1.514),
    ("paper", 0.90, "common", "retainz"): Published(None, 1.214),
    ("grid4", 0.84, "fixed", "retainz"): Published(4.53),
    ("grid16", 0.84, "fixed", "retainz"): Published(4.99),
}

DESIGN: Final[dict[Key, Published]] = {
    ("paper", 0.84, "fixed", "zenfs"): Published(6.99, 1.189),
    ("paper", 0.84, "fixed", "equal-epoch"): Published(6.11, 1.003),
    ("paper", 0.84, "fixed", "retainz"): Published(3.95, 1.003),
    ("paper", 0.84, "fixed", "plan-bare"): Published(2.13, 1.003),
    ("paper", 0.84, "fixed", "plan-bare ahead=3"): Published(2.05, 1.003),
    ("paper", 0.84, "common", "zenfs"): Published(7.26, 1.068),
    ("paper", 0.84, "common", "equal-epoch"): Published(6.11, 1.003),
    ("paper", 0.84, "common", "retainz"): Published(3.95, 1.003),
    ("paper", 0.84, "common", "plan-bare"): Published(2.13, 1.003),
    ("paper", 0.84, "priced", "plan"): Published(2.02, 1.006),
    ("paper", 0.84, "priced", "plan-ahead"): Published(1.94, 1.006),
    ("paper", 0.90, "fixed", "zenfs"): Published(saves="22-46"),
    ("paper", 0.90, "fixed", "equal-epoch"): Published(saves="250"),
    ("paper", 0.90, "fixed", "retainz"): Published(saves="250"),
    ("paper", 0.90, "fixed", "plan-bare"): Published(saves="250"),
    ("paper", 0.90, "fixed", "plan-bare ahead=3"): Published(saves="250"),
    ("paper", 0.90, "common", "zenfs"): Published(None, 1.181),
    ("paper", 0.90, "common", "equal-epoch"): Published(None, 1.045),
    ("paper", 0.90, "common", "retainz"): Published(None, 1.009),
    ("paper", 0.90, "common", "plan-bare"): Published(None, 1.006),
    ("paper", 0.90, "priced", "plan"): Published(None, 1.006),
    ("paper", 0.90, "priced", "plan-ahead"): Published(None, 1.006),
    ("paper", 0.92, "common", "zenfs"): Published(None, 1.287),
    ("paper", 0.92, "common", "equal-epoch"): Published(None, 1.241),
    ("paper", 0.92, "common", "retainz"): Published(None, 1.252),
    ("paper", 0.92, "common", "plan-bare"): Published(None, 1.120),
    ("paper", 0.92, "priced", "plan"): Published(None, 1.007),
    ("paper", 0.92, "priced", "plan-ahead"): Published(None, 1.008),
    ("paper", 0.94, "common", "zenfs"): Published(None, 1.734),
    ("paper", 0.94, "common", "equal-epoch"): Published(None, 1.804),
    ("paper", 0.94, "common", "retainz"): Published(None, 1.575),
    ("paper", 0.94, "common", "plan-bare"): Published(None, 1.665),
    ("paper", 0.94, "priced", "plan"): Published(None, 1.060),
    ("paper", 0.94, "priced", "plan-ahead"): Published(None, 1.046),
    ("paper", 0.95, "common", "zenfs"): Published(None, 2.063),
    ("paper", 0.95, "common", "equal-epoch"): Published(None, 1.962),
    ("paper", 0.95, "common", "retainz"): Published(None, 1.673),
    ("paper", 0.95, "common", "plan-bare"): Published(None, 1.707),
    ("paper", 0.95, "priced", "plan"): Published(None, 1.224),
    ("paper", 0.95, "priced", "plan-ahead"): Published(None, 1.197),
    ("grid4", 0.84, "fixed", "retainz"): Published(4.12),
    ("grid4", 0.84, "fixed", "plan-bare"): Published(2.15),
    ("grid16", 0.84, "fixed", "retainz"): Published(4.52),
    ("grid16", 0.84, "fixed", "plan-bare"): Published(3.19),
    ("small", 0.70, "", "zenfs"): Published(11.1),
    ("small", 0.70, "", "retainz"): Published(6.34),
    ("small", 0.70, "", "no-size-adaptation"): Published(10.45),
    ("small", 0.70, "", "plan-bare"): Published(3.09),
    ("late", 0.80, "", "retainz"): Published(5.45),
    ("late", 0.80, "", "plan-bare"): Published(2.51),
    ("sizes", 0.80, "", "retainz"): Published(4.39),
    ("sizes", 0.80, "", "plan-bare"): Published(2.34),
    ("poisson", 0.80, "", "retainz"): Published(5.05),
    ("poisson", 0.80, "", "plan-bare"): Published(3.17),
}
