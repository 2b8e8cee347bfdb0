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
from dataclasses import dataclass, replace
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
    Infeasible,
    Measured,
    kind,
)
from sweeper.core.pairs import Pairs, Point
from sweeper.core.standing import Fallen, fallen, front_among, unconfirmed
from sweeper.core.study import differences
from sweeper.engines import EngineOptions, ModelFacts
from sweeper.host import host_facts, load
from sweeper.models import ModelError, resolve_models
from sweeper.recipe import write_recipes
from sweeper.record.attempts import Attempts, RecordError
from sweeper.record.tracking import FinalReport, Tracking
from sweeper.record.tracking import Progress as StudyProgress
from sweeper.report import (
    front_rows,
    hypervolume_of,
    write_front_html,
    write_front_png,
)
from sweeper.search.study import Ended, Proposal, Search, Stop, sweep
from sweeper.server import Registry, terminating_as_interrupt
from sweeper.trial import Job, attempt
from sweeper.view import View

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
    fallen: tuple[Fallen, ...] = ()
    unconfirmed: int = 0
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
            "folder": str(self.folder),
            "recipes": [str(path) for path in self.recipes],
            "tracking_uri": self.tracking_uri,
            "tracking_failures": self.tracking_failures,
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
        if self.differences:
            lines.append("changed   " + "; ".join(self.differences))
            lines.append(
                "          go on under another name (name=OTHER), or compare them all the same: "
                "mix_conditions=true"
            )
        if self.recipes:
            lines.append(f"recipes   {self.recipes[0].parent}  (start one: bash {self.recipes[0]})")
        if self.attempts:
            lines.append(f"report    {self.folder / 'front.html'}")
        lines.append(f"trials    {verb} show +study={self.study}")
        if self.tracking_uri is not None:
            lines.append(f"MLflow    {verb} ui +study={self.study}")
        if self.interrupted or self.why == Stop.MINUTES.value:
            lines.append(f"go on     {verb} +study={self.study}")
        if self.tracking_failures:
            lines.append(
                f"MLflow refused {self.tracking_failures} operations; the attempts on disk are "
                "complete"
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
    with _only_one(folder, study.name), terminating_as_interrupt():
        _same_study(loaded, folder)
        registry = Registry(folder / "started.json")
        orphans = registry.reap()
        store = Attempts(folder / "attempts")
        try:
            known = store.all()
        except RecordError as error:
            raise StudyError(str(error)) from None
        job = prepare(loaded)
        view = View(console, budget_boots=study.budget.boots, budget_minutes=study.budget.minutes)
        with view:
            if orphans:
                view.say(f"ended {len(orphans)} engine processes that an earlier run left behind")
            if load() > BUSY_HOST_LOAD:
                view.say(
                    f"this machine is busy (load {load():.2f} a processor): numbers will suffer"
                )
            tracking = _track(loaded, known, store, view)
            search = Search(study, job, folder / "study.db", known)
            run = _Run(
                loaded=loaded, job=job, folder=folder, store=store, registry=registry,
                search=search, tracking=tracking, view=view, attempts=list(known),
            )  # fmt: skip
            with contextlib.closing(search):
                ended, interrupted = run.to_the_end()
        return run.conclude(ended, interrupted=interrupted)


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
    return job_of(loaded, models, found)


def job_of(loaded: Loaded, models: dict[str | None, ModelFacts], options: EngineOptions) -> Job:
    """Return the job of a study for models and engine options that were resolved."""
    study = loaded.study
    folders = {
        name: str(cache_folder(loaded) / name.lower())
        for name in loaded.engine.wire.cache_variables
    }
    hardware = Pairs(hardware=study.hardware_name, memory_limit_bytes=study.memory_limit_bytes)
    if study.device_memory_bytes is not None:
        hardware = hardware.with_(device_memory_bytes=study.device_memory_bytes)
    return Job(
        study=study.name,
        engine=loaded.engine,
        params=study.engine_params,
        options=replace(options, env=Pairs({**folders, **options.env})),
        models=models,
        space=study.space,
        workload=study.workload,
        also=study.also,
        guard=study.guard,
        objectives=study.objectives,
        proof_boots=study.proof_boots,
        hardware=hardware,
        host=host_facts(),
    )


def _python() -> str:
    """Return how the user would call this interpreter: by name if that finds it, else by path."""
    found = shutil.which("python")
    if found is not None and Path(found).parent == Path(sys.executable).parent:
        return "python"
    with contextlib.suppress(ValueError):
        return str(Path(sys.executable).relative_to(Path.cwd()))
    return sys.executable


def cache_folder(loaded: Loaded) -> Path:
    """Return where the engines of this study cache what they compile.

    A folder of the study's own, so that nothing another version left behind can break it.
    """
    return loaded.studies_dir / loaded.study.name / "cache"


@contextmanager
def _only_one(folder: Path, name: str) -> Iterator[None]:
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


def _track(
    loaded: Loaded, known: Sequence[Attempt], store: Attempts, view: View
) -> Tracking | None:
    if loaded.tracking_uri is None:
        return None
    study = loaded.study
    try:
        tracking = Tracking.open(
            loaded.tracking_uri,
            study.name,
            Pairs(
                engine=study.engine_name,
                model=study.model_name,
                hardware=study.hardware_name,
                workload=study.workload.name,
                description=study.description,
            ),
        )
    except ValueError as error:
        raise StudyError(f"tracking.uri: {error}") from None
    view.say("opening the MLflow store")
    # Importing MLflow and making its tables takes seconds of processor time, which must not
    # fall into a measurement.
    for each in known:
        tracking.attempt(each, store.folder(each.number))
    tracking.drain(timeout_s=60.0)
    return tracking


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
                recorded=self.recorded,
            )
            if ended.fault is None and ended.why is not Stop.INCOMPARABLE:
                self.confirm()
        except KeyboardInterrupt:
            boots = sum(each.confirms is None for each in self.attempts[before:])
            return Ended(why=Stop.INTERRUPTED, boots=boots), True
        return ended, False

    def boot(self, proposal: Proposal, number: int) -> Attempt:
        self.view.booting(number, self.search.boots, proposal.point)
        return self._attempt(proposal.point, number=number, trial=proposal.trial, racing=True)

    def _attempt(
        self, point: Point, *, number: int, trial: int, racing: bool, confirms: int | None = None
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
                watch=self.view.progress,
                known=known,
                confirms=confirms,
            )
        except BaseException:
            self.store.discard(number)
            raise

    def confirm(self) -> None:
        """Boot the members of the front afresh and measure them again, in interleaved order.

        What takes the place of a member that does not hold is measured again as well, as long as
        the boots for it last.
        """
        choice = self.loaded.study.confirm
        left = choice.boots
        while left > 0 and choice.rounds > 0 and (members := unconfirmed(self.attempts)):
            # Not in the order of the search, and every other round backwards: what changes with
            # time on this machine must not fall on the same members each time.
            order = [
                each
                for round_ in range(choice.rounds)
                for each in (members if round_ % 2 == 0 else members[::-1])
            ][:left]
            for count, each in enumerate(order, start=1):
                self.view.confirming(each.number, count, len(order), each.point)
                done = self._attempt(
                    each.point, number=self.store.next_number(), trial=each.trial, racing=False,
                    confirms=each.number,
                )  # fmt: skip
                self.recorded(done)
                left -= 1
                if isinstance(done.outcome, HostFault):
                    return

    def comparable(self, done: Attempt) -> tuple[str, ...]:
        """Return in what this attempt was made under other conditions than the first measured."""
        if self.loaded.study.mix_conditions or not isinstance(done.outcome, Measured):
            return ()
        first = next(each for each in self.attempts if isinstance(each.outcome, Measured))
        return incomparable(first, done, scope=Scope.STUDY, axes=self.job.space.axes)

    def recorded(self, done: Attempt) -> None:
        final = self.store.commit(done)
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
        front = front_among(self.attempts)
        measured = [each.outcome for each in self.attempts if isinstance(each.outcome, Measured)]
        self.tracking.attempt(done, final)
        self.tracking.front([each.number for each in front])
        self.tracking.progress(
            StudyProgress(
                attempt=done.number,
                boots=len(self.attempts),
                infeasible_boots=sum(
                    isinstance(each.outcome, Infeasible) for each in self.attempts
                ),
                front_size=len(front),
                hypervolume=hypervolume_of(self.attempts),
                best_decode_tok_s=max(
                    (each.decode_tok_s.median for each in measured), default=None
                ),
                best_proven_context_tokens=max(
                    (each.context.proven_tokens for each in measured), default=None
                ),
            )
        )
        # Logged before the next boot, so that no thread of ours runs beside a measurement; a
        # slow server is not waited for longer than this.
        self.tracking.drain(timeout_s=2.0)

    def conclude(self, ended: Ended, *, interrupted: bool) -> Summary:
        """Write what a finished or stopped run leaves: the front, its pictures, recipes."""
        # From disk, which knows best: an interrupt may fall between storing and remembering.
        self.attempts = self.store.all()
        front = front_among(self.attempts)
        recipes: list[Path] = []
        files: list[Path] = []
        if self.attempts:
            for name, write in (("front.png", write_front_png), ("front.html", write_front_html)):
                write(self.attempts, self.folder / name)
                files.append(self.folder / name)
            path = self.folder / "front.json"
            path.write_text(json.dumps(front_rows(self.attempts), indent=2) + "\n")
            files.append(path)
        if front:
            recipes = write_recipes(
                front, form="shell", folder=self.folder / "recipes", study_folder=self.folder
            )
        failures = 0
        if self.tracking is not None:
            self.tracking.finish(
                FinalReport(
                    front_rows=front_rows(self.attempts),
                    files=tuple(files),
                    recipes=self.folder / "recipes" if recipes else None,
                    tags=Pairs(ended=ended.why.value),
                )
            )
            status = "KILLED" if interrupted else "FAILED" if ended.fault else "FINISHED"
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
            tracking_uri=self.loaded.tracking_uri,
            tracking_failures=failures,
            fallen=fallen(self.attempts),
            unconfirmed=(
                len(unconfirmed(self.attempts)) if self.loaded.study.confirm.rounds else 0
            ),
            differences=ended.differences,
        )
