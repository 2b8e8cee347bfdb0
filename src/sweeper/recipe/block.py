"""The line in every recipe that says, for programs, what was measured and what is started.

It is JSON in ASCII on one line, so it cannot leave the comment that holds it, whatever the kind.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sweeper.core.stats import Summary
from sweeper.recipe.quoting import RecipeError
from sweeper.recipe.source import Export, Source, hub_model

SCHEMA = 1
MARK = "sweeper-recipe:"
_LINE = re.compile(r"(?:#|<!--) sweeper-recipe: \{")

_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "$": "\\u0024", "`": "\\u0060"}
"""What could mean something to a reader of the comment around: HTML, Markdown, templates."""


def block_line(source: Source, export: Export, *, form: str, body_sha256: str) -> str:
    """Return the line, without the marks of a comment."""
    said = json.dumps(
        {**described(source, export, form=form), "body_sha256": body_sha256},
        ensure_ascii=True,
        allow_nan=False,
        separators=(",", ":"),
    )
    for each, escape in _ESCAPED.items():
        # JSON has these in strings only, where an escape is the same character.
        said = said.replace(each, escape)
    return f"{MARK} {said}"


def described(source: Source, export: Export, *, form: str) -> dict[str, Any]:
    """Return what the line holds, JSON-ready."""
    attempt, measured = source.attempt, source.measured
    first = measured.figures[0] if measured.figures else None
    path = str(attempt.model.get("path") or "")
    hub = hub_model(path)
    return {
        "schema": SCHEMA,
        "form": form,
        "study": attempt.study,
        "study_folder": str(source.study_folder),
        "attempt": attempt.number,
        "trial": attempt.trial,
        "confirms": attempt.confirms,
        "measured_at": attempt.started_at,
        "point": dict(attempt.point),
        "argv": list(attempt.argv),
        "port_argument": attempt.port_argument,
        "env": dict(attempt.env),
        "memory_limit_bytes": attempt.memory_limit_bytes,
        "exported": {
            "argv": list(export.argv),
            "port_argument": export.port_argument,
            "env": dict(export.env),
            "memory_limit_bytes": export.memory_limit_bytes,
            "switches": list(export.switches),
        },
        "health_path": source.health_path,
        "figures": {
            "prompt_length": None if first is None else first.prompt_length,
            "streams": 1 if first is None else first.streams,
            "decode_tok_s": _summary(measured.decode_tok_s),
            "ttft_s": _summary(measured.ttft_s),
        },
        "window_tokens": measured.context.window_tokens,
        "proven_tokens": measured.context.proven_tokens,
        "configured_tokens": measured.context.configured_tokens,
        "workload": {
            "name": attempt.workload.get("name"),
            "digest": attempt.workload.get("digest"),
        },
        "engine": {
            "name": attempt.engine.get("name"),
            "version": attempt.engine.get("engine_version"),
            "simulated": attempt.engine.get("simulated") is True,
        },
        "model": {
            "name": attempt.model.get("name"),
            "path": path,
            "sha256": attempt.model.get("sha256") or None,
            "revision": None if hub is None else hub[1],
        },
        "host": {
            key: attempt.host.get(key) for key in ("hardware", "gpu", "gpu_driver", "cpu")
        },
    }  # fmt: skip


def _summary(summary: Summary) -> dict[str, Any]:
    return {
        "median": summary.median,
        "low": summary.low,
        "high": summary.high,
        "n": summary.n,
        "confidence": summary.confidence,
        "doubts": [doubt.value for doubt in summary.doubts],
    }


def body_digest(files: Mapping[str, str]) -> str:
    """Return the SHA-256 of a recipe's files by their names, without the line of this module."""
    digest = hashlib.sha256()
    found = False
    for name in sorted(files):
        lines = files[name].split("\n")
        at = _block_at(lines)
        if at is not None and not found:
            found = True
            del lines[at]
        digest.update(f"{name}\0{len(lines)}\0".encode())
        digest.update("\n".join(lines).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def find_block(files: Mapping[str, str]) -> dict[str, Any]:
    """Return what the line in one of these files holds.

    Raises RecipeError where there is none, or one that is damaged or of another schema.
    """
    for name in sorted(files):
        lines = files[name].split("\n")
        at = _block_at(lines)
        if at is not None:
            return _read(lines[at])
    raise RecipeError(f"it has no line {MARK}, so it is no recipe of this sweeper; export it again")


def _block_at(lines: Sequence[str]) -> int | None:
    """Return the number of the line, counted from 0: the first, since it precedes all values."""
    return next((at for at, line in enumerate(lines) if _LINE.match(line)), None)


def _read(line: str) -> dict[str, Any]:
    said = line.partition(MARK)[2].strip().removesuffix("-->")
    try:
        found = json.loads(said)
    except ValueError as error:
        raise RecipeError(f"its line {MARK} is damaged ({error}); export it again") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise RecipeError(
            f"its line {MARK} has another schema than {SCHEMA}; export it again with this sweeper"
        )
    return found
