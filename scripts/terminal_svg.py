"""A terminal's screen as a picture: tmux capture-pane -e -p | python scripts/terminal_svg.py TITLE.

Reads text with its colours from standard input, cuts what is above the line that starts with the
second argument, if there is one, and writes SVG to standard output.
"""

from __future__ import annotations

import io
import sys

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text


def main() -> None:
    """Convert standard input; the first argument is the title of the window."""
    title, *begin = sys.argv[1:]
    lines = list(Text.from_ansi(sys.stdin.read().rstrip()).split("\n"))
    while begin and lines and not lines[0].plain.startswith(begin[0]):
        lines.pop(0)
    console = Console(
        record=True,
        width=max(line.cell_len for line in lines),
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    for line in lines:
        console.print(line, no_wrap=True)
    print(console.export_svg(title=title, theme=MONOKAI))


if __name__ == "__main__":
    main()
