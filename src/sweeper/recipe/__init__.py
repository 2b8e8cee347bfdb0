"""A winning attempt to files that a person can run tomorrow: one template a format."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from sweeper.core.outcome import Attempt, Measured
from sweeper.core.pairs import Pairs, Scalar, text

DEFAULT_PORT = 8080


class RecipeError(Exception):
    """A recipe that cannot be made; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A kind of recipe: its template, the end of its files' names, and whether they are run."""

    template: str
    suffix: str
    executable: bool


FORMATS = {"shell": Format(template="shell.sh.j2", suffix=".sh", executable=True)}


def _fastest(front: Sequence[Attempt]) -> list[Attempt]:
    return [max(front, key=lambda each: _measured(each).decode_tok_s.median)]


def _longest(front: Sequence[Attempt]) -> list[Attempt]:
    return [max(front, key=lambda each: _measured(each).context.window_tokens)]


PICKS: dict[str, Callable[[Sequence[Attempt]], list[Attempt]]] = {
    "all": list,
    "fastest": _fastest,
    "longest": _longest,
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
    attempts: Sequence[Attempt], *, form: str, folder: Path, study_folder: Path
) -> list[Path]:
    """Write one recipe for each attempt into the folder and return their paths.

    The command is the recorded one, argument for argument, but for the port. Raises RecipeError
    for a format that does not exist or an attempt that was not measured.
    """
    if form not in FORMATS:
        raise RecipeError(f"there is no recipe format {form}; there are: {', '.join(FORMATS)}")
    chosen = FORMATS[form]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for attempt in attempts:
        path = folder / f"{attempt.study}-{attempt.number:04d}{chosen.suffix}"
        partial = path.with_name(path.name + ".partial")
        # A path may hold bytes that are no UTF-8; Python keeps them as surrogates.
        partial.write_text(
            render(attempt, form=form, study_folder=study_folder),
            encoding="utf-8",
            errors="surrogateescape",
        )
        partial.chmod(0o755 if chosen.executable else 0o644)
        partial.replace(path)
        written.append(path)
    return written


def render(attempt: Attempt, *, form: str, study_folder: Path) -> str:
    """Return the text of one recipe."""
    outcome = _measured(attempt)
    if not attempt.argv:
        raise RecipeError(
            f"attempt {attempt.number} measured a server that somebody else had started, so its "
            "command is not known"
        )
    hidden = [name for name, value in attempt.env.items() if _lost(value)]
    return (
        _environment()
        .get_template(FORMATS[form].template)
        .render(
            attempt=attempt,
            measured=outcome,
            argv_lines=_argv_lines(attempt),
            env={name: value for name, value in attempt.env.items() if name not in hidden},
            hidden=hidden,
            lost=any(_lost(each) for each in attempt.argv),
            default_port=DEFAULT_PORT,
            limit_kib=None
            if attempt.memory_limit_bytes is None
            else attempt.memory_limit_bytes // 1024,
            simulated=attempt.engine.get("simulated") is True,
            figures=figures(outcome),
            study_folder=study_folder,
        )
    )


def _lost(value: Scalar) -> bool:
    """Tell whether the record holds stars in the place of this value, or of a part of it."""
    return isinstance(value, str) and re.search(r"(?:^|=|:\s|://)\*\*\*(?:$|@)", value) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument of the command; the port stands for whatever the user of the recipe says."""

    value: str
    is_port: bool


def _argv_lines(attempt: Attempt) -> list[list[Argument]]:
    """Return the command in lines for reading: each option begins one, its values follow it."""
    lines: list[list[Argument]] = [[]]
    for index, value in enumerate(attempt.argv):
        if value.startswith("-") and lines[-1]:
            lines.append([])
        lines[-1].append(Argument(value=value, is_port=index == attempt.port_argument))
    return lines


def figures(measured: Measured) -> list[str]:
    """Return the measured figures in words, one a line, with interval, count and doubts."""
    speed = measured.decode_tok_s
    lines = [
        f"decode {speed.median:.1f} tok/s, {speed.low:.1f} to {speed.high:.1f} "
        f"({speed.confidence:.0%} interval of the median, {speed.n} runs)",
        f"context {measured.context.proven_tokens:,} tokens proven with a real prompt "
        f"({measured.context.configured_tokens:,} configured)",
        f"time to first token {measured.ttft_s.median * 1000:.0f} ms",
    ]
    if measured.prefill_tok_s is not None:
        lines.append(f"prefill {measured.context.prefill_tok_s:.0f} tok/s over the proven context")
    if measured.drafts is not None and measured.drafts.acceptance is not None:
        lines.append(
            f"draft acceptance {measured.drafts.acceptance:.1%} "
            f"({measured.drafts.accepted} of {measured.drafts.drafted} tokens)"
        )
    if measured.peak_bytes is not None:
        lines.append(f"memory at its peak {measured.peak_bytes / 2**20:.0f} MiB")
    if speed.doubts:
        lines.append(f"doubts: {', '.join(doubt.value for doubt in speed.doubts)}")
    return lines


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sweeper.recipe"),
        # These are shell scripts and the like: every value goes through the filter of its format.
        autoescape=False,  # noqa: S701
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["sh"] = lambda value: shlex.quote(
        text(value) if not isinstance(value, str) else value
    )
    environment.filters["comment"] = _comment
    environment.filters["pairs"] = lambda pairs: _comment(str(Pairs(pairs)))
    return environment


def _comment(value: object) -> str:
    """Return text that cannot leave a comment: everything that ends a line becomes a space."""
    return re.sub(r"[\x00-\x1f\x7f\x85\u2028\u2029]+", " ", str(value)).strip()
