"""Pictures of a study: its front, and the report's other charts for where no script runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeper.core.outcome import Attempt, Infeasible, Measured
from sweeper.core.pairs import text
from sweeper.core.standing import front_among
from sweeper.report.front import CONTEXT_NAMES, configured_context, measured_of, varied
from sweeper.report.words import (
    is_simulated,
    ratio_ticks,
    short_tokens,
    size_ticks,
    subject_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sweeper.report.content import Report

# Okabe and Ito's palette, told apart with any colour vision; shapes differ as well.
BLUE, ORANGE, RED, GREY, INK = "#0072B2", "#E69F00", "#D55E00", "#8A8F98", "#22262B"


_LANES: tuple[tuple[str, str, str], ...] = (
    ("out of memory", "|", RED),
    ("not possible", "x", ORANGE),
    ("unfit or broken", "+", GREY),
)


def _lane(attempt: Attempt) -> int:
    match attempt.outcome:
        case Infeasible(name=why):
            return 0 if why.is_memory else 1
        case _:
            return 2


def write_front_png(attempts: Iterable[Attempt], path: Path) -> None:
    """Draw speed against proven context, with everything that failed in lanes below, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    everyone = list(attempts)
    measured = measured_of(everyone)
    failed = [each for each in everyone if not isinstance(each.outcome, Measured)]
    lanes = sorted({_lane(attempt) for attempt in failed})
    figure = Figure(figsize=(9.6, 5.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    heights = [10.0, 0.55 * len(lanes)] if lanes else [10.0]
    plots = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
    upper, lower = plots[0][0], plots[-1][0]

    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(w_pad=0.14, h_pad=0.1)  # type: ignore[call-arg,unused-ignore]

    # Limits first: the front is drawn to the edge, and its labels need room.
    labels = _labels(everyone)
    _scale_context(upper, everyone, labels)
    _draw_measured(upper, measured)
    if lanes:
        _draw_lanes(lower, failed, lanes)
        upper.tick_params(axis="x", length=0)
    lower.set_xlabel(
        "context (tokens): proven above, configured below" if lanes else "proven context (tokens)",
        color=INK,
    )
    upper.set_ylabel("decode speed (tok/s): median and its interval", color=INK)
    for plot in {upper, lower}:
        plot.tick_params(colors=INK, labelsize=9)
        for side in ("top", "right"):
            plot.spines[side].set_visible(False)
    _entitle(upper, everyone, len(measured), len(failed))
    figure.draw_without_rendering()  # Only now are the axes where they will be.
    _write_labels(upper, labels)
    figure.savefig(path)


def _entitle(plot: Axes, everyone: Sequence[Attempt], measured: int, failed: int) -> None:
    subject = _drawable(subject_of(everyone).removesuffix(" · SIMULATED"))
    front = len(front_among(everyone))
    plot.set_title(subject, loc="left", fontsize=12, fontweight="bold", color=INK, pad=22)
    plot.text(
        0,
        1.025,
        f"{measured} measured, {front} on the front, {failed} not measured",
        transform=plot.transAxes,
        fontsize=9,
        color=GREY,
        va="bottom",
    )
    if is_simulated(everyone):
        plot.text(
            1,
            1.075,
            "SIMULATED: invented figures",
            transform=plot.transAxes,
            ha="right",
            va="bottom",
            fontsize=10,
            fontweight="bold",
            color="white",
            bbox={"boxstyle": "round,pad=0.35", "facecolor": RED, "edgecolor": "none"},
        )
    if not measured:
        plot.text(
            0.5,
            0.5,
            "nothing measured yet" if not failed else "no configuration could be measured",
            transform=plot.transAxes,
            ha="center",
            va="center",
            fontsize=12,
            color=GREY,
        )
        plot.set_yticks([])


def _scale_context(plot: Axes, everyone: Sequence[Attempt], labels: Sequence[_Label]) -> None:
    """Give the axis a log2 scale over all contexts and labels, with a tick at each power of two."""
    contexts = [float(result.context.proven_tokens) for _, result in measured_of(everyone)]
    contexts += [
        float(tokens)
        for attempt in everyone
        if not isinstance(attempt.outcome, Measured)
        and (tokens := configured_context(attempt)) is not None
    ]
    low, high = (min(contexts), max(contexts)) if contexts else (1024.0, 131072.0)
    margin = max(0.35, 0.07 * math.log2(high / low))
    first, last = math.log2(low) - margin, math.log2(high) + margin
    if last - first < 2:
        first, last = first - 0.5, last + 0.5
    for label in labels:
        # At 8 points a letter is about 4.7 points wide, and the axes about 560.
        share = (len(label.full) * 4.7 + 12) / 560
        last = max(last, first + (math.log2(label.x) - first) / (1 - share))
    plot.set_xscale("log", base=2)
    plot.set_xlim(2**first, 2**last)
    powers = range(math.ceil(first), math.floor(last) + 1)
    plot.set_xticks(
        [2.0**power for power in powers], [short_tokens(2.0**power) for power in powers]
    )
    plot.set_xticks([], minor=True)
    plot.grid(True, color="#E6E8EB", linewidth=0.8)
    plot.set_axisbelow(True)


def _draw_measured(plot: Axes, measured: Sequence[tuple[Attempt, Measured]]) -> None:
    front = sorted(
        measured_of(front_among([attempt for attempt, _ in measured])),
        key=lambda each: each[1].context.proven_tokens,
    )
    leading = {attempt.number for attempt, _ in front}
    others = [each for each in measured if each[0].number not in leading]
    if others:
        _draw_points(plot, others, colour=GREY, filled=False, label="measured")
    if not front:
        return
    left, _ = plot.get_xlim()
    xs = [float(result.context.proven_tokens) for _, result in front]
    ys = [result.decode_tok_s.median for _, result in front]
    # Up to its context each front point is the best speed there is; past the last there is none.
    edge_x, edge_y = [left, *xs, xs[-1]], [ys[0], *ys, 0.0]
    plot.step(edge_x, edge_y, where="pre", color=BLUE, linewidth=1.6, zorder=2)
    plot.fill_between(edge_x, edge_y, step="pre", color=BLUE, alpha=0.07, linewidth=0, zorder=1)
    _draw_points(plot, front, colour=BLUE, filled=True, label="on the front")
    top = max(result.decode_tok_s.high for _, result in measured)
    plot.set_ylim(0, top * 1.12 or 1.0)
    plot.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 0.995),
        ncols=2,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        borderaxespad=0.2,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Label:
    """What is written beside a point of the front, in full and where there is little room."""

    x: float
    y: float
    low: float
    high: float
    full: str
    short: str


def _labels(everyone: Sequence[Attempt]) -> list[_Label]:
    """Return a label for each front point: its number, and what tells it from its neighbours."""
    front = measured_of(front_among(everyone))
    axes, _ = varied([attempt for attempt, _ in front])
    labels = []
    for attempt, result in front:
        short = f"#{attempt.number}"
        said = " ".join(
            f"{axis}={text(attempt.point[axis])}"
            for axis in axes
            if axis in attempt.point and axis not in CONTEXT_NAMES
        )
        labels.append(
            _Label(
                x=float(result.context.proven_tokens),
                y=result.decode_tok_s.median,
                low=result.decode_tok_s.low,
                high=result.decode_tok_s.high,
                full=_drawable(f"{short}  {said}") if said and len(said) <= 40 else short,
                short=short,
            )
        )
    return labels


def _write_labels(plot: Axes, labels: Sequence[_Label]) -> None:
    """Write each label up and right of its point, where a front is empty, or shorter if crowded."""
    from matplotlib.transforms import Bbox

    pixels = plot.transData.transform
    taken: list[Bbox] = []
    for label in labels:
        (x, bottom), (_, top) = pixels([(label.x, label.low), (label.x, label.high)])
        taken.append(Bbox.from_extents(x - 8, bottom - 2, x + 8, top + 2))
    for label in labels:
        for said, offset, align in (
            (label.full, (7, 5), "left"),
            (label.full, (7, 13), "left"),
            (label.short, (7, 5), "left"),
            (label.short, (-7, -11), "right"),
        ):
            note = plot.annotate(
                said,
                (label.x, label.y),
                xytext=offset,
                textcoords="offset points",
                ha=align,
                fontsize=8,
                color=INK,
                zorder=6,
            )
            box = note.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            note.remove()


def _draw_points(
    plot: Axes,
    points: Sequence[tuple[Attempt, Measured]],
    *,
    colour: str,
    filled: bool,
    label: str,
) -> None:
    speeds = [result.decode_tok_s for _, result in points]
    plot.errorbar(
        [result.context.proven_tokens for _, result in points],
        [speed.median for speed in speeds],
        yerr=[
            [max(0.0, speed.median - speed.low) for speed in speeds],
            [max(0.0, speed.high - speed.median) for speed in speeds],
        ],
        fmt="o",
        markersize=7 if filled else 5.5,
        markerfacecolor=colour if filled else "white",
        markeredgecolor="white" if filled else colour,
        markeredgewidth=0.9 if filled else 1.2,
        ecolor=colour,
        elinewidth=1.2,
        capsize=2.5,
        label=label,
        zorder=5 if filled else 3,
    )


def _draw_lanes(plot: Axes, failed: Sequence[Attempt], lanes: Sequence[int]) -> None:
    labels = []
    for row, lane in enumerate(lanes):
        title, marker, colour = _LANES[lane]
        members = [attempt for attempt in failed if _lane(attempt) == lane]
        placed = [tokens for each in members if (tokens := configured_context(each)) is not None]
        counts = {tokens: placed.count(tokens) for tokens in sorted(set(placed))}
        plot.scatter(
            list(counts),
            [row] * len(counts),
            marker=marker,
            color=colour,
            s=55,
            linewidths=1.8,
            zorder=3,
        )
        for tokens, count in counts.items():
            if count > 1:
                plot.annotate(
                    f"×{count}",
                    (tokens, row),
                    xytext=(5, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=7.5,
                    color=INK,
                )
        unplaced = len(members) - len(placed)
        labels.append(f"{title} ({len(members)}{f', {unplaced} not drawn' if unplaced else ''})")
    plot.set_ylim(len(lanes) - 0.4, -0.6)
    plot.set_yticks(range(len(lanes)), labels)
    plot.tick_params(axis="y", length=0)
    plot.spines["left"].set_visible(False)
    plot.grid(True, axis="x", color="#E6E8EB", linewidth=0.8)
    plot.set_axisbelow(True)


# --- the report's other charts -------------------------------------------------------------------

_SERIES = ("#0072B2", "#D55E00", "#009E73", "#B5558D", "#A87400", "#2F8FC7", "#22262B", "#76808B")
_MARKERS = ("o", "D", "s", "^", "P", "X", "*", "v")
_DASHES = ("-", "--", ":", "-.")


def write_pictures(report: Report, folder: Path) -> dict[str, str]:
    """Draw the charts of a report into the folder; return the file of each by its section.

    A section without data has none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {"front": "front.png"}
    write_front_png(report.attempts, folder / "front.png")
    for section, draw, has in (
        ("effects", _draw_effects, any(each.ratio is not None for each in report.effects)),
        ("memory", _draw_memory, bool(report.parts)),
        ("drafts", _draw_drafts, bool(report.drafts)),
        ("depths", _draw_depths, bool(report.depths)),
    ):
        path = folder / f"{section}.png"
        if not has:
            path.unlink(missing_ok=True)  # of an earlier report, which would mislead
            continue
        figure, plot = _canvas(4.8)
        draw(report, plot)
        if report.simulated:
            plot.set_title("SIMULATED: invented figures", loc="right", fontsize=9, color=RED)
        figure.savefig(path)
        drawn[section] = path.name
    return drawn


def _canvas(height: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, height), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    plot = figure.subplots()
    plot.grid(True, color="#E6E8EB", linewidth=0.8)
    plot.set_axisbelow(True)
    plot.tick_params(colors=INK, labelsize=9)
    for side in ("top", "right"):
        plot.spines[side].set_visible(False)
    return figure, plot


def _draw_effects(report: Report, plot: Axes) -> None:
    known = [each for each in report.effects if each.ratio is not None][::-1]
    plot.figure.set_size_inches(9.6, 1.4 + 0.24 * len(known))  # type: ignore[union-attr,unused-ignore]
    for row, each in enumerate(known):
        colour = BLUE if each.clear else GREY
        if each.low is not None and each.high is not None:
            plot.plot([each.low, each.high], [row, row], color=colour, linewidth=1.4)
        plot.plot(
            [each.ratio or 1.0], [row], marker="x" if each.low is None else "o", color=colour,
            markerfacecolor=colour if each.clear else "white", linestyle="none",
        )  # fmt: skip
    plot.axvline(1, color=GREY, linewidth=1, linestyle=":")
    bounds = [b for e in known for b in (e.ratio, e.low, e.high) if b]
    reach = max([0.1, *(abs(math.log2(each)) for each in bounds)]) * 1.15
    ticks = ratio_ticks(reach)
    plot.set_xscale("log", base=2)
    plot.set_xlim(2**-reach, 2**reach)
    plot.set_xticks(ticks, [f"×{each:g}" for each in ticks])
    plot.set_xticks([], minor=True)
    labels = [_drawable(f"{each.axis} = {text(each.value)}"[:40]) for each in known]
    plot.set_yticks(range(len(known)), labels)
    plot.set_ylim(-0.7, len(known) - 0.3)
    plot.set_xlabel(
        "decode speed beside its matches (ratio): filled clear, open not, × too few", color=INK
    )


def _draw_memory(report: Report, plot: Axes) -> None:
    for index, name in enumerate(dict.fromkeys(each.part for each in report.parts)):
        here = [each for each in report.parts if each.part == name]
        plot.errorbar(
            [each.predicted / 2**20 for each in here],
            [each.observed / 2**20 for each in here],
            xerr=[
                [min(each.spread, 0.9 * each.predicted) / 2**20 for each in here],
                [each.spread / 2**20 for each in here],
            ],
            fmt=_MARKERS[index % len(_MARKERS)],
            color=_SERIES[index % len(_SERIES)],
            elinewidth=0.9,
            label=_named(name),
        )
    sizes = [each / 2**20 for part in report.parts for each in (part.predicted, part.observed)]
    ends = (min(sizes) / 1.4, max(sizes) * 1.4)
    plot.plot(ends, ends, color=GREY, linewidth=1, linestyle=":")
    plot.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    ticks = size_ticks(*ends)
    for axis in (plot.xaxis, plot.yaxis):
        axis.set_ticks(ticks, [f"{tick:,g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    plot.set_xlabel("as estimated before the boot (MiB)", color=INK)
    plot.set_ylabel("as the engine printed it (MiB)", color=INK)
    plot.legend(frameon=False, fontsize=9, labelcolor=INK)


def _draw_drafts(report: Report, plot: Axes) -> None:
    for index, each in enumerate(report.drafts):
        plot.plot(
            range(1, len(each.shares) + 1), [share * 100 for share in each.shares],
            **_line(index, each.label),
        )  # fmt: skip
    plot.set_ylim(0, 104)
    plot.set_xticks(range(1, max(len(each.shares) for each in report.drafts) + 1))
    plot.set_xlabel("position in the draft (tokens)", color=INK)
    plot.set_ylabel("accepted, of all steps (%)", color=INK)
    plot.legend(frameon=False, fontsize=8, labelcolor=INK, title=_after(report), title_fontsize=8)


def _draw_depths(report: Report, plot: Axes) -> None:
    for index, each in enumerate(report.depths):
        line = _line(index, each.label)
        plot.plot([at.tokens for at in each.depths], [at.tok_s for at in each.depths], **line)
        sure = [(at.tokens, at.tok_s, at.summary) for at in each.depths if at.summary is not None]
        plot.errorbar(
            [tokens for tokens, _, _ in sure],
            [speed for _, speed, _ in sure],
            yerr=[
                [max(0.0, speed - summary.low) for _, speed, summary in sure],
                [max(0.0, summary.high - speed) for _, speed, summary in sure],
            ],
            fmt="none", ecolor=line["color"], capsize=2.5,
        )  # fmt: skip
    plot.set_xscale("log", base=2)
    plot.xaxis.set_major_formatter(lambda value, _: short_tokens(value))
    plot.set_ylim(bottom=0)
    plot.set_xlabel("prompt (tokens)", color=INK)
    plot.set_ylabel("decode speed (tok/s)", color=INK)
    plot.legend(frameon=False, fontsize=8, labelcolor=INK, title=_after(report), title_fontsize=8)


def _after(report: Report) -> str:
    return _drawable(" · ".join(report.label_axes))


def _line(index: int, label: str) -> dict[str, Any]:
    return {
        "color": _SERIES[index % len(_SERIES)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "label": _named(label if len(label) <= 50 else label[:49] + "…"),
    }


def _drawable(said: str) -> str:
    """Return text in which matplotlib finds no formula and no half of a character."""
    return said.encode("utf-8", "replace").decode().replace("$", r"\$")


def _named(said: str) -> str:
    """Return a label for a legend, which hides those that begin with an underscore."""
    return _drawable(said).removeprefix("_")
