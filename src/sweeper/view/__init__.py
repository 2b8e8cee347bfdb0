"""What a person sees while a study runs: on a terminal a picture that moves, elsewhere lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from sweeper.core.eta import Left, Plan, Spent, expected_again, kind_of, time_left
from sweeper.core.outcome import Attempt, Measured
from sweeper.core.pairs import Point, text
from sweeper.core.standing import front_among, standing
from sweeper.measuring import Progress
from sweeper.view.frame import About, Now, frame, in_ascii, left_words, verdict
from sweeper.view.plot import Pair

_KEPT = 6
"""How many of the last trials stay in the picture; what leaves it is printed above."""
_TICK_S, _QUIET_TICK_S = 0.5, 1.0
"""How often the picture is drawn; less often while an engine is being measured."""
_QUIET = frozenset({"first request", "guard", "prove", "warm up", "measure"})


class View:
    """Progress of one run: lines that stay, and on a terminal a picture below them that moves.

    Its methods are called by the one thread that runs the study; `stopping` may be called from a
    signal handler. Whatever the terminal does, the run is never held up by it for long: a picture
    takes some milliseconds and is drawn once or twice a second.
    """

    def __init__(
        self,
        console: Console,
        *,
        budget_boots: int,
        budget_minutes: float | None,
        about: About | None = None,
        known: Sequence[Attempt] = (),
    ) -> None:
        """Show what `known` attempts came to; nothing is printed before the view is entered."""
        self._console = console
        self._budget_boots = budget_boots
        self._budget_s = None if budget_minutes is None else budget_minutes * 60
        self._about = about
        self._moves = console.is_interactive
        self._began = time.monotonic()
        self._stage_began = self._began
        self._last_end: float | None = None
        self._attempts = list(known)
        self._spent = [
            Spent(
                kind=kind_of(each),
                seconds=each.timings.total_s,
                measure_s=each.timings.measure_s or 0.0,
            )
            for each in known
            if not each.brief
        ]
        self._boots = sum(each.confirms is None for each in known)
        self._recent: tuple[Attempt, ...] = ()
        self._front: tuple[Attempt, ...] = ()
        self._behind: tuple[Pair, ...] = ()
        self._rank()
        self._point: Point | None = None
        self._number: int | None = None
        self._why = ""
        self._progress = Progress(stage="getting ready")
        self._confirming: tuple[int, int] | None = None
        self._stopping = False
        self._told_stopping = False
        self._size = console.size
        self._drawing = threading.RLock()
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="view", daemon=True)
        self._live = self._new_live()

    def __enter__(self) -> Self:
        if self._moves:
            self._live.start()
        self._ticker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._ticker.join()
        self._live.stop()
        for each in self._recent:
            self._print(each)
        self._recent = ()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._stays(Text(text))

    def booting(self, number: int, boots: int, point: Point, *, why: str = "") -> None:
        """Show that an attempt begins, after so many boots, and why it is at this point."""
        self._boots = boots
        self._starts(number, point, why)
        if not self._moves:
            self.say(f"[{boots + 1}/{self._budget_boots}] attempt {number}: {point}")
            if why:
                self.say(f"      why: {why}")

    def confirming(
        self, member: int, count: int, of: int, point: Point, *, brief: bool = False
    ) -> None:
        """Show that a member of the front is booted again, the `count`th of `of`.

        In full, or in `brief` to see whether it works.
        """
        self._confirming = count, of
        self._starts(
            member,
            point,
            "it leaves little memory: does it work every time?"
            if brief
            else "it is on the front, and a front is measured twice",
        )
        if not self._moves:
            what = (
                f"booting again, at most {of}: {count}" if brief else f"confirming {count} of {of}"
            )
            self.say(f"[{what}] attempt {member} again: {point}")

    def progress(self, progress: Progress) -> None:
        """Show where the current attempt is."""
        if (progress.stage, progress.detail) != (self._progress.stage, self._progress.detail):
            self._stage_began = time.monotonic()
        self._progress = progress

    def finished(self, attempt: Attempt) -> None:
        """Show what an attempt came to."""
        now = time.monotonic()
        began = self._last_end if self._last_end is not None else now - attempt.timings.total_s
        self._last_end = now
        if not attempt.brief:
            self._spent.append(
                Spent(
                    kind=kind_of(attempt),
                    seconds=max(now - began, attempt.timings.total_s),
                    measure_s=attempt.timings.measure_s or 0.0,
                )
            )
        if attempt.confirms is None:
            self._boots += 1
        self._attempts.append(attempt)
        self._point, self._why = None, ""
        self._progress = Progress(stage="choosing the next point")
        self._stage_began = now
        self._rank()
        if not self._moves:
            self._print(attempt)
            return
        self._recent = (*self._recent, attempt)
        while len(self._recent) > _KEPT:
            # It leaves the picture before it is printed, so that it is never seen twice.
            first, *rest = self._recent
            self._recent = tuple(rest)
            self._print(first)

    def stopping(self) -> None:
        """Take note that the run was told to stop; safe in a signal handler, as it only notes."""
        self._stopping = True

    @property
    def asked_to_stop(self) -> bool:
        """Whether the run was told to stop."""
        return self._stopping

    def left(self) -> Left | None:
        """Return the time left with its spread, None before the first attempt has ended."""
        gone = self._elapsed_s()
        boots = max(self._budget_boots - self._boots, 0)
        seconds = None if self._budget_s is None else max(self._budget_s - gone, 0.0)
        running = self._point is not None
        if seconds == 0 and boots:
            boots = 1 if running and self._confirming is None else 0
        if self._confirming is not None:
            count, of = self._confirming
            boots, again = 0, of - count + running
        else:
            confirm = None if self._about is None else self._about.confirm
            again = expected_again(
                front=len(self._front), boots_done=self._boots, boots_left=boots,
                rounds=0 if confirm is None else confirm.rounds,
                most=0 if confirm is None else confirm.boots,
            )  # fmt: skip
        since = self._last_end if self._last_end is not None else self._began
        return time_left(
            self._spent,
            Plan(
                boots=boots,
                again=again,
                seconds=seconds,
                running_s=max(time.monotonic() - since, 0.0) if running else 0.0,
                confirming=self._confirming is not None,
            ),
        )

    def left_s(self) -> float | None:
        """Return the seconds left by what attempts took so far; None before the first."""
        left = self.left()
        return None if left is None else left.seconds

    def picture(self, width: int, height: int, *, ascii_only: bool = False) -> Group:
        """Return the picture as it is now, of at most this size."""
        return Group(*frame(self._now(), width=width, height=height, ascii_only=ascii_only))

    def _starts(self, number: int, point: Point, why: str) -> None:
        if self._last_end is None:
            self._last_end = time.monotonic()
        self._number, self._why = number, why
        self._progress = Progress(stage="boot", detail="starting")
        self._stage_began = time.monotonic()
        self._point = point

    def _rank(self) -> None:
        """Work out the front and what is behind it: once an attempt, not once a picture."""
        self._front = front_among(self._attempts)
        members = {each.number for each in self._front}
        self._behind = tuple(
            (float(each.outcome.context.window_tokens), each.outcome.decode_tok_s.median)
            for each in standing(self._attempts)
            if each.number not in members
            and isinstance(each.outcome, Measured)
            and each.outcome.context.window_tokens > 0
            and each.outcome.decode_tok_s.median > 0
        )

    def _now(self) -> Now:
        now = time.monotonic()
        if self._confirming is not None:
            count = "confirming {} of {}".format(*self._confirming)
        else:
            count = f"boot {min(self._boots + 1, self._budget_boots)} of {self._budget_boots}"
        version = self._attempts[-1].engine.get("engine_version") if self._attempts else None
        return Now(
            about=self._about,
            engine_version="" if version is None else text(version),
            count=count,
            point=self._point,
            attempt=self._number,
            why=self._why,
            progress=self._progress,
            stage_s=max(now - self._stage_began, 0.0),
            gone_s=now - self._began,
            left=self.left(),
            stopping=self._stopping,
            recent=self._recent,
            front=self._front,
            behind=self._behind,
        )

    def _print(self, attempt: Attempt) -> None:
        line = Text()
        line.append(f"{attempt.number:>4} ", style="dim")
        words, style = verdict(attempt)
        line.append(words, style=style)
        line.append(f"  {attempt.point}", style="dim")
        left = "" if self._moves else left_words(self.left())
        took = f"{attempt.timings.total_s:.1f} s"
        line.append(f"  {', '.join(each for each in (took, left) if each)}", style="dim")
        self._stays(line)

    def _stays(self, line: Text) -> None:
        if self._console.options.ascii_only:
            line = in_ascii(line)
        with self._drawing:
            self._console.print(line, soft_wrap=True)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began

    # --- drawing ------------------------------------------------------------------------------

    def _new_live(self) -> Live:
        return Live(
            console=self._console,
            get_renderable=self._drawn,
            auto_refresh=False,
            transient=True,
            vertical_overflow="crop",
        )

    def _drawn(self) -> Group:
        width, height = self._console.size
        # The cursor needs a line of its own, or the terminal scrolls with every picture.
        return self.picture(width, height - 1, ascii_only=self._console.options.ascii_only)

    def _tick(self) -> None:
        while not self._over.wait(self._tick_s()):
            if self._stopping and not self._told_stopping:
                self._told_stopping = True
                if not self._moves:
                    self.say(
                        "stopping: the engine is ended and what is finished is kept; once more: "
                        "at once"
                    )
            if self._moves:
                self._redraw()

    def _tick_s(self) -> float:
        quiet = self._progress.stage in _QUIET and not self._stopping
        return _QUIET_TICK_S if quiet else _TICK_S

    def _redraw(self) -> None:
        with self._drawing:
            size = self._console.size
            if size != self._size:
                # Where the lines of the last picture are after a change of the width, only the
                # terminal knows.
                self._size = size
                self._console.control(Control(ControlType.HOME, (ControlType.CLEAR)))
                self._live.stop()
                self._live = self._new_live()
                self._live.start()
            self._live.refresh()


__all__ = ["About", "View"]
