"""A study for the browser: the attempts that a sweep of `fake_demo` might leave, in no time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.examples import attempt_of, fake_engine_facts, measured_attempt

from sweeper.core.launch import Phase
from sweeper.core.outcome import Attempt, Finding, Infeasible, InfeasibleName, Measured
from sweeper.core.pairs import Pairs
from sweeper.core.sample import DraftCounters
from sweeper.core.standing import front_among
from sweeper.recipe import write_recipes
from sweeper.record.attempts import ENGINE_LOG, Attempts
from sweeper.report import write_front_png, write_page

STUDY = "fake_demo"
_KV_KIB = {"f16": 64, "q8_0": 34, "q4_0": 18}


def simulated_attempts(boots: int) -> Iterator[Attempt]:
    """Yield so many attempts of the search, twenty at most, and the front measured again."""
    made: list[Attempt] = []
    choices = [
        (4096, "f16", 0, 512), (16384, "f16", 0, 128), (32768, "q4_0", 0, 128),
        (8192, "f16", 2, 512), (8192, "q8_0", 2, 512), (4096, "q8_0", 4, 2048),
        (16384, "q8_0", 2, 512), (16384, "q4_0", 4, 512), (32768, "q4_0", 4, 512),
        (2048, "f16", 4, 512), (4096, "q4_0", 8, 512), (32768, "q8_0", 0, 128),
        (16384, "q4_0", 2, 128), (8192, "q4_0", 4, 2048), (32768, "q4_0", 2, 128),
        (2048, "q8_0", 8, 512), (4096, "f16", 2, 512), (16384, "q8_0", 4, 128),
        (8192, "q4_0", 2, 512), (4096, "q4_0", 4, 512),
    ]  # fmt: skip
    for number, (context, kv_type, n_max, batch) in enumerate(choices[:boots], start=1):
        made.append(_attempt(number, context, kv_type, n_max, batch))
        yield made[-1]
    for number, member in enumerate(front_among(made), start=len(made) + 1):
        assert isinstance(member.outcome, Measured)
        yield replace(member, number=number, confirms=member.number, started_at=_started(number))


def _started(number: int) -> str:
    return f"2026-11-29T{17 + number // 30}:{2 * number % 60:02d}:00+00:00"


def _attempt(number: int, context: int, kv_type: str, n_max: int, batch: int) -> Attempt:
    point = Pairs(context=context, kv_type=kv_type, n_max=n_max, batch=batch, flash_attn="on")
    common = {
        "number": number,
        "study": STUDY,
        "engine": fake_engine_facts(),
        "model": Pairs(name="fake", sha256="a" * 64),
        "started_at": _started(number),
    }
    free = 1024 - 400 - batch * 100 // 512 - (64 if n_max else 0)
    wanted = context * _KV_KIB[kv_type] // 1024
    if wanted > free:
        finding = Finding(
            phase=Phase.KV,
            cause=f"fake: cannot allocate {wanted} MiB for kv cache, {free} MiB free of 1024 MiB",
            explanation=f"The kv cache needs {wanted} MiB where {free} MiB are left of 1024 MiB.",
            facts=Pairs(shortfall_bytes=(wanted - free) * 2**20),
        )
        name = InfeasibleName.OOM_KV_CACHE
        return attempt_of(Infeasible(name=name, finding=finding), point=point, **common)
    chance = 0.72 - 0.02 * (number % 3)
    positions = [chance**position for position in range(1, n_max + 1)]
    accepted = sum(positions)
    speed = 50 * (1 + accepted) / (1 + 0.09 * n_max) * (1 - context / 300_000)
    speed *= {"f16": 1.0, "q8_0": 0.98, "q4_0": 0.95}[kv_type]
    attempt = measured_attempt(
        decode_tok_s=round(speed, 2), context=context, proven=context, n_max=n_max, **common
    )
    assert isinstance(attempt.outcome, Measured)
    drafts = None
    if n_max:
        drafts = DraftCounters(
            steps=1000,
            drafted=1000 * n_max,
            accepted=round(1000 * accepted),
            accepted_per_position=tuple(round(1000 * each) for each in positions),
        )
    outcome = replace(attempt.outcome, drafts=drafts, figures=())
    return replace(attempt, point=point, outcome=outcome)


def write_study(studies: Path, *, boots: int = 20) -> list[Attempt]:
    """Write the study into a folder of studies, with report and recipes; return its attempts."""
    folder = studies / STUDY
    attempts = Attempts(folder / "attempts")
    made = list(simulated_attempts(boots))
    for each in made:
        said = [f"fake: boot {each.number}", "fake: loading weights"]
        if not isinstance(each.outcome, Measured):
            said.append(each.outcome.finding.cause)
        (attempts.begin(each.number) / ENGINE_LOG).write_text("\n".join(said) + "\n")
        attempts.commit(each)
    write_front_png(made, folder / "front.png")
    write_page(made, folder / "report.html")
    write_recipes(front_among(made), form="shell", folder=folder / "recipes", study_folder=folder)
    return made
