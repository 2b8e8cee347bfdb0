"""Attempts to MLflow, between measurements. MLflow owns nothing: the attempts can rebuild it.

Nothing here imports mlflow before a study runs: the import takes four seconds and the first
migration of a store six, so all of it happens on a thread of its own, and only while the caller
waits or has said that nothing is being measured.
"""

from __future__ import annotations

import collections
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from sweeper.core.outcome import Attempt
from sweeper.core.pairs import Pairs
from sweeper.core.reliability import Reliability, margin_words
from sweeper.record.codec import HIDDEN
from sweeper.record.mlflow_design import FinalReport, Progress

if TYPE_CHECKING:
    from sweeper.record.mlflow_store import Store

__all__ = ["FinalReport", "Progress", "Tracking", "checked_uri", "without_password"]

log = logging.getLogger(__name__)

RETRY_STORE_AFTER_S = 30.0
"""How long a store that could not be reached is left alone: each try can take many seconds."""

_URL_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")

_Job: TypeAlias = "tuple[str, Callable[[Store], None]]"


class Tracking:
    """One study in MLflow: an experiment, a run for every attempt, and one for the study.

    Every method but `drain` and `close` returns at once, and none but `open` raises. What cannot
    be logged because the store is away waits and is tried again; what the store refuses is warned
    of once and counted, for the attempts on disk are complete without it. Work is done only
    during `drain` and `close`, so none of it runs beside a measurement.
    """

    @classmethod
    def open(
        cls,
        uri: str,
        experiment: str,
        study_facts: Pairs,
        *,
        sweep: str | None = None,
        axes: tuple[str, ...] = (),
        began_ms: int | None = None,
    ) -> Tracking:
        """Start tracking a study, named as the experiment, in the store at `uri`.

        `study_facts` become tags of the study's run; `engine`, `model` and `hardware` of every run.
        `sweep` tells this study from others of its name; what is there already of it is continued.
        `began_ms` is when its first attempt began, in milliseconds since 1970.
        Raises ValueError for a store MLflow cannot use, and nothing else: the store is reached for
        in the background.
        """
        checked = checked_uri(uri)

        def opened() -> Store:
            from sweeper.record.mlflow_store import Store, Subject

            subject = Subject(
                study=experiment,
                sweep=sweep or experiment,
                facts=study_facts,
                axes=axes,
                began_ms=began_ms,
            )
            return Store.open(checked, experiment, subject)

        return cls(opened)

    def __init__(self, make_store: Callable[[], Store]) -> None:
        self._make_store = make_store
        self._store: Store | None = None
        self._jobs: collections.deque[_Job] = collections.deque()
        self._changed = threading.Condition()
        # All below is written under the condition's lock.
        self._may_work = self._closing = self._given_up = False
        self._not_before = 0.0
        self._failed = self._refused = self._attempts = 0
        self._warned = False
        self._busy_s = 0.0
        _prepare_environment()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._enqueue("open the store", lambda _store: None)
        self._thread.start()

    @property
    def added(self) -> int:
        """How many attempts were not there before."""
        return 0 if self._store is None else self._store.added

    @property
    def seconds_per_attempt(self) -> float | None:
        """The time that MLflow took for each attempt so far, in seconds; None before the first.

        Without the opening of the store.
        """
        return self._busy_s / self._attempts if self._attempts else None

    def attempt(self, attempt: Attempt, folder: Path) -> None:
        """Log an attempt that lies committed in `folder`; one that is there already is kept."""

        def work(store: Store) -> None:
            before = store.added
            store.log_attempt(attempt, folder)
            self._attempts += store.added - before

        self._enqueue(f"log attempt {attempt.number}", work)

    def front(
        self,
        numbers: Collection[int],
        confirmed: Collection[int] = (),
        holds: Mapping[int, Reliability] = MappingProxyType({}),
    ) -> None:
        """Tag exactly these attempts as on the front, and as of points that were measured again.

        `holds` says how likely the points of attempts work again, by the number of the attempt.
        """
        members, again = frozenset(numbers), frozenset(confirmed)
        said = {number: (hold.hold.value, margin_words(hold)) for number, hold in holds.items()}
        self._enqueue("mark the front", lambda store: store.mark(members, again, said))

    def progress(self, progress: Progress) -> None:
        """Log where the study stands, as a step of the figures of the study's run."""
        self._enqueue("log the progress", lambda store: store.log_progress(progress))

    def finish(self, report: FinalReport) -> None:
        """Log the front, its pictures and the recipes on the study's run."""
        self._enqueue("log the report", lambda store: store.log_report(report))

    def drain(self, timeout_s: float) -> bool:
        """Let everything given so far be logged; tell whether it was, in that time.

        Called between measurements. A store that is away is not waited for.
        """
        with self._changed:
            self._may_work = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._jobs or self._is_away(), timeout_s)
            self._may_work = False
            return not self._jobs

    def close(self, timeout_s: float = 60.0, *, status: str = "FINISHED") -> int:
        """Let everything be logged, end the study's run and return how much was not logged.

        `status` is MLflow's word for how the study ended (FINISHED, FAILED, KILLED). A store that
        is away is tried once more; what is not done within `timeout_s` is given up.
        """
        with self._changed:
            if not self._closing:
                self._enqueue("end the study's run", lambda store: store.end(status))
            self._closing = self._may_work = True
            self._not_before = 0.0
            self._changed.notify_all()
        try:
            self._thread.join(timeout_s)
        finally:
            with self._changed:
                self._given_up = True
                left = len(self._jobs)
                self._changed.notify_all()
        if left:
            self._warn(f"{left} operations could not be done", None)
        return self._failed + self._refused + left

    def _enqueue(self, what: str, job: Callable[[Store], None]) -> None:
        with self._changed:
            if self._closing:
                self._refused += 1
                self._warn(f"could not {what}: tracking is closed already", None)
                return
            self._jobs.append((what, job))
            self._changed.notify_all()

    def _is_away(self) -> bool:
        return time.monotonic() < self._not_before

    def _work(self) -> None:
        while (next_ := self._next()) is not None:
            what, job = next_
            began = time.monotonic()
            opened = self._store is not None
            try:
                if self._store is None:
                    self._store = self._make_store()
                job(self._store)
            except Exception as error:  # Whatever MLflow raises must not cost a measurement.
                if self._keep_for_later(what, error):
                    continue
            with self._changed:
                self._jobs.popleft()
                if opened:
                    self._busy_s += time.monotonic() - began
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        """Wait for something to do, and for being allowed to; None when all is over."""
        with self._changed:
            while True:
                if self._given_up or (self._closing and not self._jobs):
                    return None
                if self._jobs and self._may_work and not self._is_away():
                    return self._jobs[0]
                away_s = self._not_before - time.monotonic()
                self._changed.wait(away_s if away_s > 0 and self._may_work else None)

    def _keep_for_later(self, what: str, error: Exception) -> bool:
        """Tell whether the store is away, so that this is worth another try; count it else."""
        away = self._store is None or not self._store.answers()
        with self._changed:
            self._warn(f"could not {what}", error)
            if away:
                self._not_before = time.monotonic() + RETRY_STORE_AFTER_S
                # At the end nothing is waited for: the next run, or `sync`, makes up for it.
                self._given_up = self._closing
            else:
                self._failed += 1
            self._changed.notify_all()
        return away

    def _warn(self, what: str, error: Exception | None) -> None:
        said = what if error is None else f"{what}: {_first_line(error)}"
        # Once: a store that is down would otherwise say so after every attempt.
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        log.log(
            level,
            "mlflow: %s. The attempts on disk are complete and the study goes on; "
            "what is missing is logged later, or by the verb sync",
            without_password(said),
            exc_info=error if log.isEnabledFor(logging.DEBUG) else None,
        )


def checked_uri(uri: str) -> str:
    """Return a store URI that MLflow can use, with a sqlite path made absolute.

    Raises ValueError for a folder, which MLflow no longer writes to, and says what to write.
    """
    if uri.startswith("sqlite:"):
        path = uri.removeprefix("sqlite:///")
        if path == uri or not path or path == ":memory:":
            raise ValueError(
                f"{uri} is not a database that outlives the study; "
                f"write {_sqlite_uri(Path('mlruns/mlflow.db'))}"
            )
        return _sqlite_uri(Path(path))
    scheme = re.match(r"[A-Za-z][\w+\-]*(?=://)", uri)
    if uri == "databricks" or (scheme is not None and scheme[0].lower() != "file"):
        return uri
    folder = Path(re.sub(r"^file:(//)?", "", uri) or "mlruns")
    database = folder if folder.suffix == ".db" else folder / "mlflow.db"
    raise ValueError(
        f"{uri!r} is a folder, and MLflow no longer keeps runs in plain folders; "
        f"write {_sqlite_uri(database)} instead"
    )


def without_password(words: str) -> str:
    """Return a text with the user and password of every address in it hidden."""
    return _URL_USER.sub(HIDDEN, words)


def _sqlite_uri(path: Path) -> str:
    return f"sqlite:///{path.absolute()}"


def _prepare_environment() -> None:
    """Set what mlflow reads when it is imported, where the user has not set it.

    Called before the thread starts, so that nobody copies an environment that is changing.
    """
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    # A measurement tool must not talk to strangers while it measures.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # Standard output is for what the user asked for.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    # MLflow's own patience is seven retries of two minutes; the attempts are safe without it.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
    return said if len(said) <= 300 else f"{said[:299]}…"
