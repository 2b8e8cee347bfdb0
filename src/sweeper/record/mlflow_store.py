"""The runs of one study in an MLflow store: the only module that imports mlflow.

What it writes can be written again: everything is found by what it is about, times are those of
the attempts, and what is there already is left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import socket
import sqlite3
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from sweeper.core.outcome import Attempt
from sweeper.core.pairs import Pairs, text
from sweeper.record import mlflow_design as design
from sweeper.record.attempts import ATTEMPT_JSON, ENGINE_LOG
from sweeper.record.mlflow_design import FinalReport, Progress

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Whose runs these are.

    `sweep` tells apart studies of one name: on other machines, or begun anew. `facts` become tags
    of the study's run; engine, model and hardware of every run. `axes` are columns. `began_ms` is
    when the first attempt began, in milliseconds since 1970; None where there is none yet.
    """

    study: str
    sweep: str
    facts: Pairs = Pairs()
    axes: tuple[str, ...] = ()
    began_ms: int | None = None


class Store:
    """Used by one thread at a time; raises whatever MLflow raises."""

    def __init__(self, client: Any, subject: Subject) -> None:
        self._client = client
        self._subject = subject
        self._experiment = ""
        self._run = ""
        self._runs: dict[int, str] = {}
        """The run of every attempt that has one, by its number."""
        self._complete: set[int] = set()
        self._kinds: dict[int, str] = {}
        self._standing: dict[int, dict[str, str]] = {}
        """What every run says of its standing."""
        self._front: frozenset[int] = frozenset()
        self._confirmed: frozenset[int] = frozenset()
        self._holds: dict[int, tuple[str, str]] = {}
        self._steps: set[int] = set()
        """The attempts after which the study's figures were logged."""
        self._progress: Progress | None = None
        self._tags: dict[str, str] = {}
        self._note: str | None = None
        """What stands above the experiment."""
        self._report = ""
        self._keys = design.view_keys()
        self._simulated = subject.facts.get("simulated") is True
        self.added = 0

    @classmethod
    def open(cls, uri: str, experiment: str, subject: Subject) -> Self:
        """Connect, create or find the experiment and the study's run, and read what is there."""
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
        store = cls(MlflowClient(tracking_uri=uri), subject)
        store._find_experiment(experiment, location)
        store._end_orphans()
        store._find_study()
        store._find_attempts()
        store._design_experiment()
        return store

    def answers(self) -> bool:
        """Tell whether the store can be reached now."""
        try:
            self._client.get_experiment(self._experiment)
        except Exception:
            return False
        return True

    # --- what is there ----------------------------------------------------------------------------

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

    def _studies(self) -> list[Any]:
        return list(self._search("tags.`sweeper.role` = 'study'"))

    def _end_orphans(self) -> None:
        """End the studies' runs whose process on this machine is gone without having done so."""
        for run in self._studies():
            tags = run.data.tags
            if run.info.status == "RUNNING" and _is_gone(tags.get("sweeper.process", "")):
                self._client.set_terminated(run.info.run_id, status="KILLED")

    def _find_study(self) -> None:
        everyone = self._studies()
        # Compared here, not in the filter, so that no name needs quoting.
        own = [run for run in everyone if run.data.tags.get("sweeper.sweep") == self._subject.sweep]
        if len(everyone) > len(own):
            self._keys = design.view_keys(f"-{self._subject.sweep}")
        tags = {
            **design.study_tags(self._subject.facts),
            **self._common_tags(),
            "sweeper.role": "study",
        }
        if own:
            study = min(own, key=lambda run: (int(run.info.start_time), run.info.run_id))
            self._tags = dict(study.data.tags)
            self._client.update_run(study.info.run_id, status="RUNNING")
            if "boots" in study.data.metrics:
                history = self._client.get_metric_history(study.info.run_id, "boots")
                self._steps = {int(each.step) for each in history}
        else:
            study = self._client.create_run(
                self._experiment,
                start_time=self._subject.began_ms,
                run_name=self._subject.study,
                tags=tags,
            )
            self._tags = dict(study.data.tags)
        self._run = study.info.run_id
        self._tag_study({**tags, "sweeper.process": _this_process()})

    def _find_attempts(self) -> None:
        for run in self._search("tags.`sweeper.role` = 'attempt'"):
            tags = run.data.tags
            number = tags.get("sweeper.attempt", "")
            if tags.get("sweeper.sweep") != self._subject.sweep or not number.isdecimal():
                continue
            self._runs[int(number)] = run.info.run_id
            self._kinds[int(number)] = tags.get("kind", "")
            self._standing[int(number)] = {
                key: tags[key]
                for key in ("on_front", "confirmed", "holds", "memory_left", "mlflow.runColor")
                if key in tags
            }
            if "holds" in tags:
                self._holds[int(number)] = tags["holds"], tags.get("memory_left", "")
            self._simulated |= tags.get("simulated") == "true"
            # A run left RUNNING is one that a killed process had not finished writing.
            if run.info.status != "RUNNING":
                self._complete.add(int(number))
            if tags.get("on_front") == "true":
                self._front |= {int(number)}
            if tags.get("confirmed") == "true":
                self._confirmed |= {int(number)}

    def _design_experiment(self) -> None:
        """Give the experiment its kind, its saved views and its note."""
        wanted = {
            "mlflow.experimentKind": "custom_model_development",
            "mlflow.experiment.primaryMetric.name": "decode_tok_s",
            "mlflow.experiment.primaryMetric.greaterIsBetter": "true",
        }
        several = self._keys != design.view_keys()
        made = design.views(self._subject.axes, self._subject.sweep if several else None)
        for each, value in made.items():
            wanted[f"mlflow.sharedViewState.{self._keys[each]}"] = value
        here = self._client.get_experiment(self._experiment).tags
        for key, value in wanted.items():
            if here.get(key) != value:
                self._client.set_experiment_tag(self._experiment, key, value)
        self._note = here.get("mlflow.note.content")
        if self._note is None:
            self._write_note()

    def _common_tags(self) -> dict[str, str]:
        facts = self._subject.facts
        named = {
            key: text(facts[key])
            for key in ("engine", "model", "hardware")
            if facts.get(key) is not None
        }
        return {
            "study": self._subject.study,
            "sweeper.sweep": self._subject.sweep,
            "mlflow.source.name": "sweeper",
            **named,
        }

    # --- attempts ---------------------------------------------------------------------------------

    def log_attempt(self, attempt: Attempt, folder: Path) -> None:
        """Write the run of one attempt, or complete one that was cut off."""
        number = attempt.number
        if number in self._complete:
            return
        start_ms = design.epoch_ms(attempt.started_at)
        end_ms = design.ended_ms(attempt)
        tags = design.tags_of(attempt)
        if number not in self._runs:
            run = self._client.create_run(
                self._experiment,
                start_time=start_ms,
                run_name=design.run_name(attempt, self._subject.axes),
                tags={**self._common_tags(), **tags},
            )
            self._runs[number] = run.info.run_id
        run_id = self._runs[number]
        self._kinds[number] = tags["kind"]
        self._simulated |= tags.get("simulated") == "true"
        self._standing[number] = self._standing_of(number)
        note = design.note_of(
            attempt,
            log_tail=design.log_tail(folder / ENGINE_LOG),
            links=design.links_of(self._experiment, run_id, self._run, self._keys[design.TRIALS]),
        )
        # The same timestamp each time: writing a metric twice then leaves one.
        self._log(
            run_id,
            metrics=design.metrics_of(attempt),
            params={design.key(axis): text(value) for axis, value in attempt.point.items()},
            tags={
                **self._common_tags(),
                **tags,
                **self._standing[number],
                "mlflow.note.content": note,
            },
            at_ms=end_ms,
            step=number,
        )
        if (folder / ATTEMPT_JSON).is_file():
            self._client.log_artifact(run_id, str(folder / ATTEMPT_JSON))
        self._log_engine_log(run_id, folder / ENGINE_LOG)
        self._client.set_terminated(run_id, status=design.status_of(attempt), end_time=end_ms)
        self._complete.add(number)
        self.added += 1

    def _log_engine_log(self, run_id: str, path: Path) -> None:
        if not path.is_file():
            return
        if path.stat().st_size <= design.LOG_LIMIT_BYTES:
            self._client.log_artifact(run_id, str(path))
            return
        with tempfile.TemporaryDirectory() as folder:
            short = Path(folder) / ENGINE_LOG
            short.write_bytes(design.head_and_tail(path))
            self._client.log_artifact(run_id, str(short))

    def mark(
        self,
        front: frozenset[int],
        confirmed: frozenset[int],
        holds: Mapping[int, tuple[str, str]],
    ) -> None:
        """Bring up to date which attempts are on the front, and which were measured again.

        `holds` says of measured points whether they work every time, in a word and in words.
        """
        # Remembered first: an attempt that is logged later gets its tags from here.
        self._front, self._confirmed, self._holds = front, confirmed, dict(holds)
        for number in sorted(self._runs):
            wanted = self._standing_of(number)
            if self._standing.get(number) != wanted:
                self._log(self._runs[number], tags=wanted)
                self._standing[number] = wanted

    def _standing_of(self, number: int) -> dict[str, str]:
        return design.standing_tags(
            self._kinds.get(number, ""),
            on_front=number in self._front,
            confirmed=number in self._confirmed,
            hold=self._holds.get(number),
        )

    # --- the study --------------------------------------------------------------------------------

    def log_progress(self, progress: Progress) -> None:
        """Write one step of the study's figures, if it is not there."""
        self._progress = progress
        if progress.attempt in self._steps:
            return
        self._log(
            self._run,
            metrics=design.metrics_of_progress(progress),
            at_ms=progress.at_ms,
            step=progress.attempt,
        )
        self._steps.add(progress.attempt)
        self._write_note()

    def log_report(self, report: FinalReport) -> None:
        """Write the tables, the files of the report, the recipes and the facts of the host."""
        tables = {"front.json": report.front_rows, "trials.json": report.trial_rows}
        files = [path for path in report.files if path.is_file()]
        folders = [path for path in report.folders if path.is_dir()]
        documents: dict[str, Any] = {
            # The layout of log_table, which itself would append the rows of a resumed study again.
            **{path: design.table(rows) for path, rows in tables.items() if rows},
            **({"host.json": dict(report.host)} if report.host else {}),
        }
        listed = json.dumps([{"path": path, "type": "table"} for path in tables if tables[path]])
        digest = _digest(documents, files, folders)
        if self._tags.get("sweeper.report") != digest:
            for path, document in documents.items():
                self._client.log_dict(self._run, document, path)
            for file in files:
                self._client.log_artifact(self._run, str(file))
            for folder in folders:
                self._client.log_artifacts(self._run, str(folder), folder.name)
        self._tag_study(
            {
                "mlflow.loggedArtifacts": listed,
                "sweeper.report": digest,
                **{design.key(each): text(value) for each, value in report.tags.items()},
                **({"simulated": "true"} if self._simulated else {}),
            }
        )
        self._report = next((path.name for path in files if path.suffix == ".html"), "")
        self._write_note()

    def end(self, status: str) -> None:
        """End the study's run."""
        self._write_note()
        ended = None if self._progress is None else self._progress.at_ms
        self._client.set_terminated(self._run, status=status, end_time=ended)

    def _write_note(self) -> None:
        note = design.note_of_study(
            self._subject.study,
            self._subject.facts,
            self._progress,
            experiment=self._experiment,
            run=self._run,
            simulated=self._simulated,
            view_keys=self._keys,
            report=self._report,
        )
        self._tag_study({"mlflow.note.content": note})
        if self._note != note:
            self._client.set_experiment_tag(self._experiment, "mlflow.note.content", note)
            self._note = note

    def _tag_study(self, tags: Mapping[str, str]) -> None:
        new = {key: value for key, value in tags.items() if self._tags.get(key) != value}
        if new:
            self._log(self._run, tags=new)
            self._tags.update(new)

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
            params=[
                Param(key, design.cut(value, design.PARAM_LIMIT))
                for key, value in (params or {}).items()
            ],
            tags=[
                RunTag(key, design.cut(value, design.NOTE_LIMIT))
                for key, value in (tags or {}).items()
            ],
        )


def _host() -> str:
    # A digest: a shared server need not know the names of its users' machines.
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]


def _this_process() -> str:
    own = psutil.Process()
    return f"{_host()} {own.pid} {own.create_time():.2f}"


def _is_gone(process: str) -> bool:
    """Tell whether a process, as `_this_process` said it, was of this machine and has ended."""
    host, _, rest = process.partition(" ")
    pid, _, started = rest.partition(" ")
    if host != _host() or not pid.isdecimal():
        return False
    try:
        return f"{psutil.Process(int(pid)).create_time():.2f}" != started
    except psutil.NoSuchProcess:
        return True


def _digest(documents: Mapping[str, Any], files: Sequence[Path], folders: Sequence[Path]) -> str:
    """Return a digest of all that a report consists of."""
    found = hashlib.sha256(json.dumps(documents, sort_keys=True, default=str).encode())
    inside = [(folder.parent, path) for folder in folders for path in sorted(folder.rglob("*"))]
    for root, path in [*((path.parent, path) for path in files), *inside]:
        if path.is_file():
            found.update(f"\n{os.fspath(path.relative_to(root))}\n".encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:16]
