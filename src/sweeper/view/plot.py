"""A front drawn in characters: decode speed over context, for a terminal of any size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Pair = tuple[float, float]
"""Context in tokens and decode tokens/s, both above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What is drawn with: the front and its staircase, what is behind it, the axes."""

    front: str = "●"
    behind: str = "∙"
    level: str = "─"
    drop: str = "│"
    turn: str = "╰"
    axis: str = "┤"
    corner: str = "└"
    floor: str = "─"


UNICODE = Marks()
ASCII = Marks(front="#", behind=".", level="-", drop="|", turn="`", axis="|", corner="+", floor="-")


def plot(
    behind: Sequence[Pair], front: Sequence[Pair], *, width: int, height: int,
    marks: Marks = UNICODE,
) -> list[str]:  # fmt: skip
    """Return the plot as lines of equal width, none where the size or the points do not allow one.

    Contexts go from left to right in powers of two, speeds from 0 or from below the slowest up. The
    staircase is the best speed at each context: a point serves every shorter one as well.
    """
    everything = [*behind, *front]
    if not everything or width < 16 or height < 4:
        return []
    rows = height - 2
    low, high = _span([speed for _, speed in everything])
    left, right = _span_log([context for context, _ in everything])
    labels = _labels(low, high, rows)
    edge = max(len(label) for label in labels.values()) + 1
    columns = width - edge - 1

    def place(pair: Pair) -> tuple[int, int]:
        across = (math.log2(pair[0]) - left) / (right - left)
        up = (pair[1] - low) / (high - low)
        return round((1 - up) * (rows - 1)), round(across * (columns - 1))

    grid = [[" "] * columns for _ in range(rows)]
    _staircase(grid, sorted(map(place, front), key=lambda at: (at[1], at[0])), marks)
    for at, mark in [(place(each), marks.behind) for each in behind] + [
        (place(each), marks.front) for each in front
    ]:
        grid[at[0]][at[1]] = mark
    lines = [
        labels.get(row, "").rjust(edge) + marks.axis + "".join(cells)
        for row, cells in enumerate(grid)
    ]
    lines.append(" " * edge + marks.corner + marks.floor * columns)
    first, last = short(2**left), short(2**right)
    between = columns - len(first) - len(last)
    unit = "tok/s over context"
    said = unit.center(between) if between >= len(unit) + 2 else " " * max(between, 1)
    lines.append(" " * (edge + 1) + first + said + last)
    return [line[:width].ljust(width) for line in lines]


def short(tokens: float) -> str:
    """Return a token count as people say it: 512, 4K, 1M."""
    for size, unit in ((2**20, "M"), (2**10, "K")):
        # What lacks a few tokens of 8K is 8K here.
        if tokens >= size * 0.99:
            count = tokens / size
            return f"{round(count) if count >= 10 else round(count, 1):g}{unit}"
    return f"{round(tokens)}"


def _staircase(grid: list[list[str]], steps: Sequence[tuple[int, int]], marks: Marks) -> None:
    begin, before = 0, None
    for row, column in steps:
        for at in range(begin, column):
            grid[row][at] = marks.level
        if before is not None and before < row:
            for between in range(before + 1, row):
                grid[between][begin] = marks.drop
            if begin < column:
                grid[row][begin] = marks.turn
        begin, before = column, row


def _span(speeds: Sequence[float]) -> Pair:
    low, high = min(speeds), max(speeds)
    room = (high - low) * 0.15
    if high <= low or room > low:
        return 0.0, high
    return low - room, high


def _span_log(contexts: Sequence[float]) -> Pair:
    left, right = math.log2(min(contexts)), math.log2(max(contexts))
    return (left, right) if right > left else (left - 1, right + 1)


def _labels(low: float, high: float, rows: int) -> dict[int, str]:
    wanted = {0, rows - 1} | ({(rows - 1) // 2} if rows >= 5 else set())
    digits = 0 if high - low >= 8 or high >= 1000 else 1
    return {row: f"{high - (high - low) * row / (rows - 1):.{digits}f}" for row in wanted}


__all__ = ["ASCII", "UNICODE", "Marks", "plot", "short"]
