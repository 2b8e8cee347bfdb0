"""Attempts to tables for a terminal, as wide as it is."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from sweeper.core.outcome import Attempt
from sweeper.core.pairs import Pairs, text
from sweeper.core.reliability import Hold
from sweeper.core.standing import front_among
from sweeper.report.front import front_rows, trial_rows, varied
from sweeper.report.words import count_text, figure_text, percent_text, subject_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    """One column of a terminal table; those with the highest `rank` go first when it is narrow."""

    header: str
    cells: tuple[str, ...]
    rank: int
    right: bool = True
    folds_to: int | None = None
    """The width to which prose may be folded; None for what must stay on its line."""

    @property
    def width(self) -> int:
        """The characters that its widest line takes."""
        natural = max(len(line) for cell in (self.header, *self.cells) for line in cell.split("\n"))
        return natural if self.folds_to is None else min(natural, self.folds_to)


def front_table(
    attempts: Iterable[Attempt], *, width: int = 80, only: Collection[int] | None = None
) -> Table:
    """Return the front as a table that fits `width`; what had to be left out is said below it.

    Of the front of all attempts only the numbers in `only`, where they are given.
    """
    everyone = list(attempts)
    front = [each for each in front_among(everyone) if only is None or each.number in only]
    rows = [row for row in front_rows(everyone) if only is None or row["attempt"] in only]
    axes, same = varied(front)
    columns = [
        column_of("#", rows, "attempt", str, rank=0),
        *(column_of(axis, rows, axis, text, rank=2, right=False) for axis in axes),
        column_of("decode\ntok/s", rows, "decode_tok_s", figure_text, rank=0),
        TableColumn(
            header="interval\ntok/s",
            cells=tuple(
                f"{figure_text(row['decode_tok_s_low'])}–{figure_text(row['decode_tok_s_high'])}"
                for row in rows
            ),
            rank=3,
        ),
        column_of("proven\ntokens", rows, "proven_context_tokens", count_text, rank=1),
        column_of("ttft\nms", rows, "ttft_ms", figure_text, rank=4),
        column_of("accept.\n%", rows, "acceptance", percent_text, rank=5),
        column_of("left\nMiB", rows, "memory_left_mib", figure_text, rank=4),
        TableColumn(
            header="boots\nheld",
            cells=tuple(_boots(row) for row in rows),
            rank=4,
            right=False,
        ),
        column_of("doubts", rows, "doubts", str, rank=6, right=False),
        column_of("prefill\ntok/s", rows, "prefill_tok_s", figure_text, rank=7),
        column_of("peak\nMiB", rows, "peak_memory_mib", count_text, rank=8),
    ]
    return fitted_table(
        f"front of {subject_of(everyone)}", columns, same, width, empty="nothing measured",
        notes=[f"{row['attempt']}: {row['why_counted']}" for row in rows if row["why_counted"]],
    )  # fmt: skip


def trials_table(
    attempts: Iterable[Attempt], *, width: int = 80, only: Collection[int] | None = None
) -> Table:
    """Return all attempts as a table that fits `width`, front points marked with a star.

    Where they are given, only the numbers in `only`.
    """
    everyone = list(attempts)
    rows = [row for row in trial_rows(everyone) if only is None or row["attempt"] in only]
    axes, same = varied([each for each in everyone if only is None or each.number in only])
    columns = [
        TableColumn(
            header="#",
            cells=tuple(f"{row['attempt']}{'*' if row['on_front'] else ' '}" for row in rows),
            rank=0,
        ),
        column_of("outcome", rows, "outcome", str, rank=0, right=False),
        *(column_of(axis, rows, axis, text, rank=3, right=False) for axis in axes),
        column_of("decode\ntok/s", rows, "decode_tok_s", figure_text, rank=1),
        column_of("proven\ntokens", rows, "proven_context_tokens", count_text, rank=2),
        column_of("boot\ns", rows, "boot_s", figure_text, rank=5),
        column_of("total\ns", rows, "total_s", figure_text, rank=6),
        column_of("phase", rows, "phase", str, rank=7, right=False),
        column_of("what happened", rows, "explanation", str, rank=4, right=False, folds_to=28),
    ]
    return fitted_table(
        f"attempts of {subject_of(everyone)}", columns, same, width, empty="none yet"
    )


def _boots(row: Mapping[str, Any]) -> str:
    """Return how many boots of a point held, and where it is not known whether all will."""
    held = f"{row['boots_held']}/{row['boots']}"
    return held if row["holds"] in (Hold.RELIABLE, Hold.UNKNOWN) else f"{held} {row['holds']}"


def column_of(
    header: str,
    rows: Sequence[Mapping[str, Any]],
    key: str,
    show: Callable[[Any], str],
    *,
    rank: int,
    right: bool = True,
    folds_to: int | None = None,
) -> TableColumn:
    """Return a column of one key of rows, each value as `show` writes it."""
    values = [row[key] for row in rows]
    numeric = all(value is None or isinstance(value, int | float) for value in values)
    return TableColumn(
        header=header,
        cells=tuple("" if value is None else show(value) for value in values),
        rank=rank,
        right=right or (numeric and bool(values)),
        folds_to=folds_to,
    )


def fitted_table(
    title: str, columns: Sequence[TableColumn], same: Pairs, width: int, *, empty: str,
    notes: Sequence[str] = (),
) -> Table:  # fmt: skip
    """Return a table that fits the width: the columns that matter least are left out, and named.

    Below it stand what all rows share and these notes.
    """
    shown = [column for column in columns if any(column.cells) or column.rank == 0]
    dropped: list[TableColumn] = []
    while _width(shown) > width and any(column.rank > 0 for column in shown):
        # Of equal rank the last goes first, so that the leading axes stay longest.
        worst = max(enumerate(shown), key=lambda item: (item[1].rank, item[0]))[1]
        shown.remove(worst)
        dropped.append(worst)
    rows = len(columns[0].cells)
    missing = ", ".join(_flat(each.header) for each in reversed(dropped))
    notes = [
        *(line for note in notes for line in textwrap.wrap(note, width)),
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


def _width(columns: Sequence[TableColumn]) -> int:
    return sum(column.width + 2 for column in columns)


def _flat(header: str) -> str:
    return header.replace("\n", " ")
