"""Names what happened to an engine from its log alone, whoever made it and however long it is."""

from __future__ import annotations

import codecs
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from sweeper.core.launch import Phase
from sweeper.core.outcome import BrokenName, kind, name
from sweeper.engines import engine_names, load_engine
from sweeper.places import ConfError

_CHUNK_BYTES = 1 << 20
_LONGEST_LINE = 1 << 16
"""Longer lines are cut: a binary file may have none that end."""
_LINES_TO_TELL_BY = 5000


def diagnose(path: str, *, engine_name: str | None, exit_code: int | None) -> dict[str, Any]:
    """Return outcome, kind, phase, cause, explanation, facts and what to try next, JSON-ready.

    `path` may be `-` for standard input. Without an engine's name, the adapter that recognises
    most of the beginning is taken. Raises ConfError for a file that cannot be read.
    """
    with _opened(path) as file:
        chosen = engine_name if engine_name is not None else _recognised(file)
        if chosen is None:
            return _foreign()
        engine = load_engine(chosen)
        found = engine.diagnose(lines_of(file), as_signal(exit_code))
        facts = {**engine.evidence(lines_of(file)), **found.finding.facts}
    return {
        "outcome": name(found),
        "kind": kind(found),
        "phase": found.finding.phase.value,
        "explanation": found.finding.explanation,
        "cause": found.finding.cause,
        "facts": facts,
        "try_next": dict(found.finding.try_next),
        "engine": engine.name,
    }


def as_signal(exit_code: int | None) -> int | None:
    """Return a shell's 128 + N as the signal it stands for, as -N; other codes as they are."""
    if exit_code is not None and 128 < exit_code <= 128 + 64:
        return 128 - exit_code
    return exit_code


def lines_of(file: IO[bytes]) -> Iterator[str]:
    """Yield the lines of a file from its start, a carriage return ending one too.

    Holds one chunk and one line at a time. What is not UTF-8 is replaced.
    """
    file.seek(0)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rest = ""
    while chunk := file.read(_CHUNK_BYTES):
        text = rest + decoder.decode(chunk)
        *whole, rest = text.replace("\r", "\n").split("\n")
        rest = rest[:_LONGEST_LINE]
        for line in whole:
            if line:
                yield line[:_LONGEST_LINE]
    rest = (rest + decoder.decode(b"", final=True)).replace("\r", "\n")
    yield from (line for line in rest.split("\n") if line)


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    if path == "-":
        # Read twice, which a pipe cannot be.
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy)
            yield copy
        return
    try:
        file = Path(path).open("rb")  # noqa: SIM115 - closed below, opened where errors are ours
    except OSError as error:
        raise ConfError(f"{path}: {error.strerror or error}; name the engine's log") from None
    with file:
        yield file


def _recognised(file: IO[bytes]) -> str | None:
    """Return the name of the adapter that knows most of a log's beginning, if one knows any."""
    known = {}
    for each in engine_names():
        engine = load_engine(each)
        head = itertools.islice(lines_of(file), _LINES_TO_TELL_BY)
        known[each] = sum(engine.milestone(line) is not None for line in head)
    best = max(known, key=lambda each: known[each])
    return best if known[best] > 0 else None


def _foreign() -> dict[str, Any]:
    return {
        "outcome": BrokenName.UNKNOWN.value,
        "kind": "broken",
        "phase": Phase.SPAWN.value,
        "explanation": "This reads like no engine's log that is known here; if it is, say whose: "
        + " or ".join(f"engine={each}" for each in engine_names()),
        "cause": "",
        "facts": {},
        "try_next": {},
        "engine": None,
    }


def as_text(found: dict[str, Any]) -> str:
    """Return a diagnosis for a person."""
    lines = [
        f"{found['outcome']} ({found['kind'].replace('_', ' ')}), in the phase {found['phase']}",
        found["explanation"],
    ]
    if found["cause"]:
        lines.append(f"  {found['cause']}")
    if found["try_next"]:
        wanted = ", ".join(f"{key} = {value}" for key, value in found["try_next"].items())
        lines.append(f"try next: {wanted}")
    lines += [f"  {key}: {_figure(key, value)}" for key, value in sorted(found["facts"].items())]
    return "\n".join(lines)


def _figure(key: str, value: object) -> str:
    if key.endswith("_bytes") and isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value / 2**20:,.1f} MiB"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
