"""A whole run of a study: what is checked first, what is written where, how it is left."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from sweeper.conf import Loaded
from sweeper.core.comparable import Scope, incomparable
from sweeper.core.known import known_from
from sweeper.core.outcome import (
    Attempt,
    Broken,
    BrokenName,
    HostFault,
    Measured,
    kind,
)
from sweeper.core.pairs import Point
from sweeper.core.reliability import Hold, boot_decides, margin_words
from sweeper.core.standing import Fallen, fallen, front_among, reliability_of, unconfirmed
from sweeper.core.study import differences
from sweeper.engines import EngineOptions
from sweeper.host import load
from sweeper.job import Job
from sweeper.joining import cache_folder, job_of
from sweeper.models import ModelError, resolve_models
from sweeper.recipe import write_recipes
from sweeper.record.attempts import Attempts, RecordError
from sweeper.record.sync import (
    KILLED,
    open_tracking,
    remember_end,
    report_of,
    tell,
    tell_all,
)
from sweeper.record.tracking import Tracking, without_password
from sweeper.report import (
    front_rows,
    write_report,
)
from sweeper.search.samplers import SamplerError
from sweeper.search.study import Ended, Proposal, Search, Stop, confirm, sweep
from sweeper.server import Registry, terminating_as_interrupt
from sweeper.trial import Progress, attempt
from sweeper.view import About, View

BUSY_HOST_LOAD = 0.5
"""Load average per processor from which other work is likely to disturb the measurements."""


class StudyError(Exception):
    """A study that cannot be started as asked; says why and what to do."""


class HostCannotError(Exception):
    """A host on which no point of the study could work; says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run leaves for its caller to print."""

    study: str
    attempts: tuple[Attempt, ...]
    why: str
    boots: int
    interrupted: bool
    fault: HostFault | None
    folder: Path
    recipes: tuple[Path, ...]
    tracking_uri: str | None
    tracking_failures: int
    tracking_s: float | None = None
    fallen: tuple[Fallen, ...] = ()
    unconfirmed: int = 0
    unsure: tuple[tuple[int, str], ...] = ()
    """Members of the front that may not boot every time: the attempt, and its margin in words."""
    differences: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the summary as one JSON document."""
        counts: dict[str, int] = {}
        for each in self.attempts:
            counts[kind(each.outcome)] = counts.get(kind(each.outcome), 0) + 1
        return {
            "study": self.study,
            "ended": self.why,
            "boots_of_this_run": self.boots,
            "attempts": len(self.attempts),
            "outcomes": counts,
            "front": front_rows(self.attempts),
            "fallen": [
                {"attempt": each.attempt.number, "why": each.fall.value, "words": each.explanation}
                for each in self.fallen
            ],
            "unconfirmed": self.unconfirmed,
            "unsure": [{"attempt": number, "words": words} for number, words in self.unsure],
            "folder": str(self.folder),
            "recipes": [str(path) for path in self.recipes],
            "tracking_uri": self.tracking_uri,
            "tracking_failures": self.tracking_failures,
            "tracking_s_per_attempt": self.tracking_s,
        }

    @property
    def next_steps(self) -> tuple[str, ...]:
        """Where to look next, in lines for a terminal."""
        verb = f"{_python()} -m sweeper"
        again = sum(each.confirms is not None for each in self.attempts)
        lines = [
            f"{self.why}: {self.boots} boots in this run, {len(self.attempts) - again} in all"
            + (f", and {again} to measure the front again" if again else "")
        ]
        lines += [
            f"dropped   attempt {each.attempt.number}: {each.explanation}" for each in self.fallen
        ]
        if self.unconfirmed:
            lines.append(
                f"doubtful  {self.unconfirmed} members of the front were not measured again yet"
            )
        lines += [
            f"unsure    attempt {number} may not boot every time: {words}"
            for number, words in self.unsure
        ]
        if self.differences:
            lines.append("changed   " + "; ".join(self.differences))
            lines.append(
                "          go on under another name (name=OTHER), or compare them all the same: "
                "mix_conditions=true"
            )
        if self.recipes:
            lines.append(f"recipes   {self.recipes[0].parent}  (start one: bash {self.recipes[0]})")
        if self.attempts:
            lines.append(f"report    {self.folder / 'report.html'}")
        lines.append(f"trials    {verb} show +study={self.study}")
        if self.tracking_uri is not None:
            lines.append(f"MLflow    {verb} ui +study={self.study}")
        if self.interrupted or self.why == Stop.MINUTES.value:
            lines.append(f"go on     {verb} +study={self.study}")
        if self.tracking_failures:
            lines.append(
                f"MLflow lacks {self.tracking_failures} operations, the attempts on disk are "
                f"complete: {verb} sync +study={self.study}"
            )
        return tuple(lines)


def run_study(loaded: Loaded, console: Console) -> Summary:
    """Run or resume a study until its budget ends, and return what it has come to.

    Raises StudyError and HostCannotError before anything is booted. Ctrl-C is a way to end: the
    engine is stopped, what is finished is kept, and the summary says so.
    """
    study = loaded.study
    folder = loaded.studies_dir / study.name
    folder.mkdir(parents=True, exist_ok=True)
    with only_one(folder, study.name), terminating_as_interrupt():
        _same_study(loaded, folder)
        registry = Registry(folder / "started.json")
        orphans = registry.reap()
        store = Attempts(folder / "attempts")
        try:
            known = store.all()
        except RecordError as error:
            raise StudyError(str(error)) from None
        job = prepare(loaded)
        view = View(
            console,
            budget_boots=study.budget.boots,
            budget_minutes=study.budget.minutes,
            about=_about(loaded, job),
            known=known,
        )
        with view, terminating_as_interrupt(view.stopping):
            if orphans:
                view.say(f"ended {len(orphans)} engine processes that an earlier run left behind")
            if load() > BUSY_HOST_LOAD:
                view.say(
                    f"this machine is busy (load {load():.2f} a processor): numbers will suffer"
                )
            tracking = _track(loaded, known, view)
            before = earlier_attempts(loaded, job)
            if before:
                names = ", ".join(dict.fromkeys(each.study for each in before))
                view.say(f"learning from {len(before)} attempts of earlier studies: {names}")
            try:
                search = Search(study, job, folder / "study.db", known, earlier=before)
            except SamplerError as error:
                raise StudyError(f"sampler: {error}") from None
            run = _Run(
                loaded=loaded, job=job, folder=folder, store=store, registry=registry,
                search=search, tracking=tracking, view=view, attempts=list(known),
            )  # fmt: skip
            with contextlib.closing(search):
                ended, interrupted = run.to_the_end()
        return run.conclude(ended, interrupted=interrupted)


def _about(loaded: Loaded, job: Job) -> About:
    """Return what a view of this run says of it in its first line."""
    study = loaded.study
    card = job.host.get("gpu")
    return About(
        study=study.name,
        engine=study.engine_name,
        hardware=f"{study.hardware_name} ({card})" if card else study.hardware_name,
        simulated=loaded.engine.simulated,
        confirm=study.confirm,
    )


def prepare(loaded: Loaded) -> Job:
    """Return the job: engine found, model found and checked.

    Raises HostCannotError or StudyError with what is missing and what to do.
    """
    found = loaded.engine.find(loaded.options)
    if not isinstance(found, EngineOptions):
        raise HostCannotError(found.finding.explanation)
    if found.prefix and shutil.which(found.prefix[0]) is None:
        raise HostCannotError(
            f"engine.prefix begins with {found.prefix[0]}, and no such program exists"
        )
    try:
        models = resolve_models(loaded.model)
    except ModelError as error:
        raise StudyError(str(error)) from None
    job = job_of(loaded, models, found)
    if (lacks := job.without_template()) is not None:
        raise StudyError(lacks)
    return job


def _python() -> str:
    """Return how the user would call this interpreter: by name if that finds it, else by path."""
    found = shutil.which("python")
    if found is not None and Path(found).parent == Path(sys.executable).parent:
        return "python"
    with contextlib.suppress(ValueError):
        return str(Path(sys.executable).relative_to(Path.cwd()))
    return sys.executable


@contextmanager
def only_one(folder: Path, name: str) -> Iterator[None]:
    """Hold the study for this process; two would overwrite each other's attempts."""
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise StudyError(
                f"study {name} is being run by process {file.read().strip() or '?'}; wait for it, "
                "or give this one another name: name=OTHER"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _same_study(loaded: Loaded, folder: Path) -> None:
    """Refuse to go on under a name whose attempts were made under other conditions."""
    path = folder / "study.json"
    declared = loaded.study.identity()
    if not path.exists():
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"schema": 1, "identity": declared}, indent=2))
        partial.replace(path)
        return
    stored = json.loads(path.read_text())["identity"]
    changes = differences(stored, declared)
    if changes:
        raise StudyError(
            f"study {loaded.study.name} was started differently, and its attempts would not be "
            "comparable:\n  " + "\n  ".join(changes) + "\n"
            f"go on as it was, give this one another name (name=OTHER), or remove {folder}"
        )


def _track(loaded: Loaded, known: Sequence[Attempt], view: View) -> Tracking | None:
    if loaded.tracking_uri is None:
        return None
    folder = loaded.studies_dir / loaded.study.name
    try:
        tracking = open_tracking(loaded.tracking_uri, loaded.study, folder, known)
    except ValueError as error:
        raise StudyError(f"tracking.uri: {error}") from None
    view.say("opening the MLflow store")
    # Importing MLflow and making its tables takes seconds of processor time, which must not
    # fall into a measurement.
    tell_all(tracking, known, folder)
    tracking.drain(timeout_s=60.0)
    remember_end(folder, *KILLED)  # true until another end is remembered
    return tracking


def earlier_attempts(loaded: Loaded, job: Job) -> list[Attempt]:
    """Return the attempts of earlier studies that this one may learn from.

    Those of the same engine and model on the same machine and memory; which studies are looked at
    says `warm_start`. Raises StudyError for a named study that is not there or cannot be read.
    """
    chosen = loaded.study.warm_start
    if chosen is False:
        return []
    if chosen is True:
        names = sorted(
            each.parent.name
            for each in loaded.studies_dir.glob("*/attempts")
            if each.parent.name != loaded.study.name
        )
    else:
        assert not isinstance(chosen, bool)
        names = list(chosen)
        for name in names:
            if not (loaded.studies_dir / name / "attempts").is_dir():
                raise StudyError(f"warm_start: there is no study {name} in {loaded.studies_dir}")
    weights = {model.sha256 for model in job.models.values()}
    found = []
    for name in names:
        try:
            attempts = Attempts(loaded.studies_dir / name / "attempts").all()
        except RecordError as error:
            if chosen is True:
                continue  # nobody asked for this one
            raise StudyError(f"warm_start: {error}") from None
        found += [
            each
            for each in attempts
            if each.engine.get("name") == job.engine.name
            and each.model.get("sha256") in weights
            and all(
                each.host.get(key) == {**job.host, **job.hardware}.get(key)
                for key in ("cpu", "gpu", "gpu_memory_bytes", "memory_limit_bytes")
            )
        ]
    return found


def write_skips(search: Search, path: Path, *, checked: int, wrong: Sequence[str]) -> None:
    """Write every point that was never booted with its reason, one JSON object a line.

    The first line counts them by reason, and says how many predictions were checked by a boot and
    which were wrong. Of a large space only the first 50,000 points are listed.
    """
    counts: dict[str, int] = {}
    lines: list[str] = []
    for point, why in search.skips():
        kind_of = why.split(":", 1)[0]
        counts[kind_of] = counts.get(kind_of, 0) + 1
        if len(lines) < 50_000:
            lines.append(json.dumps({"point": dict(point), "why": why}))
    head = json.dumps({"skipped": counts, "checked": checked, "wrong": list(wrong)})
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join([head, *lines]) + "\n")
    partial.replace(path)


@dataclass(kw_only=True)
class _Run:
    """The parts of one run of a study."""

    loaded: Loaded
    job: Job
    folder: Path
    store: Attempts
    registry: Registry
    search: Search
    tracking: Tracking | None
    view: View
    attempts: list[Attempt]

    def to_the_end(self) -> tuple[Ended, bool]:
        before = len(self.attempts)
        try:
            ended = sweep(
                self.loaded.study,
                self.search,
                boot=self.boot,
                next_number=self.store.next_number,
                comparable=self.comparable,
                cards=self.cards,
                recorded=self.recorded,
            )
            if ended.fault is None and ended.why is not Stop.INCOMPARABLE:
                self.confirm()
        except KeyboardInterrupt:
            boots = sum(each.confirms is None for each in self.attempts[before:])
            return Ended(why=Stop.INTERRUPTED, boots=boots), True
        return ended, False

    def boot(self, proposal: Proposal, number: int) -> Attempt:
        self.view.booting(number, self.search.boots, proposal.point, why=proposal.why)
        return self._attempt(proposal.point, number=number, trial=proposal.trial, racing=True)

    def _watch(self, progress: Progress) -> None:
        """Show how far the attempt is; end it if the run was told to stop and Python lost that.

        What a signal raises in the middle of a destructor never arrives where it could be caught.
        """
        if self.view.asked_to_stop:
            raise KeyboardInterrupt
        self.view.progress(progress)

    def _attempt(
        self,
        point: Point,
        *,
        number: int,
        trial: int,
        racing: bool,
        confirms: int | None = None,
        brief: bool = False,
    ) -> Attempt:
        known = known_from(
            self.attempts,
            front_among(self.attempts) if racing else None,
            weights=self.job.model(point).sha256,
            reference=self.loaded.study.reference or None,
        )
        partial = self.store.begin(number)
        try:
            return attempt(
                self.job,
                point,
                number=number,
                trial=trial,
                folder=partial,
                registry=self.registry,
                watch=self._watch,
                known=known,
                confirms=confirms,
                brief=brief,
                prove=not brief or not self._boots_decide(point),
            )
        except BaseException:
            self.store.discard(number)
            raise

    def _boots_decide(self, point: Point) -> bool:
        """Tell whether every boot of a point took its memory before it was ready."""
        known = [
            each
            for each in self.attempts
            if each.point == point and isinstance(each.outcome, Measured)
        ]
        return bool(known) and all(boot_decides(each) for each in known)

    def confirm(self) -> None:
        """Boot the members of the front afresh: measured again, and seen to work every time."""

        def boot(member: Attempt, brief: bool, count: int, of: int) -> Attempt:
            self.view.confirming(member.number, count, of, member.point, brief=brief)
            self.recorded(
                self._attempt(
                    member.point, number=self.store.next_number(), trial=member.trial,
                    racing=False, confirms=member.number, brief=brief,
                )
            )  # fmt: skip
            return self.attempts[-1]

        confirm(self.loaded.study.confirm, lambda: self.attempts, boot=boot)

    @property
    def cards(self) -> int:
        """How many cards the engine may use; 1 where there are none."""
        count = self.job.host.get("gpu_count")
        return count if isinstance(count, int) and count > 0 else 1

    def comparable(self, done: Attempt) -> tuple[str, ...]:
        """Return in what this attempt was made under other conditions than the first measured."""
        if self.loaded.study.mix_conditions or not isinstance(done.outcome, Measured):
            return ()
        first = next(each for each in self.attempts if isinstance(each.outcome, Measured))
        return incomparable(first, done, scope=Scope.STUDY, axes=self.job.space.axes)

    def recorded(self, done: Attempt) -> None:
        self.store.commit(done)
        # What is shown and tracked is what was stored, from which secrets are gone.
        done = self.store.read(done.number)
        self.attempts.append(done)
        self.view.finished(done)
        if isinstance(done.outcome, Broken) and (
            done.outcome.name is BrokenName.COMPILE_CACHE_CORRUPT
        ):
            # The retry must not find what broke this one.
            shutil.rmtree(cache_folder(self.loaded), ignore_errors=True)
        if self.tracking is None:
            return
        tell(self.tracking, self.attempts, self.folder)
        # Logged before the next boot, so that no thread of ours runs beside a measurement; a
        # slow server is not waited for longer than this.
        self.tracking.drain(timeout_s=2.0)

    def conclude(self, ended: Ended, *, interrupted: bool) -> Summary:
        """Write what a finished or stopped run leaves: the front, its pictures, recipes."""
        # From disk, which knows best: an interrupt may fall between storing and remembering.
        self.attempts = self.store.all()
        front = front_among(self.attempts)
        holds = reliability_of(self.attempts)
        recipes: list[Path] = []
        files: list[Path] = []
        if self.attempts:
            files += write_report(self.attempts, self.folder, job=self.job)
            path = self.folder / "front.json"
            path.write_text(json.dumps(front_rows(self.attempts), indent=2) + "\n")
            files.append(path)
        checked, wrong = self.search.checks
        for line in wrong:
            self.view.say(f"a prediction was wrong: {line}")
        if self.attempts:
            write_skips(self.search, self.folder / "skips.jsonl", checked=checked, wrong=wrong)
        if front:
            recipes = write_recipes(
                front,
                form="shell",
                folder=self.folder / "recipes",
                study_folder=self.folder,
                front=front,
                everyone=self.attempts,
                health_path=self.loaded.engine.wire.health_path,
            )
        failures = 0
        if self.tracking is not None:
            status = "KILLED" if interrupted else "FAILED" if ended.fault else "FINISHED"
            remember_end(self.folder, ended.why.value, status)
            self.tracking.finish(report_of(self.folder, self.attempts))
            with contextlib.suppress(KeyboardInterrupt):
                failures = self.tracking.close(timeout_s=60.0, status=status)
        return Summary(
            study=self.loaded.study.name,
            attempts=tuple(self.attempts),
            why=ended.why.value
            + (f": {ended.fault.finding.explanation}" if ended.fault is not None else ""),
            boots=ended.boots,
            interrupted=interrupted,
            fault=ended.fault,
            folder=self.folder,
            recipes=tuple(recipes),
            tracking_uri=self.loaded.tracking_uri and without_password(self.loaded.tracking_uri),
            tracking_failures=failures,
            tracking_s=self.tracking.seconds_per_attempt if self.tracking is not None else None,
            fallen=fallen(self.attempts),
            unconfirmed=(
                len(unconfirmed(self.attempts)) if self.loaded.study.confirm.rounds else 0
            ),
            unsure=tuple(
                (each.number, margin_words(holds[each.point]))
                for each in front
                if holds[each.point].hold is Hold.UNSURE
            ),
            differences=ended.differences,
        )
