#!/usr/bin/env python3
"""Train a small transformer on the CPU and checkpoint it into two directories.

This is an ordinary training program: it knows paths, torch and how many checkpoints it wants to
keep, and nothing of the filesystem below. After every few optimizer steps it saves model,
optimizer and random number generator

- with `torch.save` into `FILES/step-N.pt`, and
- with `torch.distributed.checkpoint` into the directory `TREES/step-N/`,

and then deletes what is old, as training frameworks do. A step that is a multiple of
`--keep-every` is a milestone, by default one save in five. Milestones are kept longer, but not for
ever: 65 generations would leave 13 in each directory, most of the device. So the last
`--milestones` stay here, as with a user who copies the older ones elsewhere and removes them.

    quickstart_train.py train FILES TREES --text FILE --losses OUT.json
    quickstart_train.py resume FILES TREES --text FILE --losses OUT.json

`train` goes on for a few steps after its last save and writes their losses to `--losses`;
`resume` loads the newest checkpoint of each directory, takes the same steps, and fails unless the
losses are equal to the last bit.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.nn import functional

# Weights and AdamW's two moments come to 16.7 MiB a save.
VOCABULARY = 256  # bytes
WIDTH = 192
LAYERS = 3
HEADS = 4
CONTEXT = 64
BATCH = 4
STEPS_AFTER = 3  # steps past the last save, compared after a resume
STEP_NAME = re.compile(r"step-(\d+)(\.pt)?")


class Transformer(nn.Module):
    """A causal language model over bytes, with dropout, so that a step draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.mask = nn.Buffer(
            nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next byte at each place; tokens is (batch, CONTEXT)."""
        hidden = self.blocks(self.tokens(tokens) + self.positions, mask=self.mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


class Training:
    """Model, optimizer and data; `step` is the number of optimizer steps taken."""

    def __init__(self, text: Path, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.data = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
        self.model = Transformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0

    def advance(self) -> float:
        """Take one step on a random batch and return its loss."""
        starts = torch.randint(len(self.data) - CONTEXT - 1, (BATCH,))
        batch = torch.stack([self.data[i : i + CONTEXT + 1] for i in starts.tolist()])
        logits = self.model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def save_file(self, path: Path) -> None:
        """Save everything into one file with plain torch.save."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        torch.save(state, path)

    def load_file(self, path: Path) -> None:
        """Load what save_file saved."""
        state = torch.load(path)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])

    def _tree(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        step = torch.tensor(self.step)
        return {
            "step": step,
            "model": model,
            "optimizer": optimizer,
            "random": torch.get_rng_state(),
        }

    def save_tree(self, path: Path) -> None:
        """Save everything into a directory with torch.distributed.checkpoint."""
        save_distributed(self._tree(), checkpoint_id=path, no_dist=True)

    def load_tree(self, path: Path) -> None:
        """Load what save_tree saved."""
        state = self._tree()
        load_distributed(state, checkpoint_id=path, no_dist=True)
        self.step = int(state["step"])
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        torch.set_rng_state(state["random"])


@dataclass(frozen=True)
class Retention:
    """How many checkpoints of a directory the trainer keeps."""

    last: int
    every: int
    milestones: int

    def expired(self, numbers: list[int]) -> list[int]:
        """Return the numbers to delete from `numbers`, given in ascending order."""
        anchors = [n for n in numbers if n % self.every == 0]
        kept = {*numbers[-self.last :], *anchors[-self.milestones :]}
        return [n for n in numbers if n not in kept]


def saved(directory: Path) -> dict[int, Path]:
    """Return the checkpoints of a directory by number, in ascending order."""
    found = {int(m[1]): p for p in directory.iterdir() if (m := STEP_NAME.fullmatch(p.name))}
    return dict(sorted(found.items()))


def prune(directory: Path, retention: Retention) -> None:
    """Delete the checkpoints that the retention does not keep."""
    paths = saved(directory)
    for number in retention.expired(list(paths)):
        path = paths[number]
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def size_of(path: Path) -> int:
    """Return the bytes of a file or of all files of a directory tree."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(p.stat().st_size for p in files)


def train(args: argparse.Namespace) -> int:
    """Train from the start, saving and pruning; then the steps that a resume must repeat."""
    training = Training(args.text)
    keep_files = Retention(args.keep_last_files, args.keep_every, args.milestones)
    keep_trees = Retention(args.keep_last_trees, args.keep_every, args.milestones)
    written, saving_s, started = 0, 0.0, time.monotonic()
    for generation in range(1, args.generations + 1):
        loss = [training.advance() for _ in range(args.save_every)][-1]
        before = time.monotonic()
        file = args.files / f"step-{training.step}.pt"
        tree = args.trees / f"step-{training.step}"
        training.save_file(file)
        training.save_tree(tree)
        saving_s += time.monotonic() - before
        written += size_of(file) + size_of(tree)
        prune(args.files, keep_files)
        prune(args.trees, keep_trees)
        if training.step % args.keep_every == 0:
            print(
                f"generation {generation:3}/{args.generations}  step {training.step:4}  "
                f"loss {loss:.3f}  written {written >> 20:5} MiB  "
                f"saves {saving_s / generation:.3f} s each  {time.monotonic() - started:.0f} s",
                flush=True,
            )
    losses = [training.advance() for _ in range(STEPS_AFTER)]
    args.losses.write_text(json.dumps({"written": written, "losses": losses}))
    return 0


def resume(args: argparse.Namespace) -> int:
    """Continue from the newest checkpoint of each directory; compare with the first run."""
    expected = json.loads(args.losses.read_text())["losses"]
    same = True
    for directory, load in ((args.files, Training.load_file), (args.trees, Training.load_tree)):
        # Another seed: whatever is equal afterwards came from the checkpoint.
        training = Training(args.text, seed=2)
        newest = list(saved(directory).values())[-1]
        load(training, newest)
        step = training.step
        losses = [training.advance() for _ in range(len(expected))]
        same &= losses == expected
        print(f"resumed from {newest} at step {step}")
        for index, (ours, theirs) in enumerate(zip(losses, expected, strict=True), step + 1):
            verdict = "equal" if ours == theirs else "DIFFERENT"
            print(f"  step {index}: loss {ours!r}, uninterrupted run {theirs!r}: {verdict}")
    return 0 if same else 1


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description="Train a small transformer with checkpoints.")
    parser.add_argument("command", choices=("train", "resume"))
    parser.add_argument("files", type=Path, help="directory for step-N.pt (torch.save)")
    parser.add_argument("trees", type=Path, help="directory for step-N/ (distributed checkpoint)")
    parser.add_argument("--text", type=Path, required=True, help="the text to learn")
    parser.add_argument("--losses", type=Path, required=True, help="losses after the last save")
    parser.add_argument("--generations", type=int, default=65)
    parser.add_argument("--save-every", type=int, default=5, help="optimizer steps a generation")
    parser.add_argument("--keep-last-files", type=int, default=3)
    parser.add_argument("--keep-last-trees", type=int, default=2)
    parser.add_argument("--keep-every", type=int, default=25, help="milestones' step numbers")
    parser.add_argument("--milestones", type=int, default=6)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run one command; exit code 1 when a resumed run differs."""
    # One thread: the same sums on every machine, and a core for the filesystem.
    torch.set_num_threads(1)
    # Saving without a process group is what this program wants.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    args = parse(arguments)
    return train(args) if args.command == "train" else resume(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
