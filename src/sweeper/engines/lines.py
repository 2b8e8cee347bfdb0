"""What engines' logs have in common."""

from __future__ import annotations

import re

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def plain(line: str, longest: int) -> str:
    """Return the first `longest` characters of a line, without the colours among them."""
    line = line[:longest]
    return _ANSI.sub("", line) if "\x1b" in line else line
