"""Commands read back out of recipes, as the programs that they are for read them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from sweeper.recipe.quoting import RecipeError, comment

PORT_VARIABLE = "$serve_port"
"""What stands for the port in a shell recipe."""


@dataclass(slots=True)
class Found:
    """What a recipe starts: words, environment, and limit on address space in bytes."""

    argv: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    memory_limit_bytes: int | None = None


def shell_script(script: str) -> Found:
    """Return what a shell recipe runs; the port is the word `$serve_port`."""
    found = Found()
    for words in shell_commands(script):
        match words[0]:
            case "export":
                for each in words[1:]:
                    name, _, value = each.partition("=")
                    found.env[name] = value
            case "ulimit" if len(words) == 3 and words[1] == "-v" and words[2].isdigit():
                found.memory_limit_bytes = int(words[2]) * 1024
            case "exec":
                found.argv = tuple(words[1:])
                break
            case _:
                pass
    return found


def shell_commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a shell script, quotes taken off.

    What only a shell could tell (variables, substitutions, operators) stays as it is written.
    """
    words: list[str] = []
    word: list[str] | None = None
    at, end = 0, len(script)
    while at < end:
        each = script[at]
        if each == "\\" and at + 1 < end:
            if script[at + 1] != "\n":
                word = [*(word or []), script[at + 1]]
            at += 2
            continue
        if each in "'\"":
            content, at = _quoted(script, at)
            word = [*(word or []), content]
            continue
        if each == "#" and word is None:
            at = _line_end(script, at)
            continue
        if each in " \t\n":
            if word is not None:
                words.append("".join(word))
                word = None
            if each == "\n" and words:
                yield words
                words = []
        else:
            word = [*(word or []), each]
        at += 1
    if word is not None:
        words.append("".join(word))
    if words:
        yield words


def _quoted(script: str, at: int) -> tuple[str, int]:
    """Return the content of the quotes that open at this place, and the place after them."""
    quote, content = script[at], []
    at += 1
    while at < len(script) and script[at] != quote:
        if quote == '"' and script[at] == "\\" and script[at + 1 : at + 2] in ("$", "`", '"', "\\"):
            at += 1
        content.append(script[at])
        at += 1
    return "".join(content), at + 1


def _line_end(script: str, at: int) -> int:
    end = script.find("\n", at)
    return len(script) if end < 0 else end


# --- systemd ----------------------------------------------------------------------------------

_SYSTEMD_ESCAPES = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    "\\": "\\", '"': '"', "'": "'", "s": " ",
}  # fmt: skip
_NUMBERED = re.compile(
    r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-3][0-7]{2})"
)  # fmt: skip


def systemd_unit(unit: str) -> Found:
    """Return what a systemd service runs, by the rules of systemd.syntax(7) and systemd.service(5).

    Of several settings of one name the last counts, but for Environment=, which adds up.
    """
    found = Found()
    for name, value in _systemd_settings(unit):
        match name:
            case "ExecStart":
                words = systemd_words(value)
                found.argv = (
                    *(word.replace("%%", "%") for word in words[:1]),
                    *(_without_doubles(word) for word in words[1:]),
                )
            case "Environment":
                for each in systemd_words(value):
                    key, _, said = each.replace("%%", "%").partition("=")
                    found.env[key] = said
            case "LimitAS" if value.isdigit():
                found.memory_limit_bytes = int(value)
            case _:
                pass
    return found


def _without_doubles(word: str) -> str:
    return word.replace("%%", "%").replace("$$", "$")


def _systemd_settings(unit: str) -> Iterator[tuple[str, str]]:
    carried = ""
    for line in unit.split("\n"):
        if line.lstrip().startswith(("#", ";")):
            continue
        if line.endswith("\\"):
            carried += line[:-1] + " "
            continue
        name, equals, value = (carried + line).partition("=")
        carried = ""
        if equals and not name.lstrip().startswith("["):
            yield name.strip(), value.strip()


def systemd_words(value: str) -> list[str]:
    """Return the words of a setting, quotes and escapes taken off, specifiers left in.

    An escape of a byte that is not ASCII is part of UTF-8, or stays as a surrogate.
    """
    words: list[str] = []
    word: bytearray | None = None
    quote = ""
    at = 0
    while at < len(value):
        each = value[at]
        if each == "\\" and at + 1 < len(value):
            content, at = _unescaped(value, at + 1)
            word = (word or bytearray()) + content
            continue
        if quote:
            if each == quote:
                quote = ""
            else:
                word = (word or bytearray()) + each.encode("utf-8", "surrogateescape")
        elif each in "'\"" and word is None:
            quote, word = each, bytearray()
        elif each in " \t":
            if word is not None:
                words.append(word.decode("utf-8", "surrogateescape"))
                word = None
        else:
            word = (word or bytearray()) + each.encode("utf-8", "surrogateescape")
        at += 1
    if word is not None:
        words.append(word.decode("utf-8", "surrogateescape"))
    return words


def _unescaped(value: str, at: int) -> tuple[bytes, int]:
    numbered = _NUMBERED.match(value, at)
    if numbered is not None:
        byte, short, long, octal = numbered.groups()
        if byte or octal:
            return bytes([int(byte, 16) if byte else int(octal, 8)]), numbered.end()
        return chr(int(short or long, 16)).encode("utf-8", "surrogatepass"), numbered.end()
    known = _SYSTEMD_ESCAPES.get(value[at])
    return (known if known is not None else "\\" + value[at]).encode(), at + 1


# --- llama-server's presets -------------------------------------------------------------------

_PRESET_KEY = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]*)[ \t]*=[ \t]*([^;#\r\n]*)")
_PRESET_SECTION = re.compile(r"\[[ \t]*([^\]]+)\][ \t]*(?:[;#].*)?")


def preset_sections(text: str) -> dict[str, dict[str, str]]:
    """Return the sections of a preset.ini, by the grammar in common/preset.cpp of llama.cpp.

    Keys before the first section are those of `default`. A later value of a key replaces an
    earlier one, and so does a later section of a name. Raises RecipeError for a line that the
    grammar does not know: llama-server takes no such file.
    """
    sections: dict[str, dict[str, str]] = {"default": {}}
    current = sections["default"]
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), start=1):
        if (header := _PRESET_SECTION.fullmatch(line)) is not None:
            current = sections[header[1]] = {}
        elif (found := _PRESET_KEY.match(line)) is not None:
            current[found[1]] = found[2].rstrip(" \t")
        elif not re.fullmatch(r"[ \t]*(?:[;#].*)?", line):
            raise RecipeError(f"line {number} is none that llama-server reads: {comment(line)}")
    return {name: keys for name, keys in sections.items() if keys or name != "default"}
