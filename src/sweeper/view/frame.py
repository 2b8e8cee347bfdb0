"""The picture of a running study, line by line, for a terminal of any size."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from sweeper.core.eta import Left
from sweeper.core.outcome import (
    Attempt,
    Broken,
    HostFault,
    Infeasible,
    Measured,
    Unfit,
    name,
)
from sweeper.core.pairs import Point, text
from sweeper.core.reliability import least_left, mib
from sweeper.core.study import Confirm
from sweeper.measuring import Progress
from sweeper.view.plot import ASCII, UNICODE, Pair, plot

_BESIDE = 84
"""From how many columns on the plot stands beside the table of the front."""
_PLOT_WIDTH, _PLOT_ROWS, _LEAST_PLOT_ROWS = 40, 9, 6
_FRONT_ROWS, _TRIAL_ROWS = 8, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What stays the same over a run: what is swept, where, and what follows the search."""

    study: str
    engine: str
    hardware: str
    simulated: bool = False
    confirm: Confirm | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """Where a run is. Times in seconds; `recent` and `front` as they are shown, best front first.

    `count` says which boot of how many is running, `point` is None while none is.
    """

    about: About | None
    engine_version: str
    count: str
    point: Point | None
    attempt: int | None
    why: str
    progress: Progress
    stage_s: float
    gone_s: float
    left: Left | None
    stopping: bool
    recent: tuple[Attempt, ...]
    front: tuple[Attempt, ...]
    behind: tuple[Pair, ...]


def frame(now: Now, *, width: int, height: int, ascii_only: bool = False) -> list[Text]:
    """Return at most `height` lines of at most `width` columns: first what matters most."""
    top = _heading(now, width, height, ascii_only)
    if height <= len(top):
        # The line that moves and the time left say most.
        kept = sorted(top, key=lambda ranked: ranked[0])[: max(height, 1)]
        ranks = {rank for rank, _ in kept}
        return _cut([line for rank, line in top if rank in ranks], width, ascii_only)
    lines = [line for _, line in top]
    room = height - len(lines)
    trials = _trials(now.recent, ascii_only)
    front = _front(now, width, room, ascii_only, trials=len(trials))
    room -= len(front)
    if trials and room > 1:
        heading = [Text("last trials", style="bold")] if room > 3 else []
        shown = trials[-(room - len(heading) - (room > 4)) :][-_TRIAL_ROWS:]
        front += ([Text("")] if front and room > len(heading) + len(shown) else []) + heading
        front += shown
    return _cut([*lines, *front][:height], width, ascii_only)


def stage_words(progress: Progress) -> str:
    """Return in words what an attempt is doing."""
    detail = progress.detail.replace("at most ", "≤ ")
    match progress.stage:
        case "boot":
            return detail or "booting"
        case "prove":
            return f"proving {detail}" if detail[:1].isdigit() else f"proving: {detail}"
        case "warm up":
            return f"warming up: {detail}" if detail else "warming up"
        case "measure":
            return f"measuring {detail}"
        case "guard":
            return f"checking the answers: {detail}"
        case other:
            return f"{other}: {detail}" if detail else other


def verdict(attempt: Attempt) -> tuple[str, str]:
    """Return what an attempt came to, in words, and the style that they are shown in."""
    match attempt.outcome:
        case Measured(decode_tok_s=speed, context=context, drafts=drafts):
            words = f"{speed.median:.1f} tok/s, {context.proven_tokens:,} tokens proven"
            if attempt.brief:
                left = least_left(attempt)
                spare = "" if left is None else f", {mib(left)} of memory left"
                words = f"attempt {attempt.confirms} booted again: {context.proven_tokens:,} tokens"
                return f"{words} proven{spare}", "green"
            if attempt.confirms is not None:
                words = f"attempt {attempt.confirms} measured again: {words}"
            if drafts is not None and drafts.acceptance is not None:
                words += f", {drafts.acceptance:.0%} of drafts accepted"
            if speed.doubts:
                words += f" (doubts: {', '.join(speed.doubts)})"
            return words, "green"
        case Infeasible(finding=finding) | Unfit(finding=finding):
            return f"{name(attempt.outcome)}: {finding.explanation}", "yellow"
        case Broken(finding=finding) | HostFault(finding=finding):
            return f"{name(attempt.outcome)}: {finding.explanation}", "red"


def clock(seconds: float) -> str:
    """Return a time as m:ss, or h:mm:ss from an hour on."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"
    return f"{whole // 60}:{whole % 60:02}"


def left_words(left: Left | None) -> str:
    """Return the time left with its spread in words; nothing where it is not known."""
    if left is None:
        return ""
    if left.high < 10:
        return f"about {_rough(left.seconds)} left"
    low, high = _rough(left.low), _rough(left.high)
    if low.split()[1] == high.split()[1]:
        low = low.split()[0]
    return f"about {_rough(left.seconds)} left ({low}–{high})"


def bar(share: float, width: int, *, ascii_only: bool = False) -> str:
    """Return a bar of that many columns, filled to a share of 0..1."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    done, rest = ("#", ".") if ascii_only else ("█", "░")
    return done * filled + rest * (width - filled)


def _rough(seconds: float) -> str:
    """Return a time with no more digits than an estimate can carry."""
    if seconds < 100:
        return f"{round(seconds)} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def _heading(now: Now, width: int, height: int, ascii_only: bool) -> list[tuple[int, Text]]:
    """Return the lines that are always there, each with its rank: the least goes last."""
    lines: list[tuple[int, Text]] = []
    about = now.about
    dot = " | " if ascii_only else " · "
    if about is not None:
        title = Text(about.study, style="bold")
        engine = " ".join(each for each in (about.engine, now.engine_version) if each)
        title.append(f"{dot}{engine}", style="not bold")
        if about.simulated:
            title.append(" SIMULATED", style="bold magenta")
        title.append(f"{dot}{about.hardware}", style="not bold")
        lines.append((3, title))
    whole = None if now.left is None else now.gone_s + now.left.seconds
    left = left_words(now.left) or "time left not known yet"
    parts = [now.count, f"{clock(now.gone_s)} gone", left]
    if len(dot.join(parts)) > width:
        parts = [now.count, left.partition(" (")[0]]
    status = Text(dot.join(each for each in parts if each))
    if now.stopping:
        status = Text("stopping: the engine is ended, what is finished is kept", style="bold red")
    lines.append((1, status))
    if whole:
        lines.append((4, Text(bar(now.gone_s / whole, width, ascii_only=ascii_only), style="cyan")))
    if now.point is not None:
        arrow = ">" if ascii_only else "▸"
        point = Text(f"{arrow} attempt {now.attempt}  ", style="bold")
        point.append(str(now.point), style="not bold")
        lines.append((2, point))
    words = stage_words(now.progress)
    moving = Text(f"  {words}", style="bold cyan")
    moving.append(f"  {round(now.stage_s)} s", style="dim")
    room = width - moving.cell_len - 2
    if now.progress.done is not None and room >= 6:
        moving.append("  " + bar(now.progress.done, min(room, 24), ascii_only=ascii_only), "cyan")
    lines.append((0, moving))
    if now.why and now.point is not None:
        # A reason is a sentence: it gets a second line where there is room for it.
        most = 2 if height >= 20 else 1
        reason = textwrap.wrap(
            f"why: {now.why}", max(width - 2, 8), max_lines=most, placeholder=" …",
            subsequent_indent="     ",
        )  # fmt: skip
        lines += [(5 + at, Text(f"  {each}", style="dim")) for at, each in enumerate(reason)]
    return lines


def _front(now: Now, width: int, room: int, ascii_only: bool, *, trials: int) -> list[Text]:
    """Return the front as a table with its plot, in as many lines as leave room for the trials."""
    if not now.front or room < 5:
        return []
    beside = width >= _BESIDE
    # Below each other the plot takes room from the trials, which are printed above later anyway.
    kept = min(trials, _TRIAL_ROWS if beside else _TRIAL_ROWS // 2)
    most = room - 1 if trials == 0 else max(room - kept - 2, room // 2)
    plot_width = min(max(_PLOT_WIDTH, width - 70), 70) if beside else min(width, 60)
    table = _table(now.front, width - plot_width - 3 if beside else width, most - 1)
    marks = ASCII if ascii_only else UNICODE
    points = [(float(c), s) for c, s in map(_pair, now.front)]
    rows = min(_PLOT_ROWS + (room > 24) * 4, most - 1 - (0 if beside else len(table)))
    drawn = []
    if rows >= _LEAST_PLOT_ROWS:
        drawn = plot(now.behind, points, width=plot_width, height=rows, marks=marks)
    lines = [Text("")]
    if not beside:
        lines += [*table, *(_coloured(line, marks.front) for line in drawn)]
        return lines if len(lines) <= most else lines[:most]
    for at in range(max(len(table), len(drawn))):
        line = table[at].copy() if at < len(table) else Text("")
        line.truncate(width - plot_width - 3, overflow="ellipsis", pad=True)
        if at < len(drawn):
            line.append("   ")
            line.append_text(_coloured(drawn[at], marks.front))
        lines.append(line)
    return lines[:most]


def _coloured(line: str, mark: str) -> Text:
    found = Text(line, style="dim")
    found.highlight_words([mark], style="not dim bold green")
    return found


def _pair(attempt: Attempt) -> Pair:
    assert isinstance(attempt.outcome, Measured)
    return float(attempt.outcome.context.window_tokens), attempt.outcome.decode_tok_s.median


def _table(front: Sequence[Attempt], width: int, rows: int) -> list[Text]:
    """Return a line for each member: its speed, half the interval, tokens, what sets it apart."""
    shown = front[: max(min(rows - 1, _FRONT_ROWS), 1)]
    if len(shown) < len(front) and len(shown) > 1:
        shown = shown[:-1]
    axes = sorted({axis for each in front for axis in each.point})
    apart = [
        axis
        for axis in axes
        if len({Point({axis: each.point.get(axis)}) for each in front}) > 1 or len(front) == 1
    ]
    # The axis of the context says no more than the tokens beside it.
    apart = [axis for axis in apart if not all(_is_window(each, axis) for each in front)]
    lines = [Text(f"{'front':>5}  {'tok/s':>7} {'±':<5} {'tokens':>9}", style="bold")]
    for each in shown:
        assert isinstance(each.outcome, Measured)
        speed = each.outcome.decode_tok_s
        half = (speed.high - speed.low) / 2
        spread = f"{half:.0f}" if half >= 10 else f"{half:.1f}"
        line = Text(
            f"{each.number:>5}  {speed.median:>7.1f} {spread:<5} "
            f"{each.outcome.context.proven_tokens:>9,}"
        )
        sets = " ".join(f"{a}={text(each.point[a])}" for a in apart if a in each.point)
        line.append(f"  {sets}", style="dim")
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    if len(shown) < len(front):
        lines.append(Text(f"{'':>5}  and {len(front) - len(shown)} more", style="dim"))
    return lines


def _is_window(attempt: Attempt, axis: str) -> bool:
    assert isinstance(attempt.outcome, Measured)
    return attempt.point.get(axis) == attempt.outcome.context.configured_tokens


def _trials(recent: Sequence[Attempt], ascii_only: bool) -> list[Text]:
    lines = []
    for each in recent:
        words, style = verdict(each)
        mark = {"green": "+", "yellow": "x", "red": "!"}[style]
        if not ascii_only:
            mark = {"+": "✓", "x": "✗", "!": "!"}[mark]
        line = Text(f"{each.number:>5} ", style="dim")
        line.append(f"{mark} {words}", style=f"not dim {style}")
        line.append(f"  {each.point}", style="dim")
        lines.append(line)
    return lines


def in_ascii(line: Text) -> Text:
    """Return the line with nothing in it that an ASCII terminal cannot show."""
    said = line.plain.translate(_ASCII).encode("ascii", "replace").decode()
    found = Text(said, style=line.style)
    found.spans = list(line.spans)
    return found


_ASCII = str.maketrans("–≤…±×·∙●", "-<.~x|.#")


def _cut(lines: Sequence[Text], width: int, ascii_only: bool) -> list[Text]:
    """Return the lines on one row each: cropped, and without control characters of others."""
    found = []
    for each in lines:
        line = each
        if not line.plain.isprintable():
            clean = "".join(c if c.isprintable() else " " for c in line.plain)
            line = Text(clean, style=line.style)
        line.truncate(max(width, 1), overflow="ellipsis")
        if ascii_only:
            line = in_ascii(line)
        line.no_wrap = True
        found.append(line)
    return found


__all__ = [
    "About",
    "Now",
    "bar",
    "clock",
    "frame",
    "in_ascii",
    "left_words",
    "stage_words",
    "verdict",
]
