"""What studies on disk have come to: rows, conditions on them, files of them, and leaderboards."""

from __future__ import annotations

import csv
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from sweeper.conf import OUTPUTS, Leaderboard, Loaded, outline
from sweeper.core.comparable import Scope, incomparable
from sweeper.core.front import Entry, pareto_front
from sweeper.core.objectives import counted_tok_s
from sweeper.core.outcome import Attempt, Figures, Measured
from sweeper.core.pairs import Pairs, Point, Scalar, text
from sweeper.core.reliability import Reliability
from sweeper.core.space import suggestion
from sweeper.core.standing import front_among, reliability_of
from sweeper.places import ConfDirs, ConfError
from sweeper.recipe import PICKS
from sweeper.record.attempts import Attempts, RecordError
from sweeper.report.front import measured_row, trial_rows
from sweeper.report.tables import TableColumn, column_of, fitted_table, trials_table
from sweeper.report.words import count_text, figure_text, percent_text

if TYPE_CHECKING:
    from rich.table import Table

Row: TypeAlias = dict[str, Any]
_MIB = 2**20


def recorded(studies_dir: Path, study: str) -> list[Attempt]:
    """Return the attempts of a study's folder; raises ConfError where a record is damaged."""
    try:
        return Attempts(studies_dir / study / "attempts").all()
    except RecordError as error:
        raise ConfError(str(error)) from None


def named_studies(studies_dir: Path, names: Sequence[str]) -> dict[str, list[Attempt]]:
    """Return the attempts of each study that was named by its folder.

    Raises ConfError for a name that no folder has.
    """
    there = (
        sorted(each.name for each in studies_dir.iterdir() if (each / "attempts").is_dir())
        if studies_dir.is_dir()
        else []
    )
    for each in names:
        if each not in there:
            raise ConfError(
                f"show.studies: there is no study {each} in {studies_dir}{suggestion(each, there)}"
            )
    return {each: recorded(studies_dir, each) for each in dict.fromkeys(names)}


# --- rows and conditions -------------------------------------------------------------------------


def rows_of(studies: Mapping[str, Sequence[Attempt]]) -> list[Row]:
    """Return every attempt of the studies as a row of equal keys, in order; None: not there."""
    found: list[Row] = []
    for study, attempts in studies.items():
        by_number = {each.number: each for each in attempts}
        holds = reliability_of(attempts)
        for row in trial_rows(attempts):
            attempt = by_number[row["attempt"]]
            found.append(
                {
                    "study": study,
                    **row,
                    **_figures(attempt, holds),
                    "engine": attempt.engine.get("name"),
                    "engine_version": attempt.engine.get("engine_version"),
                    "model": attempt.model.get("name"),
                    "started_at": attempt.started_at,
                }
            )
    return _of_equal_keys(found)


_FIGURES = (
    "decode_tok_s", "decode_tok_s_low", "decode_tok_s_high", "counted_tok_s", "acceptance",
    "ttft_ms", "prefill_tok_s", "peak_memory_mib", "memory_left_mib", "boots_held", "boots",
    "holds", "joules_per_token", "mean_logprob", "confirms", "doubts",
)  # fmt: skip


def _figures(attempt: Attempt, holds: Mapping[Point, Reliability]) -> Row:
    if not isinstance(attempt.outcome, Measured):
        return dict.fromkeys(_FIGURES)
    row = measured_row(attempt, attempt.outcome, (), holds[attempt.point])
    return {key: row[key] for key in _FIGURES}


def _of_equal_keys(rows: Sequence[Row]) -> list[Row]:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return [{key: row.get(key) for key in keys} for row in rows]


_ALIASES = {"kind": "outcome_kind", "number": "attempt", "speed": "decode_tok_s"}
_CONDITION = re.compile(
    r"\s*(?:,|and\b)?\s*([\w.]+)\s*(!=|>=|<=|=|>|<|~)\s*(\"[^\"]*\"|'[^']*'|[^\s,=<>~!][^\s,]*)"
)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """One condition on rows: `key op value`, the value as it was written."""

    key: str
    op: str
    value: str

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Tell whether a row meets it; what is not there equals `null` and is above nothing."""
        actual = row[self.key]
        match self.op:
            case "=":
                return self._equals(actual)
            case "!=":
                return not self._equals(actual)
            case "~":
                return actual is not None and self.value.casefold() in text(actual).casefold()
            case _:
                wanted = _number(self.value)
                is_number = isinstance(actual, int | float) and not isinstance(actual, bool)
                return is_number and wanted is not None and _COMPARE[self.op](actual, wanted)

    def _equals(self, actual: Scalar) -> bool:
        wanted = _number(self.value)
        if wanted is not None and isinstance(actual, int | float) and not isinstance(actual, bool):
            return actual == wanted
        return text(actual) == self.value


def _number(said: str) -> float | None:
    """Return a number as people write it: 4096, 4K, 1e3; None for anything else."""
    found = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)([KMkm]?)", said)
    if found is None:
        return None
    return float(found[1]) * {"": 1, "k": 2**10, "m": 2**20}[found[2].lower()]


def conditions(said: str, keys: Sequence[str]) -> tuple[Where, ...]:
    """Return the conditions that `show.where` states on rows with these keys.

    Raises ConfError for what is no condition, and for keys that no row has.
    """
    found: list[Where] = []
    at = 0
    while said[at:].strip():
        stated = _CONDITION.match(said, at)
        if stated is None:
            raise ConfError(
                f"show.where: cannot read `{said[at:].strip()}`; write conditions as KEY=VALUE, "
                "with = != > >= < <= or ~ (contains), and a space between them: "
                "kind=measured n_max>=2"
            )
        key = _ALIASES.get(stated[1], stated[1])
        if key not in keys:
            raise ConfError(
                f"show.where: no trial has a column {stated[1]}"
                f"{suggestion(stated[1], [*keys, *_ALIASES])}"
            )
        value = stated[3]
        if value[:1] in "\"'":
            value = value[1:-1]
        if stated[2] in _COMPARE and _number(value) is None:
            raise ConfError(
                f"show.where: {stated[1]}{stated[2]}{value} compares with what is no number; "
                "names can be compared with = != and ~"
            )
        found.append(Where(key=key, op=stated[2], value=value))
        at = stated.end()
    return tuple(found)


def chosen(rows: Sequence[Row], where: str) -> list[Row]:
    """Return the rows that meet all conditions of `show.where`; all of them where it is empty."""
    if not rows:
        return []
    stated = conditions(where, list(rows[0]))
    return [row for row in rows if all(each.holds(row) for each in stated)]


# --- files ---------------------------------------------------------------------------------------


def as_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV with a head; empty cells for what is not there."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if rows:
        writer.writerow(rows[0])
    writer.writerows(
        ["" if value is None else text(value) for value in row.values()] for row in rows
    )
    return out.getvalue()


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Write rows as Parquet; a column of several types becomes text.

    Raises ConfError where pyarrow is not installed or the file cannot be written.
    """
    try:
        import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
        import pyarrow.parquet as pq  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise ConfError(
            "output=parquet needs pyarrow, which is not installed: pip install pyarrow, or take "
            "output=csv"
        ) from None
    columns = {key: _of_one_type([row[key] for row in rows]) for key in (rows[0] if rows else ())}
    try:
        pq.write_table(pa.table(columns), path)
    except OSError as error:
        raise ConfError(f"show.to: {path}: {error.strerror or error}") from None


def _of_one_type(values: list[Scalar]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} and float in kinds:
        return [None if value is None else float(value) for value in values]
    if len(kinds) > 1:
        return [None if value is None else text(value) for value in values]
    return list(values)


def written(rows: Sequence[Row], output: str, to: str | None) -> str:
    """Write rows as CSV or Parquet to the file; return what is to be printed.

    Raises ConfError for Parquet without a file: it is nothing for a terminal.
    """
    if to is None:
        if output == "parquet":
            raise ConfError("output=parquet is no text: name a file for it, show.to=trials.parquet")
        return as_csv(rows)
    path = Path(to).expanduser()
    if output == "parquet":
        write_parquet(rows, path)
    else:
        try:
            path.write_text(as_csv(rows), encoding="utf-8")
        except OSError as error:
            raise ConfError(f"show.to: {path}: {error.strerror or error}") from None
    return f"{path}\n"


# --- leaderboards --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An attempt on a leaderboard: what it did on the board's workload, and what it is best at.

    `differs` are the facts that keep it from being compared with the board's reference, in words.
    """

    study: str
    attempt: Attempt
    picks: tuple[str, ...]
    load: Figures
    differs: tuple[str, ...] = ()

    @property
    def result(self) -> Measured:
        """The attempt's figures."""
        assert isinstance(self.attempt.outcome, Measured)
        return self.attempt.outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A leaderboard: what is ranked, fastest first, and what is not, and why.

    `reference` is the study that the others are compared with: the one that most can be.
    """

    name: str
    description: str
    workload: str | None
    reference: str | None
    ranked: tuple[Placed, ...]
    apart: tuple[Placed, ...]
    not_run: tuple[str, ...]
    without_result: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def board_of(
    studies: Mapping[str, Sequence[Attempt]],
    *,
    name: str,
    description: str = "",
    workload: str | None = None,
    mix: bool = False,
) -> Board:
    """Return the best of each study's front in one ranking, by decode speed on one workload.

    Of every study its fastest, its balanced and its longest. What was measured under other
    conditions than the reference stands apart unless `mix` is set; engines and models may differ.
    """
    placed: dict[str, list[Placed]] = {}
    not_run, without = [], {}
    for study, attempts in studies.items():
        if not attempts:
            not_run.append(study)
            continue
        found = _placed(study, attempts, workload)
        if found:
            placed[study] = found
        elif front_among(attempts):
            without[study] = (
                f"has not measured the workload {workload}; add also=[{workload}] and run it again"
            )
        else:
            without[study] = f"none of its {len(attempts)} boots was measured"
    everyone = [each for several in placed.values() for each in several]
    notes = []
    by_name = _by_name_only(everyone, workload)
    if by_name:
        notes.append(
            f"{', '.join(by_name)}: the workload {workload} was measured beside another one, and "
            "is taken for the same by its name alone"
        )
    reference = _reference(placed, workload)
    if reference is not None:
        everyone = [_beside(each, placed[reference][0], workload) for each in everyone]
    ranked = [each for each in everyone if mix or not each.differs]
    return Board(
        name=name,
        description=description,
        workload=workload,
        reference=reference,
        ranked=tuple(sorted(ranked, key=_speed, reverse=True)),
        apart=tuple(
            sorted((e for e in everyone if not mix and e.differs), key=_speed, reverse=True)
        ),
        not_run=tuple(not_run),
        without_result=without,
        notes=tuple(notes),
    )


def _speed(placed: Placed) -> float:
    return counted_tok_s(placed.load)


def _placed(study: str, attempts: Sequence[Attempt], workload: str | None) -> list[Placed]:
    loads = {
        each.number: load
        for each in front_among(attempts)
        if (load := load_on(each, workload)) is not None
    }
    members = [each for each in front_among(attempts) if each.number in loads]
    if not members:
        return []
    picks: dict[int, list[str]] = {}
    for pick in ("fastest", "balanced", "longest"):
        (best,) = PICKS[pick](members)
        picks.setdefault(best.number, []).append(pick)
    by_number = {each.number: each for each in members}
    return [
        Placed(study=study, attempt=by_number[n], picks=tuple(said), load=loads[n])
        for n, said in picks.items()
    ]


def load_on(attempt: Attempt, workload: str | None) -> Figures | None:
    """Return what an attempt did on a workload, its first load of a single stream if it has one.

    None for the workload: the one that its study compares by.
    """
    result = attempt.outcome
    if not isinstance(result, Measured):
        return None
    own = attempt.workload.get("name")
    wanted = own if workload is None else workload
    if workload is None and result.figures:
        return result.figures[0]
    loads = [each for each in result.figures if each.workload == wanted]
    if loads:
        return min(loads, key=lambda each: each.streams != 1)
    if result.figures or wanted != own:
        return None
    return Figures(
        workload=str(wanted), prompt_length=None, streams=1, decode_tok_s=result.decode_tok_s,
        ttft_s=result.ttft_s, prefill_tok_s=result.prefill_tok_s, drafts=result.drafts,
    )  # fmt: skip


def _by_name_only(everyone: Iterable[Placed], workload: str | None) -> list[str]:
    return list(
        dict.fromkeys(
            each.study
            for each in everyone
            if workload is not None and each.attempt.workload.get("name") != workload
        )
    )


def _differences(one: Placed, other: Placed, workload: str | None) -> tuple[str, ...]:
    # The digest on record is of the workload that a study compares by.
    aside = bool(_by_name_only((one, other), workload))
    return incomparable(
        one.attempt,
        other.attempt,
        scope=Scope.LEADERBOARD,
        allowed=("workload_digest",) if aside else (),
    )


def _reference(placed: Mapping[str, Sequence[Placed]], workload: str | None) -> str | None:
    """Return the study that most others can be compared with, the first of several such."""

    def companions(study: str) -> int:
        mine = placed[study][0]
        return sum(not _differences(mine, several[0], workload) for several in placed.values())

    return max(placed, key=companions, default=None)


def _beside(each: Placed, reference: Placed, workload: str | None) -> Placed:
    return Placed(
        study=each.study, attempt=each.attempt, picks=each.picks, load=each.load,
        differs=_differences(reference, each, workload),
    )  # fmt: skip


def board_rows(board: Board) -> list[Row]:
    """Return the ranked rows of a board, then those that stand apart, of equal keys."""
    entries = (
        Entry(label=index, objectives=(_speed(each), float(each.result.context.window_tokens)))
        for index, each in enumerate(board.ranked)
    )
    best = {entry.label for entry in pareto_front(entries)}
    rows = [
        _board_row(each, rank=rank, unbeaten=rank - 1 in best)
        for rank, each in enumerate(board.ranked, 1)
    ]
    return rows + [_board_row(each, rank=None, unbeaten=None) for each in board.apart]


def _board_row(placed: Placed, *, rank: int | None, unbeaten: bool | None) -> Row:
    attempt, result, load = placed.attempt, placed.result, placed.load
    first = bool(result.figures) and load == result.figures[0]
    drafts = load.drafts if load.drafts is not None or not first else result.drafts
    seen = result.telemetry
    card = seen.gpu_engine_bytes if seen is not None else None
    memory = card if card is not None else result.peak_bytes
    return {
        "rank": rank,
        "unbeaten": unbeaten,
        "study": placed.study,
        "attempt": attempt.number,
        "best_at": ", ".join(placed.picks),
        "decode_tok_s": load.decode_tok_s.median,
        "decode_tok_s_low": load.decode_tok_s.low,
        "decode_tok_s_high": load.decode_tok_s.high,
        "counted_tok_s": counted_tok_s(load),
        "acceptance": drafts.acceptance if drafts is not None else None,
        "proven_context_tokens": result.context.proven_tokens,
        "memory_mib": memory / _MIB if memory is not None else None,
        "engine": attempt.engine.get("name"),
        "engine_version": attempt.engine.get("engine_version"),
        "model": attempt.model.get("name"),
        "point": str(attempt.point),
        "workload": load.workload,
        "doubts": ", ".join(doubt.value for doubt in load.decode_tok_s.doubts),
        "simulated": attempt.engine.get("simulated") is True,
        "differs": "; ".join(placed.differs),
    }


def board_json(board: Board, rows: Sequence[Row]) -> dict[str, Any]:
    """Return a board with these of its rows as one JSON document."""
    differs = {(each.study, each.attempt.number): list(each.differs) for each in board.apart}
    return {
        "leaderboard": board.name,
        "description": board.description,
        "workload": board.workload,
        "reference": board.reference,
        "ranked": [row for row in rows if row["rank"] is not None],
        "apart": [
            {**row, "differs": differs[row["study"], row["attempt"]]}
            for row in rows
            if row["rank"] is None
        ],
        "not_run": list(board.not_run),
        "without_result": dict(board.without_result),
        "notes": list(board.notes),
    }


def board_tables(board: Board, rows: Sequence[Row], width: int) -> list[Table]:
    """Return the ranked rows as a table that fits `width`, and one of those that stand apart."""
    on = board.workload or "the workload of each study"
    simulated = " · SIMULATED" if any(row["simulated"] for row in rows) else ""
    ranked = [row for row in rows if row["rank"] is not None]
    apart = [row for row in rows if row["rank"] is None]
    tables = [
        _board_table(f"{board.name} on {on}{simulated}", ranked, width, empty="nothing to rank")
    ]
    if apart:
        title = f"not ranked: measured under other conditions than {board.reference}{simulated}"
        tables.append(_board_table(title, apart, width, empty=""))
    return tables


def _board_table(title: str, rows: Sequence[Row], width: int, *, empty: str) -> Table:
    def interval(row: Row) -> str:
        return f"{figure_text(row['decode_tok_s_low'])}–{figure_text(row['decode_tok_s_high'])}"

    places = tuple(
        "" if row["rank"] is None else f"{row['rank']}{'*' if row['unbeaten'] else ' '}"
        for row in rows
    )
    columns = [
        TableColumn(header="", cells=places, rank=1),
        column_of("decode\ntok/s", rows, "decode_tok_s", figure_text, rank=0),
        TableColumn(header="interval\ntok/s", cells=tuple(map(interval, rows)), rank=4),
        column_of("accept.\n%", rows, "acceptance", percent_text, rank=5),
        column_of("proven\ntokens", rows, "proven_context_tokens", count_text, rank=1),
        column_of("memory\nMiB", rows, "memory_mib", count_text, rank=6),
        column_of("engine", rows, "engine", str, rank=3, right=False),
        column_of("model", rows, "model", str, rank=4, right=False, folds_to=28),
        column_of("study", rows, "study", str, rank=2, right=False),
        column_of("#", rows, "attempt", str, rank=7),
        column_of("best at", rows, "best_at", str, rank=8, right=False, folds_to=18),
        column_of("doubts", rows, "doubts", str, rank=9, right=False, folds_to=18),
    ]
    return fitted_table(title, columns, Pairs(), width, empty=empty)


def board_notes(board: Board) -> list[str]:
    """Return what a board says below its tables, line by line."""
    lines = []
    if board.ranked:
        lines.append("* no other of these is faster with as much context")
    for study in dict.fromkeys(each.study for each in board.apart):
        differs = dict.fromkeys(d for e in board.apart if e.study == study for d in e.differs)
        lines.append(f"{study} beside {board.reference}: {'; '.join(differs)}")
    if board.apart:
        lines.append("rank them all the same: show.mix=true")
    elif any(each.differs for each in board.ranked):
        lines.append(f"ranked although conditions differ from those of {board.reference}:")
        for study in dict.fromkeys(each.study for each in board.ranked if each.differs):
            differs = dict.fromkeys(d for e in board.ranked if e.study == study for d in e.differs)
            lines.append(f"  {study}: {'; '.join(differs)}")
    lines += [f"{study}: {why}" for study, why in board.without_result.items()]
    lines += board.notes
    lines += [
        f"{study}: not run yet; start it: python -m sweeper +study={study}"
        for study in board.not_run
    ]
    return lines


def several_tables(
    studies: Mapping[str, Sequence[Attempt]], rows: Sequence[Row], width: int
) -> list[Table]:
    """Return the rows of each study as a table of its trials."""
    return [
        trials_table(
            attempts, width=width, only={row["attempt"] for row in rows if row["study"] == study}
        )
        for study, attempts in studies.items()
    ]


def board_of_named(named: Leaderboard | Loaded, studies: Mapping[str, Sequence[Attempt]]) -> Board:
    """Return the leaderboard that was named; of a study and others, by what each compares by."""
    if isinstance(named, Leaderboard):
        return board_of(
            studies, name=named.name, description=named.description, workload=named.workload,
            mix=named.show.mix,
        )  # fmt: skip
    return board_of(studies, name=" and ".join(studies), mix=named.show.mix)


def board_studies(board: Leaderboard, dirs: ConfDirs) -> dict[str, list[Attempt]]:
    """Return the attempts of a leaderboard's studies by their folders, and of those named beside.

    Raises ConfError for a folder that was named and does not exist.
    """
    names = [str(outline(each, dirs)["study"]) for each in board.studies]
    found = {each: recorded(board.studies_dir, each) for each in dict.fromkeys(names)}
    return {**found, **named_studies(board.studies_dir, board.show.studies)}


__all__ = [
    "OUTPUTS", "Board", "Placed", "Row", "Where", "as_csv", "board_json", "board_notes",
    "board_of", "board_rows", "board_studies", "board_tables", "chosen", "conditions", "load_on",
    "named_studies", "recorded", "rows_of", "write_parquet", "written",
]  # fmt: skip
