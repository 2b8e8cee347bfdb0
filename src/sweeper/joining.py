"""A loaded study, its models and its programs on this host, joined into one job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sweeper.conf import Loaded
from sweeper.core.pairs import Pairs
from sweeper.engines import EngineOptions, ModelFacts
from sweeper.host import host_facts
from sweeper.job import Job


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
        memory_left_bytes=study.memory_left_bytes,
        hardware=hardware,
        host=host_facts(),
    )


def cache_folder(loaded: Loaded) -> Path:
    """Return where the engines of this study cache what they compile.

    A folder of the study's own, so that nothing another version left behind can break it.
    """
    return loaded.studies_dir / loaded.study.name / "cache"
