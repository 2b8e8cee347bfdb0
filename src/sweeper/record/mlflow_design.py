"""What a person meets in MLflow: which names, figures, tags, notes, columns and charts.

Pure: no MLflow here. One flat list of runs: MLflow shows nested ones collapsed and without their
figures. A run for each attempt, and one for the study with the front, the report and the recipes.
"""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sweeper.core.objectives import counted_tok_s
from sweeper.core.outcome import (
    Attempt,
    Broken,
    Figures,
    HostFault,
    Infeasible,
    Measured,
    Unfit,
    kind,
    name,
)
from sweeper.core.pairs import Pairs, text
from sweeper.core.reliability import least_left, mib, rooms_of
from sweeper.record.attempts import ENGINE_LOG

LOG_LIMIT_BYTES = 1_000_000
"""Of a longer engine log only the head and the tail go to MLflow, this much in all."""
NOTE_LIMIT = 4000  # MLflow cuts a tag at 8000 characters, with a warning.
PARAM_LIMIT = 6000
REASON_LIMIT = 200
_TAIL_LINES, _TAIL_LIMIT = 12, 1800
_MIB, _GIB = 2**20, 2**30

STUDY_KIND = "study"
"""The kind of the run that stands for the whole study; of the others it is that of the outcome."""

# Okabe and Ito's palette, which the front's picture uses as well.
_FRONT_COLOUR, _MEASURED_COLOUR, _FAILED_COLOUR, _STUDY_COLOUR = (
    *("#0072B2", "#9CC5DF", "#D55E00", "#22262B"),
)

TRIALS, FRONT, FAILED = "trials", "front", "failed"
"""The saved views of an experiment, by the key in their address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the study stands after an attempt; None for what does not exist yet.

    `hypervolume` is in tok/s x log2 tokens; `at_ms` is when the attempt ended, since 1970.
    """

    attempt: int
    boots: int
    infeasible_boots: int
    front_size: int
    hypervolume: float
    at_ms: int
    best_decode_tok_s: float | None = None
    best_proven_context_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalReport:
    """What a study leaves on its run; files that do not exist are passed over.

    The rows of each table all have the same keys. `folders` go to a folder of their own name.
    """

    front_rows: Sequence[Mapping[str, Any]]
    trial_rows: Sequence[Mapping[str, Any]] = ()
    files: Sequence[Path] = ()
    folders: Sequence[Path] = ()
    host: Pairs = Pairs()
    tags: Pairs = Pairs()


# --- figures and tags ----------------------------------------------------------------------------


def metrics_of(attempt: Attempt) -> dict[str, float]:
    """Return the figures of an attempt, the unit in each name; what was not measured is absent.

    Rounded to what a table can show: the exact figures are in attempt.json.
    """
    left = least_left(attempt)
    figures: dict[str, float | None] = {
        "boot_s": attempt.timings.boot_s,
        "memory_left_mib": None if left is None else left / _MIB,
    }
    match attempt.outcome:
        case Measured() if attempt.brief:
            pass  # it was asked for too little to have figures of its own
        case Measured() as measured:
            prefill, drafts, peak = measured.prefill_tok_s, measured.drafts, measured.peak_bytes
            quality, main = measured.quality, next(iter(measured.figures), None)
            figures |= {
                "decode_tok_s": measured.decode_tok_s.median,
                "decode_tok_s_low": measured.decode_tok_s.low,
                "decode_tok_s_high": measured.decode_tok_s.high,
                "counted_tok_s": counted_tok_s(measured),
                "proven_context_tokens": measured.context.proven_tokens,
                "ttft_ms": measured.ttft_s.median * 1000,
                "prefill_tok_s": prefill.median if prefill is not None else None,
                "acceptance": drafts.acceptance if drafts is not None else None,
                "peak_memory_gib": peak / _GIB if peak is not None else None,
                "joules_per_token": main.joules_per_token if main is not None else None,
                "mean_logprob": quality.mean_logprob if quality is not None else None,
            }
            for each in measured.figures[1:]:
                figures |= _figures_of_load(each)
        case Infeasible(finding=finding) | Unfit(finding=finding):
            shortfall = finding.facts.get("shortfall_bytes")
            if isinstance(shortfall, int | float) and not isinstance(shortfall, bool):
                figures["shortfall_mib"] = shortfall / _MIB
        case Broken() | HostFault():
            pass
    return existing(figures)


def _figures_of_load(load: Figures) -> dict[str, float | None]:
    """Return the figures of a further load; MLflow makes a group of what is before the slash."""
    of = "" if load.prompt_length is None else f"_at_{load.prompt_length}_tokens"
    beside = "" if load.streams == 1 else f"_of_{load.streams}_streams"
    found: dict[str, float | None] = {
        key(f"{load.workload}/decode_tok_s{of}{beside}"): load.decode_tok_s.median
    }
    if load.total_tok_s is not None and load.streams > 1:
        found[key(f"{load.workload}/total_tok_s{of}{beside}")] = load.total_tok_s.median
    return found


def metrics_of_progress(progress: Progress) -> dict[str, float]:
    """Return the figures of the study's run at one step."""
    return existing(
        {
            "best_decode_tok_s": progress.best_decode_tok_s,
            "best_proven_context_tokens": progress.best_proven_context_tokens,
            "front_size": progress.front_size,
            "hypervolume": progress.hypervolume,
            "boots": progress.boots,
            "infeasible_boots": progress.infeasible_boots,
        }
    )


def tags_of(attempt: Attempt) -> dict[str, str]:
    """Return what an attempt is searched and filtered by, but for its standing and its note."""
    tags = {
        "sweeper.role": "attempt",
        "sweeper.attempt": str(attempt.number),
        "sweeper.trial": str(attempt.trial),
        "outcome": name(attempt.outcome),
        "kind": kind(attempt.outcome),
        **{
            key: text(facts["name"])
            for key, facts in (("engine", attempt.engine), ("model", attempt.model))
            if "name" in facts
        },
    }
    if attempt.confirms is not None:
        tags["confirms"] = str(attempt.confirms)
        tags["brief"] = "true" if attempt.brief else "false"
    if not isinstance(attempt.outcome, Measured):
        tags["phase"] = attempt.outcome.finding.phase.value
        tags["reason"] = cut(attempt.outcome.finding.explanation, REASON_LIMIT)
    if attempt.engine.get("simulated") is True:
        tags["simulated"] = "true"
    return tags


def standing_tags(
    attempt_kind: str, *, on_front: bool, confirmed: bool, hold: tuple[str, str] | None = None
) -> dict[str, str]:
    """Return what may change about an attempt when others follow, its colour in charts too.

    `hold` is whether its point works every time: a word (`reliable`, `flaky`, ...), and its margin.
    """
    if attempt_kind != "measured":
        colour = _FAILED_COLOUR
    else:
        colour = _FRONT_COLOUR if on_front else _MEASURED_COLOUR
    return {
        "on_front": "true" if on_front else "false",
        "confirmed": "true" if confirmed else "false",
        "mlflow.runColor": colour,
        **({} if hold is None else {"holds": hold[0], "memory_left": hold[1]}),
    }


def study_tags(facts: Pairs) -> dict[str, str]:
    """Return the facts of a study as tags of its run."""
    return {
        **{key(each): text(value) for each, value in facts.items() if value is not None},
        "kind": STUDY_KIND,
        "mlflow.runColor": _STUDY_COLOUR,
    }


def run_name(attempt: Attempt, axes: Sequence[str] = ()) -> str:
    """Return the name of an attempt's run: its number, its values, the context first."""
    order = sorted(
        attempt.point, key=lambda axis: (axis != "context", axes.index(axis) if axis in axes else 0)
    )
    values = " ".join(text(attempt.point[axis]) for axis in order)
    again = "" if attempt.confirms is None else f" again: {attempt.confirms:04d},"
    return cut(f"{attempt.number:04d}{again} {values}".strip(), 120)


def status_of(attempt: Attempt) -> str:
    """Return MLflow's word for how it ended: FINISHED has figures, FAILED has a reason."""
    return "FINISHED" if isinstance(attempt.outcome, Measured) else "FAILED"


# --- notes ---------------------------------------------------------------------------------------


def note_of(attempt: Attempt, *, log_tail: str = "", links: str = "") -> str:
    """Return the few lines of Markdown that a person reads on the run's page."""
    match attempt.outcome:
        case Measured(decode_tok_s=speed, context=context):
            lines = [
                f"**{speed.median:.1f} tok/s** ({speed.low:.1f} to {speed.high:.1f}, n = {speed.n})"
                f" with **{context.proven_tokens:,} tokens** proven of "
                f"{context.configured_tokens:,} configured."
            ]
            if attempt.brief:
                lines = [f"It booted and held {context.proven_tokens:,} tokens; nothing was timed."]
            elif speed.doubts:
                lines.append(f"Doubts: {', '.join(speed.doubts)}.")
            lines += [
                f"Memory left to {room.of}: {mib(room.left_bytes)}." for room in rooms_of(attempt)
            ]
        case failure:
            finding = failure.finding
            lines = [f"**{failure.name.value}**: {finding.explanation}"]
            if finding.cause:
                # Indented, so that Markdown leaves a log line as it is.
                lines.append(f"    {finding.cause}")
            if finding.try_next:
                lines.append(f"Try next: {finding.try_next}")
    if attempt.confirms is not None:
        what = "booted again, to see whether it works" if attempt.brief else "measured again"
        lines.insert(0, f"Attempt {attempt.confirms} {what}, after the search.")
    if attempt.engine.get("simulated") is True:
        lines[0] = f"**SIMULATED** {lines[0]}"
    if links:
        lines.append(links)
    lines += attempt.notes
    if log_tail and not isinstance(attempt.outcome, Measured):
        lines.append(f"The end of its log:\n\n```\n{log_tail.replace('```', 'ˋˋˋ')}\n```")
    return cut("\n\n".join(lines), NOTE_LIMIT)


def note_of_study(
    study: str,
    facts: Pairs,
    progress: Progress | None,
    *,
    experiment: str,
    run: str,
    simulated: bool,
    view_keys: Mapping[str, str],
    report: str = "",
) -> str:
    """Return the line that stands above the experiment and on the study's run, with its links.

    `report` is the name of the page among the files of the study's run; empty while there is none.
    """
    about = [f"**{study}**", *(["**SIMULATED**"] if simulated else [])]
    named = [text(facts[each]) for each in ("engine", "model", "hardware") if facts.get(each)]
    about += dict.fromkeys(named)
    said = [" · ".join(about)]
    if progress is not None and progress.best_decode_tok_s is not None:
        said.append(f"fastest **{progress.best_decode_tok_s:,.1f} tok/s**")
        if progress.best_proven_context_tokens is not None:
            said.append(f"longest **{progress.best_proven_context_tokens:,} tokens** proven")
    links = [
        f"[report]({artifact_address(experiment, run, report)})",
        f"[recipes]({artifact_address(experiment, run, 'recipes')})",
        f"[charts]({view_address(experiment, view_keys[TRIALS], charts=True)})",
        f"[trials]({view_address(experiment, view_keys[TRIALS])})",
        f"[front]({view_address(experiment, view_keys[FRONT])})",
        f"[failed]({view_address(experiment, view_keys[FAILED])})",
    ]
    return f"{', '.join(said)}: {' · '.join(links)}"


def links_of(experiment: str, run: str, study_run: str, view_key: str) -> str:
    """Return the links on an attempt's page."""
    return (
        f"[engine.log]({artifact_address(experiment, run, ENGINE_LOG)}) · "
        f"[all trials]({view_address(experiment, view_key)}) · "
        f"[front, report and recipes]({artifact_address(experiment, study_run)})"
    )


def log_tail(path: Path) -> str:
    """Return the last lines of an engine's log; empty where there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16_384))
        lines = file.read().decode(errors="replace").splitlines()
    said = [line.rstrip() for line in lines if line.strip()][-_TAIL_LINES:]
    while len(said) > 1 and sum(len(line) + 1 for line in said) > _TAIL_LIMIT:
        said.pop(0)
    return "\n".join(said)[-_TAIL_LIMIT:]


def head_and_tail(path: Path) -> bytes:
    """Return the first and last lines of a long log, with a line that says what is missing."""
    half = LOG_LIMIT_BYTES // 2
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(half)
        head = head[: head.rfind(b"\n") + 1] or head
        file.seek(size - half)
        tail = file.read(half)
        tail = tail[tail.find(b"\n") + 1 :] or tail
    missing = size - len(head) - len(tail)
    note = (
        f"\n[sweeper: {missing:,} of {size:,} bytes left out here; the whole log is in the "
        "study's folder]\n\n"
    )
    return head + note.encode() + tail


# --- saved views ---------------------------------------------------------------------------------


def view_address(experiment: str, view_key: str, *, charts: bool = False) -> str:
    """Return the part of an address, from the # on, that opens an experiment in a saved view."""
    # Any further search parameter would make the page ignore the view.
    mode = "&compareRunsMode=CHART" if charts else ""
    return (
        f"#/experiments/{quote(experiment)}/runs?workflowType=machine_learning"
        f"&viewStateShareKey={quote(view_key)}{mode}"
    )


def artifact_address(experiment: str, run: str, path: str = "") -> str:
    """Return the part of an address, from the # on, that opens a file of a run, or all of them."""
    within = f"/{quote(path)}" if path else ""
    return (
        f"#/experiments/{quote(experiment)}/runs/{quote(run)}/artifacts{within}"
        "?workflowType=machine_learning"
    )


def view_keys(suffix: str = "") -> dict[str, str]:
    """Return the keys of the saved views; with a suffix where an experiment has several sweeps."""
    return {each: f"{each}{suffix}" for each in (TRIALS, FRONT, FAILED)}


def views(axes: Sequence[str], sweep: str | None = None) -> dict[str, str]:
    """Return the saved views of an experiment as MLflow keeps them in tags, by their keys.

    With a `sweep` they show its runs only: for an experiment with several.
    """
    named = {
        TRIALS: ("Trials, fastest first", _trials_view(axes)),
        FRONT: ("Front", {**_trials_view(axes), "searchFilter": "tags.on_front = 'true'"}),
        FAILED: ("What failed, and why", _failed_view(axes)),
    }
    found = {}
    for index, (each, (words, view)) in enumerate(named.items()):
        state = dict(view)
        if sweep is not None:
            own = f"tags.`sweeper.sweep` = '{sweep}'"
            state["searchFilter"] = (
                f"{view['searchFilter']} and {own}" if "searchFilter" in view else own
            )
        packed = base64.b64encode(zlib.compress(json.dumps(state).encode(), 9)).decode()
        # Latest first is how the menu shows them; nothing else reads these times.
        made = 1_700_000_000_000 - index
        found[each] = json.dumps(
            {"name": words, "createdAt": made, "updatedAt": made, "state": f"deflate;{packed}"}
        )
    return found


def _trials_view(axes: Sequence[str]) -> dict[str, Any]:
    columns = [
        *_columns("metrics", "decode_tok_s", "proven_context_tokens", "acceptance"),
        *_columns("tags", "outcome", "on_front", "holds"),
        *_columns("metrics", "memory_left_mib"),
        *_columns("params", *map(key, axes)),
    ]
    return {
        **_view(columns),
        "orderByKey": "metrics.`counted_tok_s`",
        "orderByAsc": False,
        "compareRunCharts": _charts(axes),
        "compareRunSections": [
            {
                "uuid": uuid, "name": words, "display": True, "isReordered": True,
                "deleted": False, "isGenerated": False, "columns": columns, "cardHeight": 420,
            }
            for uuid, words, columns in (
                ("front", "The front: decode speed against proven context", 2),
                ("search", "The search: figures of each attempt, by its number", 2),
                ("axes", "What the axes did", 1),
            )
        ],
        "isAccordionReordered": True,
    }  # fmt: skip


def _failed_view(axes: Sequence[str]) -> dict[str, Any]:
    columns = [
        *_columns("metrics", "shortfall_mib"),
        *_columns("tags", "outcome", "phase", "reason"),
        *_columns("params", *map(key, axes)),
    ]
    return {
        **_view(columns),
        "searchFilter": "attributes.status = 'FAILED' and tags.kind != 'study'",
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
    }


def _view(columns: list[str]) -> dict[str, Any]:
    return {
        "selectedColumns": columns,
        "columnOrder": columns,
        "columnWidths": {each: _width(each) for each in columns},
        "runsHiddenMode": "SHOW_ALL",
        "hideEmptyCharts": True,
    }


def _width(column: str) -> int:
    """Return how wide a column is in pixels: its title fits, and what stands in it."""
    title = column[column.index("`") + 1 : -1]
    return {"outcome": 150, "phase": 100, "reason": 480}.get(title, max(80, 30 + 7 * len(title)))


def _columns(group: str, *names: str) -> list[str]:
    return [f"{group}.`{each}`" for each in names]


def _charts(axes: Sequence[str]) -> list[dict[str, Any]]:
    def chart(uuid: str, section: str, words: str, **given: Any) -> dict[str, Any]:
        common = {"deleted": False, "isGenerated": False, "runsCountToCompare": 100}
        return {
            **common, "uuid": uuid, "metricSectionId": section, "displayName": words, **given
        }  # fmt: skip

    def line(*names: str) -> dict[str, Any]:
        return {
            "type": "LINE", "metricKey": names[0], "selectedMetricKeys": list(names),
            "lineSmoothness": 0, "xAxisScaleType": "linear", "scaleType": "linear", "range": {},
            "xAxisKey": "step", "selectedXAxisMetricKey": "", "yAxisKey": "metric",
            "yAxisExpressions": [], "ignoreOutliers": False, "useGlobalXaxisKey": True,
            "useGlobalLineSmoothing": True, "displayPoints": True,
        }  # fmt: skip

    def metric(of: str) -> dict[str, str]:
        return {"key": of, "type": "METRIC"}

    charts = [
        chart(
            "front-scatter", "front", "decode tok/s against proven context",
            type="SCATTER", xaxis=metric("proven_context_tokens"), yaxis=metric("decode_tok_s"),
        ),
        chart(
            "acceptance-scatter", "front", "decode tok/s against acceptance of drafts",
            type="SCATTER", xaxis=metric("acceptance"), yaxis=metric("decode_tok_s"),
        ),
        chart(
            "best", "search", "decode tok/s: attempts, and the best so far",
            **line("decode_tok_s", "best_decode_tok_s"),
        ),
        chart("hypervolume", "search", "hypervolume of the front", **line("hypervolume")),
    ]  # fmt: skip
    if axes:
        charts.append(
            chart(
                "axes", "axes", "every axis, and the decode tok/s it came to",
                type="PARALLEL", selectedParams=[key(each) for each in axes],
                selectedMetrics=["decode_tok_s"], showAllRuns=False,
            )
        )  # fmt: skip
    return charts


# --- words that MLflow takes ---------------------------------------------------------------------


def existing(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Return the figures that exist and are finite, each with five digits at most."""
    return {
        key: _rounded(float(value))
        for key, value in figures.items()
        if value is not None and math.isfinite(value)
    }


def _rounded(value: float) -> float:
    if value == 0 or value.is_integer():
        return value
    return round(value, max(0, 4 - math.floor(math.log10(abs(value)))))


def key(words: str) -> str:
    """Return a name with only the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", words, flags=re.ASCII)


def cut(value: str, limit: int) -> str:
    """Return the text, shortened to so many characters with an ellipsis."""
    return value if len(value) <= limit else f"{value[: limit - 1]}…"


def epoch_ms(iso: str) -> int:
    """Return a moment in milliseconds since 1970; one without a zone is in UTC."""
    moment = datetime.fromisoformat(iso)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)


def ended_ms(attempt: Attempt) -> int:
    """Return when an attempt ended, in milliseconds since 1970."""
    return epoch_ms(attempt.started_at) + round(attempt.timings.total_s * 1000)


def table(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rows of equal keys in the layout of MLflow's tables."""
    listed = list(rows)
    columns = list(listed[0]) if listed else []
    return {"columns": columns, "data": [[row[each] for each in columns] for row in listed]}
