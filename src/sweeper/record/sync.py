"""What a study's folder says, told to MLflow: during a run step by step, afterwards all at once."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeper.core.objectives import counted_tok_s
from sweeper.core.outcome import Attempt, Infeasible, Measured
from sweeper.core.pairs import Pairs
from sweeper.core.standing import front_among, reliability_of
from sweeper.core.study import Study
from sweeper.record.attempts import Attempts
from sweeper.record.mlflow_design import ended_ms, epoch_ms
from sweeper.record.tracking import FinalReport, Progress, Tracking
from sweeper.report import front_rows, hypervolume_of, trial_rows

SWEEP_JSON = "sweep.json"
"""Beside the attempts: which sweep this is, and how its last run ended."""

KILLED = ("it was killed", "KILLED")
"""How a run ended that could not say so: in words, and in MLflow's."""

_REPORT = ("*.html", "*.png", "*.svg", "*.md", "*.pdf")
_FOLDERS = ("recipes", "report")


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """What a rebuilding of MLflow came to."""

    attempts: int
    added: int
    failures: int
    seconds_per_attempt: float | None


def open_tracking(
    uri: str, study: Study, folder: Path, attempts: Sequence[Attempt] = ()
) -> Tracking:
    """Return the tracking of a study with these attempts in `folder`; raises as `Tracking.open`."""
    return Tracking.open(
        uri,
        study.name,
        Pairs(
            engine=study.engine_name,
            model=study.model_name,
            hardware=study.hardware_name,
            workload=study.workload.name,
            description=study.description,
        ),
        sweep=str(sweep_of(folder)["sweep"]),
        axes=tuple(axis.name for axis in study.space.axes),
        began_ms=min((epoch_ms(each.started_at) for each in attempts), default=None),
    )


def tell(tracking: Tracking, attempts: Sequence[Attempt], folder: Path) -> None:
    """Tell of the last of these attempts, and of where the study stands after all of them."""
    _tell_attempt(tracking, attempts[-1], folder)
    _tell_standing(tracking, attempts)
    tracking.progress(_progress(attempts))


def tell_all(tracking: Tracking, attempts: Sequence[Attempt], folder: Path) -> None:
    """Tell of every attempt, and of where the study stood after each of them."""
    ordered = sorted(attempts, key=lambda each: each.number)
    # The standing first, so that every run is written as it is to be.
    _tell_standing(tracking, ordered)
    for count, each in enumerate(ordered, start=1):
        _tell_attempt(tracking, each, folder)
        tracking.progress(_progress(ordered[:count]))


def _tell_attempt(tracking: Tracking, attempt: Attempt, folder: Path) -> None:
    tracking.attempt(attempt, folder / "attempts" / f"{attempt.number:04d}")


def _tell_standing(tracking: Tracking, attempts: Sequence[Attempt]) -> None:
    again = {
        each.point
        for each in attempts
        if each.confirms is not None and not each.brief and _is_measured(each)
    }
    holds = reliability_of(attempts)
    tracking.front(
        [each.number for each in front_among(attempts)],
        [each.number for each in attempts if each.point in again and _is_measured(each)],
        {each.number: holds[each.point] for each in attempts if each.point in holds},
    )


def _progress(attempts: Sequence[Attempt]) -> Progress:
    """Return where a study stood after the last of these attempts."""
    measured = [each.outcome for each in attempts if isinstance(each.outcome, Measured)]
    return Progress(
        attempt=attempts[-1].number,
        boots=len(attempts),
        infeasible_boots=sum(isinstance(each.outcome, Infeasible) for each in attempts),
        front_size=len(front_among(attempts)),
        hypervolume=hypervolume_of(attempts),
        at_ms=ended_ms(attempts[-1]),
        best_decode_tok_s=max((counted_tok_s(each) for each in measured), default=None),
        best_proven_context_tokens=max(
            (each.context.proven_tokens for each in measured), default=None
        ),
    )


def report_of(folder: Path, attempts: Sequence[Attempt]) -> FinalReport:
    """Return what a study's folder holds for a person: tables, pictures, pages, recipes."""
    ended = sweep_of(folder).get("ended")
    return FinalReport(
        front_rows=front_rows(attempts),
        trial_rows=trial_rows(attempts),
        files=sorted(path for pattern in _REPORT for path in folder.glob(pattern)),
        folders=[folder / each for each in _FOLDERS],
        host=attempts[-1].host if attempts else Pairs(),
        tags=Pairs(ended=ended, outcome=ended) if isinstance(ended, str) else Pairs(),
    )


def remember_end(folder: Path, why: str, status: str) -> None:
    """Keep how a run ended, in words and in MLflow's."""
    _write(folder, {**sweep_of(folder), "ended": why, "status": status})


def sync(uri: str, study: Study, folder: Path, *, timeout_s: float = 3600.0) -> Synced:
    """Rebuild what MLflow shows of a study from its folder; what is there already is left alone.

    The caller holds the study. Raises ValueError for a store that MLflow cannot use, RecordError
    for a damaged attempt.
    """
    attempts = Attempts(folder / "attempts").all()
    tracking = open_tracking(uri, study, folder, attempts)
    tell_all(tracking, attempts, folder)
    tracking.finish(report_of(folder, attempts))
    # A run that was killed has not said how it ended.
    status = str(sweep_of(folder).get("status", KILLED[1]))
    failures = tracking.close(timeout_s, status=status)
    return Synced(
        attempts=len(attempts),
        added=tracking.added,
        failures=failures,
        seconds_per_attempt=tracking.seconds_per_attempt,
    )


def _is_measured(attempt: Attempt) -> bool:
    return isinstance(attempt.outcome, Measured)


def sweep_of(folder: Path) -> dict[str, Any]:
    """Return what is kept of a sweep; a new one gets a name that no other has."""
    path = folder / SWEEP_JSON
    if path.is_file():
        kept = json.loads(path.read_text())
        if isinstance(kept, dict) and isinstance(kept.get("sweep"), str):
            return kept
    new = {"schema": 1, "sweep": secrets.token_hex(4)}
    _write(folder, new)
    return new


def _write(folder: Path, kept: dict[str, Any]) -> None:
    path = folder / SWEEP_JSON
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(kept, indent=2) + "\n")
    partial.replace(path)
