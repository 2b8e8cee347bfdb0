"""Templates filled in: one file, or a folder of them."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sweeper.core.outcome import Attempt, Figures, Measured
from sweeper.recipe import telling
from sweeper.recipe.block import block_line, body_digest
from sweeper.recipe.formats import FORMATS, Format, available
from sweeper.recipe.quoting import (
    RecipeError,
    code,
    comment,
    dollars,
    fence,
    llama_swap,
    markdown,
    plain,
    shell,
    systemd,
    yaml,
)
from sweeper.recipe.source import DEFAULT_PORT, Export, Source

if TYPE_CHECKING:
    import jinja2

SINGLE = ""
"""The name of the file of a recipe that is one file."""


def rendered(source: Source, form: str) -> dict[str, str]:
    """Return the files of a recipe by their names in its folder; `SINGLE` for one that has none.

    Raises RecipeError for a format that does not exist, is not made for this engine, or cannot
    hold this command.
    """
    chosen = FORMATS.get(form)
    if chosen is None:
        raise RecipeError(f"there is no recipe format {form}; there are: {', '.join(FORMATS)}")
    if not source.attempt.argv:
        raise RecipeError(
            f"attempt {source.attempt.number} measured a server that somebody else had started, "
            "so its command is not known"
        )
    forms = available(source)
    if form not in forms:
        raise RecipeError(
            f"format {form} is not made for {comment(source.engine_name) or 'this engine'}, since "
            f"{chosen.only}; for it there are: {', '.join(forms)}"
        )
    for name in source.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise RecipeError(f"{comment(name)} is no name of an environment variable")
    export = chosen.export(source)
    values = _values(source, export)
    # Once to take the digest of all but the line that holds it, and once with it.
    body = _files(chosen, {**values, "block": _block(source, export, form, "")})
    return _files(chosen, {**values, "block": _block(source, export, form, body_digest(body))})


def _block(source: Source, export: Export, form: str, digest: str) -> str:
    return block_line(source, export, form=form, body_sha256=digest)


def _files(chosen: Format, values: dict[str, Any]) -> dict[str, str]:
    environment = _environment()
    if chosen.suffix:
        return {SINGLE: environment.get_template(chosen.template).render(values)}
    within = f"{chosen.template}/"
    return {
        each.removeprefix(within).removesuffix(".j2"): environment.get_template(each).render(values)
        for each in environment.list_templates()
        if each.startswith(within)
    }


def _values(source: Source, export: Export) -> dict[str, Any]:
    """Return what the templates may name."""
    measured, attempt = source.measured, source.attempt
    limit = export.memory_limit_bytes
    lines = argv_lines(export)
    command = " ".join(shell(each.value) for line in lines for each in line)
    return {
        "source": source,
        "export": export,
        "head": telling.head(source, export),
        "headline": _headline(source),
        "description": f"{source.served_name} ({_headline(source)})",
        "argv_lines": lines,
        "cmd": _command(export, source),
        "default_port": DEFAULT_PORT,
        "limit_kib": None if limit is None else limit // 1024,
        "simulated": attempt.engine.get("simulated") is True,
        "figures": telling.figures(measured),
        "doubts": telling.doubts_in_words(measured),
        "engine": telling.engine_words(source),
        "model": telling.model_words(source),
        "host": telling.host_words(source),
        "confirmed": telling.confirmation(source),
        "position": telling.front_position(source),
        "front": [each for each in source.front if isinstance(each.outcome, Measured)],
        "reasons": telling.reasons(source),
        "rows": measured.figures or (_compared(attempt, measured),),
        "troubles": telling.troubles(source.failed),
        "secrets": telling.secrets(source),
        "margin": telling.margin(source),
        "restarts": telling.restarts(source),
        "page_port": "PORT" if export.port_argument is None else DEFAULT_PORT,
        "request": _request(source),
        "fence": fence(command + _request(source) + str(export.env)),
        "guide": _guide(source),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument of the command; the port stands for whatever the user of the recipe says."""

    value: str
    is_port: bool


def argv_lines(export: Export) -> list[list[Argument]]:
    """Return the command in lines for reading: each option begins one, its values follow it."""
    lines: list[list[Argument]] = [[]]
    for index, value in enumerate(export.argv):
        if value.startswith("-") and lines[-1]:
            lines.append([])
        lines[-1].append(Argument(value=value, is_port=index == export.port_argument))
    return lines


def _command(export: Export, source: Source) -> str:
    """Return the command in one line, the port as the launcher's placeholder."""
    if source.deployable is not None and "runtime" in export.values:
        words = [shell(each) for each in export.argv]
        port = "{port}"
    else:
        words = [llama_swap(each) for each in export.argv]
        port = "${PORT}"
    if export.port_argument is not None:
        words[export.port_argument] = port
    return " ".join(words)


def _headline(source: Source) -> str:
    measured = source.measured
    where = source.attempt.host.get("gpu") or source.attempt.host.get("cpu") or ""
    said = (
        f"{measured.decode_tok_s.median:.1f} tok/s with "
        f"{measured.context.window_tokens:,} tokens of context"
    )
    return comment(f"{said} on {where}" if where else said)


def _compared(attempt: Attempt, measured: Measured) -> Figures:
    """Return the compared load of a record that keeps no other."""
    length = attempt.workload.get("prompt_tokens")
    return Figures(
        workload=plain(attempt.workload.get("name") or "workload"),
        prompt_length=length if isinstance(length, int) else None,
        streams=1,
        decode_tok_s=measured.decode_tok_s,
        ttft_s=measured.ttft_s,
        prefill_tok_s=measured.prefill_tok_s,
        drafts=measured.drafts,
    )


def _request(source: Source) -> str:
    return json.dumps(
        {
            "model": source.served_name,
            "messages": [{"role": "user", "content": "Say hello."}],
            "max_tokens": 64,
        }
    )


def _guide(source: Source) -> list[str]:
    """Return the guide of a recipe in Markdown, line by line."""
    lines = [
        "## Overview",
        "",
        markdown(f"{_headline(source)}. {telling.front_position(source)}"),
        "",
        "## Prerequisites",
        "",
        f"- Engine: {markdown(telling.engine_words(source))}",
        f"- Model: {markdown(telling.model_words(source))}",
        f"- Machine: {markdown(telling.host_words(source))}",
        "",
        "## Measured",
        "",
        *(f"- {markdown(each)}" for each in telling.figures(source.measured)),
        f"- {markdown(telling.confirmation(source))}",
    ]
    found = telling.troubles(source.failed)
    if found:
        lines += ["", "## Troubleshooting", ""]
    lines += [
        f"- **{markdown(kind)}** with {code(str(last.point))}: "
        f"{markdown(last.outcome.finding.explanation)}"
        for kind, _, last in found
        if not isinstance(last.outcome, Measured)
    ]
    return lines


def _indented(line: object) -> str:
    """Return a line for a comment with the spaces that it begins with."""
    said = str(line)
    return " " * (len(said) - len(said.lstrip(" "))) + comment(said)


def _number_or_yaml(value: str) -> str:
    """Return a whole number bare, since it stays what it is, and all else in quotes."""
    return value if re.fullmatch(r"0|[1-9]\d{0,17}", value) else yaml(value)


def _slug(value: object) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", str(value).lower()).strip("-")


def _shortened(value: object, most: int = 300) -> str:
    said = comment(value)
    return said if len(said) <= most else said[:most] + "…"


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sweeper.recipe"),
        # These are shell scripts and the like: every value goes through the filter of its format.
        autoescape=False,  # noqa: S701
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        {
            "sh": shell,
            "plain": plain,
            "comment": comment,
            "indented": _indented,
            "yaml": yaml,
            "number_or_yaml": _number_or_yaml,
            "compose": lambda value: yaml(dollars(value)),
            "kubernetes": lambda value: yaml(dollars(value)),
            "systemd": systemd,
            "systemd_env": lambda value: systemd(value, variables=False),
            "systemd_text": lambda value: comment(value).replace("%", "%%").rstrip("\\"),
            "md": markdown,
            "code": code,
            "cell": lambda value: code(value).replace("|", "\\|"),
            "interval": telling.interval,
            "doubts": telling.doubts_of,
            "slug": _slug,
            "shortened": _shortened,
            "capitalize_first": lambda said: str(said)[:1].upper() + str(said)[1:],
        }
    )
    return environment
