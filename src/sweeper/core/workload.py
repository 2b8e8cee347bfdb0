"""What is asked of a server while it is measured, as data."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Literal

from sweeper.core.pairs import Pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """How often a load is repeated: until the number is known well enough, within limits.

    Warm-up requests (at most `warmup_max`, each of at most `warmup_tokens` tokens; at least
    `warmup_min`) end when a test on them says that the server is steady. Then at least `least`
    and at most `most` requests are measured; in between, repeats end when the interval of the
    median at `confidence` is within `interval` of the median to either side (a share; None: all
    `most` are made). With `racing` they also end, before `least` too, when the configuration can no
    longer reach the front, or certainly does.
    """

    least: int = 9
    most: int = 20
    interval: float | None = 0.01
    confidence: float = 0.95
    racing: bool = True
    warmup_min: int = 6
    warmup_max: int = 12
    warmup_tokens: int = 256

    def __post_init__(self) -> None:
        for name, least in (
            ("least", 1), ("most", 1), ("warmup_min", 0), ("warmup_max", 0), ("warmup_tokens", 2),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(
                    f"repeats.{name}: must be at least {least}, got {getattr(self, name)}"
                )
        if self.most < self.least:
            raise ValueError(
                f"repeats.most: must be at least repeats.least ({self.least}), got {self.most}"
            )
        if self.warmup_max < self.warmup_min:
            raise ValueError(
                f"repeats.warmup_max: must be at least repeats.warmup_min ({self.warmup_min}), "
                f"got {self.warmup_max}"
            )
        if self.interval is not None and not 0 < self.interval < 1:
            raise ValueError(
                f"repeats.interval: must be a share between 0 and 1, got {self.interval}"
            )
        if not 0.5 < self.confidence < 1:
            raise ValueError(
                f"repeats.confidence: must be above 0.5 and below 1, got {self.confidence}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One thing that is asked of the server: so many streams of prompts of such a length.

    `prompt_tokens` is the exact length of generated text; None is the workload's own prompt.
    """

    prompt_tokens: int | None = None
    streams: int = 1


_OWN_KEYS = {
    "model": "is the model of the study",
    "prompt": "belongs in workload.prompt",
    "messages": "is made of workload.prompt, with workload.api: chat",
    "stream": "is needed to time an answer",
    "stream_options": "is needed to count tokens",
    "max_tokens": "belongs in workload.max_tokens",
    "max_completion_tokens": "belongs in workload.max_tokens",
    "seed": "belongs in workload.seed",
    "temperature": "belongs in workload.temperature",
    "ignore_eos": "belongs in workload.ignore_eos",
    "chat_template_kwargs": "belongs in workload.chat_template",
    "n": "must stay 1: several answers at once are workload.streams",
}
"""The fields of a request that a workload has keys of its own for, or that are the client's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A benchmark: what is asked, how often, by how many streams. Times in seconds.

    Either `prompt` is asked, or each of `prompts` in turn, so that no single text decides how many
    drafts are accepted; or text of exactly the lengths `prompt_tokens`. With `to_window`
    these go on, four times as long each, up to what the window holds beside an answer. Each
    combination of length and number of `streams` is a load of its own, the first one is what the
    search compares. `max_tokens` is the length of an answer. With `minutes` every load is kept up
    without a pause for that long, whatever the repeats say.

    `fresh_prefix` begins every prompt with words of its own, so that no prefix cache can help;
    `cached_runs` then asks one prompt again, so many times, for the named warm-cache figures.
    Request i is sent with `seed` + i. `ignore_eos` makes answers of full length, where the engine
    can. `chat_template` are arguments of the chat template (`enable_thinking`), `request` further
    fields of every request. `proof_answer_tokens` is how many tokens of the window the answer of
    the context proof takes, `proof_turns` in how many turns a conversation grows to the window as
    well; 0: only the one prompt.

    Raises ValueError for what cannot be measured, as `key: what is wrong with it`.
    """

    name: str
    max_tokens: int
    proof_answer_tokens: int
    api: Literal["completion", "chat"] = "completion"
    prompt: str = ""
    prompts: tuple[str, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    to_window: bool = False
    streams: tuple[int, ...] = (1,)
    minutes: float | None = None
    repeats: Repeats = field(default_factory=Repeats)
    fresh_prefix: bool = True
    cached_runs: int = 0
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int | None = 0
    chat_template: Pairs = Pairs()
    request: Pairs = Pairs()
    proof_turns: int = 0
    request_timeout_s: float = 600.0
    silence_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.prompt.strip() and self.prompts:
            raise ValueError(
                "prompts: and prompt are both given; put the one among the others, or empty them "
                "with prompts=[]"
            )
        if any(not each.strip() for each in self.prompts):
            raise ValueError("prompts: each must be a text to answer")
        if len(set(self.prompts)) != len(self.prompts):
            raise ValueError("prompts: must be different texts; one of them stands there twice")
        if self.texts and self.prompt_tokens:
            raise ValueError(
                "prompt: and prompt_tokens are both given; keep the text, or the lengths of texts "
                "that are generated"
            )
        if not self.texts and not self.prompt_tokens:
            raise ValueError(
                "prompt: must be a text to answer; or give several in prompts, or lengths of "
                "generated texts in prompt_tokens"
            )
        if self.to_window and not self.prompt_tokens:
            raise ValueError("to_window: needs prompt_tokens to start from")
        if self.api not in ("completion", "chat"):
            raise ValueError(f"api: must be completion or chat, got {self.api}")
        if self.api == "chat" and self.prompt_tokens:
            raise ValueError(
                "prompt_tokens: only a plain completion can be of an exact length, since a chat "
                "template adds tokens of its own: set api to completion, or ask a prompt"
            )
        if self.api != "chat" and self.chat_template:
            raise ValueError(
                "chat_template: only a chat goes through a template: set api to chat, or leave "
                "this empty"
            )
        if not self.streams:
            raise ValueError("streams: must name at least one number of streams")
        for name, least in (
            ("max_tokens", 2), ("proof_answer_tokens", 1), ("cached_runs", 0), ("proof_turns", 0),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name}: must be at least {least}, got {getattr(self, name)}")
        for name in ("prompt_tokens", "streams"):
            values = list(getattr(self, name))
            if any(value < 1 for value in values) or len(set(values)) != len(values):
                raise ValueError(
                    f"{name}: must be whole numbers above 0, each different, got {values}"
                )
        for name in ("request_timeout_s", "silence_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name}: must be a number of seconds above 0, got {getattr(self, name)}"
                )
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise ValueError(f"minutes: must be above 0, got {self.minutes}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature: must be 0 or more, got {self.temperature}")
        for name in self.request:
            if name in _OWN_KEYS:
                raise ValueError(f"request.{name}: {_OWN_KEYS[name]}; take it out of request")

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that are asked in turn; none where generated texts of exact length are."""
        return self.prompts or ((self.prompt,) if self.prompt.strip() else ())

    def loads(self, window: int) -> Iterator[Load]:
        """Yield what is asked of a server with this window in tokens, the compared load first.

        A prompt that would not fit beside at least two tokens of answer is left out, so there
        may be none at all.
        """
        for length in self._lengths(window):
            for streams in self.streams:
                yield Load(prompt_tokens=length, streams=streams)

    def _lengths(self, window: int) -> Iterator[int | None]:
        if not self.prompt_tokens:
            yield None
            return
        full = window - self.max_tokens
        if not self.to_window or full < 1:
            yield from (each for each in self.prompt_tokens if each <= window - 2)
            return
        # The last one fills the window, so what is longer than it is covered by it.
        yield from (each for each in self.prompt_tokens if each < full)
        longer = max(self.prompt_tokens) * 4
        # A step close to the end would cost minutes and tell nothing new.
        while longer * 1.5 < full:
            yield longer
            longer *= 4
        yield full

    def answer_tokens(self, load: Load, window: int) -> int:
        """Return how long an answer to this load is in this window, in tokens, at least 2.

        How long the workload's own prompt is only the server knows: half the window is its.
        """
        taken = window // 2 if load.prompt_tokens is None else load.prompt_tokens
        return max(2, min(self.max_tokens, window - taken))

    def described(self) -> dict[str, object]:
        """Return the workload as JSON-ready data."""
        found = {
            **asdict(self),
            "request": dict(self.request),
            "chat_template": dict(self.chat_template),
        }
        if not self.prompts:
            del found["prompts"]  # as it was before there were several: the digest stays the same
        return found

    def digest(self) -> str:
        """Return 16 hex digits that change with anything that changes the numbers."""
        return hashlib.sha256(json.dumps(self.described(), sort_keys=True).encode()).hexdigest()[
            :16
        ]
