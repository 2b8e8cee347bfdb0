"""Attempts to MLflow, in the background. MLflow owns nothing: it can be rebuilt from the attempts.

The only module that imports mlflow, and only once a study runs: the import takes four seconds and
the first migration of a store six, so all of it happens on a thread of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import queue
import re
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from sweeper.core.outcome import Attempt, Broken, HostFault, Infeasible, Measured, Unfit, kind, name
from sweeper.core.pairs import Pairs, text
from sweeper.record.attempts import ATTEMPT_JSON, ENGINE_LOG

log = logging.getLogger(__name__)

RETRY_STORE_AFTER_S = 30.0
"""How long a store that could not be reached is left alone: each try can take many seconds."""

LOG_LIMIT_BYTES = 1_000_000
"""Of a longer engine log only the head and the tail go to MLflow, this much in all."""
_NOTE_LIMIT = 4000  # MLflow cuts a tag at 8000 characters, with a warning.
_PARAM_LIMIT = 6000
_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the study stands after an attempt; None for what does not exist yet.

    `hypervolume` is in tok/s x log2 tokens.
    """

    attempt: int
    boots: int
    infeasible_boots: int
    front_size: int
    hypervolume: float
    best_decode_tok_s: float | None = None
    best_proven_context_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalReport:
    """What a finished study leaves on its parent run; files that do not exist are passed over.

    `front_rows` all have the same keys.
    """

    front_rows: Sequence[Mapping[str, Any]]
    files: Sequence[Path] = ()
    recipes: Path | None = None
    tags: Pairs = Pairs()


_Job: TypeAlias = "tuple[str, Callable[[_Store], None]]"


class Tracking:
    """One study in MLflow: an experiment, a parent run, and a run for every attempt.

    Every method but `close` returns at once and none but `open` raises: what MLflow refuses is
    warned of once and counted, for the attempts on disk are complete without it.
    """

    @classmethod
    def open(
        cls, uri: str, experiment: str, study_facts: Pairs, *, study: str | None = None
    ) -> Tracking:
        """Start tracking a study (named as the experiment, if not given) in the store at `uri`.

        `study_facts` become tags of the parent; `engine`, `model` and `hardware` of every run.
        A study that is there already is continued. Raises ValueError for a store MLflow cannot
        use, and nothing else: the store is reached for in the background.
        """
        return cls(checked_uri(uri), experiment, study or experiment, study_facts)

    def __init__(self, uri: str, experiment: str, study: str, study_facts: Pairs) -> None:
        self._make_store = functools.partial(_Store.open, uri, experiment, study, study_facts)
        self._store: _Store | None = None
        self._jobs: queue.SimpleQueue[_Job | threading.Event | None]
        self._jobs = queue.SimpleQueue()
        # Each counter has one writer: the caller's thread the first two, the worker the others.
        self._accepted = self._refused = 0
        self._done = self._failed = 0
        self._closed = self._warned = False
        self._not_before = 0.0
        _prepare_environment()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._enqueue("open the store", lambda _store: None)
        self._thread.start()

    def attempt(self, attempt: Attempt, folder: Path) -> None:
        """Log an attempt that lies committed in `folder`; one that is there already is kept."""
        self._enqueue(
            f"log attempt {attempt.number}", lambda store: store.log_attempt(attempt, folder)
        )

    def front(self, numbers: Collection[int]) -> None:
        """Tag exactly these attempts as being on the front."""
        members = frozenset(numbers)
        self._enqueue("mark the front", lambda store: store.mark_front(members))

    def progress(self, progress: Progress) -> None:
        """Log where the study stands, as a step of the parent's metrics."""
        self._enqueue("log the progress", lambda store: store.log_progress(progress))

    def finish(self, report: FinalReport) -> None:
        """Log the front, its pictures and the recipes on the parent run."""
        self._enqueue("log the report", lambda store: store.log_report(report))

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything given so far is logged; tell whether it was, in that time.

        Called between measurements, so that no work of ours runs beside one.
        """
        drained = threading.Event()
        self._jobs.put(drained)
        return drained.wait(timeout_s)

    def close(self, timeout_s: float = 60.0, *, status: str = "FINISHED") -> int:
        """Wait until everything is logged, end the parent run and return how much failed.

        `status` is MLflow's word for how the study ended (FINISHED, FAILED, KILLED). What is not
        done within `timeout_s` is counted as failed and given up.
        """
        if not self._closed:
            self._enqueue("end the study's run", lambda store: store.end(status))
            self._closed = True
            self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            left = self._accepted - self._done
            self._warn(f"not done after {timeout_s:g} s, {left} operations given up", None)
            return self._failed + self._refused + left
        return self._failed + self._refused

    def _enqueue(self, what: str, job: Callable[[_Store], None]) -> None:
        if self._closed:
            self._refused += 1
            self._warn(f"could not {what}: tracking is closed already", None)
            return
        self._accepted += 1
        self._jobs.put((what, job))

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            what, job = item
            try:
                if self._store is None:
                    self._store = self._reached()
                job(self._store)
            except Exception as error:  # Whatever MLflow raises must not cost a measurement.
                self._failed += 1
                self._warn(f"could not {what}", error)
            self._done += 1

    def _reached(self) -> _Store:
        """Return the store; one that could not be reached is left alone for a while."""
        if time.monotonic() < self._not_before:
            raise ConnectionError("the store could not be reached a moment ago")
        try:
            return self._make_store()
        except Exception:
            self._not_before = time.monotonic() + RETRY_STORE_AFTER_S
            raise

    def _warn(self, what: str, error: Exception | None) -> None:
        said = what if error is None else f"{what}: {_first_line(error)}"
        # Once: a store that is down would otherwise say so after every attempt.
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        log.log(
            level,
            "mlflow: %s. The attempts on disk are complete and the study goes on; "
            "more failures like this are counted, not printed",
            said,
            exc_info=error if log.isEnabledFor(logging.DEBUG) else None,
        )


def ui_command(uri: str, port: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command and environment of the MLflow UI, as lean as it goes.

    MLflow's defaults start 16 processes and take 3 GB; these settings start 2 and take 0.5 GB.
    """
    command = (
        sys.executable, "-m", "mlflow", "server",
        "--backend-store-uri", uri,
        "--host", "127.0.0.1",
        "--port", str(port),
        "--workers", "1",
    )  # fmt: skip
    return command, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


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


def _sqlite_uri(path: Path) -> str:
    return f"sqlite:///{path.absolute()}"


def _prepare_environment() -> None:
    """Set what mlflow reads when it is imported, where the user has not set it.

    Called before the thread starts, so that nobody copies an environment that is changing.
    """
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    # A measurement tool must not talk to strangers while it measures.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # MLflow's own patience is seven retries of two minutes; the attempts are safe without it.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")


class _Store:
    """The runs of one study in an MLflow store. Lives on the tracking thread; raises freely."""

    def __init__(self, client: Any, study: str, study_facts: Pairs) -> None:
        self._client = client
        self._study = study
        self._facts = study_facts
        self._experiment = ""
        self._parent = ""
        self._runs: dict[int, str] = {}
        """The run of every attempt that has one, by its number."""
        self._complete: set[int] = set()
        self._on_front: set[int] = set()

    @classmethod
    def open(cls, uri: str, experiment: str, study: str, study_facts: Pairs) -> _Store:
        """Connect, create or find the experiment and the parent run, and read what is there."""
        from mlflow import MlflowClient

        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        location = None
        if uri.startswith("sqlite:///"):
            folder = Path(uri.removeprefix("sqlite:///")).parent
            folder.mkdir(parents=True, exist_ok=True)
            # MLflow would try for a minute to open what cannot be opened.
            with contextlib.closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as probe:
                probe.execute("PRAGMA user_version")
            location = (folder / "artifacts" / re.sub(r"[^\w.\-]", "_", experiment)).as_uri()
        store = cls(MlflowClient(tracking_uri=uri), study, study_facts)
        store._find_experiment(experiment, location)
        store._find_parent()
        store._find_attempts()
        return store

    def _find_experiment(self, experiment: str, location: str | None) -> None:
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            self._experiment = self._client.create_experiment(
                experiment, artifact_location=location
            )
        elif found.lifecycle_stage != "active":
            raise RuntimeError(
                f"the experiment {experiment} was deleted there; bring it back with "
                f"`mlflow experiments restore -x {found.experiment_id}`, or name another"
            )
        else:
            self._experiment = found.experiment_id

    def _search(self, condition: str) -> Iterable[Any]:
        token = None
        while True:
            page = self._client.search_runs(
                [self._experiment], condition, max_results=1000, page_token=token
            )
            yield from page
            token = page.token
            if not token:
                return

    def _find_parent(self) -> None:
        # The name is compared here, not in the filter, so that no name needs quoting.
        found = [
            run
            for run in self._search("tags.`sweeper.role` = 'parent'")
            if run.data.tags.get("sweeper.study") == self._study
        ]
        if found:
            parent = min(found, key=lambda run: int(run.info.start_time))
            self._client.update_run(parent.info.run_id, status="RUNNING")
        else:
            parent = self._client.create_run(
                self._experiment,
                run_name=self._study,
                tags={"sweeper.role": "parent", **self._common_tags()},
            )
        self._parent = parent.info.run_id
        self._log(self._parent, tags={**_tags(self._facts), **self._common_tags()})

    def _find_attempts(self) -> None:
        for run in self._search(f"tags.`mlflow.parentRunId` = '{self._parent}'"):
            number = run.data.tags.get("sweeper.attempt", "")
            if not number.isdecimal():
                continue
            self._runs[int(number)] = run.info.run_id
            # A run left RUNNING is one that a killed process had not finished writing.
            if run.info.status != "RUNNING":
                self._complete.add(int(number))
            if run.data.tags.get("on_front") == "true":
                self._on_front.add(int(number))

    def _common_tags(self) -> dict[str, str]:
        # Repeated on every run: MLflow's filters drop a child whose parent does not match.
        named = {
            key: text(self._facts[key])
            for key in ("engine", "model", "hardware")
            if self._facts.get(key) is not None
        }
        return {
            "sweeper.study": self._study,
            "mlflow.source.name": "sweeper",
            **named,
            **({"simulated": "true"} if self._facts.get("simulated") is True else {}),
        }

    def log_attempt(self, attempt: Attempt, folder: Path) -> None:
        """Write the run of one attempt, or complete one that was cut off."""
        number = attempt.number
        if number in self._complete:
            return
        start_ms = _epoch_ms(attempt.started_at)
        end_ms = start_ms + round(attempt.timings.total_s * 1000)
        if number not in self._runs:
            run = self._client.create_run(
                self._experiment,
                start_time=start_ms,
                run_name=_cut(f"{number:04d} {attempt.point}".strip(), 120),
                tags={"mlflow.parentRunId": self._parent, "sweeper.attempt": str(number)},
            )
            self._runs[number] = run.info.run_id
        run_id = self._runs[number]
        # The same timestamp each time: writing a metric twice then leaves one.
        self._log(
            run_id,
            metrics=metrics_of(attempt),
            params={_key(axis): text(value) for axis, value in attempt.point.items()},
            tags={**self._common_tags(), **tags_of(attempt), **self._front_tag(number)},
            at_ms=end_ms,
        )
        if (folder / ATTEMPT_JSON).is_file():
            self._client.log_artifact(run_id, str(folder / ATTEMPT_JSON))
        self._log_engine_log(run_id, folder / ENGINE_LOG)
        self._client.set_terminated(run_id, status=_status(attempt), end_time=end_ms)
        self._complete.add(number)

    def _front_tag(self, number: int) -> dict[str, str]:
        return {"on_front": "true" if number in self._on_front else "false"}

    def _log_engine_log(self, run_id: str, path: Path) -> None:
        if not path.is_file():
            return
        if path.stat().st_size <= LOG_LIMIT_BYTES:
            self._client.log_artifact(run_id, str(path))
            return
        with tempfile.TemporaryDirectory() as folder:
            short = Path(folder) / ENGINE_LOG
            short.write_bytes(head_and_tail(path))
            self._client.log_artifact(run_id, str(short))

    def mark_front(self, members: frozenset[int]) -> None:
        """Bring the tag `on_front` up to date where it changed."""
        # Remembered first: an attempt that is logged later gets its tag from here.
        changed, self._on_front = self._on_front ^ members, set(members)
        for number in sorted(changed & self._runs.keys()):
            self._log(self._runs[number], tags=self._front_tag(number))

    def log_progress(self, progress: Progress) -> None:
        """Write one step of the parent's metrics."""
        figures = {
            "best_decode_tok_s": progress.best_decode_tok_s,
            "best_proven_context_tokens": progress.best_proven_context_tokens,
            "front_size": progress.front_size,
            "hypervolume": progress.hypervolume,
            "boots": progress.boots,
            "infeasible_boots": progress.infeasible_boots,
        }
        self._log(
            self._parent,
            metrics=_existing(figures),
            at_ms=round(time.time() * 1000),
            step=progress.attempt,
        )

    def log_report(self, report: FinalReport) -> None:
        """Write the front as a table, the report's files and the recipes."""
        rows = list(report.front_rows)
        columns = list(rows[0]) if rows else []
        # The layout of log_table, which itself would append the rows of a resumed study again.
        self._client.log_dict(
            self._parent,
            {"columns": columns, "data": [[row[key] for key in columns] for row in rows]},
            "front.json",
        )
        listed = json.dumps([{"path": "front.json", "type": "table"}])
        self._log(self._parent, tags={"mlflow.loggedArtifacts": listed, **_tags(report.tags)})
        for path in report.files:
            if path.is_file():
                self._client.log_artifact(self._parent, str(path))
        if report.recipes is not None and report.recipes.is_dir():
            self._client.log_artifacts(self._parent, str(report.recipes), "recipes")

    def end(self, status: str) -> None:
        """End the parent run."""
        self._client.set_terminated(self._parent, status=status)

    def _log(
        self,
        run_id: str,
        *,
        metrics: Mapping[str, float] | None = None,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        at_ms: int = 0,
        step: int = 0,
    ) -> None:
        """Write everything in one call."""
        from mlflow.entities import Metric, Param, RunTag

        self._client.log_batch(
            run_id,
            metrics=[Metric(key, value, at_ms, step) for key, value in (metrics or {}).items()],
            params=[Param(key, _cut(value, _PARAM_LIMIT)) for key, value in (params or {}).items()],
            tags=[RunTag(key, _cut(value, _NOTE_LIMIT)) for key, value in (tags or {}).items()],
        )


def metrics_of(attempt: Attempt) -> dict[str, float]:
    """Return the figures of an attempt, the unit in each name; what was not measured is absent."""
    figures: dict[str, float | None] = {"boot_s": attempt.timings.boot_s}
    match attempt.outcome:
        case Measured() as measured:
            prefill, drafts, peak = measured.prefill_tok_s, measured.drafts, measured.peak_bytes
            figures |= {
                "decode_tok_s": measured.decode_tok_s.median,
                "decode_tok_s_low": measured.decode_tok_s.low,
                "decode_tok_s_high": measured.decode_tok_s.high,
                "proven_context_tokens": measured.context.proven_tokens,
                "ttft_ms": measured.ttft_s.median * 1000,
                "prefill_tok_s": prefill.median if prefill is not None else None,
                "acceptance": drafts.acceptance if drafts is not None else None,
                "peak_memory_gib": peak / _GIB if peak is not None else None,
            }
        case Infeasible(finding=finding) | Unfit(finding=finding):
            shortfall = finding.facts.get("shortfall_bytes")
            if isinstance(shortfall, int | float) and not isinstance(shortfall, bool):
                figures["shortfall_mib"] = shortfall / _MIB
        case Broken() | HostFault():
            pass
    return _existing(figures)


def tags_of(attempt: Attempt) -> dict[str, str]:
    """Return what an attempt is searched and filtered by."""
    tags = {
        "sweeper.role": "attempt",
        "sweeper.attempt": str(attempt.number),
        "sweeper.trial": str(attempt.trial),
        "outcome": name(attempt.outcome),
        "outcome_kind": kind(attempt.outcome),
        **{
            key: text(facts["name"])
            for key, facts in (("engine", attempt.engine), ("model", attempt.model))
            if "name" in facts
        },
        "mlflow.note.content": _cut(note_of(attempt), _NOTE_LIMIT),
    }
    if not isinstance(attempt.outcome, Measured):
        tags["phase"] = attempt.outcome.finding.phase.value
    if attempt.engine.get("simulated") is True:
        tags["simulated"] = "true"
    return tags


def note_of(attempt: Attempt) -> str:
    """Return the few lines of Markdown that a person reads on the run's page."""
    match attempt.outcome:
        case Measured(decode_tok_s=speed, context=context):
            lines = [
                f"**{speed.median:.1f} tok/s** ({speed.low:.1f} to {speed.high:.1f}, n = {speed.n})"
                f" with **{context.proven_tokens:,} tokens** proven of "
                f"{context.configured_tokens:,} configured."
            ]
            if speed.doubts:
                lines.append(f"Doubts: {', '.join(speed.doubts)}.")
        case failure:
            finding = failure.finding
            lines = [f"**{failure.name.value}**: {finding.explanation}"]
            if finding.cause:
                # Indented, so that Markdown leaves a log line as it is.
                lines.append(f"    {finding.cause}")
            if finding.try_next:
                lines.append(f"Try next: {finding.try_next}")
    if attempt.engine.get("simulated") is True:
        lines.insert(0, "**SIMULATED**: these figures are invented by a fake engine.")
    return "\n\n".join([*lines, *attempt.notes])


def head_and_tail(path: Path) -> bytes:
    """Return the first and last lines of a long log, with a line that says what is missing."""
    half = LOG_LIMIT_BYTES // 2
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(half)
        head = head[: head.rfind(b"\n") + 1] or head
        file.seek(size - half)
        tail = file.read(half)
        tail = tail[tail.find(b"\n") + 1 :] or tail
    missing = size - len(head) - len(tail)
    note = (
        f"\n[sweeper: {missing:,} of {size:,} bytes left out here; the whole log is in {path}]\n\n"
    )
    return head + note.encode() + tail


def _status(attempt: Attempt) -> str:
    match attempt.outcome:
        case Measured() | Infeasible() | Unfit():
            return "FINISHED"
        case Broken() | HostFault():
            return "FAILED"


def _existing(figures: Mapping[str, float | None]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in figures.items()
        if value is not None and math.isfinite(value)
    }


def _tags(facts: Pairs) -> dict[str, str]:
    return {_key(key): text(value) for key, value in facts.items() if value is not None}


def _key(name: str) -> str:
    """Return a name with only the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


def _cut(value: str, limit: int) -> str:
    return value if len(value) <= limit else f"{value[: limit - 1]}…"


def _epoch_ms(iso: str) -> int:
    moment = datetime.fromisoformat(iso)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return _cut(f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": "), 300)
