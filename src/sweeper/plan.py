"""What a study would do: its size, what is out and why, the first boots. Boots nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweeper.conf import Assumed, Leaderboard, Loaded, outline
from sweeper.core.eta import Kind, Plan, Spent, expected_again, kind_of, time_left
from sweeper.core.launch import Launch
from sweeper.core.memory import Estimate, Excess, MemoryModel, excess
from sweeper.core.outcome import Attempt, Failure, Measured
from sweeper.core.pairs import Pairs, Point, Scalar, text
from sweeper.core.reliability import mib, spread_of
from sweeper.core.standing import front_among
from sweeper.core.study import Study
from sweeper.core.typed import FieldError
from sweeper.engines import (
    EngineOptions,
    ModelFacts,
    capacity_of,
    estimated,
    no_draft_layers,
)
from sweeper.host import available_bytes
from sweeper.job import Job
from sweeper.joining import job_of
from sweeper.models import described_models
from sweeper.places import ConfDirs
from sweeper.search.facts import learnt_from
from sweeper.search.study import Search

_PORT = 8080


def make_plan(loaded: Loaded, attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Return the plan as one JSON-ready document; sizes in bytes."""
    study = loaded.study
    job, models, problems = looking_ahead(loaded)
    learnt = learnt_from(job, attempts)
    search = Search(study, job, None, attempts)
    device = study.device_memory_bytes
    stated = (each for each in (device, study.memory_limit_bytes) if each is not None)
    available = min(stated, default=None)
    unweighed = _unweighed(models) if not attempts else []
    judged = None if unweighed else device
    overhead = _overhead(attempts)

    by_rule = {rule.reason: 0 for rule in study.space.rules}
    reasons: dict[str, int] = {}
    declared = left = 0
    fit = dict.fromkeys(_FIT, 0)
    out: list[dict[str, Any]] = []
    for values in study.space.declared():
        declared += 1
        rule = study.space.refused_by(values)
        if rule is not None:
            by_rule[rule.reason] += 1
            continue
        point = Pairs(values)
        reason = search.refusal(point)
        if reason is None:
            left += 1
            if judged is not None:
                fit[_fit(need_of(job, point, judged, learnt)[1].fits)] += 1
            continue
        short = reason.split(",", 1)[0] if reason.startswith("booted") else reason
        reasons[short] = reasons.get(short, 0) + 1
        out.append({"point": dict(point), "reason": reason})
    first = []
    for _ in range(loaded.plan_points):
        proposal = search.ask()
        if proposal is None:
            break
        point = proposal.point
        footprint = job.engine.footprint(job.settings(point), job.model(point))
        launch = job.launch(point, _PORT)
        each: dict[str, Any] = {
            "point": dict(point),
            "why": proposal.why,
            "command": list(launch.argv) if isinstance(launch, Launch) else [],
            "env": dict(launch.env) if isinstance(launch, Launch) else {},
            "attach": None if isinstance(launch, Launch) else launch.base_url,
            "memory_parts_bytes": dict(footprint.parts),
            "memory_needed_bytes": round(footprint.total_bytes + (overhead or 0)),
        }
        if judged is not None:
            needs, beyond = need_of(job, point, judged, learnt)
            each |= {
                "memory_parts_bytes": {name: round(size.mean) for name, size in needs.parts},
                "memory_needed_bytes": round(needs.mean),
                "memory_spread_bytes": round(needs.spread),
                "memory_excess_bytes": round(beyond.mean),
                "fits": round(beyond.fits, 3),
            }
        first.append(each)
    base = Pairs(first[0]["point"]) if first else next(study.space.points(), None)
    return {
        "study": study.name,
        "description": study.description,
        "engine": study.engine_name,
        "model": study.model_name,
        "hardware": study.hardware_name,
        "problems": problems,
        "weights_known": not unweighed,
        "notes": [*unweighed, *_notes(loaded, models)],
        "points_declared": declared,
        "points_out_by_rule": by_rule,
        "points_out_by_boots": reasons,
        "points_left": left,
        "points_by_fit": None if judged is None else fit,
        "boots_done": search.boots,
        "boots_budget": study.budget.boots,
        "memory_available_bytes": available_bytes() if available is None else available,
        "device_memory_bytes": device,
        "unified_memory": study.unified_memory,
        "memory_left_asked_bytes": study.memory_left_bytes,
        "memory_boot_spread_bytes": spread_of(attempts),
        "memory_limited": study.memory_limit_bytes is not None,
        "engine_overhead_bytes": None if overhead is None else round(overhead),
        "memory_by_axis": None if base is None else memory_by_axis(job, base, learnt),
        "duration": duration(
            study, attempts, loaded.assumed, boots_done=search.boots, window=_window(job, first)
        ),
        "first": first,
        "out": out,
    }


_FIT = ("likely", "unsure", "hardly")


def _fit(probability: float) -> str:
    return "likely" if probability >= 0.9 else "hardly" if probability <= 0.1 else "unsure"


def looking_ahead(
    loaded: Loaded,
) -> tuple[Job, Mapping[str | None, ModelFacts], list[str]]:
    """Return the job as far as it is known here, its models, and what is missing to start."""
    problems: list[str] = []
    found = loaded.engine.find(loaded.options)
    if isinstance(found, EngineOptions):
        options = found
    else:
        options = loaded.options
        problems.append(_explained(found))
    models, absent = described_models(loaded.model)
    job = job_of(loaded, models, options)
    problems += absent
    if (lacks := job.without_template()) is not None:
        problems.append(lacks)
    return job, models, problems


def need_of(
    job: Job, point: Point, device_memory_bytes: float, learnt: MemoryModel
) -> tuple[Estimate, Excess]:
    """Return what a point needs of the card, and by how much that is above what it may take."""
    settings = job.settings(point)
    needs = learnt.corrected(estimated(job.engine, settings, job.model(point)))
    return needs, excess(needs, capacity_of(job.engine, settings, device_memory_bytes))


def memory_by_axis(job: Job, base: Point, learnt: MemoryModel) -> dict[str, Any]:
    """Return what each value of each axis adds to the memory of a point, in bytes.

    Beside the value of the axis that needs least. Estimates of one component are off in the same
    way for all values, so the spread of a difference is the difference of spreads.
    """
    axes: dict[str, list[dict[str, Any]]] = {}
    for axis in job.space.axes:
        if axis.name not in base:
            continue
        needs: list[tuple[Scalar, Estimate]] = []
        for value in axis.values:
            point = _moved(job, base, axis.name, value)
            try:
                settings = job.settings(point)
                needs.append(
                    (value, learnt.corrected(estimated(job.engine, settings, job.model(point))))
                )
            except (FieldError, LookupError):
                continue
        if not needs:
            continue
        least = min((need for _, need in needs), key=lambda need: need.mean)
        axes[axis.name] = [
            {
                "value": value,
                "adds_bytes": round(need.mean - least.mean),
                "adds_spread_bytes": round(_spread_between(need, least)),
            }
            for value, need in needs
        ]
    return {"at": dict(base), "axes": axes}


def _moved(job: Job, base: Point, name: str, value: Scalar) -> Point:
    """Return a point with another value of one axis; axes that this brings in begin with theirs."""
    values: dict[str, Scalar] = {}
    for axis in job.space.axes:
        if axis.active(values):
            values[axis.name] = value if axis.name == name else base.get(axis.name, axis.values[0])
    return Pairs(values)


def _spread_between(one: Estimate, other: Estimate) -> float:
    names = {name for estimate in (one, other) for name, _ in estimate.parts}
    return float(
        sum((one.part(name).spread - other.part(name).spread) ** 2 for name in names) ** 0.5
    )


_CONTEXT_NAMES = ("context", "max_model_len", "ctx_size", "context_tokens", "n_ctx")


def context_axis(job: Job) -> str | None:
    """Return the axis that sets how much context is configured, None where none does."""
    return next(
        (
            axis.name
            for axis in job.space.axes
            if any(name in _CONTEXT_NAMES for name in (axis.name, *axis.sets))
        ),
        None,
    )


def _window(job: Job, first: Sequence[Mapping[str, Any]]) -> int:
    """Return a window in tokens as the first boots have it, in the middle of them."""
    axis = context_axis(job)
    swept = sorted(each["point"].get(axis) or 0 for each in first) if axis is not None else []
    if swept and isinstance(swept[len(swept) // 2], int):
        return int(swept[len(swept) // 2])
    stated = [job.params.get(name) for name in _CONTEXT_NAMES]
    return next((each for each in stated if isinstance(each, int) and each > 0), 8192)


def duration(
    study: Study,
    attempts: Sequence[Attempt],
    assumed: Assumed,
    *,
    boots_done: int,
    window: int,
) -> dict[str, Any]:
    """Return how long the rest of a study takes, in seconds: expected, and 8 cases in 10.

    From its own attempts; before the first, from what the study assumes of a boot and of speeds.
    """
    left = max(study.budget.boots - boots_done, 0)
    spent = [
        Spent(
            kind=kind_of(each),
            seconds=each.timings.total_s,
            measure_s=each.timings.measure_s or 0.0,
        )
        for each in attempts
        if not each.brief
    ]
    each_s: dict[str, float] | None = None
    if not spent:
        each_s = assumed_boot(study, assumed, window)
        spent = [Spent(kind=Kind.FULL, seconds=sum(each_s.values()), measure_s=each_s["measure_s"])]
    again = expected_again(
        front=len(front_among(attempts)),
        boots_done=boots_done,
        boots_left=left,
        rounds=study.confirm.rounds,
        most=study.confirm.boots,
    )
    again = max(again - sum(each.confirms is not None and not each.brief for each in attempts), 0)
    minutes = study.budget.minutes
    reckoned = time_left(
        spent, Plan(boots=left, again=again, seconds=None if minutes is None else minutes * 60)
    )
    assert reckoned is not None
    return {
        "seconds": round(reckoned.seconds),
        "low_s": round(reckoned.low),
        "high_s": round(reckoned.high),
        "boots_left": left,
        "boots_to_confirm": again,
        "attempts": len(attempts),
        "assumed": None
        if each_s is None
        else {
            "decode_tok_s": assumed.decode_tok_s,
            "prefill_tok_s": assumed.prefill_tok_s,
            "window_tokens": window,
            **{name: round(value, 1) for name, value in each_s.items()},
        },
    }


def assumed_boot(study: Study, assumed: Assumed, window: int) -> dict[str, float]:
    """Return how long one boot that is measured to the end takes, part by part, in seconds."""
    measure_s = 0.0
    for workload in (study.workload, *study.also):
        for load in workload.loads(window):
            answer_s = workload.answer_tokens(load, window) / assumed.decode_tok_s
            # The length of a prompt of its own is not known before a server counts it.
            prompt_s = (load.prompt_tokens or 256) * load.streams / assumed.prefill_tok_s
            if workload.minutes is not None:
                measure_s += workload.minutes * 60
                continue
            repeats = workload.repeats
            warm_s = min(repeats.warmup_tokens / assumed.decode_tok_s, answer_s) + prompt_s
            measure_s += repeats.warmup_min * warm_s + repeats.least * (answer_s + prompt_s)
    proof_s = window / assumed.prefill_tok_s
    proof_s += study.workload.proof_answer_tokens / assumed.decode_tok_s
    return {"boot_s": assumed.boot_s, "prove_s": proof_s, "measure_s": measure_s}


def _notes(loaded: Loaded, models: Mapping[str | None, ModelFacts]) -> list[str]:
    """Return what is not swept, and why not, where that follows from the model."""
    if any("n_max" in axis.sets for axis in loaded.study.space.axes):
        return []
    reasons = {why for model in models.values() if (why := no_draft_layers(model)) is not None}
    return [f"no speculation offered: {why}" for why in sorted(reasons)]


def leaderboard_plan(board: Leaderboard, dirs: ConfDirs) -> dict[str, Any]:
    """Return what the studies of a leaderboard are, as their own files say it."""
    return {
        "leaderboard": board.name,
        "description": board.description,
        "workload": board.workload,
        "studies": [outline(name, dirs) for name in board.studies],
    }


def leaderboard_text(plan: dict[str, Any]) -> str:
    """Return the plan of a leaderboard for a person."""
    lines = [
        f"leaderboard {plan['leaderboard']}: {plan['description']}",
        f"shown, not run, on the workload {plan['workload'] or 'that each study compares by'}",
    ]
    for each in plan["studies"]:
        lines += [
            "",
            f"{each['study']}: {each['description']}",
            f"   {each['engine']} serving {each['model']} on {each['hardware']}; "
            f"more: python -m sweeper plan +study={each['study']}",
        ]
        if plan["workload"] is not None and plan["workload"] not in each["workloads"]:
            lines.append(
                f"   measures {', '.join(each['workloads'])}: run it with also=[{plan['workload']}]"
            )
    return "\n".join(lines)


def _unweighed(models: Mapping[str | None, ModelFacts]) -> list[str]:
    """Return of which models not even the size is known, so that what fits cannot be said."""
    return [
        f"the size of {model.name} is not known, so that all memory below is without its weights "
        "and what fits cannot be told: model.path names its file, model.facts.weights_bytes its "
        "size"
        for model in models.values()
        if not model.size_bytes and not Path(model.path).exists()
    ]


def _explained(failure: Failure) -> str:
    return failure.finding.explanation


def _overhead(attempts: Sequence[Attempt]) -> float | None:
    """Return what measured boots needed beyond their footprint: the engine itself, in bytes."""
    beyond = sorted(
        each.outcome.peak_bytes - each.footprint.total_bytes
        for each in attempts
        if isinstance(each.outcome, Measured)
        and each.outcome.peak_bytes is not None
        # A simulated engine asks for memory that it does not use.
        and each.engine.get("simulated") is not True
    )
    return beyond[len(beyond) // 2] if beyond else None


def plan_text(plan: dict[str, Any]) -> str:
    """Return the plan for a person."""
    lines = [
        f"study {plan['study']}: {plan['description']}",
        f"{plan['engine']} serving {plan['model']} on {plan['hardware']}; nothing is booted here",
        "",
    ]
    lines += [f"cannot start yet: {problem}" for problem in plan["problems"]]
    lines += plan["notes"]
    lines.append(f"{plan['points_declared']:>7,} points declared")
    lines += [
        f"{-count:>7,} out by rule: {reason}"
        for reason, count in plan["points_out_by_rule"].items()
        if count
    ]
    lines += [
        f"{-count:>7,} out: {reason}" for reason, count in plan["points_out_by_boots"].items()
    ]
    lines.append(f"{plan['points_left']:>7,} left to choose from")
    if plan["points_by_fit"] is not None:
        likely, unsure, hardly = (plan["points_by_fit"][each] for each in _FIT)
        lines.append(
            f"{likely:>7,} of them likely fit, {unsure:,} may or may not, {hardly:,} hardly"
        )
    lines.append(
        f"{plan['boots_budget']:>7,} boots are the budget, {plan['boots_done']} of them done"
    )
    limited = "the study's limit" if plan["memory_limited"] else "free on this machine now"
    if plan["device_memory_bytes"] is not None:
        limited = (
            "the card's, shared with the processor" if plan["unified_memory"] else "the card's"
        )
    lines += ["", f"memory available: {_mib(plan['memory_available_bytes'])} ({limited})"]
    overhead = plan["engine_overhead_bytes"]
    if plan["device_memory_bytes"] is not None:
        corrected = f", corrected by {plan['boots_done']} boots" if plan["boots_done"] else ""
        lines.append(
            "memory needed: as estimated before any boot, give or take a standard deviation"
            if not corrected
            else f"memory needed: as estimated{corrected}, give or take a standard deviation"
        )
    elif overhead is None:
        lines.append(
            "memory needed: model, cache and buffers as estimated before any boot, without the "
            "engine itself, which the first measured boot will tell"
        )
    else:
        lines.append(
            f"memory needed: as estimated, plus {_mib(overhead)} for the engine as boots showed"
        )
    lines.append(_asked_text(plan["memory_left_asked_bytes"], plan["memory_boot_spread_bytes"]))
    lines += _axes_text(plan["memory_by_axis"])
    lines += ["", *_duration_text(plan["duration"])]
    for index, each in enumerate(plan["first"], 1):
        parts = ", ".join(
            f"{name} {_mib(size)}" for name, size in each["memory_parts_bytes"].items() if size
        )
        if each["attach"] is not None:
            command = f"(measures the server at {each['attach']})"
        else:
            env = [f"{name}={shlex.quote(str(value))}" for name, value in each["env"].items()]
            command = " ".join([*env, shlex.join(each["command"])])
        lines += [
            "",
            f"{index}. {Pairs(each['point'])}" + (f" ({each['why']})" if each["why"] else ""),
            f"   needs about {_mib(each['memory_needed_bytes'])}{_sure(each)} ({parts})",
            f"   {command}",
        ]
    return "\n".join(lines)


def _asked_text(least: float | None, spread: float | None) -> str:
    """Return what a configuration must leave of memory to be on the front."""
    differs = (
        "how much boots of one configuration differ is not known yet"
        if spread is None
        else f"boots of one configuration differ by {mib(spread)}, one standard deviation"
    )
    match least:
        case None:
            asked = "so much that a configuration works 19 times of 20"
        case 0:
            return "memory to be left: nothing is asked for (limits), so a winner may boot by luck"
        case _:
            asked = f"{mib(least)} at least (limits), and so much that it works 19 times of 20"
    return f"memory to be left: {asked}; {differs}"


def _axes_text(by_axis: dict[str, Any] | None) -> list[str]:
    if by_axis is None:
        return []
    lines = []
    for axis, values in by_axis["axes"].items():
        if not any(round(each["adds_bytes"] / 2**20) for each in values):
            continue
        said = []
        for each in values:
            adds, spread = each["adds_bytes"], each["adds_spread_bytes"]
            more = f" +- {_mib(spread)}" if spread >= 2**20 else ""
            said.append(
                f"{text(each['value'])} +{_mib(adds)}{more}" if adds else text(each["value"])
            )
        lines.append(f"   {axis}: {', '.join(said)}")
    if lines:
        at = Pairs(by_axis["at"])
        lines = ["", f"what each value adds to it, beside the least of its axis, at {at}:", *lines]
    return lines


def _duration_text(found: dict[str, Any]) -> list[str]:
    lines = [
        f"time: about {span_text(found['seconds'])} ({span_text(found['low_s'])} to "
        f"{span_text(found['high_s'])} in 8 cases of 10) for {found['boots_left']} boots and some "
        f"{found['boots_to_confirm']} to confirm the front"
    ]
    assumed = found["assumed"]
    if assumed is None:
        lines.append(f"   from the {found['attempts']} attempts so far")
    else:
        lines.append(
            f"   assumed, nothing was booted yet: {assumed['boot_s']:g} s for a boot, "
            f"{assumed['prove_s']:g} s to fill {assumed['window_tokens']:,} tokens, "
            f"{assumed['measure_s']:g} s to measure, at {assumed['decode_tok_s']:g} tok/s and "
            f"{assumed['prefill_tok_s']:g} tok/s of prefill (plan.assumed)"
        )
    return lines


def span_text(seconds: float) -> str:
    """Return a span of time as people say it: 40 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def _sure(each: dict[str, Any]) -> str:
    if "fits" not in each:
        return ""
    room = -each["memory_excess_bytes"]
    where = f"{_mib(room)} to spare" if room >= 0 else f"{_mib(-room)} too much"
    return f" +- {_mib(each['memory_spread_bytes'])}, {where}, fits with {each['fits']:.0%}"


def _mib(size: float) -> str:
    mib = size / 2**20
    return f"{mib:,.0f} MiB" if mib < 10_000 else f"{mib / 1024:,.1f} GiB"
