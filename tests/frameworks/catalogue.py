"""Which frameworks there are, and what a user sets for them on a mount."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

SAVES = 28
KEEP = 3
STEPS = 2  # training steps to a save: the numbers go past 10, where order by name goes wrong
MILESTONES = 12  # steps; every sixth save


@dataclass(frozen=True)
class Framework:
    """One framework with one of its ways of saving."""

    name: str
    title: str
    module: str
    """Below this package; has `train` and `resume`."""
    packages: tuple[str, ...]
    """What has to be importable."""
    variant: str = ""
    attributes: Mapping[str, str] = field(default_factory=lambda: {"keep_last": str(KEEP)})
    numbers: range = range(STEPS, STEPS * SAVES + 1, STEPS)
    """Of all generations that are saved."""
    marks: bool = True
    """Whether something shows that a save is complete, without help from the program."""

    @property
    def kept(self) -> list[int]:
        """The numbers of the generations that are there in the end."""
        newest = self.numbers[-int(self.attributes["keep_last"]) :]
        every = int(self.attributes.get("keep_every", 0))
        return [n for n in self.numbers if n in newest or (every and n % every == 0)]

    def missing(self) -> str:
        """Return which packages are not installed, empty when all are."""
        gone = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return ", ".join(gone)


_MILESTONES = {"keep_every": str(MILESTONES)}

FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework(
            "torchtitan",
            "TorchTitan, keep_latest_k=3",
            "torchtitan",
            ("torchtitan", "tyro", "spmd_types"),
        ),
        Framework(
            "torchtitan-async",
            "TorchTitan, keep_latest_k=3, async_mode=async",
            "torchtitan",
            ("torchtitan", "tyro", "spmd_types"),
            variant="async",
            attributes={"keep_last": str(KEEP + 1)},  # it looks before the new save is there
        ),
        Framework(
            "megatron",
            f"Megatron-LM, save_retain_interval={MILESTONES}",
            "megatron",
            ("megatron",),
            attributes={"keep_last": "1", **_MILESTONES},
        ),
        Framework(
            "megatron-torch",
            f"Megatron-LM, save_retain_interval={MILESTONES}, ckpt_format=torch",
            "megatron",
            ("megatron",),
            variant="torch",
            attributes={"keep_last": "1", **_MILESTONES},
        ),
        Framework(
            "trainer",
            "Hugging Face Trainer, save_total_limit=3",
            "trainer",
            ("transformers", "accelerate"),
        ),
        Framework(
            "accelerate",
            "accelerate, total_limit=3",
            "accelerate",
            ("accelerate",),
            numbers=range(SAVES),
            marks=False,
        ),
        Framework(
            "lightning",
            "Lightning, save_top_k=3 and save_last",
            "lightning",
            ("lightning",),
        ),
        Framework(
            "orbax",
            f"Orbax, max_to_keep=3, keep_period={MILESTONES}",
            "orbax",
            ("orbax", "jax"),
            attributes={"keep_last": str(KEEP), **_MILESTONES},
        ),
    )
}
