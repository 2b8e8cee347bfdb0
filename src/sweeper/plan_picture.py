"""What of a space fits, as a picture: context against the axis that takes most memory beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from sweeper.conf import Loaded
from sweeper.core.outcome import Attempt, Infeasible, Measured
from sweeper.core.pairs import Pairs, Scalar, text
from sweeper.core.typed import FieldError
from sweeper.engines import refusal_of
from sweeper.job import Job
from sweeper.plan import context_axis, looking_ahead, need_of
from sweeper.search.facts import learnt_from

Cell: TypeAlias = tuple[int, int]
_LIKELY = 0.9


@dataclass(kw_only=True)
class Seen:
    """The points of one cell: how many, how many are out by rule, and how likely the rest fit."""

    points: int = 0
    ruled_out: int = 0
    fits: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A space seen along two of its axes: `x` along the values of one, `y` of the other.

    `y` is None where the space has one axis only. `marks` are boots: the cell, and what became of
    it (`measured`, `memory`, `failed`), or the number of a boot to come.
    """

    x: str
    y: str | None
    xs: tuple[Scalar, ...]
    ys: tuple[Scalar, ...]
    cells: Mapping[Cell, Seen]
    marks: tuple[tuple[Cell, str], ...]
    available_bytes: float
    weights_known: bool = True


def region_of(loaded: Loaded, plan: Mapping[str, Any], attempts: Sequence[Attempt]) -> Region:
    """Return how likely each part of a study's space fits into memory, and where boots were."""
    job, _, _ = looking_ahead(loaded)
    learnt = learnt_from(job, attempts)
    x, y = _axes(job, plan)
    axes = {axis.name: axis for axis in job.space.axes}
    xs, ys = axes[x].values, axes[y].values if y is not None else (None,)
    available = float(plan["device_memory_bytes"] or plan["memory_available_bytes"])
    # Where no card is stated, the engine itself comes on top, as far as boots have told.
    if plan["device_memory_bytes"] is None:
        available -= plan["engine_overhead_bytes"] or 0
    cells: dict[Cell, Seen] = {}
    for values in job.space.declared():
        cell = _cell(values, x, y, xs, ys)
        if cell is None:
            continue
        seen = cells.setdefault(cell, Seen())
        seen.points += 1
        point = Pairs(values)
        if job.space.refused_by(values) is not None or _refused(job, point):
            seen.ruled_out += 1
            continue
        seen.fits.append(need_of(job, point, available, learnt)[1].fits)
    marks = [
        (cell, _ending(each))
        for each in attempts
        if each.confirms is None and (cell := _cell(each.point, x, y, xs, ys)) is not None
    ]
    marks += [
        (cell, str(number))
        for number, each in enumerate(plan["first"], 1)
        if (cell := _cell(each["point"], x, y, xs, ys)) is not None
    ]
    return Region(
        x=x,
        y=y,
        xs=xs,
        ys=ys,
        cells=cells,
        marks=tuple(marks),
        available_bytes=available,
        weights_known=plan["weights_known"],
    )


def _axes(job: Job, plan: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the axis of context, and of the others the one whose values differ most in memory."""
    by_axis = (plan["memory_by_axis"] or {"axes": {}})["axes"]
    spans = {
        axis.name: max((each["adds_bytes"] for each in by_axis.get(axis.name, ())), default=0)
        for axis in job.space.axes
    }
    ordered = sorted(spans, key=lambda name: -spans[name])
    x = context_axis(job) or ordered[0]
    rest = [name for name in ordered if name != x]
    return x, rest[0] if rest else None


def _cell(
    values: Mapping[str, Scalar],
    x: str,
    y: str | None,
    xs: Sequence[Scalar],
    ys: Sequence[Scalar],
) -> Cell | None:
    try:
        return xs.index(values[x]), 0 if y is None else ys.index(values[y])
    except (KeyError, ValueError):
        return None  # an axis that is not active here


def _refused(job: Job, point: Pairs) -> bool:
    try:
        return refusal_of(job.engine, job.settings(point), job.model(point)) is not None
    except FieldError:
        return True


def _ending(attempt: Attempt) -> str:
    match attempt.outcome:
        case Measured():
            return "measured"
        case Infeasible(name=name) if name.is_memory:
            return "memory"
        case _:
            return "failed"


def write_plan_png(region: Region, path: Path, *, title: str, subtitle: str) -> None:
    """Draw a region: shades for how likely it fits, hatches where rules forbid, marks for boots."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    ink, grey = "#22262B", "#8A8F98"
    columns, rows = len(region.xs), len(region.ys)
    width, height = max(7.5, 1.05 * columns + 3.2), max(3.6, 0.62 * rows + 2.3)
    figure = Figure(figsize=(min(width, 16), min(height, 12)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    plot = figure.subplots()
    scale = LinearSegmentedColormap.from_list("fits", [_shade(0.0), _shade(1.0)])
    shades = ScalarMappable(Normalize(0, 1), scale)
    for (at_x, at_y), seen in region.cells.items():
        corner = (at_x - 0.5, at_y - 0.5)
        if not seen.fits:
            plot.add_patch(
                Rectangle(
                    corner, 1, 1, facecolor="#F1F2F4", edgecolor=grey, hatch="///", linewidth=0
                )
            )
            continue
        mean = sum(seen.fits) / len(seen.fits)
        plot.add_patch(Rectangle(corner, 1, 1, facecolor=_shade(mean), edgecolor="white"))
        if seen.ruled_out:
            share = seen.ruled_out / seen.points
            plot.add_patch(
                Rectangle(
                    (at_x + 0.5 - share, at_y - 0.5), share, 1, facecolor="#F1F2F4", edgecolor=grey,
                    hatch="///", linewidth=0,
                )
            )  # fmt: skip
        likely = sum(each >= _LIKELY for each in seen.fits)
        plot.text(
            at_x - 0.45, at_y - 0.3, f"{likely}/{len(seen.fits)}", ha="left", va="center",
            fontsize=7.5, color="white" if mean > 0.55 else ink,
        )  # fmt: skip
    _mark(plot, region.marks)
    plot.set_xlim(-0.5, columns - 0.5)
    plot.set_ylim(-0.5, rows - 0.5)
    unit = " (tokens)" if all(isinstance(each, int) and each >= 256 for each in region.xs) else ""
    plot.set_xticks(range(columns), [_plain(each) for each in region.xs])
    plot.set_yticks(range(rows), [_plain(each) for each in region.ys] if region.y else [""])
    if sum(len(_plain(each)) for each in region.xs) > 8 * 12:
        plot.tick_params(axis="x", rotation=35)
    plot.set_xlabel(f"{region.x}{unit}".replace("$", r"\$"), color=ink)
    plot.set_ylabel((region.y or "").replace("$", r"\$"), color=ink)
    plot.tick_params(length=0, colors=ink, labelsize=9)
    for spine in plot.spines.values():
        spine.set_visible(False)
    bar = figure.colorbar(shades, ax=plot, fraction=0.05, pad=0.02)
    bar.set_label("probability of fitting, mean", color=ink, fontsize=9)
    bar.ax.tick_params(labelsize=8, colors=ink)
    plot.set_title(
        f"{title}\n".replace("$", r"\$"), loc="left", fontsize=12, fontweight="bold", color=ink
    )
    plot.text(0, 1.02, subtitle, transform=plot.transAxes, fontsize=8.5, color=grey, va="bottom")
    figure.legend(
        handles=[
            Patch(facecolor="#F1F2F4", edgecolor=grey, hatch="///", label="out by rule"),
            *_legend(region.marks),
        ],
        loc="outside lower left", ncols=5, frameon=False, fontsize=8.5, labelcolor=ink,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


_MARKS: dict[str, tuple[str, str, str]] = {
    "measured": ("o", "#E69F00", "booted: measured"),
    "memory": ("X", "#D55E00", "booted: out of memory"),
    "failed": ("s", "#CC79A7", "booted: failed otherwise"),
}


def _mark(plot: Any, marks: Sequence[tuple[Cell, str]]) -> None:
    """Draw boots beside each other in the upper half of their cell, the first five."""
    together: dict[Cell, list[str]] = {}
    for cell, what in marks:
        together.setdefault(cell, []).append(what)
    for (at_x, at_y), several in together.items():
        room = several[:5]
        for place, what in enumerate(room):
            x = at_x - 0.37 + place * 0.17
            if what in _MARKS:
                marker, colour, _ = _MARKS[what]
                plot.plot(
                    [x], [at_y + 0.15], marker=marker, color=colour, markersize=7,
                    markeredgecolor="white", markeredgewidth=0.8, linestyle="none", zorder=4,
                )  # fmt: skip
            else:
                plot.text(
                    x, at_y + 0.15, what, ha="center", va="center", fontsize=7.5, fontweight="bold",
                    color="#22262B", zorder=5,
                    bbox={"boxstyle": "circle,pad=0.22", "facecolor": "white"},
                )  # fmt: skip


def _shade(probability: float) -> tuple[float, float, float]:
    """Return white for 0 and a dark blue for 1, told apart with any colour vision."""
    none, all_ = (0.97, 0.98, 1.0), (0.03, 0.27, 0.55)
    red, green, blue = (a + (b - a) * probability for a, b in zip(none, all_, strict=True))
    return red, green, blue


def _legend(marks: Sequence[tuple[Cell, str]]) -> list[Any]:
    from matplotlib.lines import Line2D

    seen = {what for _, what in marks}
    found = [
        Line2D([], [], marker=marker, color=colour, linestyle="none", markersize=7, label=label)
        for what, (marker, colour, label) in _MARKS.items()
        if what in seen
    ]
    if seen - _MARKS.keys():
        found.append(
            Line2D(
                [], [], marker="o", markerfacecolor="white", color="#22262B", linestyle="none",
                markersize=8, label="1, 2 … the next boots",
            )
        )  # fmt: skip
    return found


def _plain(value: Scalar) -> str:
    said = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else text(value)
    return said.replace("$", r"\$")


def picture_words(region: Region) -> str:
    """Return what the picture shows, in a line below its title."""
    lacks = "" if region.weights_known else ", the weights not counted: their size is not known"
    return (
        f"{region.available_bytes / 2**30:.2f} GiB of memory; in each cell: how many points likely "
        f"fit, of those that no rule forbids{lacks}"
    )
