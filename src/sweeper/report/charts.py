"""The report's charts as plotly specifications: data only, coloured by the page's own scheme.

A colour that begins with `@` is one of the page's; every axis says its unit.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from sweeper.core.outcome import Attempt, Measured
from sweeper.core.pairs import text
from sweeper.core.standing import front_among, standing
from sweeper.report.content import Report, effect_words
from sweeper.report.effects import Effect
from sweeper.report.front import configured_context, measured_of, measured_row
from sweeper.report.seen import DepthsSeen, DraftsSeen, PartSeen
from sweeper.report.words import (
    count_text,
    figure_text,
    percent_text,
    ratio_ticks,
    short_tokens,
    size_ticks,
)

Chart: TypeAlias = dict[str, Any]
SERIES = tuple(f"@s{index}" for index in range(8))
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "x", "star", "triangle-down")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")


def charts_of(report: Report) -> dict[str, Chart]:
    """Return the charts of a report by the section they belong to; none without data."""
    charts = {"front": _front(report.attempts)}
    if any(each.ratio is not None for each in report.effects):
        charts["effects"] = _effects(report.effects)
    if report.parts:
        charts["memory"] = _memory(report.parts)
    if report.drafts:
        charts["drafts"] = _drafts(report.drafts)
    if report.depths:
        charts["depths"] = _depths(report.depths)
    return charts


def _layout(x: Mapping[str, Any], y: Mapping[str, Any], *, height: int = 420) -> Chart:
    axis = {
        "gridcolor": "@line", "linecolor": "@line", "zerolinecolor": "@line", "automargin": True,
        "fixedrange": False,
    }  # fmt: skip
    return {
        "height": height,
        "autosize": True,
        "margin": {"l": 56, "r": 16, "t": 16, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "@ink", "size": 13, "family": "system-ui, sans-serif"},
        "hoverlabel": {
            "align": "left", "bgcolor": "@raised", "bordercolor": "@line",
            "font": {"color": "@ink"},
        },
        "hovermode": "closest",
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        "xaxis": {**axis, **x},
        "yaxis": {**axis, **y},
    }  # fmt: skip


def _titled(title: str) -> Chart:
    return {"title": {"text": title, "standoff": 12}}


def _tokens_axis(title: str, contexts: Iterable[float]) -> Chart:
    values = [each for each in contexts if each > 0] or [1024, 131072]
    first, last = math.log2(min(values)), math.log2(max(values))
    margin = max(0.25, 0.06 * (last - first))
    powers = range(math.ceil(first - margin), math.floor(last + margin) + 1)
    step = max(1, math.ceil(len(powers) / 9))
    ticks = [2**power for power in powers[::step]]
    return {
        **_titled(title),
        "type": "log",
        "range": [(first - margin) * math.log10(2), (last + margin) * math.log10(2)],
        "tickvals": ticks,
        "ticktext": [short_tokens(tick) for tick in ticks],
    }


def _bars(values: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> Chart:
    return {
        "type": "data",
        "symmetric": False,
        "array": [max(0.0, high - value) for value, high in zip(values, highs, strict=True)],
        "arrayminus": [max(0.0, value - low) for value, low in zip(values, lows, strict=True)],
        "thickness": 1.3,
        "width": 4,
    }


# --- the front -----------------------------------------------------------------------------------


def _front(everyone: Sequence[Attempt]) -> Chart:
    front = sorted(
        measured_of(front_among(everyone)), key=lambda each: each[1].context.proven_tokens
    )
    leading = {attempt.number for attempt, _ in front}
    others = [each for each in measured_of(standing(everyone)) if each[0].number not in leading]
    data: list[Chart] = []
    for points, label, colour, symbol in (
        (others, "measured", "@other", "circle-open"),
        (front, "on the front", "@front", "circle"),
    ):
        if not points:
            continue
        speeds = [result.decode_tok_s for _, result in points]
        medians = [speed.median for speed in speeds]
        is_front = points is front
        data.append(
            {
                "type": "scatter",
                "x": [result.context.proven_tokens for _, result in points],
                "y": medians,
                "error_y": {
                    **_bars(medians, [each.low for each in speeds], [each.high for each in speeds]),
                    "color": colour,
                },
                "mode": "lines+markers" if is_front else "markers",
                # "vh": first down to the next speed, then along to its context.
                "line": {"shape": "vh", "width": 2, "color": colour},
                "marker": {
                    "size": 11 if is_front else 9, "color": colour, "symbol": symbol,
                    "line": {"width": 1.5, "color": "@page" if is_front else colour},
                },
                "name": label,
                "hovertext": [_card(attempt, result) for attempt, result in points],
                "hoverinfo": "text",
            }
        )  # fmt: skip
    failed = [
        (attempt, tokens)
        for attempt in everyone
        if not isinstance(attempt.outcome, Measured)
        and (tokens := configured_context(attempt)) is not None
    ]
    if failed:
        together: dict[int, list[Attempt]] = {}
        for attempt, tokens in failed:
            together.setdefault(tokens, []).append(attempt)
        data.append(
            {
                "type": "scatter",
                "x": list(together),
                "y": [0.0] * len(together),
                "mode": "markers+text",
                "text": [f"×{len(each)}" if each[1:] else "" for each in together.values()],
                "textposition": "top right",
                "textfont": {"color": "@fail", "size": 12},
                "marker": {"size": 10, "color": "@fail", "symbol": "x-thin-open",
                           "line": {"width": 2.5, "color": "@fail"}},
                "name": "not measured, at its configured context",
                "hovertext": [_card_of_failures(several) for several in together.values()],
                "hoverinfo": "text",
                "cliponaxis": False,
            }
        )  # fmt: skip
    contexts = [
        *(result.context.proven_tokens for _, result in measured_of(everyone)),
        *(tokens for _, tokens in failed),
    ]
    layout = _layout(
        _tokens_axis("proven context (tokens)", contexts),
        {**_titled("decode speed (tok/s)"), "rangemode": "tozero"},
        height=480,
    )
    return {"data": data, "layout": layout}


def _card(attempt: Attempt, result: Measured) -> str:
    row = measured_row(attempt, result, ())
    speed = result.decode_tok_s
    lines = [
        f"<b>attempt {attempt.number}: {figure_text(speed.median)} tok/s</b> "
        f"({figure_text(speed.low)} to {figure_text(speed.high)}, n = {speed.n})",
        f"{result.context.proven_tokens:,} tokens proven of "
        f"{result.context.configured_tokens:,} configured",
        f"first token after {figure_text(row['ttft_ms'])} ms",
        f"{percent_text(row['acceptance'])} % of drafts accepted"
        if row["acceptance"] is not None
        else "",
        f"prefill {figure_text(row['prefill_tok_s'])} tok/s"
        if row["prefill_tok_s"] is not None
        else "",
        f"peak {count_text(row['peak_memory_mib'])} MiB"
        if row["peak_memory_mib"] is not None
        else "",
        f"doubts: {html.escape(row['doubts'])}" if row["doubts"] else "",
        *_point(attempt),
    ]
    return "<br>".join(line for line in lines if line)


def _card_of_failures(several: Sequence[Attempt]) -> str:
    lines: list[str] = []
    for attempt in several[:3]:
        assert not isinstance(attempt.outcome, Measured)
        said = textwrap.wrap(attempt.outcome.finding.explanation, 60)
        lines += [
            f"<b>attempt {attempt.number}: {attempt.outcome.name.value}</b>",
            *(html.escape(line) for line in said),
            *(html.escape(line) for line in textwrap.wrap(str(attempt.point), 60)),
        ]
    if several[3:]:
        lines.append("and " + ", ".join(f"#{each.number}" for each in several[3:]))
    return "<br>".join(lines)


def _point(attempt: Attempt) -> list[str]:
    return [
        f"{html.escape(axis)} = {html.escape(text(each))}" for axis, each in attempt.point.items()
    ]


# --- what each axis did --------------------------------------------------------------------------


def _effects(effects: Sequence[Effect]) -> Chart:
    known = [each for each in effects if each.ratio is not None]
    labels = [_label(each) for each in known]
    data: list[Chart] = []
    for name, members, symbol, colour in (
        ("clear difference", [e for e in known if e.clear], "circle", "@front"),
        (
            "none that is clear",
            [e for e in known if e.low and not e.clear],
            "circle-open",
            "@other",
        ),
        ("too few to tell", [e for e in known if not e.low], "x-thin-open", "@muted"),
    ):
        if not members:
            continue
        ratios = [each.ratio or 1.0 for each in members]
        lows = [each.low or ratio for each, ratio in zip(members, ratios, strict=True)]
        highs = [each.high or ratio for each, ratio in zip(members, ratios, strict=True)]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "orientation": "h",
                "name": name,
                "x": ratios,
                "y": [_label(each) for each in members],
                "error_x": {**_bars(ratios, lows, highs), "color": colour},
                "marker": {"size": 10, "symbol": symbol, "color": colour,
                           "line": {"width": 2, "color": colour}},
                "hovertext": [_card_of_effect(each) for each in members],
                "hoverinfo": "text",
            }
        )  # fmt: skip
    bounds = [b for e in known for b in (e.ratio, e.low, e.high) if b is not None and b > 0]
    reach = max([0.1, *(abs(math.log2(each)) for each in bounds)]) * 1.15
    shown = ratio_ticks(reach)
    layout = _layout(
        {
            **_titled("speed beside its matches (ratio)"),
            "type": "log",
            "range": [-reach * math.log10(2), reach * math.log10(2)],
            "tickvals": shown,
            "ticktext": [f"×{each:g}" for each in shown],
        },
        # A category has no unit: it is the axis and its value.
        {
            "type": "category", "categoryorder": "array", "categoryarray": labels[::-1],
            "title": {"text": ""}, "range": [-0.7, len(labels) - 0.3],
        },
        height=130 + 26 * len(labels),
    )  # fmt: skip
    layout["shapes"] = [
        {"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1,
         "line": {"color": "@muted", "width": 1, "dash": "dot"}}
    ]  # fmt: skip
    return {"data": data, "layout": layout}


def _label(effect: Effect) -> str:
    said = f"{effect.axis} = {text(effect.value)}"
    return html.escape(said if len(said) <= 26 else said[:25] + "…")


def _card_of_effect(effect: Effect) -> str:
    lines = [
        f"<b>{html.escape(effect.axis)} = {html.escape(text(effect.value))}</b>",
        effect_words(effect),
        f"{effect.comparisons} comparisons, {effect.exact} of them exact",
        f"{effect.boots} boots, {effect.measured} measured, {effect.out_of_memory} out of memory",
    ]
    return "<br>".join(lines)


# --- memory, drafts, depth -----------------------------------------------------------------------


def _memory(parts: Sequence[PartSeen]) -> Chart:
    names = list(dict.fromkeys(each.part for each in parts))
    data: list[Chart] = []
    for index, name in enumerate(names):
        here = [each for each in parts if each.part == name]
        colour = SERIES[index % len(SERIES)]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": html.escape(name),
                "x": [each.predicted / 2**20 for each in here],
                "y": [each.observed / 2**20 for each in here],
                "error_x": {
                    "type": "data", "array": [each.spread / 2**20 for each in here],
                    "arrayminus": [
                        min(each.spread, each.predicted * 0.9) / 2**20 for each in here
                    ],
                    "symmetric": False, "color": colour, "thickness": 1, "width": 0,
                },
                "marker": {"size": 9, "color": colour, "symbol": SYMBOLS[index % len(SYMBOLS)],
                           "opacity": 0.85},
                "hovertext": [
                    f"<b>attempt {each.attempt}: {html.escape(each.part)}</b><br>"
                    f"thought {_mib(each.predicted)}, give or take {_mib(each.spread)}<br>"
                    f"printed {_mib(each.observed)}"
                    for each in here
                ],
                "hoverinfo": "text",
            }
        )  # fmt: skip
    sizes = [size / 2**20 for each in parts for size in (each.predicted, each.observed)]
    low, high = math.log10(min(sizes)) - 0.15, math.log10(max(sizes)) + 0.15
    data.append(
        {
            "type": "scatter", "mode": "lines", "name": "as thought",
            "x": [10**low, 10**high], "y": [10**low, 10**high], "hoverinfo": "skip",
            "line": {"color": "@muted", "width": 1, "dash": "dot"},
        }
    )  # fmt: skip
    ticks = size_ticks(10**low, 10**high)
    scale = {
        "type": "log", "range": [low, high], "tickvals": ticks,
        "ticktext": [f"{tick:,g}" for tick in ticks],
    }  # fmt: skip
    layout = _layout(
        {**_titled("as estimated before the boot (MiB)"), **scale},
        {**_titled("as the engine printed it (MiB)"), **scale},
        height=460,
    )
    return {"data": data, "layout": layout}


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _drafts(drafts: Sequence[DraftsSeen]) -> Chart:
    data = [
        {
            **_line(index, each.label),
            "x": list(range(1, len(each.shares) + 1)),
            "y": [share * 100 for share in each.shares],
            "hovertext": [
                f"<b>{html.escape(each.label)}</b><br>position {position}: "
                f"accepted in {share:.1%} of all steps<br>drafts of {position}: "
                f"{each.yields[position]:.2f} tokens/step"
                for position, share in enumerate(each.shares, 1)
            ],
            "hoverinfo": "text",
        }
        for index, each in enumerate(drafts)
    ]
    layout = _layout(
        {**_titled("position in the draft (tokens)"), "dtick": 1},
        {**_titled("accepted, of all steps (%)"), "range": [0, 104]},
    )
    return {"data": data, "layout": layout}


def _depths(depths: Sequence[DepthsSeen]) -> Chart:
    data: list[Chart] = []
    for index, each in enumerate(depths):
        speeds = [at.tok_s for at in each.depths]
        line = _line(index, each.label)
        line["marker"] = {
            **line["marker"],
            "symbol": [
                line["marker"]["symbol"] + ("-open" if at.summary is None else "")
                for at in each.depths
            ],
        }
        data.append(
            {
                **line,
                "x": [at.tokens for at in each.depths],
                "y": speeds,
                "error_y": {
                    **_bars(
                        speeds,
                        [at.tok_s if at.summary is None else at.summary.low for at in each.depths],
                        [at.tok_s if at.summary is None else at.summary.high for at in each.depths],
                    ),
                    "color": line["line"]["color"],
                },
                "hovertext": [
                    f"<b>{html.escape(each.label)}</b><br>{figure_text(at.tok_s)} tok/s after "
                    f"{at.tokens:,} tokens<br>"
                    + (
                        "one answer, of the context proof"
                        if at.summary is None
                        else f"{figure_text(at.summary.low)} to {figure_text(at.summary.high)}, "
                        f"n = {at.summary.n}"
                    )
                    for at in each.depths
                ],
                "hoverinfo": "text",
            }
        )
    layout = _layout(
        _tokens_axis("prompt (tokens)", [at.tokens for each in depths for at in each.depths]),
        {**_titled("decode speed (tok/s)"), "rangemode": "tozero"},
    )
    return {"data": data, "layout": layout}


def _line(index: int, label: str) -> Chart:
    colour = SERIES[index % len(SERIES)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": html.escape(label if len(label) <= 44 else label[:43] + "…"),
        "line": {"color": colour, "width": 2, "dash": DASHES[index % len(DASHES)]},
        "marker": {"size": 9, "color": colour, "symbol": SYMBOLS[index % len(SYMBOLS)]},
    }
