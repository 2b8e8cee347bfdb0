"""Samplers by name, set up as measurements say they search best; any other by its class."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from optuna.exceptions import ExperimentalWarning
from optuna.samplers import (
    BaseSampler,
    GPSampler,
    NSGAIISampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)

from sweeper.core.evidence import Prior
from sweeper.core.study import SamplerChoice
from sweeper.job import Job
from sweeper.search.facts import roles_of


class SamplerError(ValueError):
    """A sampler that cannot be made as asked; says why."""


def build_sampler(choice: SamplerChoice, seed: int, job: Job, prior: Prior) -> BaseSampler:
    """Return the sampler; raises SamplerError where its class cannot be had or made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        match choice.name:
            case "frontier":
                # Imports scikit-learn, which takes as long as all the rest.
                from sweeper.search.frontier import FrontierSampler

                return FrontierSampler(
                    job.space, roles=roles_of(job.space, job.engine), prior=prior, seed=seed
                )
            case "tpe":
                # Optuna's own default for several objectives models each axis alone, and found
                # less of the front in every comparison.
                return TPESampler(
                    seed=seed, multivariate=True, group=True, n_startup_trials=choice.startup
                )
            case "nsga2":
                return NSGAIISampler(seed=seed, population_size=max(choice.startup, 4))
            case "random" | "grid":
                # The grid is walked by the study itself, which knows what was booted.
                return RandomSampler(seed=seed)
            case "qmc":
                return QMCSampler(seed=seed)
            case "gp":
                _import("torch", "the GP sampler needs PyTorch: pip install 'sweeper[gp]'")
                return GPSampler(seed=seed, n_startup_trials=choice.startup)
            case "target":
                assert choice.target is not None
                return _made(choice.target, dict(choice.arguments))
    raise SamplerError(f"there is no sampler called {choice.name}")


def learns_from_pruned(choice: SamplerChoice) -> bool:
    """Tell whether the sampler reads a constraint without objective values.

    TPE and ours do; the others read complete trials only, so they are told the worst values there
    are.
    """
    return choice.name in ("tpe", "frontier")


def _made(target: str, arguments: dict[str, Any]) -> BaseSampler:
    module, _, name = target.rpartition(".")
    if not module:
        raise SamplerError(f"{target} is no class: write MODULE.CLASS")
    found = getattr(_import(module, f"there is no module {module}"), name, None)
    if not isinstance(found, type) or not issubclass(found, BaseSampler):
        raise SamplerError(f"{target} is not an optuna.samplers.BaseSampler")
    try:
        return found(**arguments)
    except (TypeError, ValueError) as error:
        raise SamplerError(f"{target} cannot be made with {arguments}: {error}") from error


def _import(module: str, otherwise: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SamplerError(f"{otherwise} ({error})") from error
