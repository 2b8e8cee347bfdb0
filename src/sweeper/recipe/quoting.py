"""Values as each format's reader takes them: what is written is what the engine gets."""

from __future__ import annotations

import re
import shlex

from sweeper.core.pairs import Scalar, text


class RecipeError(Exception):
    """A recipe that cannot be made; the message says why and what to do."""


def plain(value: Scalar) -> str:
    """Return a value as the text that an environment or a command line holds."""
    return value if isinstance(value, str) else text(value)


def comment(value: object) -> str:
    """Return text that cannot leave its line: what is no printable character becomes a space."""
    shown = "".join(each if each.isprintable() else " " for each in str(value))
    return re.sub(" {2,}", " ", shown).strip()


def shell(value: Scalar) -> str:
    """Return a word for a POSIX shell."""
    return shlex.quote(plain(value))


def yaml(value: Scalar) -> str:
    """Return a string as a double-quoted YAML scalar (YAML 1.2.2, 5.7 and 7.3.1).

    Raises RecipeError for a path with bytes that are no UTF-8, which YAML cannot hold.
    """
    found = ['"']
    for each in plain(value):
        code = ord(each)
        if 0xD800 <= code <= 0xDFFF:
            raise RecipeError(
                f"{comment(plain(value))} holds bytes that are no UTF-8, which this format cannot "
                "carry; use format shell or systemd, or give the file another name"
            )
        if each in '"\\':
            found.append("\\" + each)
        elif each.isprintable():
            found.append(each)
        elif code <= 0xFF:
            found.append(f"\\x{code:02x}")
        else:
            found.append(f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}")
    return "".join([*found, '"'])


def dollars(value: Scalar) -> str:
    """Return text in which no reader of `$` finds a variable.

    Compose reads `$$` as one dollar sign (docs.docker.com/reference/compose-file/interpolation),
    and so do Kubernetes' `$(NAME)` in commands, arguments and variables, and systemd's ExecStart.
    """
    return plain(value).replace("$", "$$")


_SYSTEMD_BARE = re.compile(r"[A-Za-z0-9_./=:,@+-]+")


def systemd(value: Scalar, *, variables: bool = True) -> str:
    """Return one word of a systemd unit's command line or Environment= (systemd.syntax(7)).

    Percent signs are doubled, as specifiers begin with them; dollar signs where systemd looks for
    `variables`, which it does in arguments, but not in the program and not in Environment=.
    """
    said = plain(value)
    if variables:
        said = dollars(said)
    said = said.replace("%", "%%")
    if _SYSTEMD_BARE.fullmatch(said):
        return said
    found = ['"']
    for each in said:
        if each in '"\\':
            found.append("\\" + each)
        elif each.isprintable():
            found.append(each)
        else:
            # As bytes: the file is UTF-8, and surrogates stand for bytes that are none.
            found += [f"\\x{byte:02x}" for byte in each.encode("utf-8", "surrogateescape")]
    return "".join([*found, '"'])


def llama_swap(value: Scalar) -> str:
    """Return one word of llama-swap's `cmd`.

    It is split like a shell's, but before that llama-swap drops lines that begin with `#`, takes a
    backslash off the end of lines, and replaces `${NAME}`, all of it inside quotes too
    (internal/config/commands.go and load.go of mostlygeek/llama-swap). So a quote is closed and
    opened again around each newline and after each dollar sign before a brace.
    """
    quoted = shlex.quote(plain(value))
    return quoted.replace("${", "$''{").replace("\n", "''\n''") if quoted[0] == "'" else quoted


def preset(flag: str, value: str) -> str:
    """Return a value for llama-server's preset.ini, whose parser knows neither quotes nor escapes.

    Raises RecipeError for a value that would be read differently (common/preset.cpp of llama.cpp:
    a value ends before `;`, `#` or the end of the line, without the spaces around it).
    """
    wrong = next((each for each in value if each in ";#\r\n"), None)
    if wrong is not None or value != value.strip(" \t"):
        what = "spaces around it" if wrong is None else repr(wrong)
        raise RecipeError(
            f"the value of {flag} has {what}, which llama-server's preset files cannot hold: "
            f"{comment(value)}; use format shell, systemd or llama-swap"
        )
    return utf8(value)


def utf8(value: str) -> str:
    """Return the text if it is UTF-8; raises RecipeError else."""
    yaml(value)
    return value


_MARKDOWN = re.compile(r"([\\`*_\[\]<>|&#~!])")


def markdown(value: object) -> str:
    """Return text that Markdown shows as it is, in a table too."""
    return _MARKDOWN.sub(r"\\\1", comment(value))


def code(value: object) -> str:
    """Return text as a Markdown code span."""
    said = comment(value)
    ticks = "`" * (_longest_run(said) + 1)
    pad = " " if said.startswith("`") or said.endswith("`") else ""
    return f"{ticks}{pad}{said}{pad}{ticks}" if said else "` `"


def fence(body: str) -> str:
    """Return the line that opens and closes a Markdown code block around this text."""
    return "`" * max(3, _longest_run(body) + 1)


def _longest_run(said: str) -> int:
    return max((len(run) for run in re.findall("`+", said)), default=0)
