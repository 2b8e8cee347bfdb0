"""Attempts to what a person looks at: the front as rows, a table, a picture and a page."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from sweeper.core.front import hypervolume
from sweeper.core.outcome import Attempt, Infeasible, Measured, kind, name
from sweeper.core.pairs import Pairs, Scalar, text
from sweeper.core.standing import front_among, standing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 2**20

CONTEXT_NAMES = (
    "context",
    "context_tokens",
    "ctx",
    "ctx_size",
    "n_ctx",
    "max_model_len",
    "configured_tokens",
)
"""Where the context that a failed attempt asked for is looked up: in its point, then its facts."""

# Okabe and Ito's palette, told apart with any colour vision; shapes differ as well.
_BLUE, _ORANGE, _RED, _GREY, _INK = "#0072B2", "#E69F00", "#D55E00", "#8A8F98", "#22262B"


# --- the front -----------------------------------------------------------------------------------


def measured_of(attempts: Iterable[Attempt]) -> list[tuple[Attempt, Measured]]:
    """Return the attempts that were measured and proved some context, with their figures."""
    return [
        (attempt, attempt.outcome)
        for attempt in attempts
        if isinstance(attempt.outcome, Measured) and attempt.outcome.context.proven_tokens > 0
    ]


def reference_point(attempts: Iterable[Attempt]) -> tuple[float, float] | None:
    """Return where the hypervolume starts: no speed, half the smallest proven context.

    In (tok/s, log2 tokens); None where nothing was measured.
    """
    contexts = [result.context.window_tokens for _, result in measured_of(attempts)]
    return (0.0, math.log2(min(contexts)) - 1) if contexts else None


def hypervolume_of(attempts: Iterable[Attempt]) -> float:
    """Return the hypervolume of the measured attempts, in tok/s x log2 tokens; 0 for none."""
    everyone = list(attempts)
    reference = reference_point(everyone)
    if reference is None:
        return 0.0
    return hypervolume(
        (
            (result.decode_tok_s.median, math.log2(result.context.window_tokens))
            for _, result in measured_of(standing(everyone))
        ),
        reference,
    )


def axes_of(attempts: Iterable[Attempt]) -> tuple[str, ...]:
    """Return the names of all axes that occur in these attempts, sorted."""
    return tuple(sorted({axis for attempt in attempts for axis in attempt.point}))


def configured_context(attempt: Attempt) -> int | None:
    """Return the context an attempt asked for, in tokens, as far as its record tells."""
    if isinstance(attempt.outcome, Measured):
        return attempt.outcome.context.configured_tokens
    for place in (attempt.point, attempt.outcome.finding.facts):
        for each in CONTEXT_NAMES:
            value = place.get(each)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def is_simulated(attempts: Iterable[Attempt]) -> bool:
    """Tell whether any of these figures was invented by a fake engine."""
    return any(attempt.engine.get("simulated") is True for attempt in attempts)


# --- rows ----------------------------------------------------------------------------------------


def front_rows(attempts: Iterable[Attempt]) -> list[dict[str, Any]]:
    """Return the front as rows with equal keys, fastest first; None for what is not there."""
    everyone = list(attempts)
    front = front_among(everyone)
    axes = axes_of(front)
    return [_measured_row(attempt, result, axes) for attempt, result in measured_of(front)]


def _measured_row(attempt: Attempt, result: Measured, axes: Sequence[str]) -> dict[str, Any]:
    speed, prefill, peak = result.decode_tok_s, result.prefill_tok_s, result.peak_bytes
    quality = result.quality
    return {
        "attempt": attempt.number,
        **{axis: attempt.point.get(axis) for axis in axes},
        "decode_tok_s": speed.median,
        "decode_tok_s_low": speed.low,
        "decode_tok_s_high": speed.high,
        "proven_context_tokens": result.context.proven_tokens,
        "acceptance": result.drafts.acceptance if result.drafts is not None else None,
        "ttft_ms": result.ttft_s.median * 1000,
        "prefill_tok_s": prefill.median if prefill is not None else None,
        "peak_memory_mib": peak / _MIB if peak is not None else None,
        "joules_per_token": result.figures[0].joules_per_token if result.figures else None,
        "mean_logprob": quality.mean_logprob if quality is not None else None,
        "confirms": attempt.confirms,
        "doubts": ", ".join(speed.doubts),
    }


def trial_rows(attempts: Iterable[Attempt]) -> list[dict[str, Any]]:
    """Return every attempt as a row with equal keys, in order; None for what is not there."""
    everyone = sorted(attempts, key=lambda attempt: attempt.number)
    axes = axes_of(everyone)
    front = {attempt.number for attempt in front_among(everyone)}
    return [_trial_row(attempt, axes, attempt.number in front) for attempt in everyone]


def _trial_row(attempt: Attempt, axes: Sequence[str], on_front: bool) -> dict[str, Any]:
    outcome = attempt.outcome
    measured = outcome if isinstance(outcome, Measured) else None
    finding = None if isinstance(outcome, Measured) else outcome.finding
    return {
        "attempt": attempt.number,
        "outcome": name(outcome),
        "outcome_kind": kind(outcome),
        "phase": finding.phase.value if finding is not None else None,
        **{axis: attempt.point.get(axis) for axis in axes},
        "decode_tok_s": measured.decode_tok_s.median if measured is not None else None,
        "proven_context_tokens": measured.context.proven_tokens if measured is not None else None,
        "boot_s": attempt.timings.boot_s,
        "total_s": attempt.timings.total_s,
        "on_front": on_front,
        "explanation": finding.explanation if finding is not None else "",
    }


# --- tables for a terminal -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """One column of a terminal table; those with the highest `rank` go first when it is narrow."""

    header: str
    cells: tuple[str, ...]
    rank: int
    right: bool = True
    folds_to: int | None = None
    """The width to which prose may be folded; None for what must stay on its line."""

    @property
    def width(self) -> int:
        natural = max(len(line) for cell in (self.header, *self.cells) for line in cell.split("\n"))
        return natural if self.folds_to is None else min(natural, self.folds_to)


def front_table(attempts: Iterable[Attempt], *, width: int = 80) -> Table:
    """Return the front as a table that fits `width`; what had to be left out is said below it."""
    everyone = list(attempts)
    front = front_among(everyone)
    rows = front_rows(everyone)
    axes, same = _varied(front)
    columns = [
        _column("#", rows, "attempt", str, rank=0),
        *(_column(axis, rows, axis, text, rank=2, right=False) for axis in axes),
        _column("decode\ntok/s", rows, "decode_tok_s", _figure, rank=0),
        _Column(
            header="interval\ntok/s",
            cells=tuple(
                f"{_figure(row['decode_tok_s_low'])}–{_figure(row['decode_tok_s_high'])}"
                for row in rows
            ),
            rank=3,
        ),
        _column("proven\ntokens", rows, "proven_context_tokens", _count, rank=1),
        _column("ttft\nms", rows, "ttft_ms", _figure, rank=4),
        _column("accept.\n%", rows, "acceptance", _percent, rank=5),
        _column("doubts", rows, "doubts", str, rank=6, right=False),
        _column("prefill\ntok/s", rows, "prefill_tok_s", _figure, rank=7),
        _column("peak\nMiB", rows, "peak_memory_mib", _count, rank=8),
    ]
    return _table(f"front of {_subject(everyone)}", columns, same, width, empty="nothing measured")


def trials_table(attempts: Iterable[Attempt], *, width: int = 80) -> Table:
    """Return all attempts as a table that fits `width`, front points marked with a star."""
    everyone = list(attempts)
    rows = trial_rows(everyone)
    axes, same = _varied(everyone)
    columns = [
        _Column(
            header="#",
            cells=tuple(f"{row['attempt']}{'*' if row['on_front'] else ' '}" for row in rows),
            rank=0,
        ),
        _column("outcome", rows, "outcome", str, rank=0, right=False),
        *(_column(axis, rows, axis, text, rank=3, right=False) for axis in axes),
        _column("decode\ntok/s", rows, "decode_tok_s", _figure, rank=1),
        _column("proven\ntokens", rows, "proven_context_tokens", _count, rank=2),
        _column("boot\ns", rows, "boot_s", _figure, rank=5),
        _column("total\ns", rows, "total_s", _figure, rank=6),
        _column("phase", rows, "phase", str, rank=7, right=False),
        _column("what happened", rows, "explanation", str, rank=4, right=False, folds_to=28),
    ]
    return _table(f"attempts of {_subject(everyone)}", columns, same, width, empty="none yet")


def _column(
    header: str,
    rows: Sequence[Mapping[str, Any]],
    key: str,
    show: Callable[[Any], str],
    *,
    rank: int,
    right: bool = True,
    folds_to: int | None = None,
) -> _Column:
    values = [row[key] for row in rows]
    numeric = all(value is None or isinstance(value, int | float) for value in values)
    return _Column(
        header=header,
        cells=tuple("" if value is None else show(value) for value in values),
        rank=rank,
        right=right or (numeric and bool(values)),
        folds_to=folds_to,
    )


def _varied(attempts: Sequence[Attempt]) -> tuple[tuple[str, ...], Pairs]:
    """Return the axes that differ between these attempts, and the settings that do not."""
    if len(attempts) < 2:
        return axes_of(attempts), Pairs()
    same = Pairs(
        {
            axis: attempts[0].point[axis]
            for axis in attempts[0].point
            if all(_holds(attempt, axis, attempts[0].point[axis]) for attempt in attempts)
        }
    )
    return tuple(axis for axis in axes_of(attempts) if axis not in same), same


def _holds(attempt: Attempt, axis: str, value: Scalar) -> bool:
    # Through Pairs, because there 1 and true are different values.
    return axis in attempt.point and Pairs({axis: attempt.point[axis]}) == Pairs({axis: value})


def _table(title: str, columns: Sequence[_Column], same: Pairs, width: int, *, empty: str) -> Table:
    shown = [column for column in columns if any(column.cells) or column.rank == 0]
    dropped: list[_Column] = []
    while _width(shown) > width and any(column.rank > 0 for column in shown):
        # Of equal rank the last goes first, so that the leading axes stay longest.
        worst = max(enumerate(shown), key=lambda item: (item[1].rank, item[0]))[1]
        shown.remove(worst)
        dropped.append(worst)
    rows = len(columns[0].cells)
    missing = ", ".join(_flat(each.header) for each in reversed(dropped))
    notes = [
        f"all: {same}" if same else "",
        f"left out at {width} columns: {missing}" if dropped else "",
        empty if not rows else "",
    ]
    table = Table(
        title=Text(title),
        caption=Text("\n".join(note for note in notes if note)) if any(notes) else None,
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        title_justify="left",
        caption_justify="left",
        header_style="bold",
    )
    for column in shown:
        table.add_column(
            Text(column.header),
            justify="right" if column.right else "left",
            no_wrap=column.folds_to is None,
            min_width=column.width,
            overflow="fold",
            vertical="top",
        )
    # Rich folds the title to the width of the columns: an empty one makes room for it.
    spare = min(width, max(map(len, (title, *notes)))) - _width(shown)
    if spare > 0:
        table.add_column("", min_width=spare)
    for index in range(rows):
        table.add_row(*(Text(column.cells[index]) for column in shown))
    return table


def _width(columns: Sequence[_Column]) -> int:
    return sum(column.width + 2 for column in columns)


def _flat(header: str) -> str:
    return header.replace("\n", " ")


def _figure(value: float) -> str:
    """Return a measured figure with no more digits than it can carry."""
    return (
        f"{value:,.0f}"
        if abs(value) >= 1000
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
    )


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value * 100:.1f}"


def _said(value: object) -> str:
    return (
        text(value) if value is None or isinstance(value, bool | int | float | str) else str(value)
    )


def _subject(attempts: Sequence[Attempt]) -> str:
    """Return the study, engine and model that these attempts belong to, in one line."""
    if not attempts:
        return "a study without attempts"
    first = attempts[0]
    engine = " ".join(
        text(first.engine[key])
        for key in ("name", "engine_version")
        if first.engine.get(key) is not None
    )
    parts = [first.study, engine, _said(first.model.get("name", ""))]
    said = " · ".join(part for part in parts if part)
    return f"{said} · SIMULATED" if is_simulated(attempts) else said


def _short(tokens: float) -> str:
    """Return a token count as people say it: 512, 4K, 1M."""
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if tokens >= size:
            return f"{tokens / size:.4g}{unit}"
    return f"{tokens:.4g}"


# --- the picture ---------------------------------------------------------------------------------

_LANES: tuple[tuple[str, str, str], ...] = (
    ("out of memory", "|", _RED),
    ("not possible", "x", _ORANGE),
    ("unfit or broken", "+", _GREY),
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
        color=_INK,
    )
    upper.set_ylabel("decode speed (tok/s): median and its interval", color=_INK)
    for plot in {upper, lower}:
        plot.tick_params(colors=_INK, labelsize=9)
        for side in ("top", "right"):
            plot.spines[side].set_visible(False)
    _entitle(upper, everyone, len(measured), len(failed))
    figure.draw_without_rendering()  # Only now are the axes where they will be.
    _write_labels(upper, labels)
    figure.savefig(path)


def _entitle(plot: Axes, everyone: Sequence[Attempt], measured: int, failed: int) -> None:
    subject = _subject(everyone).removesuffix(" · SIMULATED")
    front = len(front_among(everyone))
    plot.set_title(subject, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=22)
    plot.text(
        0,
        1.025,
        f"{measured} measured, {front} on the front, {failed} not measured",
        transform=plot.transAxes,
        fontsize=9,
        color=_GREY,
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
            bbox={"boxstyle": "round,pad=0.35", "facecolor": _RED, "edgecolor": "none"},
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
            color=_GREY,
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
    plot.set_xticks([2.0**power for power in powers], [_short(2.0**power) for power in powers])
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
        _draw_points(plot, others, colour=_GREY, filled=False, label="measured")
    if not front:
        return
    left, _ = plot.get_xlim()
    xs = [float(result.context.proven_tokens) for _, result in front]
    ys = [result.decode_tok_s.median for _, result in front]
    # Up to its context each front point is the best speed there is; past the last there is none.
    edge_x, edge_y = [left, *xs, xs[-1]], [ys[0], *ys, 0.0]
    plot.step(edge_x, edge_y, where="pre", color=_BLUE, linewidth=1.6, zorder=2)
    plot.fill_between(edge_x, edge_y, step="pre", color=_BLUE, alpha=0.07, linewidth=0, zorder=1)
    _draw_points(plot, front, colour=_BLUE, filled=True, label="on the front")
    top = max(result.decode_tok_s.high for _, result in measured)
    plot.set_ylim(0, top * 1.12 or 1.0)
    plot.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 0.995),
        ncols=2,
        frameon=False,
        fontsize=9,
        labelcolor=_INK,
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
    axes, _ = _varied([attempt for attempt, _ in front])
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
                full=f"{short}  {said}" if said and len(said) <= 40 else short,
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
                color=_INK,
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
                    color=_INK,
                )
        unplaced = len(members) - len(placed)
        labels.append(f"{title} ({len(members)}{f', {unplaced} not drawn' if unplaced else ''})")
    plot.set_ylim(len(lanes) - 0.4, -0.6)
    plot.set_yticks(range(len(lanes)), labels)
    plot.tick_params(axis="y", length=0)
    plot.spines["left"].set_visible(False)
    plot.grid(True, axis="x", color="#E6E8EB", linewidth=0.8)
    plot.set_axisbelow(True)


# --- the page ------------------------------------------------------------------------------------

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ subject }}</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; color: #22262b; max-width: 1100px;
         margin: 2rem auto; padding: 0 1rem; }
  h1 { font-size: 1.35rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
  .simulated { display: inline-block; background: #d55e00; color: #fff; font-weight: 600;
               padding: .15rem .6rem; border-radius: .3rem; }
  .scroll { overflow-x: auto; }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
  th, td { padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top;
           border-bottom: 1px solid #e6e8eb; }
  th { font-weight: 600; white-space: nowrap; } td.n, th.n { text-align: right; }
  td.n { white-space: nowrap; }
  code { font-size: .85em; overflow-wrap: anywhere; color: #5a6068; }
</style>
</head>
<body>
<h1>{{ subject }}</h1>
{% if simulated %}
<p class="simulated">SIMULATED: a fake engine invented these figures</p>
{% endif %}
<p>{{ measured }} measured, {{ front.rows | length }} on the front, {{ failures | length }} not
measured. Context is what a real prompt and its answer filled; speed is the median, with the
interval that holds it.</p>
{{ chart | safe }}
<h2>The front</h2>
{% if front.rows %}
<div class="scroll"><table>
<tr>{% for column in front.columns %}<th{% if column.right %} class="n"{% endif %}>
{{- column.header }}</th>{% endfor %}</tr>
{% for row in front.rows %}<tr>{% for cell in row %}
<td{% if front.columns[loop.index0].right %} class="n"{% endif %}>{{ cell }}</td>
{%- endfor %}</tr>
{% endfor %}
</table></div>
{% else %}<p>Nothing was measured.</p>{% endif %}
<h2>What could not be measured</h2>
{% if failures %}
<div class="scroll"><table>
<tr><th class="n">#</th><th>outcome</th><th>phase</th><th>point</th><th>what happened</th></tr>
{% for each in failures %}
<tr><td class="n">{{ each.number }}</td><td>{{ each.name }}</td><td>{{ each.phase }}</td>
<td>{{ each.point }}</td><td>{{ each.explanation }}
{%- if each.cause %}<br><code>{{ each.cause }}</code>{% endif %}
{%- if each.try_next %}<br>try next: {{ each.try_next }}{% endif %}</td></tr>
{% endfor %}
</table></div>
{% else %}<p>Everything that was tried was measured.</p>{% endif %}
</body>
</html>
"""


def write_front_html(attempts: Iterable[Attempt], path: Path) -> None:
    """Write one page that needs no network: the front to hover over, and why the rest failed."""
    from jinja2 import Environment, StrictUndefined

    everyone = sorted(attempts, key=lambda attempt: attempt.number)
    rows = front_rows(everyone)
    columns = _page_columns(everyone, rows)
    failures = [
        {
            "number": attempt.number,
            "name": attempt.outcome.name.value,
            "phase": attempt.outcome.finding.phase.value,
            "point": str(attempt.point),
            "explanation": attempt.outcome.finding.explanation,
            "cause": attempt.outcome.finding.cause,
            "try_next": str(attempt.outcome.finding.try_next),
        }
        for attempt in everyone
        if not isinstance(attempt.outcome, Measured)
    ]
    page = Environment(autoescape=True, undefined=StrictUndefined).from_string(_PAGE)
    path.write_text(
        page.render(
            subject=_subject(everyone),
            simulated=is_simulated(everyone),
            measured=len(measured_of(everyone)),
            chart=_chart(everyone),
            front={
                "columns": columns,
                "rows": list(zip(*(column.cells for column in columns), strict=True)),
            },
            failures=failures,
        ),
        # A log line that was not UTF-8 may be quoted in a cause.
        encoding="utf-8",
        errors="replace",
    )


def _page_columns(everyone: Sequence[Attempt], rows: Sequence[Mapping[str, Any]]) -> list[_Column]:
    columns = [
        _column("#", rows, "attempt", str, rank=0),
        *(
            _column(axis, rows, axis, text, rank=0, right=False)
            for axis in axes_of(front_among(everyone))
        ),
        _column("decode, tok/s", rows, "decode_tok_s", _figure, rank=0),
        _column("low", rows, "decode_tok_s_low", _figure, rank=0),
        _column("high", rows, "decode_tok_s_high", _figure, rank=0),
        _column("proven context, tokens", rows, "proven_context_tokens", _count, rank=0),
        _column("acceptance, %", rows, "acceptance", _percent, rank=0),
        _column("first token, ms", rows, "ttft_ms", _figure, rank=0),
        _column("prefill, tok/s", rows, "prefill_tok_s", _figure, rank=0),
        _column("peak, MiB", rows, "peak_memory_mib", _count, rank=0),
        _column("doubts", rows, "doubts", str, rank=0, right=False),
    ]
    return [column for column in columns if any(column.cells)]


def _chart(everyone: Sequence[Attempt]) -> str:
    """Return the interactive chart as HTML with plotly inside it."""
    from plotly import graph_objects as go  # type: ignore[import-untyped,unused-ignore]

    front = sorted(
        measured_of(front_among(everyone)), key=lambda each: each[1].context.proven_tokens
    )
    leading = {attempt.number for attempt, _ in front}
    others = [each for each in measured_of(everyone) if each[0].number not in leading]
    figure = go.Figure()
    for points, label, colour, symbol in (
        (others, "measured", _GREY, "circle-open"),
        (front, "on the front", _BLUE, "circle"),
    ):
        if not points:
            continue
        speeds = [result.decode_tok_s for _, result in points]
        is_front = points is front
        figure.add_trace(
            go.Scatter(
                x=[result.context.proven_tokens for _, result in points],
                y=[speed.median for speed in speeds],
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [max(0.0, speed.high - speed.median) for speed in speeds],
                    "arrayminus": [max(0.0, speed.median - speed.low) for speed in speeds],
                    "thickness": 1.2,
                    "width": 3,
                },
                mode="lines+markers" if is_front else "markers",
                # "vh": first down to the next speed, then along to its context.
                line={"shape": "vh", "width": 1.6, "color": colour},
                marker={"size": 10 if is_front else 8, "color": colour, "symbol": symbol},
                name=label,
                hovertext=[_card(attempt, result) for attempt, result in points],
                hoverinfo="text",
            )
        )
    failed = [
        (attempt, tokens)
        for attempt in everyone
        if not isinstance(attempt.outcome, Measured)
        and (tokens := configured_context(attempt)) is not None
    ]
    if failed:
        figure.add_trace(
            go.Scatter(
                x=[tokens for _, tokens in failed],
                y=[0.0] * len(failed),
                mode="markers",
                marker={"size": 11, "color": _RED, "symbol": "line-ns-open", "line": {"width": 2}},
                name="not measured (at its configured context)",
                hovertext=[_card_of_failure(attempt) for attempt, _ in failed],
                hoverinfo="text",
                cliponaxis=False,
            )
        )
    contexts = [
        *(result.context.proven_tokens for _, result in measured_of(everyone)),
        *(tokens for _, tokens in failed),
    ]
    ticks = [
        2**power
        for power in range(
            math.floor(math.log2(min(contexts, default=1024))),
            math.ceil(math.log2(max(contexts, default=131072))) + 1,
        )
    ]
    figure.update_layout(
        template="plotly_white",
        height=520,
        margin={"l": 60, "r": 20, "t": 30, "b": 60},
        legend={"orientation": "h", "y": 1.08, "x": 0},
        hoverlabel={"align": "left", "bgcolor": "white"},
        font={"color": _INK},
    )
    figure.update_xaxes(
        title="context (tokens)",
        type="log",
        tickvals=ticks,
        ticktext=[_short(tick) for tick in ticks],
    )
    figure.update_yaxes(title="decode speed (tok/s)", rangemode="tozero")
    chart: str = figure.to_html(
        full_html=False, include_plotlyjs=True, config={"displaylogo": False}
    )
    return chart


def _card(attempt: Attempt, result: Measured) -> str:
    row = _measured_row(attempt, result, ())
    speed = result.decode_tok_s
    lines = [
        f"<b>attempt {attempt.number}: {_figure(speed.median)} tok/s</b> "
        f"({_figure(speed.low)} to {_figure(speed.high)}, n = {speed.n})",
        f"{result.context.proven_tokens:,} tokens proven of "
        f"{result.context.configured_tokens:,} configured",
        f"first token after {_figure(row['ttft_ms'])} ms",
        f"{_percent(row['acceptance'])} % of drafts accepted"
        if row["acceptance"] is not None
        else "",
        f"prefill {_figure(row['prefill_tok_s'])} tok/s"
        if row["prefill_tok_s"] is not None
        else "",
        f"peak {_count(row['peak_memory_mib'])} MiB" if row["peak_memory_mib"] is not None else "",
        f"doubts: {html.escape(row['doubts'])}" if row["doubts"] else "",
        *(
            f"{html.escape(axis)} = {html.escape(text(each))}"
            for axis, each in attempt.point.items()
        ),
    ]
    return "<br>".join(line for line in lines if line)


def _card_of_failure(attempt: Attempt) -> str:
    assert not isinstance(attempt.outcome, Measured)
    lines = [
        f"<b>attempt {attempt.number}: {attempt.outcome.name.value}</b>",
        *_folded(attempt.outcome.finding.explanation, 70),
        *(
            f"{html.escape(axis)} = {html.escape(text(each))}"
            for axis, each in attempt.point.items()
        ),
    ]
    return "<br>".join(lines)


def _folded(prose: str, width: int) -> list[str]:
    return [html.escape(line) for line in textwrap.wrap(prose, width)]
