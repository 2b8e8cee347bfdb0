"""Whether a recipe still holds: boot what it starts, measure it by the same protocol, compare."""

from __future__ import annotations

import enum
import json
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sweeper.core.known import Known
from sweeper.core.launch import Death, Launch
from sweeper.core.outcome import Failure, Infeasible, Measured, Outcome, kind, name, ran_out
from sweeper.core.quality import Guard
from sweeper.core.stats import Doubt, Summary
from sweeper.core.study import workload_of
from sweeper.core.workload import Workload
from sweeper.engines import Engine, ModelFacts, load_engine
from sweeper.host import host_facts
from sweeper.measuring import Protocol, Session, Watch
from sweeper.models import checksum
from sweeper.recipe import Recipe, RecipeError, read_recipe
from sweeper.server import Registry, Server, free_port, serving

MOST_BOOTS = 5
"""How often a recipe is booted, of whose boots one ran out of memory."""
TOLERANCE = 0.05
"""How far the new median may be below the old one: two boots of one configuration differ."""


class Verdict(enum.StrEnum):
    """What came of it; the value is what is printed."""

    PASS = "PASS"  # noqa: S105 - not a password
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def exit_code(self) -> int:
        """Return 0 for PASS, 1 for FAIL, 2 for INCONCLUSIVE."""
        return list(Verdict).index(self)


class VerifyError(Exception):
    """A recipe that cannot be verified at all; says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A verdict with its reasons, the recorded figure and the new one, where there is one.

    `held` of `boots` worked, where it was booted.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    recipe: Recipe
    outcome: Outcome | None = None
    held: int | None = None
    boots: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as one JSON document."""
        recorded = self.recipe.decode_tok_s
        found: dict[str, Any] = {
            "verdict": self.verdict.value,
            "reasons": list(self.reasons),
            "study": self.recipe.study,
            "attempt": self.recipe.attempt,
            "recorded": {
                "decode_tok_s": [recorded.low, recorded.median, recorded.high],
                "window_tokens": self.recipe.window_tokens,
            },
            "measured": None,
            "boots": self.boots,
            "boots_held": self.held,
        }
        if isinstance(self.outcome, Measured):
            speed = self.outcome.decode_tok_s
            found["measured"] = {
                "decode_tok_s": [speed.low, speed.median, speed.high],
                "window_tokens": self.outcome.context.window_tokens,
                "doubts": [each.value for each in speed.doubts],
            }
        return found

    @property
    def lines(self) -> tuple[str, ...]:
        """The verdict in lines for a terminal."""
        recorded = self.recipe.decode_tok_s
        lines = [
            f"{self.verdict.value}  {self.recipe.study}, attempt {self.recipe.attempt}",
            f"recorded  {_interval(recorded.median, recorded.low, recorded.high)}, "
            f"{self.recipe.window_tokens:,} tokens of context",
        ]
        if isinstance(self.outcome, Measured):
            speed = self.outcome.decode_tok_s
            lines.append(
                f"measured  {_interval(speed.median, speed.low, speed.high)}, "
                f"{self.outcome.context.window_tokens:,} tokens of context"
                + (f" (doubts: {', '.join(speed.doubts)})" if speed.doubts else "")
            )
        return (*lines, *(f"          {each}" for each in self.reasons))


def verify(path: Path, *, watch: Watch, boot_timeout_s: float = 600.0) -> Verified:
    """Boot the recipe in this file, measure it as it was measured, and judge.

    FAIL without a boot where the file starts another command than was exported, or its model is
    another one. Raises VerifyError where nothing can be said: no recipe, a form that starts
    nothing, a secret that is not kept, a study whose workload is not known any more.
    """
    try:
        recipe = read_recipe(path)
    except RecipeError as error:
        raise VerifyError(str(error)) from None
    if recipe.command is None:
        raise VerifyError(f"{path}: a recipe of the form {recipe.form} starts nothing to verify")
    if changes := (*recipe.differs(), *_other_model(recipe)):
        return Verified(verdict=Verdict.FAIL, reasons=changes, recipe=recipe)
    engine = _engine(recipe)

    def boot(*, brief: bool) -> Outcome:
        return _measured(recipe, engine, watch=watch, boot_timeout_s=boot_timeout_s, brief=brief)

    outcomes = [boot(brief=False)]
    while _ran_out(outcomes) and len(outcomes) < MOST_BOOTS:
        # Memory differs from boot to boot: one ending for lack of it does not say how often.
        known = any(isinstance(each, Measured) for each in outcomes)
        outcomes.append(boot(brief=known))
    return judged(recipe, *outcomes, conditions=_conditions(recipe))


def _ran_out(outcomes: Sequence[Outcome]) -> int:
    """Return how many of these ended for lack of memory."""
    return sum(ran_out(each) for each in outcomes)


def judged(recipe: Recipe, *outcomes: Outcome, conditions: tuple[str, ...] = ()) -> Verified:
    """Return the verdict on new boots of a recipe, the first of them measured in full.

    Where the first ran out of memory there are more. FAIL: two of them or more ran out of memory,
    which what works 19 times of 20 hardly does; INCONCLUSIVE: one of them did.

    Of the measurement itself, FAIL: it does not work any more, proves less context, or its
    interval lies below the recorded one by more than the tolerance. INCONCLUSIVE: doubts or a wide
    interval leave it open, the conditions are others, or it is faster by more than the tolerance,
    which needs a reason too.
    """
    failed = _ran_out(outcomes)
    held = sum(isinstance(each, Measured) for each in outcomes)
    if failed and len(outcomes) > 1:
        first = next(each for each in outcomes if isinstance(each, Infeasible))
        measured = next((each for each in outcomes if isinstance(each, Measured)), first)
        return Verified(
            verdict=Verdict.FAIL if failed > 1 else Verdict.INCONCLUSIVE,
            reasons=(
                f"it worked in {held} of {len(outcomes)} boots; {name(first)}: "
                f"{first.finding.explanation}",
                *conditions,
            ),
            recipe=recipe, outcome=measured, held=held, boots=len(outcomes),
        )  # fmt: skip
    verified = _judged(recipe, outcomes[0], conditions)
    return replace(verified, held=held, boots=len(outcomes))


def _judged(recipe: Recipe, outcome: Outcome, conditions: tuple[str, ...]) -> Verified:
    reasons = list(conditions)
    if not isinstance(outcome, Measured):
        reasons.insert(0, f"{name(outcome)}: {outcome.finding.explanation}")
        # What is nobody's fault, such as a port that was taken, says nothing of the recipe.
        verdict = (
            Verdict.INCONCLUSIVE if kind(outcome) in ("broken", "host_fault") else Verdict.FAIL
        )
        return Verified(verdict=verdict, reasons=tuple(reasons), recipe=recipe, outcome=outcome)
    proven = outcome.context.window_tokens
    if proven < recipe.window_tokens:
        reasons.insert(
            0, f"only {proven:,} tokens of context were proven, and {recipe.window_tokens:,} before"
        )
        return Verified(
            verdict=Verdict.FAIL, reasons=tuple(reasons), recipe=recipe, outcome=outcome
        )
    verdict, why = _compared(recipe, outcome.decode_tok_s)
    if conditions and verdict is Verdict.FAIL:
        verdict = Verdict.INCONCLUSIVE  # the difference may be that of the conditions
    return Verified(verdict=verdict, reasons=(why, *reasons), recipe=recipe, outcome=outcome)


def _compared(recipe: Recipe, new: Summary) -> tuple[Verdict, str]:
    old = recipe.decode_tok_s
    least, most = old.median * (1 - TOLERANCE), old.median * (1 + TOLERANCE)
    within = f"within {TOLERANCE:.0%} of the recorded median"
    if least <= new.median <= most or (new.low <= old.high and new.high >= old.low):
        return Verdict.PASS, f"the new median is {within}, or the intervals overlap"
    disturbed = [each.value for each in new.doubts if each in (Doubt.CONTENDED, Doubt.THROTTLED)]
    if disturbed:
        return Verdict.INCONCLUSIVE, f"the machine was disturbed meanwhile: {', '.join(disturbed)}"
    if new.high < min(least, old.low):
        return Verdict.FAIL, f"slower: all of the new interval is below {least:.1f} tok/s"
    if new.low > max(most, old.high):
        return Verdict.INCONCLUSIVE, "faster than recorded: something has changed"
    return Verdict.INCONCLUSIVE, "the intervals are too wide to tell"


# --- the parts ------------------------------------------------------------------------------------


def _engine(recipe: Recipe) -> Engine:
    identity = _identity(recipe)
    params = {
        key.removeprefix("engine.params."): value
        for key, value in identity.items()
        if key.startswith("engine.params.")
    }
    engine_name = str(recipe.engine.get("name"))
    try:
        return load_engine(engine_name, params or None)
    except (LookupError, ValueError) as error:
        raise VerifyError(f"the engine of this recipe cannot be had: {error}") from None


def _identity(recipe: Recipe) -> dict[str, Any]:
    """Return the study as it was declared when the recipe was measured."""
    path = Path(recipe.study_folder) / "study.json"
    if not path.is_file() and recipe.path.parent.name == "recipes":
        path = recipe.path.parent.parent / "study.json"  # the study's folder was moved
    try:
        identity = json.loads(path.read_text())["identity"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VerifyError(
            f"{path} is needed to measure by the same protocol, and cannot be read ({error}); "
            "keep the recipe in the folder of its study"
        ) from None
    assert isinstance(identity, dict)
    return identity


def _workload(recipe: Recipe) -> Workload:
    try:
        workload = workload_of(_identity(recipe))
    except (TypeError, ValueError, KeyError) as error:
        raise VerifyError(f"the workload of study {recipe.study} is not known: {error}") from None
    if workload.digest() != recipe.workload.get("digest"):
        raise VerifyError(
            f"study {recipe.study} has another workload by now than this recipe was measured with; "
            "export it again from the study's last run"
        )
    return workload


def _measured(
    recipe: Recipe, engine: Engine, *, watch: Watch, boot_timeout_s: float, brief: bool
) -> Outcome:
    protocol = Protocol(workload=_workload(recipe), guard=Guard())
    command = recipe.command
    assert command is not None
    if any("***" in str(each) for each in (*command.argv, *command.env.values())):
        raise VerifyError(
            "the recipe was measured with a secret that is not kept: write it into the file, in "
            "place of ***"
        )
    if shutil.which(command.argv[0]) is None:
        raise VerifyError(f"{command.argv[0]} is not on this machine")
    port = free_port()
    try:
        argv = command.on_port(port)
    except RecipeError as error:
        raise VerifyError(str(error)) from None
    launch = Launch(
        argv=argv,
        env=command.env,
        host="127.0.0.1",
        port=port,
        health_path=recipe.health_path,
        boot_timeout_s=boot_timeout_s,
        stop_timeout_s=10.0,
        memory_limit_bytes=command.memory_limit_bytes,
    )
    log: list[str] = []
    model = ModelFacts(
        name=str(recipe.model.get("name")),
        path=str(recipe.model.get("path")),
        served_name=str(recipe.model.get("name")),
        size_bytes=0,
        sha256=str(recipe.model.get("sha256") or ""),
    )
    session = Session(
        engine=engine, settings=None, window=recipe.window_tokens, model=model,
        protocol=protocol.brief() if brief else protocol, known=Known(),
        first_request_timeout_s=boot_timeout_s, began=time.perf_counter(), log=log, watch=watch,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="sweeper-verify-") as folder:
        registry = Registry(Path(folder) / "started.json")
        with serving(
            launch, log_path=Path(folder) / "engine.log", registry=registry, watch=log.append
        ) as started:
            match started.result:
                case Death() as death:
                    failed: Failure = engine.verdict(death, log)
                    return failed
                case Server() as server:
                    return session.measure(server)
    raise AssertionError("a recipe is never somebody else's server")


def _other_model(recipe: Recipe) -> tuple[str, ...]:
    """Return that the model's file is not the measured one, where that can be seen."""
    recorded, path = recipe.model.get("sha256"), Path(str(recipe.model.get("path") or ""))
    if not isinstance(recorded, str) or not re.fullmatch(r"[0-9a-f]{64}", recorded):
        return ()
    if not path.is_file():
        return ()
    found = checksum(path)
    return () if found == recorded else (f"{path} is another model: SHA-256 {found[:12]}…",)


def _conditions(recipe: Recipe) -> tuple[str, ...]:
    """Return in what this machine is not the one that the recipe was measured on."""
    here = host_facts()
    titles = {"gpu": "GPU", "gpu_driver": "GPU driver", "cpu": "processor"}
    return tuple(
        f"measured elsewhere: {title} was {recipe.host.get(key)} and is {here.get(key)}"
        for key, title in titles.items()
        if recipe.host.get(key) != here.get(key)
        # The processor says little of what a card did.
        and not (key == "cpu" and recipe.host.get("gpu") is not None)
    )


def _interval(median: float, low: float, high: float) -> str:
    return f"{median:.1f} tok/s ({low:.1f} to {high:.1f})"


__all__ = ["Verdict", "Verified", "VerifyError", "judged", "verify"]
