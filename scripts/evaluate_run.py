"""Replays all experiments and writes docs/evaluation.md with its pictures.

    scripts/evaluate [--seeds N] [--jobs N] [--output DIR]

The same seeds give the same text, but for measured times. Every number in it comes from this run,
or is one that the paper or the design has published.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import evaluate_allocation as allocation
import evaluate_experiments as asked
from bench_zoned import table
from evaluate_experiments import Experiment

from retainzfs.cli import replay as command
from retainzfs.evaluation import pictures, tables
from retainzfs.evaluation.experiment import Cell, Setting
from retainzfs.evaluation.measures import DRIVE
from retainzfs.evaluation.published import PAPER

DOCS = Path(__file__).resolve().parent.parent / "docs"
SEEDS = 8
WIDTH = 116  # of a line of text

# The paper's other figures, which are of no single cell
PAPER_EQUAL = 34.1  # percent less overhead than equal-epoch
PAPER_SPAN = 4.9  # percent less write amplification with the span at 90 % load
PAPER_SMALL = 11.5  # percent less overhead with size adaptation
PAPER_LARGE_ZONES = 43.4  # percent less overhead than ZenFS-Alloc with 64 MiB zones
PAPER_LARGE_P99 = 38.2
PAPER_ACTIVE = 3.86  # zones, for 6, 14 and 30 active zones
PAPER_ALLOCATION = (0.270, 5.996)  # ms a commit, cached and scanned
PAPER_METADATA = 430.2  # KiB

Answers = Mapping[Setting, Cell]


class Page:
    """docs/evaluation.md in the making."""

    def __init__(self, answers: Answers, seeds: Sequence[int]) -> None:
        self.answers, self.seeds = answers, seeds
        self.lines: list[str] = []

    def say(self, *paragraphs: str) -> None:
        for paragraph in paragraphs:
            whole = paragraph.startswith(("!", "#", "<"))
            self.lines += [paragraph] if whole else _wrapped(paragraph)
            self.lines.append("")

    def table(self, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        self.lines += [table(heads, rows), ""]

    def by(self, *commands: str) -> None:
        seeds = f" --seeds {_seeds(self.seeds)}"
        self.lines += ["```console", *(f"$ {one.strip()}{seeds}" for one in commands), "```", ""]

    def picture(self, name: str, what: str) -> None:
        self.say(f"![{what}](evaluation/{name})")

    def cells(self, experiment: Experiment) -> Iterator[tuple[Setting, Cell]]:
        for setting in experiment.settings:
            yield setting, self.answers[setting]

    def change(
        self, of: Setting, to: Setting, figure: str = "overhead_zones", sign: int = 1
    ) -> str:
        """How much less a figure is, in percent; with `sign` -1 how much more."""
        whole = self.answers[to].mean(figure)
        return f"{sign * 100 * (1 - self.answers[of].mean(figure) / whole):.1f} %"


def _wrapped(paragraph: str) -> list[str]:
    return textwrap.wrap(paragraph, WIDTH, break_long_words=False, break_on_hyphens=False)


def _seeds(seeds: Sequence[int]) -> str:
    return f"{seeds[-1] + 1}" if seeds[0] == 0 else f"{seeds[0]}-{seeds[-1]}"


FIGURES = ("overhead", "invalid", "tail", "WA", "saves", "p99 zones", "p99 ms", "decision µs")


def figures(cell: Cell) -> list[str]:
    return [text.replace("[", "(").replace("]", ")") for text in tables.columns(cell)]


def named(setting: Setting, cell: Cell) -> list[str]:
    return [f"{setting.load:.0%}", setting.rule, cell.setting.label]


# Sections


def introduction(page: Page) -> None:
    page.say(
        "# Evaluation",
        "<!-- Written by scripts/evaluate; change that. -->",
        f"This page is written by `scripts/evaluate --seeds {_seeds(page.seeds)}`: all figures"
        f" are of one run, but for the columns *paper* and *design*. Replays are in simulated time"
        " ([how](replay.md)): the same saves for every policy, no device. They give the same"
        " figures each time, but for measured times (*decision*, allocation), which are"
        " processor time.",
        f"Unless stated otherwise a figure is the mean over {len(page.seeds)} inputs, with the"
        f" least and the greatest in parentheses. **Overhead** is the time average, in zones, of"
        f" dead bytes that are not reset yet (*invalid*) and of unused room in zones in use"
        f" (*tail*). **WA** is bytes written by the host, copies and the journal's block"
        f" included, per byte saved. *Saves* are those done before space ran out; where some were"
        f" not, the other figures are of the time until then and flatter whoever failed. **p99**"
        f" of a save is in zones written and copied, and in ms of a modelled drive: write"
        f" {_rate(DRIVE.write)}, read {_rate(DRIVE.read)}, finish {DRIVE.finish:g} ms, reset"
        f" {DRIVE.reset:g} ms, commit {DRIVE.commit:g} ms. It is no measurement, and not to be"
        f" compared with ms of the paper.",
        "*paper* is what the paper on RetainZ has published, *design* the simulation in which the"
        " policies were designed, on other inputs of the same kind. `zenfs` is always the best"
        " of 16: four mappings of lifetimes and four finish thresholds; the best is the one that"
        " does most saves, and of these the one with the least overhead.",
        "`retainz` is a reconstruction: the paper's formulas were not to be had. The widest spread"
        " of retirements in a zone, W, is a guess, and a wider one does better; so both are shown,"
        " and the honest comparison of `plan` is with `span=4`.",
    )


def _rate(ms_a_byte: float) -> str:
    return f"{1000 / ms_a_byte / (1 << 20):.0f} MiB/s"


def main_table(page: Page) -> None:
    page.say("## Under pressure")
    page.by("retainzfs replay --table")
    page.table(
        ("load", "admission", "policy", *FIGURES, "paper", "design"),
        [
            [
                *named(setting, cell),
                *figures(cell),
                str(tables.paper(setting)) or "-",
                str(tables.design(setting)) or "-",
            ]
            for setting, cell in page.cells(asked.MAIN)
        ],
    )
    page.say(
        "In *design*, `plan` without copies in idle time and without what is learned of lateness is"
        " `plan-bare` here, which does not let data follow anchors either. `plan` and"
        " `plan-ahead` come with their own admission rule, `priced`."
    )
    for rule in asked.PRESSURE:
        page.picture(f"pressure-{rule}.png", f"Overhead and write amplification, {rule} admission")
    page.picture("p99.png", "p99 of a save")
    page.picture("occupancy.png", "What the zones hold over time, under zenfs and under plan")


def differences(page: Page) -> None:
    page.say("## Where we and the paper differ")
    page.by(*asked.RESERVE_ONLY.commands)
    page.table(
        ("load", "admission", "policy", "copies go to", *FIGURES, "paper"),
        [
            [
                *named(setting, cell),
                "tails" if setting.to_tails else "the reserve only",
                *figures(cell),
                str(tables.paper(setting)) or "-",
            ]
            for setting, cell in page.cells(asked.RESERVE_ONLY)
        ],
    )
    paper_zenfs = PAPER["paper", 0.90, "fixed", "zenfs"]
    ours, reserve = (_fixed_zenfs(page, to_tails=tails) for tails in (True, False))
    page.say(
        "At 90 % load the paper copies more than we do, with both allocators, and with fixed"
        f" admission its ZenFS-Alloc runs out of space after {paper_zenfs.saves} saves. Here it"
        f" does {tables.saves(ours)} of them. Our collection copies into tails of the victim's"
        f" kind, and needs the zone that is held back only for what they do not take; the paper"
        f" does not say where its collector copies to. With a collector that copies to that zone"
        f" only, `zenfs` does {tables.saves(reserve)}, so this " + _verdict(ours, reserve),
        "What else may differ, and the text does not tell: what the load is a share of, how the"
        " collector chooses its victim, and what it does about tails of zones that it began. We"
        " have not tuned ours towards the paper's figures, and claim nothing about 90 % against its"
        " allocators; within this page all policies share one collector.",
    )


def _fixed_zenfs(page: Page, *, to_tails: bool) -> Cell:
    return next(
        cell
        for setting, cell in page.cells(asked.RESERVE_ONLY)
        if (setting.policy, setting.load, setting.rule) == ("zenfs", 0.90, "fixed")
        and setting.to_tails is to_tails
    )


def _verdict(ours: Cell, reserve: Cell) -> str:
    """Whether the collector explains why the paper's zenfs gave up."""
    if reserve.mean("saves_done") < ours.mean("saves_done"):
        return (
            "may well be why the paper's gave up. It is not all: with common admission the paper's"
            " ZenFS-Alloc does all saves at a high WA, and the last rows show what ours does."
        )
    return "does not explain it."


def zenfs(page: Page) -> None:
    page.say("## zenfs, all mappings and thresholds")
    for setting in (s for s in asked.MAIN.settings if s.policy == "zenfs" and s.load <= 0.90):
        page.by(f"retainzfs replay --zenfs --load {setting.load:g} --admission {setting.rule}")
        page.table(
            ("mapping and threshold", *FIGURES),
            [
                [v.label.partition(" ")[2], *figures(page.answers[v])]
                for v in tables.variants(setting)
            ],
        )


def ablations(page: Page) -> None:
    page.say("## What each term does")
    page.by(*asked.ABLATION.commands)
    rows = [[cell.setting.label, *figures(cell)] for _, cell in page.cells(asked.ABLATION)]
    page.table(("policy", *FIGURES), rows)
    page.picture("split.png", "Dead bytes and unused tails by policy")
    equal, retainz, plan = (
        next(s for s in asked.ABLATION.settings if s.policy == name and not s.parameters)
        for name in ("equal-epoch", "retainz", "plan")
    )
    page.say(
        f"Against `equal-epoch`, `retainz` has {page.change(retainz, equal)} less overhead (paper:"
        f" {PAPER_EQUAL} %), `plan` {page.change(plan, equal)}. In the paper `isolate` runs out of"
        f" space here; ours does {tables.saves(page.answers[asked.ABLATION.settings[1]])} saves."
    )
    page.by(*asked.SPAN.commands)
    page.table(
        ("family", "load", "policy", *FIGURES),
        [
            [setting.family, f"{setting.load:.0%}", setting.label, *figures(cell)]
            for setting, cell in page.cells(asked.SPAN)
        ],
    )
    page.say(
        "The paper: no span has less overhead at 84 % and where deletions are late, and at 90 % the"
        f" span lowers WA by {PAPER_SPAN} %. Here the span lowers it by"
        f" {page.change(asked.SPAN.settings[-1], asked.SPAN.settings[-2], 'write_amplification')}"
        " (less than nothing: raises)."
    )
    page.by(*asked.SMALL.commands)
    rows = [[cell.setting.label, *figures(cell)] for _, cell in page.cells(asked.SMALL)]
    page.table(("policy, small generations", *FIGURES), rows)
    page.say(
        f"Size adaptation saves {page.change(asked.SMALL.settings[2], asked.SMALL.settings[1])} of"
        f" the overhead (paper: {PAPER_SMALL} %, on inputs that it does not describe)."
    )


def group(page: Page, found: Mapping[str, Experiment], head: str, *, own: bool = False) -> None:
    first, *others = found.values()
    page.by(*first.commands)
    page.say(f"The others likewise, with {', '.join(f'`{one.differs}`' for one in others)}.")
    heads = (head, "load", "policy", *FIGURES, *(("paper", "design") if own else ()))
    rows = []
    for name, experiment in found.items():
        for setting, cell in page.cells(experiment):
            row = [name, f"{setting.load:.0%}", cell.setting.label, *figures(cell)]
            if own:
                row += [str(where(setting)) or "-" for where in (tables.paper, tables.design)]
            rows.append(row)
    page.table(heads, rows)


def _ends(found: Mapping[str, Experiment]) -> tuple[Experiment, Experiment]:
    first, *_, last = found.values()
    return first, last


def precision(page: Page) -> None:
    page.say("## Hint precision", "Hints rounded up to a grid; sizes and deletions are the same.")
    group(page, asked.PRECISION, "hints", own=True)
    page.picture("precision.png", "Overhead by hint precision")
    exact, coarse = (one.settings for one in _ends(asked.PRECISION))
    page.say(
        "From exact hints to the coarsest, `retainz` loses"
        f" {page.change(coarse[2], exact[2], sign=-1)} and `plan`"
        f" {page.change(coarse[-1], exact[-1], sign=-1)} (less than nothing: gains). A grid costs"
        " precision, but it also makes near retirements look equal, and so lets into a zone what"
        " the span would keep out: it works like a wider W. In the paper only the loss shows."
    )


def geometry(page: Page) -> None:
    page.say("## Zone size and active zones")
    group(page, asked.ZONES, "zones")
    page.picture("zone-size.png", "Overhead by zone size")
    zenfs, retainz, _, plan = _ends(asked.ZONES)[1].settings
    page.say(
        f"With the larger zones `retainz` has {page.change(retainz, zenfs)} less overhead and"
        f" {page.change(retainz, zenfs, 'p99_ms')} less p99 than `zenfs` (paper:"
        f" {PAPER_LARGE_ZONES} % and {PAPER_LARGE_P99} %), `plan` {page.change(plan, zenfs)} and"
        f" {page.change(plan, zenfs, 'p99_ms')}."
    )
    group(page, asked.BUDGET, "active")
    page.picture("active.png", "Overhead by active zones")
    page.say(f"The paper has {PAPER_ACTIVE} zones for `retainz` with 6, 14 and 30 active zones.")


def robustness(page: Page) -> None:
    page.say("## Other workloads", "What each family is, stands in [replay](replay.md).")
    group(page, asked.ROBUSTNESS, "family", own=True)
    page.picture("robustness.png", "Overhead by family of workloads")


def costs(page: Page, where: Path) -> None:
    page.say(
        "## What a decision costs",
        "A table of zones keeps, for each zone, what lives in it; a plan looks at the partial zones"
        " only. The alternative is to scan, for every plan, all that was ever recorded: each extent"
        f" written, copied and freed. Load {allocation.LOAD:.0%}, one input, both ways placing"
        f" every byte alike, which the program asserts.",
    )
    page.lines += ["```console", "$ scripts/evaluate_allocation.py", "```", ""]
    found = allocation.costs(allocation.POLICIES, allocation.ZONES, page.seeds[0])
    page.table(
        ("policy", "zones", "cached, ms a commit", "of it upkeep of the table", "scanned"),
        allocation.rows(found),
    )
    page.say(
        f"The paper, in C++ and under an emulated processor: {PAPER_ALLOCATION[0]:.3f} ms with"
        f" cached summaries against {PAPER_ALLOCATION[1]:.3f} with scans. The scan grows with the"
        f" history."
    )
    lines = {
        f"{policy}, {way}": [
            (zones, both[way == "scanned"].whole if way == "cached" else both[1].deciding)
            for (name, zones), both in found.items()
            if name == policy
        ]
        for policy in allocation.POLICIES
        for way in ("cached", "scanned")
    }
    pictures.costs(lines, where / "allocation.png")
    page.picture("allocation.png", "Allocation cost by the number of zones")
    told = allocation.metadata(page.seeds[0])
    page.say(
        "Metadata: the same input written to a whole volume in memory, every shard a file, then a"
        f" snapshot of the journal, which holds all metadata of the volume:"
        f" {told.snapshot / 1024:.1f} KiB for {told.files} files in {told.zones} zones. The paper"
        f" says {PAPER_METADATA} KiB of allocator metadata, and not what is in them."
    )


# Pictures


def draw(page: Page, where: Path) -> None:
    for rule, experiment in asked.PRESSURE.items():
        lines: dict[str, list[Cell]] = {}
        for _, cell in page.cells(experiment):
            lines.setdefault(pictures.name_of(cell), []).append(cell)
        pictures.pressure(lines, where / f"pressure-{rule}.png")
    main = [
        (f"{pictures.name_of(cell)}, {setting.rule}, {setting.load:.0%}", cell)
        for setting, cell in page.cells(asked.MAIN)
        if (setting.load, setting.rule) in {(0.84, "fixed"), (0.92, "common")}
        or (setting.load in {0.84, 0.92} and setting.rule == "priced")
    ]
    pictures.p99(main, where / "p99.png")
    ablated = [(pictures.name_of(cell), cell) for _, cell in page.cells(asked.ABLATION)]
    pictures.split(ablated, where / "split.png")
    pictures.occupancy([ablated[0][1], ablated[-1][1]], where / "occupancy.png")
    for name, found, label in (
        ("precision", asked.PRECISION, "grid of the hints"),
        ("zone-size", asked.ZONES, "zone capacity"),
        ("active", asked.BUDGET, "active zones for data"),
        ("robustness", asked.ROBUSTNESS, "family of workloads"),
    ):
        groups = {
            key: {pictures.name_of(cell): cell for _, cell in page.cells(experiment)}
            for key, experiment in found.items()
        }
        labels = (label, "reserved overhead (zones)")
        pictures.groups(groups, "overhead_zones", labels, where / f"{name}.png")


SECTIONS: tuple[Callable[[Page], None], ...] = (
    *(introduction, main_table, differences, zenfs, ablations, precision, geometry, robustness),
)


def run(seeds: Sequence[int], jobs: int) -> Answers:
    """Replay everything once; the answers to all settings, and every variant of zenfs by itself."""
    settings = list(dict.fromkeys(s for one in asked.every() for s in one.settings))
    cells = command.run(settings, seeds, jobs)
    return {**cells, **tables.answers(settings, cells)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="inputs, default %(default)s")
    parser.add_argument("--jobs", type=int, default=0, help="replays at a time")
    parser.add_argument("--output", type=Path, default=DOCS, help="default docs")
    given = parser.parse_args()
    where = given.output / "evaluation"
    pictures.require()
    seeds = range(given.seeds)
    page = Page(run(seeds, given.jobs), seeds)
    where.mkdir(parents=True, exist_ok=True)
    for section in SECTIONS:
        section(page)
    costs(page, where)
    draw(page, where)
    text = "\n".join(page.lines).rstrip() + "\n"
    (given.output / "evaluation.md").write_text(text)
    print(f"{given.output / 'evaluation.md'}: {len(page.answers)} settings, {len(seeds)} inputs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
