"""What stays the same over the attempts of a study, and how a point becomes a launch.

Nothing here boots anything: looking ahead needs no client and no supervisor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sweeper.core.launch import Attach, Launch
from sweeper.core.objectives import OBJECTIVES
from sweeper.core.pairs import Pairs, Point
from sweeper.core.quality import Guard
from sweeper.core.space import Space
from sweeper.core.workload import Workload
from sweeper.engines import Engine, EngineOptions, ModelFacts, without_template

_TEMPLATE_ARGUMENTS = ("--chat-template", "--chat-template-file", "--chat_template")
_TEMPLATE_VARIABLES = ("LLAMA_ARG_CHAT_TEMPLATE", "LLAMA_ARG_CHAT_TEMPLATE_FILE")
"""How engines are given a chat template: llama.cpp's and vLLM's."""

MODEL_VARIANT = "model.variant"
"""The one thing an axis may set that is not an engine setting: which file of the model."""


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
    also: tuple[Workload, ...] = ()
    guard: Guard = field(default_factory=Guard)
    objectives: tuple[str, ...] = OBJECTIVES[:2]
    proof_boots: int = 1
    """How often an engine that died in the proof of its context is booted again to find less."""
    memory_left_bytes: int | None = None
    """What a configuration must leave of memory to win (see `Study`)."""
    hardware: Pairs
    host: Pairs

    @property
    def brings_template(self) -> bool:
        """Whether the study gives the engine, or each of its requests, a chat template."""
        words = [*self.options.prefix, *self.options.extra_args]
        for value in self.params.values():
            words += str(value).split() if isinstance(value, str) else []
            words += [str(each) for each in value] if isinstance(value, list | tuple) else []
        return (
            any(each.partition("=")[0] in _TEMPLATE_ARGUMENTS for each in words)
            or any(name in _TEMPLATE_VARIABLES for name in self.options.env)
            or all("chat_template" in each.request for each in self._chats)
        )

    @property
    def _chats(self) -> list[Workload]:
        return [each for each in (self.workload, *self.also) if each.api == "chat"]

    def without_template(self) -> str | None:
        """Return in words that a chat is asked of a model without a template; None: it is not.

        Of a model whose files do not tell nothing is said.
        """
        if not self._chats or self.brings_template:
            return None
        for model in self.models.values():
            if model.facts.get("chat_template") is False:
                return without_template(self._chats[0].name, model.name)
        return None

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
            # A model of one file is its own only variant.
            if MODEL_VARIANT in axis.sets and axis.name in point and None not in self.models:
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
