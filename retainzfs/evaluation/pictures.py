"""Pictures of replays as PNG files, with matplotlib.

They have to be read in print: a policy is told by its marker and hatch as well as its colour, a bar
or whisker spans least to greatest over the seeds, and legends stand beside the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from retainzfs.errors import UsageError
from retainzfs.evaluation.experiment import Cell
from retainzfs.evaluation.occupancy import Content, Strip, finite, strip

DPI: Final = 110
LIGHT: Final = "0.85"


class Look(NamedTuple):
    colour: str
    marker: str
    hatch: str


# By policy; what is not named here takes the next of OTHERS.
LOOKS: Final = {
    "zenfs": Look("#777777", "s", ""),
    "equal-epoch": Look("#8a5fb5", "^", ".."),
    "retainz": Look("#d1662b", "o", "//"),
    "retainz span=4": Look("#e8a94c", "v", "\\\\"),
    "plan-bare": Look("#4c9be8", "D", "xx"),
    "plan": Look("#1d6fb8", "P", "--"),
    "plan-ahead": Look("#7fc8a9", "*", "++"),
    "isolate": Look("#aaaaaa", "X", "oo"),
}
OTHERS: Final = (
    Look("#c2477f", "<", "||"),
    Look("#6b8e23", ">", "OO"),
    Look("#996633", "p", "**"),
    Look("#5f9ea0", "h", "/."),
)

Draw = Callable[[Path], None]


def require() -> None:
    """Raises UsageError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise UsageError("pictures need matplotlib: pip install retainzfs[evaluation]")


def name_of(cell: Cell) -> str:
    """How the policy is called in a picture; `zenfs` without the mapping that was best."""
    return "zenfs" if cell.setting.policy == "zenfs" else cell.setting.label


def look(name: str, names: Sequence[str]) -> Look:
    others = [other for other in names if other not in LOOKS]
    return LOOKS[name] if name in LOOKS else OTHERS[others.index(name) % len(OTHERS)]


def draw_all(cells: Sequence[Cell], where: Path) -> list[Path]:
    """Draw what these replays have to show: against the load, by policy, over time."""
    lines: dict[str, list[Cell]] = {}
    for cell in cells:
        lines.setdefault(f"{name_of(cell)}, {cell.setting.rule}", []).append(cell)
    bars = [
        (f"{name_of(c)}, {c.setting.rule}, {c.setting.load:.0%}", c)
        for c in sorted(cells, key=lambda c: c.setting.load)
    ]
    lightest = [c for c in cells if c.setting.load == min(o.setting.load for o in cells)]
    ends = lightest if len(lightest) < 2 else [lightest[0], lightest[-1]]
    drawings: dict[str, Draw] = {
        "pressure.png": lambda path: pressure(lines, path),
        "split.png": lambda path: split(bars, path),
        "p99.png": lambda path: p99(bars, path),
        "occupancy.png": lambda path: occupancy(ends, path),
    }
    for name, draw in drawings.items():
        draw(where / name)
    return [where / name for name in drawings]


# The kinds of pictures


def pressure(lines: Mapping[str, Sequence[Cell]], path: Path) -> None:
    """Overhead and write amplification of a policy's cells against their load; hollow where a seed
    ran out of space."""
    figure = blank(10.5, 4.6)
    axes = figure.subplots(1, 2)
    names = [name_of(line[0]) for line in lines.values()]
    for place, (name, line) in enumerate(lines.items()):
        style = look(names[place], names)
        # Side by side, so that no whisker hides another.
        shift = (place - (len(lines) - 1) / 2) * 0.0008
        for axis, measure in zip(axes, ("overhead_zones", "write_amplification"), strict=True):
            known = (cell for cell in line if math.isfinite(cell.mean(measure)))
            points = sorted(known, key=lambda cell: cell.setting.load)
            loads = [100 * (cell.setting.load + shift) for cell in points]
            means = [cell.mean(measure) for cell in points]
            axis.errorbar(
                loads,
                means,
                yerr=_whiskers(points, measure),
                color=style.colour,
                linewidth=1.2,
                capsize=2.5,
                elinewidth=0.8,
                zorder=2,
            )
            for x, y, cell in zip(loads, means, points, strict=True):
                face = "white" if cell.exhausted else style.colour
                axis.plot(
                    x, y, style.marker, color=style.colour, mfc=face, ms=7, zorder=3, label="_"
                )
            axis.plot([], [], style.marker + "-", color=style.colour, ms=7, label=name)
    axes[0].set_ylabel("reserved overhead (zones)")
    axes[1].set_ylabel("write amplification (host bytes / logical bytes)")
    axes[0].set_ylim(bottom=0)
    axes[1].set_ylim(bottom=0.98)
    for axis in axes:
        axis.set_xlabel("live data at the peak (% of the data zones)")
        axis.grid(color=LIGHT)
    axes[0].plot([], [], "o", color="black", mfc="white", label="hollow: a seed ran out of space")
    _legend(figure, axes[0], columns=4)
    save(figure, path)


def split(bars: Sequence[tuple[str, Cell]], path: Path) -> None:
    """Dead bytes and unused tails, a bar for every name."""
    figure = blank(8.5, 1.6 + 0.34 * len(bars))
    axis = figure.subplots()
    places = range(len(bars))
    invalid = [cell.mean("invalid_zones") for _, cell in bars]
    tail = [cell.mean("tail_zones") for _, cell in bars]
    axis.barh(places, invalid, color="0.35", edgecolor="black", label="invalid: dead, not reset")
    axis.barh(
        places,
        tail,
        left=invalid,
        color="#f2d49b",
        edgecolor="black",
        hatch="//",
        xerr=_whiskers([cell for _, cell in bars], "overhead_zones"),
        error_kw={"capsize": 2.5, "elinewidth": 0.9},
        label="tail: unused in zones in use",
    )
    axis.set_yticks(list(places), [name + _mark(cell) for name, cell in bars])
    axis.invert_yaxis()
    axis.set_xlabel("zones, mean over time (whisker: least to greatest overhead of a seed)")
    axis.grid(axis="x", color=LIGHT)
    axis.set_axisbelow(True)
    _legend(figure, axis, columns=2)
    _starred(figure, [cell for _, cell in bars])
    save(figure, path)


def p99(bars: Sequence[tuple[str, Cell]], path: Path) -> None:
    """The 99th percentile of a save: zones written and copied, and modelled time."""
    figure = blank(10, 1.6 + 0.34 * len(bars))
    axes = figure.subplots(1, 2, sharey=True)
    for axis, measure, label in (
        (axes[0], "p99_zones", "p99 of a save: zones written and copied"),
        (axes[1], "p99_ms", "p99 of a save: ms of a modelled drive"),
    ):
        for place, (_, cell) in enumerate(bars):
            style = look(name_of(cell), [name_of(other) for _, other in bars])
            axis.barh(
                place,
                cell.mean(measure),
                color=style.colour,
                edgecolor="black",
                hatch=style.hatch,
                xerr=_whiskers([cell], measure),
                error_kw={"capsize": 2.5, "elinewidth": 0.9},
            )
        axis.set_xlabel(label)
        axis.grid(axis="x", color=LIGHT)
        axis.set_axisbelow(True)
    axes[0].set_yticks(range(len(bars)), [name + _mark(cell) for name, cell in bars])
    axes[0].invert_yaxis()
    _starred(figure, [cell for _, cell in bars])
    save(figure, path)


def groups(
    found: Mapping[str, Mapping[str, Cell]], measure: str, labels: tuple[str, str], path: Path
) -> None:
    """Bars in groups, one in each for every policy. `labels`: of the axes."""
    figure = blank(max(8.5, 1.1 * len(found)), 4.4)
    axis = figure.subplots()
    names = list(dict.fromkeys(name for cells in found.values() for name in cells))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        style = look(name, names)
        places = [p for p, cells in enumerate(found.values()) if name in cells]
        cells = [group[name] for group in found.values() if name in group]
        bars = axis.bar(
            [place + (number - (len(names) - 1) / 2) * width for place in places],
            [cell.mean(measure) for cell in cells],
            width,
            color=style.colour,
            edgecolor="black",
            hatch=style.hatch,
            yerr=_whiskers(cells, measure),
            error_kw={"capsize": 2.5, "elinewidth": 0.9},
            label=name,
        )
        marks = ["*" if cell.exhausted else "" for cell in cells]
        axis.bar_label(bars, marks, padding=1)
    axis.set_xticks(range(len(found)), list(found))
    axis.set_xlabel(labels[0])
    axis.set_ylabel(labels[1])
    axis.grid(axis="y", color=LIGHT)
    axis.set_axisbelow(True)
    _legend(figure, axis, columns=4)
    _starred(figure, [cell for cells in found.values() for cell in cells.values()])
    save(figure, path)


def costs(found: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> None:
    """Milliseconds a commit against the zones of the device, both logarithmic."""
    figure = blank(7, 4.4)
    axis = figure.subplots()
    for (name, points), marker, line in zip(found.items(), "osD^v", _DASHES, strict=False):
        zones, ms = zip(*points, strict=True)
        axis.loglog(zones, ms, line, marker=marker, ms=7, label=name)
    ticks = sorted({zones for points in found.values() for zones, _ in points})
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    axis.margins(0.12)
    axis.set_xlabel("zones of the device")
    axis.set_ylabel("allocation (ms a commit)")
    axis.grid(color=LIGHT)
    _legend(figure, axis, columns=2)
    save(figure, path)


_DASHES: Final = ("-", "--", "-.", ":", "-")

# Zones over time

WINDOW: Final = (130, 190)  # epochs shown, of a replay that is as long
ROWS: Final = 10  # pixels of a zone
COLUMNS: Final = 8  # pixels of an epoch
DARKEST: Final = 0.3  # of the colour scale; below it a colour looks like black
DEAD: Final = (0.0, 0.0, 0.0)
FREE: Final = (1.0, 1.0, 1.0)
FOREVER: Final = (0.72, 0.72, 0.72)
TAIL: Final = (0.93, 0.42, 0.42)


def occupancy(cells: Sequence[Cell], path: Path) -> None:
    """What the zones of one input hold, epoch by epoch, a panel for every cell. Zones that hold
    nothing but what never retires are left out."""
    strips = [(cell, strip(cell.setting, min(cell.results))) for cell in cells]
    ends = [end for _, kept in strips for end in kept.ends[-1:]]
    first, last = WINDOW if min(ends) >= WINDOW[1] else (0, max(2, int(max(ends))))
    shown = [(cell, kept, _moving(kept, first, last)) for cell, kept in strips]
    heights = [max(1, len(zones)) for _, _, zones in shown]
    figure = blank(10, 2.4 + 0.11 * sum(heights))
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=heights)
    scale = _scale()
    for axis, (cell, kept, zones) in zip(axes[:, 0], shown, strict=True):
        picture = _pixels(kept, zones, (first, last), scale)
        axis.imshow(
            picture,
            extent=(first, last, len(zones), 0),
            aspect="auto",
            interpolation="nearest",
        )
        axis.set_ylabel(f"zones ({len(zones)})")
        axis.set_yticks([])
        for row in range(1, len(zones)):
            axis.axhline(row, color="white", linewidth=0.5)
        said = f"{cell.setting.label}, load {cell.setting.load:.0%}, {cell.setting.rule}"
        axis.set_title(f"{said}, seed {min(cell.results)}", fontsize=10, loc="left")
    axes[-1, 0].set_xlabel("epoch")
    _key(figure, axes, (first, last))
    save(figure, path)


def _moving(kept: Strip, first: int, last: int) -> list[int]:
    """The zones that hold something that dies, in the time shown."""
    seen = {
        zone
        for epoch in range(first, last)
        for zone, content in kept.at(epoch + 0.5).items()
        if finite(content)
    }
    return sorted(seen)


def _scale() -> Any:
    from matplotlib import colormaps  # noqa: PLC0415  an extra

    return colormaps["viridis"]


HORIZON: Final = 28  # epochs; the longest that a generation of the paper's inputs lives


def _pixels(kept: Strip, zones: Sequence[int], span: tuple[int, int], scale: Any) -> Any:
    """Rows of RGB: in every zone the live bytes from below, then the dead ones, then the tail."""
    first, last = span

    def colour(retire: float) -> tuple[float, ...]:
        if math.isinf(retire):
            return FOREVER
        share = (retire - first) / (last + HORIZON - first)
        red, green, blue, _ = scale(DARKEST + (1 - DARKEST) * min(1.0, max(0.0, share)))
        return (red, green, blue)

    image = [[FREE] * ((last - first) * COLUMNS) for _ in range(max(1, len(zones)) * ROWS)]
    for epoch in range(first, last):
        held = kept.at(epoch + 0.5)
        for place, index in enumerate(zones):
            if index not in held:
                continue
            column = _stack(held[index], kept.capacity, colour)
            for row, pixel in enumerate(reversed(column)):
                line = image[place * ROWS + row]
                for x in range(COLUMNS):
                    # A tail is dotted: told from what is free without colours too.
                    dotted = pixel is TAIL and (row + x) % 3
                    line[(epoch - first) * COLUMNS + x] = FREE if dotted else pixel
    return image


def _stack(content: Content, capacity: int, colour: Callable[[float], Any]) -> list[Any]:
    """The pixels of a zone, from below."""
    parts = [(nbytes, colour(retire)) for retire, nbytes in content.live]
    parts += [(content.dead, DEAD), (content.tail, TAIL)]
    pixels: list[Any] = []
    filled = 0
    for nbytes, shade in parts:
        filled += nbytes
        pixels += [shade] * (round(filled * ROWS / capacity) - len(pixels))
    return pixels


def _key(figure: Any, axes: Any, span: tuple[int, int]) -> None:
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415  an extra
    from matplotlib.colors import ListedColormap, Normalize  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    shades = [_scale()(DARKEST + (1 - DARKEST) * i / 255) for i in range(256)]
    norm = Normalize(span[0], span[1] + HORIZON)
    bar = ScalarMappable(norm, ListedColormap(shades))
    figure.colorbar(bar, ax=list(axes[:, 0]), label="retires at epoch", fraction=0.03, pad=0.02)
    figure.legend(
        handles=[
            Patch(facecolor=DEAD, label="dead, not reset"),
            Patch(facecolor="white", edgecolor=TAIL, hatch="....", label="unused tail"),
            Patch(facecolor=FOREVER, label="never retires"),
            Patch(facecolor="white", edgecolor="0.6", label="empty zone"),
        ],
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )


# Shared


def blank(width: float, height: float) -> Any:
    """An empty figure of so many inches."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra, and slow to import

    return Figure(figsize=(width, height), layout="constrained")


def _whiskers(cells: Sequence[Cell], measure: str) -> list[list[float]]:
    """Distances from the mean to the least and to the greatest."""
    below = [max(0.0, cell.mean(measure) - min(cell.values(measure))) for cell in cells]
    above = [max(0.0, max(cell.values(measure)) - cell.mean(measure)) for cell in cells]
    return [below, above]


def _mark(cell: Cell) -> str:
    return " *" if cell.exhausted else ""


def _starred(figure: Any, cells: Sequence[Cell]) -> None:
    if any(cell.exhausted for cell in cells):
        figure.supxlabel(
            "* a seed ran out of space; the figures are of the time until then", size=8
        )


def _legend(figure: Any, axis: Any, columns: int) -> None:
    handles, names = axis.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=columns, frameon=False)


def save(figure: Any, path: Path) -> None:
    # Without the version of the library the same data give the same bytes for longer.
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
