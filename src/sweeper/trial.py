"""One attempt at a point: boot, prove, warm up, measure, stop. The order, and nothing else."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from sweeper.core.known import Known
from sweeper.core.launch import Attach, Death, Launch, Phase
from sweeper.core.objectives import described
from sweeper.core.outcome import Attempt, Infeasible, InfeasibleName, Outcome, Timings
from sweeper.core.pairs import Pairs, Point
from sweeper.engines import told
from sweeper.job import MODEL_VARIANT, Job
from sweeper.measuring import Progress, Protocol, Session, Watch
from sweeper.server import Attached, Registry, Server, free_port, serving

PROTOCOL_SCHEMA = 2
"""Changes when the same workload is measured in another way: such figures are not comparable."""


def attempt(
    job: Job, point: Point, *, number: int, trial: int, folder: Path, registry: Registry,
    watch: Watch, known: Known | None = None, confirms: int | None = None, brief: bool = False,
    prove: bool = True,
) -> Attempt:  # fmt: skip
    """Boot the point, prove its context, measure it, stop it, and return what came of it.

    `known` is what the study has found out by now, `confirms` the attempt that this one measures
    again; `brief` only boots, proves (unless `prove` is false) and asks for one short answer of
    each stream, to see whether it works. Whatever the engine does is an outcome of the attempt.
    Raises only for bugs of our own and KeyboardInterrupt; the engine is gone in every case.
    """
    started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    began = time.perf_counter()
    settings, model = job.settings(point), job.model(point)
    launch = job.launch(point, free_port())
    log: list[str] = []
    boot_s: float | None = None

    def read(line: str) -> None:
        log.append(line)
        # What a server prints of its requests is read late, and is no step of the boot.
        phase = job.engine.milestone(line) if boot_s is None else None
        if phase is not None:
            watch(_booting(phase, told(job.engine, line)))

    watch(Progress(stage="boot", detail="starting"))
    protocol = Protocol(workload=job.workload, also=job.also, guard=job.guard)
    session = Session(
        engine=job.engine, settings=settings, model=model,
        protocol=protocol.brief(prove=prove) if brief else protocol,
        known=known if known is not None else Known(),
        first_request_timeout_s=job.options.first_request_timeout_s,
        brings_template=job.brings_template,
        began=began, log=log, watch=watch,
    )  # fmt: skip
    with serving(launch, log_path=folder / "engine.log", registry=registry, watch=read) as started:
        match started.result:
            case Server() | Attached() as server:
                boot_s = server.ready_after_s
                outcome = session.measure(server)
            case Death() as death:
                outcome = job.engine.verdict(death, log)
    stopped = started.stopped
    if stopped is not None and stopped.held_bytes:
        session.notes.append(
            f"{stopped.held_bytes / 2**20:,.0f} MiB of device memory were still held after the "
            "engine was gone: the next boot may find less than this one"
        )
    if session.dead_at_tokens is not None and isinstance(launch, Launch):
        outcome = _survivable(
            job, point, outcome, session, folder=folder, registry=registry, watch=watch
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
            prove_s=session.prove_s,
            measure_s=session.measure_s,
            stop_s=None if stopped is None else stopped.took_s,
            total_s=time.perf_counter() - began,
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
            schema=PROTOCOL_SCHEMA,
            max_tokens=job.workload.max_tokens,
            temperature=job.workload.temperature,
            also=", ".join(each.name for each in job.also),
            objectives=described(job.objectives),
            memory_left_bytes=job.memory_left_bytes,
        ),
        samples=tuple(session.samples),
        notes=tuple(session.notes),
        port_argument=launch.port_argument if isinstance(launch, Launch) else None,
        confirms=confirms,
        brief=brief,
    )


def _booting(phase: Phase, parts: tuple[int, int] | None) -> Progress:
    """Return where a boot is: its phase in words, and how much of that is done where it is told."""
    words = _PHASES.get(phase, phase.value)
    if parts is None:
        return Progress(stage="boot", detail=words)
    done, of = parts
    detail = f"{words} {done} %" if of == 100 else f"{words} {done}/{of}"
    return Progress(stage="boot", detail=detail, done=done / of)


_PHASES = {
    Phase.SPAWN: "starting",
    Phase.ARGS: "reading arguments",
    Phase.CONFIG: "reading the model's configuration",
    Phase.DEVICE: "opening the device",
    Phase.WEIGHTS: "loading weights",
    Phase.PROFILING: "profiling memory",
    Phase.CONTEXT: "making the context",
    Phase.KV: "allocating the KV cache",
    Phase.COMPUTE: "allocating compute buffers",
    Phase.DRAFT: "loading the draft model",
    Phase.CAPTURE: "capturing graphs",
    Phase.WARMUP: "warming up",
}


def _survivable(
    job: Job, point: Point, outcome: Outcome, session: Session, *, folder: Path,
    registry: Registry, watch: Watch,
) -> Outcome:  # fmt: skip
    """Find, on fresh boots, how much context an engine survives that died in the proof of it.

    Bisection between nothing and the depth that it died at, as many boots as the job allows. The
    outcome stays what it was: a server that a long prompt kills must not win; but it now says how
    much it holds, and what to try.
    """
    if not isinstance(outcome, Infeasible) or outcome.name is not InfeasibleName.OOM_RUNTIME:
        return outcome
    assert session.dead_at_tokens is not None
    good, bad = 0, session.dead_at_tokens
    for boot in range(1, job.proof_boots + 1):
        middle = (good + bad) // 2
        if middle < 2:
            break
        watch(Progress(stage="prove", detail=f"booted again to prove {middle:,} tokens"))
        launch = job.launch(point, free_port())
        log = folder / f"engine-proof-{boot}.log"
        with serving(launch, log_path=log, registry=registry, watch=lambda _line: None) as again:
            match again.result:
                case Server() | Attached() as server:
                    survived = session.prove_only(server, middle)
                case Death():
                    break
        good, bad = (middle, bad) if survived else (good, middle)
    facts = Pairs(
        {
            **outcome.finding.facts,
            "dead_at_tokens": bad,
            **({"largest_proven_tokens": good} if good else {}),
        }
    )
    return replace(outcome, finding=replace(outcome.finding, facts=facts))


__all__ = ["MODEL_VARIANT", "Job", "Progress", "Watch", "attempt"]
