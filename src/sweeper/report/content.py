"""All that a report says of a study, as plain values: the page and the Markdown only lay it out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeper.core.comparable import FACTS, facts_of
from sweeper.core.objectives import counted_tok_s
from sweeper.core.outcome import Attempt, Figures, Measured, kind, name
from sweeper.core.pairs import Pairs, Scalar, text
from sweeper.core.protocol import Finished
from sweeper.core.reliability import margin_words
from sweeper.core.standing import (
    fallen,
    front_among,
    reliability_of,
    standing,
    unconfirmed,
)
from sweeper.core.stats import Doubt, Summary, explained
from sweeper.job import Job
from sweeper.recipe import RecipeError, render
from sweeper.report.effects import LEAST_COMPARISONS, Effect, effects_of
from sweeper.report.front import front_rows, measured_of, trial_rows, varied
from sweeper.report.seen import (
    DepthsSeen,
    DraftsSeen,
    PartSeen,
    depth_of,
    depths_seen,
    drafts_seen,
    parts_seen,
)
from sweeper.report.words import (
    count_text,
    fact_text,
    figure_text,
    is_simulated,
    percent_text,
    subject_of,
)

MOST_LINES = 8
"""So many attempts are told apart in one chart, by colour, dash and symbol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The head of a column; figures stand to the right."""

    header: str
    right: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table of text, as long as its columns."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An attempt that was not measured, and why."""

    number: int
    kind: str
    name: str
    phase: str
    point: str
    explanation: str
    cause: str
    try_next: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A figure that is seen first, with its unit, and what it is of."""

    title: str
    value: str
    unit: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A study's report: what the sections of a page show, in their order."""

    study: str
    subject: str
    simulated: bool
    attempts: tuple[Attempt, ...]
    summary: str
    tiles: tuple[Tile, ...]
    front: Grid
    front_same: str
    fallen: Grid
    unconfirmed: int
    doubts: Grid
    effects: tuple[Effect, ...]
    effect_grid: Grid
    parts: tuple[PartSeen, ...]
    part_grid: Grid
    label_axes: tuple[str, ...]
    drafts: tuple[DraftsSeen, ...]
    draft_grid: Grid
    depths: tuple[DepthsSeen, ...]
    loads: Grid
    telemetry: Grid
    failures: tuple[Failed, ...]
    failure_counts: Grid
    trials: Grid
    protocol: Grid
    machine: Grid
    declared: Grid
    notes: Grid
    recipes: tuple[tuple[str, str], ...]
    recipe_problems: tuple[str, ...]
    commands: tuple[str, ...]


def report_of(
    attempts: Iterable[Attempt], *, job: Job | None = None, study_folder: Path | None = None
) -> Report:
    """Return the report of a study's attempts.

    With the `job` that made them memory is compared with the engine's own estimates. From the
    `study_folder` comes what the study declared, if it is there.
    """
    everyone = sorted(attempts, key=lambda attempt: attempt.number)
    front = front_among(everyone)
    leading = _leading(everyone, front)
    label_axes = varied(leading)[0]
    labels = _labels(leading, label_axes)
    effects = effects_of(everyone)
    parts = parts_seen(everyone, job)
    drafts = drafts_seen(leading, labels)
    failures = tuple(_failed(everyone))
    recipes, problems = _recipes(front, study_folder or Path())
    study = everyone[0].study if everyone else ""
    return Report(
        study=study,
        subject=subject_of(everyone).removesuffix(" · SIMULATED"),
        simulated=is_simulated(everyone),
        attempts=tuple(everyone),
        summary=_summary(everyone, front, failures),
        tiles=_tiles(front),
        front=_front_grid(everyone),
        front_same=str(varied(front)[1]),
        fallen=_grid(
            [
                (str(each.attempt.number), str(each.attempt.point), each.explanation)
                for each in fallen(everyone)
            ],
            "#", "<point", "<why it is not on the front any more",
        ),
        unconfirmed=len(unconfirmed(everyone)),
        doubts=_doubts(everyone),
        effects=effects,
        effect_grid=_effect_grid(effects),
        parts=parts,
        part_grid=_part_grid(parts),
        label_axes=label_axes,
        drafts=drafts,
        draft_grid=_draft_grid(drafts),
        depths=depths_seen(leading, labels),
        loads=_loads(leading),
        telemetry=_telemetry(leading),
        failures=failures,
        failure_counts=_failure_counts(failures),
        trials=_trials(everyone),
        protocol=_protocol(everyone),
        machine=_machine(everyone),
        declared=_declared(study_folder),
        notes=_grid(
            [(str(each.number), note) for each in everyone for note in each.notes], "#", "<note"
        ),
        recipes=recipes,
        recipe_problems=problems,
        commands=_commands(study, front),
    )  # fmt: skip


def _grid(rows: Iterable[Sequence[str]], *headers: str) -> Grid:
    """Return a table; a header that begins with `<` heads text, which stands to the left.

    A column without a single entry is left out.
    """
    rows = [tuple(row) for row in rows]
    kept = [index for index in range(len(headers)) if any(row[index] for row in rows)]
    columns = tuple(
        Column(header=headers[index].removeprefix("<"), right=not headers[index].startswith("<"))
        for index in kept
    )
    return Grid(columns=columns, rows=tuple(tuple(row[index] for index in kept) for row in rows))


def _leading(everyone: Sequence[Attempt], front: Sequence[Attempt]) -> tuple[Attempt, ...]:
    """Return the front's members, then the fastest others: as many as a chart can tell apart."""
    chosen = {each.number for each in front}

    def speed(attempt: Attempt) -> float:
        measured = attempt.outcome
        return counted_tok_s(measured) if isinstance(measured, Measured) else 0.0

    others = [each for each in standing(everyone) if each.number not in chosen]
    return (*front, *sorted(others, key=speed, reverse=True))[:MOST_LINES]


def _labels(attempts: Sequence[Attempt], axes: Sequence[str]) -> dict[int, str]:
    """Return for each attempt its number and the values of these axes, short enough to stand."""
    return {
        each.number: " ".join(
            [
                f"#{each.number}",
                " · ".join(text(each.point[axis]) if axis in each.point else "–" for axis in axes),
            ]
        ).strip()
        for each in attempts
    }


def _summary(
    everyone: Sequence[Attempt], front: Sequence[Attempt], failures: Sequence[Failed]
) -> str:
    if not everyone:
        return "Nothing was booted yet."
    again = sum(each.confirms is not None and not each.brief for each in everyone)
    checked = sum(each.brief for each in everyone)
    measured = sum(isinstance(each.outcome, Measured) for each in everyone)
    said = (
        f"{_many(len(everyone), 'boot')}: {measured} measured, {len(failures)} not measured; "
        f"{_many(len(front), 'point')} on the front, which no other beats in speed and context."
    )
    if again:
        said += f" {_many(again, 'boot')} measured the front again, and count instead."
    if checked:
        said += (
            f" {_many(checked, 'boot')} only tried whether members with little memory left hold."
        )
    return said


def _many(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _tiles(front: Sequence[Attempt]) -> tuple[Tile, ...]:
    members = measured_of(front)
    if not members:
        return ()
    fastest, fast = max(members, key=lambda each: counted_tok_s(each[1]))
    longest, long = max(members, key=lambda each: each[1].context.window_tokens)
    tiles = [
        Tile(
            title="fastest", value=figure_text(fast.decode_tok_s.median), unit="tok/s",
            note=f"#{fastest.number}, {_interval(fast.decode_tok_s)}, "
            f"with {fast.context.proven_tokens:,} tokens",
        ),
        Tile(
            title="longest context", value=count_text(long.context.proven_tokens), unit="tokens",
            note=f"#{longest.number}, proven, at {figure_text(long.decode_tok_s.median)} tok/s",
        ),
    ]  # fmt: skip
    drafting = [
        (each, result.drafts.acceptance)
        for each, result in members
        if result.drafts is not None and result.drafts.acceptance is not None
    ]
    if drafting:
        best, acceptance = max(drafting, key=lambda each: each[1])
        tiles.append(
            Tile(
                title="drafts accepted", value=percent_text(acceptance), unit="%",
                note=f"#{best.number}, the highest on the front",
            )
        )  # fmt: skip
    frugal = [
        (each, result.figures[0].joules_per_token)
        for each, result in members
        if result.figures and result.figures[0].joules_per_token is not None
    ]
    if frugal:
        best, joules = min(frugal, key=lambda each: each[1] or 0.0)
        tiles.append(
            Tile(
                title="least energy", value=figure_text(joules or 0.0), unit="J/token",
                note=f"#{best.number}, of the cards, while decoding",
            )
        )  # fmt: skip
    return tuple(tiles)


def _interval(summary: Summary) -> str:
    return f"{figure_text(summary.low)} to {figure_text(summary.high)}"


def _cell(row: Mapping[str, Any], key: str, show: Callable[[Any], str]) -> str:
    return "" if row[key] is None else show(row[key])


def _front_grid(everyone: Sequence[Attempt]) -> Grid:
    axes, _ = varied(front_among(everyone))
    by_number = {each.number: each for each in everyone}
    holds = reliability_of(everyone)
    rows = []
    for row in front_rows(everyone):
        outcome = by_number[row["attempt"]].outcome
        assert isinstance(outcome, Measured)
        quality = outcome.quality
        share = None if quality is None else quality.prefix_share
        rows.append(
            (
                str(row["attempt"]),
                *(_cell(row, axis, text) for axis in axes),
                figure_text(row["decode_tok_s"]),
                _interval(outcome.decode_tok_s),
                f"{outcome.decode_tok_s.confidence:.0%}",
                str(outcome.decode_tok_s.n),
                count_text(row["proven_context_tokens"]),
                _cell(row, "acceptance", percent_text),
                _cell(row, "ttft_ms", figure_text),
                _cell(row, "prefill_tok_s", figure_text),
                _cell(row, "peak_memory_mib", count_text),
                margin_words(holds[by_number[row["attempt"]].point]),
                _cell(row, "joules_per_token", figure_text),
                "" if share is None else percent_text(share),
                _cell(row, "mean_logprob", lambda value: f"{value:.3f}"),
                "" if row["confirms"] is None else f"of #{row['confirms']}",
                "; ".join(filter(None, (row["doubts"], row["why_counted"]))),
            )
        )
    return _grid(
        rows, "#", *(f"<{axis}" for axis in axes), "decode, tok/s", "interval, tok/s",
        "confidence", "runs", "proven context, tokens", "acceptance, %", "first token, ms",
        "prefill, tok/s", "peak, MiB", "<memory left, and boots that held", "energy, J/token",
        "answers alike, %", "log-probability, nats/token", "<measured again", "<doubts",
    )  # fmt: skip


def _doubts(everyone: Sequence[Attempt]) -> Grid:
    about: dict[Doubt, list[int]] = {}
    for each in everyone:
        if not isinstance(each.outcome, Measured):
            continue
        summaries = [each.outcome.decode_tok_s, *(f.decode_tok_s for f in each.outcome.figures)]
        for doubt in sorted({doubt for summary in summaries for doubt in summary.doubts}):
            about.setdefault(doubt, []).append(each.number)
    return _grid(
        [
            (doubt.value, explained(doubt), " ".join(f"#{number}" for number in numbers))
            for doubt, numbers in sorted(about.items())
        ],
        "<doubt", "<what it means", "<attempts",
    )  # fmt: skip


def effect_words(effect: Effect) -> str:
    """Return what is known of a value's effect on speed, and how well."""
    if effect.ratio is None:
        return "nothing to compare with"
    ratio = f"× {effect.ratio:.2f}"
    if effect.low is None or effect.high is None:
        few = f"fewer than {LEAST_COMPARISONS}"
        return f"{ratio}, from {few} comparisons: no interval"
    said = f"{ratio} ({effect.low:.2f} to {effect.high:.2f})"
    if effect.clear:
        return said
    return f"{said}: " + ("other settings differ too" if effect.mixed else "no clear difference")


def _effect_grid(effects: Sequence[Effect]) -> Grid:
    return _grid(
        [
            (
                each.axis, text(each.value), str(each.boots), str(each.measured),
                str(each.out_of_memory or ""), str(each.failed_otherwise or ""),
                effect_words(each), str(each.comparisons), str(each.exact),
            )
            for each in effects
        ],
        "<axis", "<value", "boots", "measured", "out of memory", "failed otherwise",
        "<decode speed beside its matches", "comparisons", "of them exact",
    )  # fmt: skip


def _part_grid(parts: Sequence[PartSeen]) -> Grid:
    """Return, for each component, how far what was printed is from what was thought."""
    rows = []
    for part in dict.fromkeys(each.part for each in parts):
        here = [each for each in parts if each.part == part]
        off = sorted(each.observed / each.predicted - 1 for each in here)
        rows.append(
            (
                part, str(len(here)), _mib(min(each.observed for each in here)),
                _mib(max(each.observed for each in here)), f"{off[len(off) // 2]:+.1%}",
                f"{off[0]:+.1%} to {off[-1]:+.1%}",
                f"{sum(each.within for each in here)} of {len(here)}",
            )
        )  # fmt: skip
    return _grid(
        rows, "<component", "boots", "least printed, MiB", "most printed, MiB",
        "median difference", "all differences", "within two spreads",
    )  # fmt: skip


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f}"


def _draft_grid(drafts: Sequence[DraftsSeen]) -> Grid:
    longest = max((len(each.yields) for each in drafts), default=1)
    rows = [
        (
            each.label,
            "" if each.acceptance is None else percent_text(each.acceptance),
            *(f"{each.yields[n]:.2f}" if n < len(each.yields) else "" for n in range(1, longest)),
        )
        for each in drafts
    ]
    headers = (f"tokens/step, drafts of {n}" for n in range(1, longest))
    return _grid(rows, "<attempt", "accepted, %", *headers)


def load_words(load: Figures) -> str:
    """Return what was asked in a load."""
    length = "own prompt" if load.prompt_length is None else f"{load.prompt_length:,} tokens"
    return f"{load.workload}, {length}"


def _loads(attempts: Sequence[Attempt]) -> Grid:
    rows = []
    for each in attempts:
        if not isinstance(each.outcome, Measured) or len(each.outcome.figures) < 2:
            continue
        for load in each.outcome.figures:
            depth = depth_of(each, load)
            total, gaps = load.total_tok_s, load.itl_s
            rows.append(
                (
                    str(each.number), load_words(load), "" if depth is None else count_text(depth),
                    str(load.streams), figure_text(load.decode_tok_s.median),
                    _interval(load.decode_tok_s), str(load.decode_tok_s.n),
                    "" if total is None else figure_text(total.median),
                    figure_text(load.ttft_s.median * 1000),
                    "" if gaps is None else figure_text(gaps.median * 1000),
                    "" if load.itl_p99_s is None else figure_text(load.itl_p99_s * 1000),
                    ended_words(load.ended),
                    ", ".join(doubt.value for doubt in load.decode_tok_s.doubts),
                )
            )  # fmt: skip
    return _grid(
        rows, "#", "<load", "prompt, tokens", "streams", "decode, tok/s", "interval, tok/s", "runs",
        "all streams, tok/s", "first token, ms", "gap, ms", "99th gap, ms",
        "<why no more runs", "<doubts",
    )  # fmt: skip


def ended_words(ended: str) -> str:
    """Return why no more repeats were made; what an older record says, as it says it."""
    try:
        return Finished(ended).words
    except ValueError:
        return ended


def _telemetry(attempts: Sequence[Attempt]) -> Grid:
    rows = []
    for each in attempts:
        if not isinstance(each.outcome, Measured) or each.outcome.telemetry is None:
            continue
        seen = each.outcome.telemetry
        joules = each.outcome.figures[0].joules_per_token if each.outcome.figures else None
        clocks = [seen.gpu_clock_min_mhz, seen.gpu_clock_median_mhz, seen.gpu_clock_max_mhz]
        rows.append(
            (
                str(each.number),
                _known(seen.gpu_power_w, figure_text),
                _known(joules, figure_text),
                _known(seen.gpu_temperature_c, count_text),
                " / ".join(count_text(clock) for clock in clocks if clock is not None),
                ", ".join(seen.throttle_reasons),
                _known(seen.gpu_engine_bytes, _mib),
                _known(seen.engine_rss_peak_bytes, _mib),
                _known(seen.engine_cpu_s, figure_text),
                _known(seen.steal_share, percent_text),
                _known(seen.others_share, percent_text),
                _known(seen.seconds, figure_text),
            )
        )
    return _grid(
        rows, "#", "power, W", "energy, J/token", "hottest, °C",
        "clocks, MHz: least / median / most",
        "<clocks held down by", "card's memory, MiB", "engine's memory, MiB",
        "engine's processor time, s", "taken by the hypervisor, %", "other programs, %",
        "watched, s",
    )  # fmt: skip


def _known(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)


def _failed(everyone: Sequence[Attempt]) -> Iterable[Failed]:
    for each in everyone:
        if not isinstance(each.outcome, Measured):
            finding = each.outcome.finding
            yield Failed(
                number=each.number,
                kind=kind(each.outcome),
                name=name(each.outcome),
                phase=finding.phase.value,
                point=str(each.point),
                explanation=finding.explanation,
                cause=finding.cause,
                try_next=str(finding.try_next),
            )


_KINDS = {
    "infeasible": "asks for more than there is, or for what does not exist; the search learns",
    "unfit": "serves, but what it serves must not win",
    "broken": "not known to be the point's fault; tried again",
    "host_fault": "nothing can work until a person mends it",
}


def _failure_counts(failures: Sequence[Failed]) -> Grid:
    counts: dict[tuple[str, str], int] = {}
    for each in failures:
        counts[each.kind, each.name] = counts.get((each.kind, each.name), 0) + 1
    return _grid(
        [
            (str(count), what, which, _KINDS.get(which, ""))
            for (which, what), count in sorted(counts.items(), key=lambda item: -item[1])
        ],
        "times", "<outcome", "<kind", "<which means",
    )  # fmt: skip


def _trials(everyone: Sequence[Attempt]) -> Grid:
    axes, _ = varied(everyone)
    rows = [
        (
            f"{row['attempt']}{'*' if row['on_front'] else ''}",
            row["outcome"],
            *(_cell(row, axis, text) for axis in axes),
            _cell(row, "decode_tok_s", figure_text),
            _cell(row, "proven_context_tokens", count_text),
            row["phase"] or "",
            _cell(row, "boot_s", figure_text),
            _cell(row, "total_s", figure_text),
        )
        for row in trial_rows(everyone)
    ]
    return _grid(
        rows, "#", "<outcome", *(f"<{axis}" for axis in axes), "decode, tok/s",
        "proven context, tokens", "<phase", "boot, s", "total, s",
    )  # fmt: skip


_PROTOCOL = {
    "name": "workload", "digest": "digest of the workload", "schema": "schema of the measurement",
    "max_tokens": "length of an answer, tokens", "temperature": "temperature",
    "also": "workloads measured as well", "objectives": "objectives",
}  # fmt: skip


def _protocol(everyone: Sequence[Attempt]) -> Grid:
    measured = measured_of(everyone)
    if not everyone:
        return _grid([], "<fact", "<value")
    attempt, result = measured[0] if measured else (everyone[0], None)
    rows = [
        (_PROTOCOL.get(key, key), text(value))
        for key, value in attempt.workload.items()
        if value not in (None, "")
    ]
    if result is not None:
        runs = [each.decode_tok_s.n for _, each in measured]
        ended: dict[str, int] = {}
        for _, each in measured:
            for load in each.figures[:1]:
                ended[load.ended] = ended.get(load.ended, 0) + 1
        rows.append(("timed requests of a number", _span(runs)))
        if any(ended):
            said = "; ".join(f"{ended_words(why)}: {count}" for why, count in ended.items() if why)
            rows.append(("why no more", said))
        rows.append(("interval", f"{result.decode_tok_s.method}, {result.decode_tok_s.asked:.0%}"))
    rows.append(("from", everyone[0].started_at))
    rows.append(("to", everyone[-1].started_at))
    return _grid(rows, "<fact", "<value")


def _span(values: Sequence[float]) -> str:
    least, most = min(values), max(values)
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"


def _machine(everyone: Sequence[Attempt]) -> Grid:
    """Return what must be equal for others to be compared with this, and the rest of the facts."""
    if not everyone:
        return _grid([], "<fact", "<value")
    measured = measured_of(everyone)
    first = measured[0][0] if measured else everyone[0]
    counting = facts_of(first)
    rows = [
        (fact.title, _fact(fact.key or fact.name, counting[fact.name]))
        for fact in FACTS
        if fact.name in counting and fact.kept_in != "workload"
    ]
    told = {fact.key for fact in FACTS}
    rows += [
        (key, _fact(key, value))
        for facts in (first.model, first.host)
        for key, value in facts.items()
        if key not in told and value is not None
    ]
    if first.memory_limit_bytes is not None:
        limit = ("limit on the engine's address space", _fact("_bytes", first.memory_limit_bytes))
        rows.append(limit)
    return _grid(dict.fromkeys(rows), "<fact", "<value")


def _fact(key: str, value: Scalar) -> str:
    if key.endswith("_bytes") and isinstance(value, int) and value >= 2**20:
        return f"{value / 2**30:,.2f} GiB" if value >= 2**30 else f"{value / 2**20:,.0f} MiB"
    return fact_text(value)


def _declared(folder: Path | None) -> Grid:
    """Return the study's settings that must not change, as its folder keeps them."""
    try:
        kept = json.loads((folder / "study.json").read_text())["identity"] if folder else {}
        rows = [(str(key), json.dumps(value, ensure_ascii=False)) for key, value in kept.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        rows = []
    return _grid(rows, "<setting", "<value")


def _recipes(
    front: Sequence[Attempt], study_folder: Path
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    found, problems = [], []
    for each in front:
        try:
            said = render(each, form="shell", study_folder=study_folder)
        except RecipeError as error:
            problems.append(str(error))
        else:
            found.append((f"#{each.number}  {each.point}", said))
    return tuple(found), tuple(problems)


def _commands(study: str, front: Sequence[Attempt]) -> tuple[str, ...]:
    if not study:
        return ()
    lines = [
        f"python -m sweeper plan +study={study}    # what it would do, boots nothing",
        f"python -m sweeper +study={study}    # run it, or go on where it stopped",
        f"python -m sweeper +study={study} name={study}-again    # all of it from the beginning",
        f"python -m sweeper show +study={study}    # every trial, from disk",
    ]
    if front:
        lines.append(
            f"python -m sweeper export +study={study} export.trial={front[0].number}    "
            "# a recipe of one attempt"
        )
    return tuple(lines)


__all__ = [
    "Column", "Failed", "Grid", "Pairs", "Report", "Tile", "effect_words", "ended_words",
    "load_words", "report_of",
]  # fmt: skip
