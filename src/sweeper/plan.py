"""What a study would do: its size, what is out and why, the first boots. Boots nothing."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from sweeper.conf import Loaded
from sweeper.core.launch import Launch
from sweeper.core.outcome import Attempt, Failure, Measured
from sweeper.core.pairs import Pairs
from sweeper.engines import EngineOptions, ModelFacts
from sweeper.host import available_bytes
from sweeper.models import ModelChoice, ModelError, resolve_models
from sweeper.orchestrate import job_of
from sweeper.search.study import Search

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
    models: dict[str | None, ModelFacts]
    try:
        models = resolve_models(loaded.model)
    except ModelError as error:
        problems.append(str(error))
        models = _stated(loaded.model)
    job = job_of(loaded, models, options)
    search = Search(study, job, None, attempts)
    available = (
        study.memory_limit_bytes if study.memory_limit_bytes is not None else available_bytes()
    )
    overhead = _overhead(attempts)

    by_rule = {rule.reason: 0 for rule in study.space.rules}
    for values in study.space.declared():
        rule = study.space.refused_by(values)
        if rule is not None:
            by_rule[rule.reason] += 1
    reasons: dict[str, int] = {}
    left = 0
    out: list[dict[str, Any]] = []
    for point in study.space.points():
        reason = search.refusal(point)
        if reason is None:
            left += 1
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
        first.append(
            {
                "point": dict(point),
                "command": list(launch.argv) if isinstance(launch, Launch) else [],
                "env": dict(launch.env) if isinstance(launch, Launch) else {},
                "attach": None if isinstance(launch, Launch) else launch.base_url,
                "memory_parts_bytes": dict(footprint.parts),
                "memory_needed_bytes": round(footprint.total_bytes + (overhead or 0)),
            }
        )
    return {
        "study": study.name,
        "description": study.description,
        "engine": study.engine_name,
        "model": study.model_name,
        "hardware": study.hardware_name,
        "problems": problems,
        "points_declared": study.space.declared_size(),
        "points_out_by_rule": by_rule,
        "points_out_by_boots": reasons,
        "points_left": left,
        "boots_done": search.boots,
        "boots_budget": study.budget.boots,
        "memory_available_bytes": available,
        "memory_limited": study.memory_limit_bytes is not None,
        "engine_overhead_bytes": None if overhead is None else round(overhead),
        "first": first,
        "out": out,
    }


def _stated(choice: ModelChoice) -> dict[str | None, ModelFacts]:
    """Return what the study itself says of models whose files are not here."""
    names: list[str | None] = list(choice.variants) or [None]
    return {
        name: ModelFacts(
            name=choice.name if name is None else f"{choice.name}:{name}",
            path=str(choice.variants[name] if name is not None else choice.path or "MODEL"),
            served_name=choice.name,
            size_bytes=_stated_size(choice.facts),
            sha256="",
            facts=choice.facts,
            draft_path=choice.draft_path,
        )
        for name in names
    }


def _stated_size(facts: Pairs) -> int:
    size = facts.get("weights_bytes", 0)
    return int(size) if isinstance(size, int | float) else 0


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
    lines.append(
        f"{plan['boots_budget']:>7,} boots are the budget, {plan['boots_done']} of them done"
    )
    limited = "the study's limit" if plan["memory_limited"] else "free on this machine now"
    lines += ["", f"memory available: {_mib(plan['memory_available_bytes'])} ({limited})"]
    overhead = plan["engine_overhead_bytes"]
    lines.append(
        "memory needed: model, cache and buffers as estimated before any boot, without the engine "
        "itself, which the first measured boot will tell"
        if overhead is None
        else f"memory needed: as estimated, plus {_mib(overhead)} for the engine as boots showed"
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
            f"   needs about {_mib(each['memory_needed_bytes'])} ({parts})",
            f"   {command}",
        ]
    return "\n".join(lines)


def _mib(size: float) -> str:
    mib = size / 2**20
    return f"{mib:,.0f} MiB" if mib < 10_000 else f"{mib / 1024:,.1f} GiB"
