"""One page that needs no network: the report of a study, to be read, hovered over and printed."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeper import __version__
from sweeper.core.outcome import Attempt
from sweeper.job import Job
from sweeper.report.charts import charts_of
from sweeper.report.content import Report, report_of

if TYPE_CHECKING:
    import jinja2


def write_page(
    attempts: Iterable[Attempt],
    path: Path,
    *,
    job: Job | None = None,
    study_folder: Path | None = None,
) -> None:
    """Write the report of a study as one HTML file with all that it needs inside.

    The `job` that made the attempts lends memory its estimates, the `study_folder` what was
    declared.
    """
    text = page_of(report_of(attempts, job=job, study_folder=study_folder))
    # A log line that was not UTF-8 may be quoted in a cause.
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8", errors="replace")
    partial.replace(path)


def page_of(report: Report) -> str:
    """Return a report as HTML."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped,unused-ignore]

    charts = charts_of(report)
    return (
        environment(html=True)
        .get_template("page.html.j2")
        .render(
            report=report,
            charts=_as_script(charts),
            drawn=tuple(charts),
            plotly=get_plotlyjs(),
            version=__version__,
        )
    )


def _as_script(value: Any) -> str:
    """Return JSON that can stand in a script element: nothing in it ends the element."""
    said = json.dumps(value, allow_nan=False)
    return said.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache
def environment(*, html: bool) -> jinja2.Environment:
    """Return the templates' environment; of HTML, where every value is escaped."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("sweeper.report"),
        autoescape=html,  # noqa: S701 - Markdown escapes by its own rules
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
