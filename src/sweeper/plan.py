"""What a study would do: its size, what is out and why, the first boots. Boots nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from sweeper.conf import Leaderboard, Loaded, outline
from sweeper.core.launch import Launch
from sweeper.core.memory import Estimate, Excess, excess
from sweeper.core.outcome import Attempt, Failure, Measured
from sweeper.core.pairs import Pairs, Point
from sweeper.engines import EngineOptions, ModelFacts, capacity_of, estimated, no_draft_layers
from sweeper.host import available_bytes
from sweeper.models import described_models
from sweeper.orchestrate import job_of
from sweeper.places import ConfDirs
from sweeper.search.study import Search
from sweeper.trial import Job

_PORT = 8080


def make_plan(loaded: Loaded, attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Return the plan as one JSON-ready document; sizes in bytes."""
    study = loaded.study
    problems: list[str] = []
    found = loaded.engine.find(loaded.options)
    if isinstance(found, EngineOptions):
        options = found
    else:
        options = loaded.options
        problems.append(_explained(found))
    models, absent = described_models(loaded.model)
    problems += absent
    job = job_of(loaded, models, options)
    search = Search(study, job, None, attempts)
    device = study.device_memory_bytes
    stated = (each for each in (device, study.memory_limit_bytes) if each is not None)
    available = min(stated, default=None)
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
            if device is not None:
                fit[_fit(_need(job, point, device)[1].fits)] += 1
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
            "command": list(launch.argv) if isinstance(launch, Launch) else [],
            "env": dict(launch.env) if isinstance(launch, Launch) else {},
            "attach": None if isinstance(launch, Launch) else launch.base_url,
            "memory_parts_bytes": dict(footprint.parts),
            "memory_needed_bytes": round(footprint.total_bytes + (overhead or 0)),
        }
        if device is not None:
            needs, beyond = _need(job, point, device)
            each |= {
                "memory_parts_bytes": {name: round(size.mean) for name, size in needs.parts},
                "memory_needed_bytes": round(needs.mean),
                "memory_spread_bytes": round(needs.spread),
                "memory_excess_bytes": round(beyond.mean),
                "fits": round(beyond.fits, 3),
            }
        first.append(each)
    return {
        "study": study.name,
        "description": study.description,
        "engine": study.engine_name,
        "model": study.model_name,
        "hardware": study.hardware_name,
        "problems": problems,
        "notes": _notes(loaded, models),
        "points_declared": declared,
        "points_out_by_rule": by_rule,
        "points_out_by_boots": reasons,
        "points_left": left,
        "points_by_fit": None if device is None else fit,
        "boots_done": search.boots,
        "boots_budget": study.budget.boots,
        "memory_available_bytes": available_bytes() if available is None else available,
        "device_memory_bytes": device,
        "unified_memory": study.unified_memory,
        "memory_limited": study.memory_limit_bytes is not None,
        "engine_overhead_bytes": None if overhead is None else round(overhead),
        "first": first,
        "out": out,
    }


_FIT = ("likely", "unsure", "hardly")


def _fit(probability: float) -> str:
    return "likely" if probability >= 0.9 else "hardly" if probability <= 0.1 else "unsure"


def _need(job: Job, point: Point, device_memory_bytes: int) -> tuple[Estimate, Excess]:
    """Return what a point needs of the card, and by how much that is above what it may take."""
    settings = job.settings(point)
    needs = estimated(job.engine, settings, job.model(point))
    return needs, excess(needs, capacity_of(job.engine, settings, device_memory_bytes))


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
        lines.append(
            "memory needed: as estimated before any boot, give or take a standard deviation"
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
            f"{index}. {Pairs(each['point'])}",
            f"   needs about {_mib(each['memory_needed_bytes'])}{_sure(each)} ({parts})",
            f"   {command}",
        ]
    return "\n".join(lines)


def _sure(each: dict[str, Any]) -> str:
    if "fits" not in each:
        return ""
    room = -each["memory_excess_bytes"]
    where = f"{_mib(room)} to spare" if room >= 0 else f"{_mib(-room)} too much"
    return f" +- {_mib(each['memory_spread_bytes'])}, {where}, fits with {each['fits']:.0%}"


def _mib(size: float) -> str:
    mib = size / 2**20
    return f"{mib:,.0f} MiB" if mib < 10_000 else f"{mib / 1024:,.1f} GiB"
