"""A report as Markdown with pictures, for a pull request or a wiki."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from sweeper import __version__
from sweeper.core.outcome import Attempt
from sweeper.job import Job
from sweeper.report.content import Grid, Report, report_of
from sweeper.report.page import environment
from sweeper.report.png import write_pictures

PICTURES = "report"
"""The folder beside the Markdown that its pictures are in."""


def write_markdown(
    attempts: Iterable[Attempt],
    path: Path,
    *,
    job: Job | None = None,
    study_folder: Path | None = None,
) -> None:
    """Write the report of a study as Markdown, and its pictures into `report/` beside it."""
    report = report_of(attempts, job=job, study_folder=study_folder)
    pictures = write_pictures(report, path.parent / PICTURES)
    text = markdown_of(report, {name: f"{PICTURES}/{file}" for name, file in pictures.items()})
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8", errors="replace")
    partial.replace(path)


def markdown_of(report: Report, pictures: dict[str, str]) -> str:
    """Return a report as Markdown; `pictures` are addresses by section."""
    text = (
        environment(html=False)
        .get_template("report.md.j2")
        .render(report=report, pictures=pictures, grid=_grid, md=escaped, version=__version__)
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def escaped(value: object) -> str:
    """Return text that stays on its line and in its cell, and means nothing to Markdown."""
    said = " ".join(str(value).split())
    said = said.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # A hash at the beginning of a word would link to another pull request.
    said = re.sub(r"#(?=\d)", "#&#8203;", said)
    return re.sub(r"([\\`*_\[\]|~!])", r"\\\1", said)


def _grid(table: Grid) -> str:
    lines = [
        "| " + " | ".join(escaped(column.header) for column in table.columns) + " |",
        "|" + "|".join("---:" if column.right else "---" for column in table.columns) + "|",
    ]
    lines += ["| " + " | ".join(escaped(cell) for cell in row) + " |" for row in table.rows]
    return "\n".join(lines)
