"""One attempt at a point: boot, prove, warm up, measure, stop. The order, and nothing else."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sweeper.bench import Client, RequestFailure, RequestTrouble
from sweeper.core.launch import Attach, Death, Launch, Phase
from sweeper.core.outcome import (
    Attempt,
    Broken,
    BrokenName,
    Failure,
    Finding,
    Measured,
    Outcome,
    ProvenContext,
    Timings,
    Unfit,
    UnfitName,
)
from sweeper.core.pairs import Pairs, Point, Scalar
from sweeper.core.sample import DraftCounters, Purpose, Sample
from sweeper.core.space import Space
from sweeper.core.stats import Doubt, Summary, summarise
from sweeper.core.workload import Workload
from sweeper.engines import Engine, EngineOptions, ModelFacts
from sweeper.server import Attached, Registry, Server, free_port, serving

MODEL_VARIANT = "model.variant"
"""The one thing an axis may set that is not an engine setting: which file of the model."""

_CLOCKS_TOLERANCE = 0.03
_DEAD_DRAFT_TOKENS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that stays the same over the attempts of a study."""

    study: str
    engine: Engine
    params: Mapping[str, Any]
    options: EngineOptions
    models: Mapping[str | None, ModelFacts]
    space: Space
    workload: Workload
    hardware: Pairs
    host: Pairs

    def settings(self, point: Point) -> Any:
        """Return the engine's settings at a point; raises FieldError for impossible ones."""
        params = dict(self.params)
        for axis in self.space.axes:
            if axis.name in point:
                params.update(
                    {name: point[axis.name] for name in axis.sets if name != MODEL_VARIANT}
                )
        return self.engine.settings(params)

    def model(self, point: Point) -> ModelFacts:
        """Return the model that a point serves."""
        for axis in self.space.axes:
            if MODEL_VARIANT in axis.sets and axis.name in point:
                return self.models[str(point[axis.name])]
        return next(iter(self.models.values()))

    def launch(self, point: Point, port: int) -> Launch | Attach:
        """Return the process that would serve this point, or where one serves already."""
        launch = self.engine.launch(self.settings(point), self.model(point), self.options, port)
        if isinstance(launch, Attach):
            return launch
        return launch.wrapped(
            self.options.prefix,
            detached=self.options.detached,
            stop_command=self.options.stop_command,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where an attempt is: its phase in words, and how much of it is done (0..1) if known."""

    stage: str
    detail: str = ""
    done: float | None = None


Watch = Callable[[Progress], None]


def attempt(
    job: Job, point: Point, *, number: int, trial: int, folder: Path, registry: Registry,
    watch: Watch,
) -> Attempt:  # fmt: skip
    """Boot the point, prove its context, measure it, stop it, and return what came of it.

    Whatever the engine does is an outcome of the attempt. Raises only for bugs of our own and
    KeyboardInterrupt; the engine is gone in every case.
    """
    started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    began = time.monotonic()
    settings, model = job.settings(point), job.model(point)
    launch = job.launch(point, free_port())
    log: list[str] = []
    boot_s: float | None = None

    def read(line: str) -> None:
        log.append(line)
        # What a server prints of its requests is read late, and is no step of the boot.
        phase = job.engine.milestone(line) if boot_s is None else None
        if phase is not None:
            watch(Progress(stage="boot", detail=phase.value.replace("_", " ")))

    watch(Progress(stage="boot", detail="starting"))
    run = _Run(job=job, settings=settings, model=model, log=log, watch=watch)
    with serving(launch, log_path=folder / "engine.log", registry=registry, watch=read) as started:
        match started.result:
            case Server() | Attached() as server:
                boot_s = server.ready_after_s
                outcome = run.measure(server)
            case Death() as death:
                outcome = job.engine.verdict(death, log)
    stopped = started.stopped
    if stopped is not None and stopped.held_bytes:
        run.notes.append(
            f"{stopped.held_bytes / 2**20:,.0f} MiB of device memory were still held after the "
            "engine was gone: the next boot may find less than this one"
        )
    return Attempt(
        study=job.study,
        number=number,
        trial=trial,
        started_at=started_at,
        point=point,
        outcome=outcome,
        argv=launch.argv if isinstance(launch, Launch) else (),
        env=launch.env if isinstance(launch, Launch) else Pairs(),
        memory_limit_bytes=launch.memory_limit_bytes if isinstance(launch, Launch) else None,
        footprint=job.engine.footprint(settings, model),
        timings=Timings(
            boot_s=boot_s,
            prove_s=run.prove_s,
            measure_s=run.measure_s,
            stop_s=None if stopped is None else stopped.took_s,
            total_s=time.monotonic() - began,
        ),
        engine=Pairs(
            {
                "name": job.engine.name,
                "simulated": job.engine.simulated,
                "attached_to": launch.base_url if isinstance(launch, Attach) else None,
                **job.engine.evidence(log),
            }
        ),
        model=Pairs(
            {
                "name": model.name,
                "path": model.path,
                "sha256": model.sha256,
                "size_bytes": model.size_bytes,
                "draft_path": model.draft_path,
            }
        ),
        host=Pairs({**job.host, **job.hardware}),
        workload=Pairs(
            name=job.workload.name,
            digest=job.workload.digest(),
            max_tokens=job.workload.max_tokens,
            runs=job.workload.runs,
            temperature=job.workload.temperature,
        ),
        samples=tuple(run.samples),
        notes=tuple(run.notes),
        port_argument=launch.port_argument if isinstance(launch, Launch) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FailedRequest:
    failure: RequestFailure
    purpose: Purpose


class _Run:
    """The part of an attempt in which the server is up."""

    def __init__(
        self, *, job: Job, settings: Any, model: ModelFacts, log: list[str], watch: Watch
    ) -> None:
        self.job = job
        self.settings = settings
        self.window = job.engine.context_tokens(settings)
        self.model = model
        self.log = log
        self.watch = watch
        self.samples: list[Sample] = []
        self.notes: list[str] = []
        self.prove_s: float | None = None
        self.measure_s: float | None = None

    def measure(self, server: Server | Attached) -> Outcome:
        workload = self.job.workload
        with Client(
            server.base_url, self.job.engine.wire, self.model.served_name, workload
        ) as client:
            if (first := self._first(client, server)) is not None:
                return first
            began = time.monotonic()
            context = self._prove(client)
            self.prove_s = time.monotonic() - began
            match context:
                case _FailedRequest(failure=failure, purpose=purpose):
                    return self._failed(failure, server, purpose)
                case Unfit():
                    return context
                case ProvenContext():
                    pass
            began = time.monotonic()
            outcome = self._timed(client, server, context)
            self.measure_s = time.monotonic() - began
            return outcome

    def _first(self, client: Client, server: Server | Attached) -> Failure | None:
        """Return what is wrong with what runs, seen before anything is measured; None for nothing.

        Health says little: servers die, hang or compile for minutes on their first request, and
        serve with less than they were asked for.
        """
        self.watch(Progress(stage="first request"))
        sample = client.complete(
            "Hello",
            max_tokens=2,
            purpose=Purpose.FIRST,
            timeout_s=self.job.options.first_request_timeout_s,
        )
        if isinstance(sample, RequestFailure):
            return self._failed(sample, server, Purpose.FIRST)
        self.samples.append(sample)
        server.alive()  # reads what the log has said since
        facts = self.job.engine.evidence(self.log)
        if self.window == 0:
            # The engine was asked to choose: what it chose is what is proven.
            chosen = facts.get("effective_context_tokens")
            if not isinstance(chosen, int) or chosen < 2:
                return Broken(
                    name=BrokenName.UNKNOWN,
                    finding=Finding(
                        phase=Phase.READY,
                        cause="",
                        explanation="the engine chose its context and did not say which: name a "
                        "length instead",
                    ),
                )
            self.window = chosen
        props = client.page(self.job.engine.wire.props_path)
        return self.job.engine.contradiction(self.settings, facts, props)

    def _prove(self, client: Client) -> ProvenContext | Unfit | _FailedRequest:
        """Fill the window with one prompt and its answer, then ask for more than it holds."""
        answer_tokens = min(self.job.workload.proof_answer_tokens, self.window - 1)
        prompt_tokens = self.window - answer_tokens
        self.watch(Progress(stage="prove", detail=f"{self.window:,} tokens"))
        # One token more than the window, of which the proof takes all that it can hold.
        text = client.tokens(self.window, self.window + 1)
        if isinstance(text, RequestFailure):
            return _FailedRequest(failure=text, purpose=Purpose.PROOF)
        sample = client.complete(
            text[:prompt_tokens], max_tokens=answer_tokens, purpose=Purpose.PROOF
        )
        if isinstance(sample, RequestFailure):
            return _FailedRequest(failure=sample, purpose=Purpose.PROOF)
        self.samples.append(sample)
        if sample.prompt_tokens < prompt_tokens:
            return self._unfit(
                UnfitName.SILENT_CONTEXT_TRUNCATION,
                f"of a prompt of {prompt_tokens:,} tokens the server read only "
                f"{sample.prompt_tokens:,}, and did not say so",
                facts={"sent_tokens": prompt_tokens, "read_tokens": sample.prompt_tokens},
            )
        over = client.complete(text, max_tokens=1, purpose=Purpose.OVERFLOW)
        refuses: bool | None = None
        match over:
            case RequestFailure(
                trouble=RequestTrouble.CONTEXT_EXCEEDED | RequestTrouble.CLIENT_ERROR
            ):
                refuses = True
            case Sample():
                refuses = False
                self.notes.append(
                    f"a prompt of {len(text):,} tokens was answered although the window is "
                    f"{self.window:,}"
                )
            case RequestFailure():
                return _FailedRequest(failure=over, purpose=Purpose.OVERFLOW)
        held = sample.prompt_tokens + sample.completion_tokens
        ended_by_window = sample.finish_reason == "length" and held < self.window
        return ProvenContext(
            configured_tokens=self.window,
            proven_tokens=held,
            reserved_tokens=self.window - held if ended_by_window else 0,
            prompt_tokens=sample.prompt_tokens,
            completion_tokens=sample.completion_tokens,
            prefill_tok_s=sample.prefill_tok_s or 0.0,
            decode_tok_s=sample.decode_tok_s,
            refuses_more=refuses,
        )

    def _timed(self, client: Client, server: Server | Attached, context: ProvenContext) -> Outcome:
        """Warm up, then measure; every repeat is kept, the warm-up apart."""
        workload, engine = self.job.workload, self.job.engine
        max_tokens = min(workload.max_tokens, max(self.window // 2, 2))
        before: DraftCounters | None = None
        for run in range(workload.warmup_runs + workload.runs):
            warming = run < workload.warmup_runs
            purpose = Purpose.WARMUP if warming else Purpose.MEASURE
            if run == workload.warmup_runs:
                before = self._counters(client)
            done = run / (workload.warmup_runs + workload.runs)
            self.watch(
                Progress(stage="warm up", done=done)
                if warming
                else Progress(
                    stage="measure",
                    detail=f"run {run - workload.warmup_runs + 1} of {workload.runs}",
                    done=done,
                )
            )
            sample = client.complete(workload.prompt, max_tokens=max_tokens, purpose=purpose)
            if isinstance(sample, RequestFailure):
                return self._failed(sample, server, purpose)
            self.samples.append(sample)
        after = self._counters(client)
        drafts = None if before is None or after is None else after.since(before)
        peak = server.peak_bytes()
        if not server.alive():
            death = server.death(0.0)
            assert death is not None
            return engine.verdict(death, self.log)
        return self._judged(context, drafts, peak)

    def _judged(
        self, context: ProvenContext, drafts: DraftCounters | None, peak: int | None
    ) -> Outcome:
        timed = [each for each in self.samples if each.purpose is Purpose.MEASURE]
        if all(_one_unit(each.text) for each in timed):
            return self._unfit(
                UnfitName.GARBAGE_OUTPUT,
                f"every answer is one unit repeated: {timed[0].text[:40]!r}",
            )
        if drafts is not None and drafts.accepted == 0 and drafts.drafted >= _DEAD_DRAFT_TOKENS:
            return self._unfit(
                UnfitName.DRAFT_INEFFECTIVE,
                f"{drafts.drafted} tokens were drafted and none was accepted",
                facts={"drafted_tokens": drafts.drafted},
            )
        speeds = [each.decode_tok_s for each in timed if each.decode_tok_s is not None]
        if not speeds:
            return self._unfit(
                UnfitName.DEGRADED_THROUGHPUT,
                "no answer was long enough to time: "
                f"{[each.completion_tokens for each in timed]} tokens",
            )
        prefill = [each.prefill_tok_s for each in timed if each.prefill_tok_s is not None]
        return Measured(
            decode_tok_s=_with_clock_doubt(summarise(speeds), timed),
            ttft_s=summarise([each.ttft_s for each in timed]),
            prefill_tok_s=summarise(prefill) if prefill else None,
            context=context,
            drafts=drafts,
            peak_bytes=peak,
        )

    def _counters(self, client: Client) -> DraftCounters | None:
        page = client.page(self.job.engine.wire.metrics_path)
        return None if page is None else self.job.engine.draft_counters(page)

    def _failed(
        self, failure: RequestFailure, server: Server | Attached, purpose: Purpose
    ) -> Failure:
        """Return what a failed request means: a dead engine is asked first what it died of."""
        if failure.trouble in (
            RequestTrouble.CONNECTION_LOST,
            RequestTrouble.SERVER_ERROR,
            RequestTrouble.ERROR_IN_STREAM,
            # A server that is ending may still close its stream as if all were well.
            RequestTrouble.NO_USAGE,
            RequestTrouble.SILENCE,
        ):
            silent = failure.trouble is RequestTrouble.SILENCE
            death = server.death() or server.complaint(failure.detail, silent=silent)
            verdict = self.job.engine.verdict(death, self.log)
            facts = {**verdict.finding.facts, "failed_during": purpose.value}
            return replace(verdict, finding=replace(verdict.finding, facts=Pairs(facts)))
        during = f"during the {purpose.value} request"
        asked: dict[str, Scalar] = {"window_tokens": self.window, **failure.server}
        match failure.trouble:
            case RequestTrouble.CONTEXT_EXCEEDED:
                what = (
                    f"the server refuses a prompt that its configured window of {self.window:,} "
                    "tokens should hold"
                    if purpose is Purpose.PROOF
                    else f"the workload's prompt does not fit the window of {self.window:,} tokens"
                )
                return self._unfit(
                    UnfitName.HTTP_400_CONTEXT, f"{what}: {failure.detail}", facts=asked
                )
            case RequestTrouble.EMPTY_ANSWER:
                return self._unfit(
                    UnfitName.GARBAGE_OUTPUT, f"an empty answer {during}: {failure.detail}"
                )
            case _:
                name, what = BrokenName.UNKNOWN, "the request failed while the server lived on"
        return Broken(
            name=name,
            finding=Finding(
                phase=Phase.SERVING,
                cause=failure.detail,
                explanation=f"{what} {during}: {failure.detail}",
                facts=Pairs(asked),
            ),
        )

    def _unfit(
        self, name: UnfitName, explanation: str, *, facts: Mapping[str, Scalar] | None = None
    ) -> Unfit:
        return Unfit(
            name=name,
            finding=Finding(
                phase=Phase.SERVING, cause=explanation, explanation=explanation,
                facts=Pairs(facts or {}),
            ),
        )  # fmt: skip


def _one_unit(text: str) -> bool:
    """Tell whether a text is nothing but one short unit, over and over."""
    stripped = text.strip()
    return len(stripped) >= 16 and re.fullmatch(r"(?s)(\S{1,8}\s*?)\1+", stripped) is not None


def _with_clock_doubt(summary: Summary, timed: list[Sample]) -> Summary:
    """Attach a doubt where the server's own decode time differs from ours by more than 3 %."""
    ratios = []
    for sample in timed:
        n, ms = sample.server.get("predicted_n"), sample.server.get("predicted_ms")
        ours = sample.decode_tok_s
        if isinstance(n, int) and isinstance(ms, int | float) and ms > 0 and n > 1 and ours:
            ratios.append(ours / ((n - 1) / ms * 1000))
    if ratios and abs(statistics.median(ratios) - 1) > _CLOCKS_TOLERANCE:
        return replace(summary, doubts=(*summary.doubts, Doubt.CLOCKS_DISAGREE))
    return summary


__all__ = ["MODEL_VARIANT", "Job", "Progress", "Watch", "attempt"]
