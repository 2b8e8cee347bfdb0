"""Attempts to what a person looks at: rows, tables, pictures, a page, and Markdown."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from sweeper.core.outcome import Attempt
from sweeper.job import Job
from sweeper.report.front import (
    CONTEXT_NAMES,
    axes_of,
    configured_context,
    front_rows,
    hypervolume_of,
    measured_of,
    reference_point,
    trial_rows,
)
from sweeper.report.markdown import PICTURES, write_markdown
from sweeper.report.page import write_page
from sweeper.report.png import write_front_png
from sweeper.report.tables import front_table, trials_table
from sweeper.report.words import is_simulated, subject_of


def write_report(
    attempts: Iterable[Attempt], folder: Path, *, job: Job | None = None
) -> tuple[Path, Path]:
    """Write a study's report into its folder; return the picture of the front and the page.

    That is `report.html`; `report.md` with its pictures in `report/`; and `front.png`. The `job`
    that made the attempts lends memory its estimates.
    """
    everyone = list(attempts)
    page, picture = folder / "report.html", folder / "front.png"
    write_page(everyone, page, job=job, study_folder=folder)
    write_markdown(everyone, folder / "report.md", job=job, study_folder=folder)
    shutil.copyfile(folder / PICTURES / picture.name, picture)
    return picture, page


__all__ = [
    "CONTEXT_NAMES",
    "axes_of",
    "configured_context",
    "front_rows",
    "front_table",
    "hypervolume_of",
    "is_simulated",
    "measured_of",
    "reference_point",
    "subject_of",
    "trial_rows",
    "trials_table",
    "write_front_png",
    "write_markdown",
    "write_page",
    "write_report",
]
