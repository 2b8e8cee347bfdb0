"""Optuna's samplers by name, set up as measurements say they search best."""

from __future__ import annotations

import warnings

from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, NSGAIISampler, QMCSampler, RandomSampler, TPESampler

from sweeper.core.study import SamplerChoice


def build_sampler(choice: SamplerChoice, seed: int) -> BaseSampler:
    """Return the sampler; the name was checked when the configuration was read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        match choice.name:
            case "tpe":
                # Optuna's own default for several objectives models each axis alone, and found
                # less of the front in every comparison.
                return TPESampler(
                    seed=seed, multivariate=True, group=True, n_startup_trials=choice.startup
                )
            case "nsga2":
                return NSGAIISampler(seed=seed, population_size=max(choice.startup, 4))
            case "random":
                return RandomSampler(seed=seed)
            case "qmc":
                return QMCSampler(seed=seed)
    raise ValueError(f"there is no sampler called {choice.name}")


def learns_from_pruned(choice: SamplerChoice) -> bool:
    """Tell whether the sampler reads a constraint without objective values.

    TPE does; the others read complete trials only, so they are told the worst values there are.
    """
    return choice.name == "tpe"
