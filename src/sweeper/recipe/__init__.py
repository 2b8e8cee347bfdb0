"""A winning attempt to files that a person can run tomorrow: one template a format."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sweeper.core.objectives import counted_tok_s
from sweeper.core.outcome import Attempt, Measured
from sweeper.core.standing import reliability_of
from sweeper.recipe.formats import FORMATS, Format, chart_name
from sweeper.recipe.quoting import RecipeError
from sweeper.recipe.reading import Command, Interval, Recipe, read_recipe
from sweeper.recipe.rendering import SINGLE, rendered
from sweeper.recipe.source import DEFAULT_PORT, Source, adapter_of
from sweeper.recipe.telling import figures
from sweeper.record.codec import redacted


def _fastest(front: Sequence[Attempt]) -> list[Attempt]:
    return [max(front, key=lambda each: counted_tok_s(_measured(each)))]


def _longest(front: Sequence[Attempt]) -> list[Attempt]:
    return [max(front, key=lambda each: _measured(each).context.window_tokens)]


def _balanced(front: Sequence[Attempt]) -> list[Attempt]:
    """Return the one closest to the ideal: as fast as the fastest, as long as the longest.

    Both objectives as doublings (log2), each between 0, its least on the front, and 1, its most.
    """
    speeds = _shares([counted_tok_s(_measured(each)) for each in front])
    windows = _shares([float(_measured(each).context.window_tokens) for each in front])
    away = [
        math.hypot(1 - speed, 1 - window) for speed, window in zip(speeds, windows, strict=True)
    ]
    return [front[away.index(min(away))]]


def _shares(values: Sequence[float]) -> list[float]:
    logs = [math.log2(max(value, 1e-9)) for value in values]
    least, most = min(logs), max(logs)
    return [1.0 if most == least else (each - least) / (most - least) for each in logs]


PICKS: dict[str, Callable[[Sequence[Attempt]], list[Attempt]]] = {
    "all": list,
    "fastest": _fastest,
    "longest": _longest,
    "balanced": _balanced,
}
"""Which members of a front are exported, by the name that a user gives."""


def _measured(attempt: Attempt) -> Measured:
    if not isinstance(attempt.outcome, Measured):
        raise RecipeError(
            f"attempt {attempt.number} was not measured, so there is nothing to export; choose one "
            "that `show` lists as measured"
        )
    return attempt.outcome


def write_recipes(
    attempts: Sequence[Attempt],
    *,
    form: str,
    folder: Path,
    study_folder: Path,
    failed: Sequence[Attempt] = (),
    front: Sequence[Attempt] = (),
    everyone: Sequence[Attempt] = (),
    health_path: str | None = None,
) -> list[Path]:
    """Write one recipe for each attempt into the folder and return their paths, files or folders.

    The command is the recorded one, argument for argument, but for what the recipe lists. `failed`
    are attempts of the study that did not work, `front` those that none other beats: a page lists
    them. `everyone` are all attempts of the study: how often the point was booted, what it left of
    memory, and whether it works every time stand in the recipe's header. `health_path` is where
    the server says that it is ready, if its adapter does not know.

    Raises RecipeError for a format that does not exist or cannot hold the command, and for an
    attempt that was not measured; what was written before stays.
    """
    if form not in FORMATS:
        raise RecipeError(f"there is no recipe format {form}; there are: {', '.join(FORMATS)}")
    chosen = FORMATS[form]
    folder.mkdir(parents=True, exist_ok=True)
    holds = reliability_of(everyone)
    written = []
    for attempt in attempts:
        source = _source(attempt, study_folder, failed, front, health_path)
        point = attempt.point
        source = replace(
            source,
            hold=holds.get(point),
            boots=tuple(each.number for each in everyone if each.point == point),
        )
        files = rendered(source, form)
        name = source.name if chosen.suffix else chart_name(source)
        path = folder / f"{name}{chosen.suffix}"
        _write(path, files, executable=chosen.executable)
        written.append(path)
    return written


def _write(path: Path, files: dict[str, str], *, executable: bool) -> None:
    """Write a file, or a folder of them, under its name only once it is whole."""
    partial = path.with_name(path.name + ".partial")
    if SINGLE in files:
        _write_file(partial, files[SINGLE])
        partial.chmod(0o755 if executable else 0o644)
        partial.replace(path)
        return
    shutil.rmtree(partial, ignore_errors=True)
    for name, said in files.items():
        target = partial / name
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_file(target, said)
    # A folder cannot be replaced in one step; nobody sees a part of one, at worst none.
    if path.exists():
        old = path.with_name(path.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(path)


def _write_file(path: Path, said: str) -> None:
    # A path may hold bytes that are no UTF-8; Python keeps them as surrogates.
    path.write_bytes(said.encode("utf-8", "surrogateescape"))


def render(
    attempt: Attempt,
    *,
    form: str,
    study_folder: Path,
    failed: Sequence[Attempt] = (),
    front: Sequence[Attempt] = (),
    health_path: str | None = None,
) -> str:
    """Return the text of one recipe; of a folder, its files one after the other."""
    files = rendered(_source(attempt, study_folder, failed, front, health_path), form)
    return files[SINGLE] if SINGLE in files else "\n".join(files.values())


def _source(
    attempt: Attempt,
    study_folder: Path,
    failed: Sequence[Attempt],
    front: Sequence[Attempt],
    health_path: str | None,
) -> Source:
    measured = _measured(attempt)
    adapter = adapter_of(str(attempt.engine.get("name") or ""))
    known = "/health" if adapter is None else adapter.wire.health_path
    return Source(
        # What comes from disk has no secrets in it; what does not is made so.
        attempt=redacted(attempt),
        measured=measured,
        study_folder=study_folder,
        health_path=health_path or known,
        front=tuple(front),
        failed=tuple(failed),
    )


__all__ = [
    "DEFAULT_PORT",
    "FORMATS",
    "PICKS",
    "Command",
    "Format",
    "Interval",
    "Recipe",
    "RecipeError",
    "figures",
    "read_recipe",
    "render",
    "write_recipes",
]
