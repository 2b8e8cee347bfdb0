"""What a person sees while a study runs: a line for every attempt, and where the current one is."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sweeper.core.outcome import (
    Attempt,
    Broken,
    HostFault,
    Infeasible,
    Measured,
    Unfit,
    name,
)
from sweeper.core.pairs import Point
from sweeper.trial import Progress


class View:
    """Progress of one run: lines that stay, and on a terminal one that moves."""

    def __init__(
        self, console: Console, *, budget_boots: int, budget_minutes: float | None
    ) -> None:
        self._console = console
        self._budget_boots = budget_boots
        self._budget_s = None if budget_minutes is None else budget_minutes * 60
        self._began = time.monotonic()
        self._durations_s: list[float] = []
        self._boots = 0
        self._point = Point()
        self._progress = Progress(stage="starting")
        self._live = Live(
            console=console,
            get_renderable=self._line,
            refresh_per_second=4,
            transient=True,
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(Text(text), soft_wrap=True)

    def booting(self, number: int, boots: int, point: Point) -> None:
        """Show that an attempt begins; `boots` counts those before it."""
        self._boots = boots
        self._point = point
        self._progress = Progress(stage="boot")
        if not self._console.is_terminal:
            self.say(f"[{boots + 1}/{self._budget_boots}] attempt {number}: {point}")

    def progress(self, progress: Progress) -> None:
        """Show where the current attempt is."""
        self._progress = progress

    def finished(self, attempt: Attempt) -> None:
        """Print what an attempt came to."""
        self._durations_s.append(attempt.timings.total_s)
        self._boots += 1
        line = Text()
        line.append(f"{attempt.number:>4} ", style="dim")
        words, style = _verdict(attempt)
        line.append(words, style=style)
        line.append(f"  {attempt.point}", style="dim")
        line.append(f"  {attempt.timings.total_s:.1f} s, {self._left()}", style="dim")
        self._console.print(line, soft_wrap=True)

    def left_s(self) -> float | None:
        """Return the seconds left by the mean of the attempts so far; None before the first."""
        if not self._durations_s:
            return None
        mean = sum(self._durations_s) / len(self._durations_s)
        left = mean * max(self._budget_boots - self._boots, 0)
        if self._budget_s is not None:
            # The attempt that is running when time is up is finished.
            left = min(left, max(self._budget_s - self._elapsed_s(), 0) + mean / 2)
        return left

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def _left(self) -> str:
        left = self.left_s()
        return "" if left is None else f"about {_clock(left)} left"

    def _line(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        stage = self._progress.stage
        if self._progress.detail:
            stage += f" {self._progress.detail}"
        if self._progress.done is not None:
            stage += f" {self._progress.done:.0%}"
        grid.add_row(
            Text(
                f"boot {min(self._boots + 1, self._budget_boots)} of {self._budget_boots}, "
                f"{_clock(self._elapsed_s())} gone, {self._left() or 'time left unknown'}:",
                style="bold",
            ),
            Text(f"{stage}  ({self._point})"),
        )
        return grid


def _verdict(attempt: Attempt) -> tuple[str, str]:
    match attempt.outcome:
        case Measured(decode_tok_s=speed, context=context, drafts=drafts):
            words = f"{speed.median:.1f} tok/s, {context.proven_tokens:,} tokens proven"
            if drafts is not None and drafts.acceptance is not None:
                words += f", {drafts.acceptance:.0%} of drafts accepted"
            return words, "green"
        case Infeasible(finding=finding) | Unfit(finding=finding):
            return f"{name(attempt.outcome)}: {finding.explanation}", "yellow"
        case Broken(finding=finding) | HostFault(finding=finding):
            return f"{name(attempt.outcome)}: {finding.explanation}", "red"


def _clock(seconds: float) -> str:
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"
    return f"{whole // 60}:{whole % 60:02}"
