"""What the end of a vLLM server means, and in what way a live one is not what was asked for.

The phase decides, the text refines, the exit code is last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from sweeper.core.launch import Death, Ended, Phase
from sweeper.core.outcome import (
    Broken,
    BrokenName,
    Diagnosis,
    Failure,
    Finding,
    HostFault,
    HostFaultName,
    Infeasible,
    InfeasibleName,
    Nothing,
    Unfit,
    UnfitName,
)
from sweeper.core.pairs import Pairs, Scalar
from sweeper.engines.vllm import VllmSettings, no_engine
from sweeper.engines.vllm_log import (
    AMOUNT,
    CAPPED,
    TRIED,
    TRUNCATED,
    Cause,
    Name,
    Reading,
    number_of,
    place,
    read,
    size_of,
)

GIB = 2**30

# --- judging ----------------------------------------------------------------------------------

_MEMORY_NAMES: dict[Phase, tuple[InfeasibleName, str]] = {
    Phase.DRAFT: (InfeasibleName.OOM_DRAFT_HEAD, "the draft model"),
    Phase.PROFILING: (InfeasibleName.OOM_ACTIVATION_PROFILING, "the profiling run"),
    Phase.KV: (InfeasibleName.OOM_KV_CACHE, "the KV cache"),
    Phase.CAPTURE: (InfeasibleName.OOM_CUDAGRAPH_CAPTURE, "the CUDA graphs"),
    Phase.WARMUP: (InfeasibleName.OOM_ACTIVATION_PROFILING, "the warm-up"),
    Phase.SERVING: (InfeasibleName.OOM_RUNTIME, "a request"),
}
_REFUSALS = ("AssertionError", "NotImplementedError", "ValueError", "ValidationError")
_PARAMETER = re.compile(r"KeyError: ['\"][\w.]*\.(?:\w*weight\w*|\w*scale\w*|\w*bias|\d+\.\w+)")
_WORKER_KILLED = re.compile(r"died unexpectedly \(exit code: -\d+\)")
_TOLD_TO_STOP = (0, -2, -15, 130, 143)
_LEAST_DRAFTED = 50


def verdict(death: Death, log: Iterable[str]) -> Failure:
    """Return what the end of a vLLM server means: the phase decides, the text refines."""
    if death.ended is Ended.NOT_STARTED:
        return no_engine(death.detail)
    reading = read([death.detail] if death.ended is Ended.LIVES else [], log)
    if death.was_ready:
        reading.up = True
    if death.ended is Ended.PORT_TAKEN:
        return Broken(
            name=BrokenName.PORT_IN_USE,
            finding=reading.finding("another process holds the port", death.detail),
        )
    lives = death.ended is Ended.LIVES
    if death.ended is Ended.SILENT:
        return _silent(reading, death.detail)
    if (failure := _named(reading, lives=lives)) is not None:
        return failure
    if death.ended is Ended.LATE:
        silent = reading.phase is Phase.SPAWN
        stuck = silent or reading.waits_at_the_end or reading.shm_waits > 1
        return Broken(
            name=BrokenName.HANG_BOOT if stuck else BrokenName.BOOT_TIMEOUT,
            finding=reading.finding(
                f"it was not ready after {death.after_s:.0f} s; the last phase it reached was "
                f"{reading.phase.value}",
                reading.last,
            ),
        )
    if lives:
        return Broken(
            name=BrokenName.HTTP_500,
            finding=reading.finding(
                f"the server answered a request with an error: {death.detail}",
                reading.last_error or death.detail,
                phase=Phase.SERVING,
            ),
        )
    return _unexplained(reading, death.exit_code)


def diagnosis(log: Iterable[str], exit_code: int | None) -> Diagnosis:
    """Return what a log means when nothing else is known of the process."""
    reading = read([], log)
    if reading.foreign and not reading.marked:
        return _unknown(reading, "this reads like the log of another program")
    lives = exit_code is None
    if (failure := _named(reading, lives=lives)) is not None:
        return failure
    if lives:
        if reading.waits_at_the_end:
            return Broken(
                name=BrokenName.HANG_BOOT,
                finding=reading.finding(
                    "it waits for its engine process, and nothing came after", reading.last
                ),
            )
        if not reading.marked:
            return _unknown(reading, "this does not read like a log of this engine")
        return Nothing(finding=reading.settled())
    if reading.up and exit_code in _TOLD_TO_STOP and (reading.stopped or exit_code != 0):
        return Nothing(finding=reading.settled())
    if not reading.marked and not reading.compiling:
        return _unknown(reading, "this does not read like a log of this engine")
    return _unexplained(reading, exit_code)


def _ending(name: Name, finding: Finding) -> Failure:
    match name:
        case InfeasibleName():
            return Infeasible(name=name, finding=finding)
        case UnfitName():
            return Unfit(name=name, finding=finding)
        case BrokenName():
            return Broken(name=name, finding=finding)
        case HostFaultName():
            return HostFault(name=name, finding=finding)


def _unknown(reading: Reading, why: str) -> Broken:
    return Broken(
        name=BrokenName.UNKNOWN, finding=reading.finding(why, reading.last_error or reading.last)
    )


def _named(reading: Reading, *, lives: bool) -> Failure | None:
    """Return what the log gives a name to: its first cause, a dead engine, or a bad service."""
    cause = reading.cause
    if cause is None and not lives:
        cause = reading.survived
    if (failure := _caused(reading, cause, lives=lives)) is not None:
        return failure
    if lives and (failure := _service(reading)) is not None:
        return failure
    if cause is not None and reading.marked and not cause.up:
        return _refusal(reading, cause)
    return None


def _caused(reading: Reading, cause: Cause | None, *, lives: bool) -> Failure | None:
    """Return what a cause with a name means, or an engine that died without one."""
    if cause is not None and cause.sign.name != "exception":
        certain = isinstance(cause.sign.name, HostFaultName)
        if certain or reading.marked or reading.kin:
            return _by_sign(reading, cause, lives=lives)
    if reading.died:
        said = cause.line if cause is not None else reading.worker_gone or reading.died
        if _WORKER_KILLED.search(reading.worker_gone):
            said = reading.worker_gone
        return Broken(
            name=BrokenName.ENGINE_DIED_MID_BENCHMARK,
            finding=reading.finding(
                "the engine behind the server died while it was serving", said,
                phase=Phase.SERVING,
            ),
        )  # fmt: skip
    return None


def _by_sign(reading: Reading, cause: Cause, *, lives: bool) -> Failure:
    sign = cause.sign
    if cause.up:
        phase = Phase.SERVING
    elif sign.phase is not None:
        phase = sign.phase
    else:
        phase = place(cause.text()) or cause.then
    match sign.name:
        case "memory":
            return _memory(reading, cause, phase, lives=lives)
        case "fault":
            # An excerpt that shows nothing of a boot was most likely cut from a running server.
            unseen = phase is Phase.SPAWN and not reading.boot_failed
            served = cause.up or unseen or phase is Phase.SERVING
            name = BrokenName.ENGINE_DIED_MID_BENCHMARK if served else BrokenName.ENGINE_CRASH
            phase = Phase.SERVING if served else phase
            return _ending(name, reading.finding(sign.why, cause.line, phase=phase))
        case "hang":
            unseen = phase is Phase.SPAWN and not reading.boot_failed
            served = cause.up or unseen or phase is Phase.SERVING
            name = BrokenName.HANG_RUNTIME if served else BrokenName.HANG_BOOT
            phase = Phase.SERVING if served else phase
            return _ending(name, reading.finding(sign.why, cause.line, phase=phase))
        case "exception":
            return _refusal(reading, cause)
        case _:
            if isinstance(sign.name, InfeasibleName) and phase is Phase.SPAWN:
                phase = Phase.CONFIG
            facts, try_next = _numbers(reading, cause)
            return _ending(
                sign.name,
                reading.finding(
                    sign.why + _said(facts), cause.line, phase=phase, facts=facts,
                    try_next=try_next,
                ),
            )  # fmt: skip


def _refusal(reading: Reading, cause: Cause) -> Failure:
    """Return what an exception of a boot means that no sign names."""
    phase = place(cause.text()) or cause.then
    deliberate = cause.exception in _REFUSALS or _PARAMETER.search(cause.line) is not None
    if deliberate:
        return Infeasible(
            name=InfeasibleName.UNSUPPORTED_COMBINATION,
            finding=reading.finding(
                "the engine refuses this combination of settings", cause.line, phase=phase
            ),
        )
    return Broken(
        name=BrokenName.ENGINE_CRASH,
        finding=reading.finding("the engine failed before it was ready", cause.line, phase=phase),
    )


def _memory(reading: Reading, cause: Cause, phase: Phase, *, lives: bool) -> Failure:
    if phase in (Phase.READY, Phase.SERVING):
        phase = Phase.SERVING
    elif re.search(r"_dummy_sampler_run|warming up sampler", cause.text()):
        # The sampler's sorting is a peak of activations, wherever it is tried.
        phase = phase if phase is Phase.PROFILING else Phase.WARMUP
    elif phase is Phase.SPAWN and "Failed to load model" not in cause.line:
        # Nothing of a boot is in sight: what still lives was serving, and graphs come late.
        if lives:
            phase = Phase.SERVING
        elif "allocated in private pools" in cause.text():
            phase = Phase.CAPTURE
    name, what = _MEMORY_NAMES.get(phase, (InfeasibleName.OOM_WEIGHTS, "the weights"))
    if name is InfeasibleName.OOM_WEIGHTS:
        phase = Phase.WEIGHTS
    asked = reading.memory
    sizes = {
        "requested_bytes": asked.requested,
        "free_bytes": asked.free,
        "total_bytes": asked.total,
    }
    facts: dict[str, Scalar] = {key: size for key, size in sizes.items() if size is not None}
    said = ""
    try_next: dict[str, Scalar] = {}
    if asked.requested is not None:
        said = f": {asked.requested / GIB:.2f} GiB were asked for"
        if asked.free is not None:
            missing = asked.requested - asked.free
            said += f" where {asked.free / GIB:.2f} GiB were free"
            if missing > 0:
                facts["shortfall_bytes"] = missing
            share = reading.facts.number("gpu_memory_utilization")
            # Once the KV pool is there, a smaller share of the card leaves more beside it.
            pooled = phase in (Phase.CAPTURE, Phase.WARMUP, Phase.SERVING)
            if pooled and share is not None and asked.total and missing > 0:
                lower = math.floor(100 * (share - missing / asked.total - 0.005)) / 100
                if lower > 0:
                    try_next["gpu_memory_utilization"] = lower
    return Infeasible(
        name=name,
        finding=reading.finding(
            f"memory ran out for {what}{said}", cause.line, phase=phase, facts=facts,
            try_next=try_next,
        ),
    )  # fmt: skip


def _said(facts: Mapping[str, Scalar]) -> str:
    """Return the numbers that explain a refusal, in words."""
    needed, there = facts.get("kv_needed_bytes"), facts.get("kv_available_bytes")
    if isinstance(needed, int) and isinstance(there, int):
        return f": {needed / GIB:.2f} GiB are needed and {there / GIB:.2f} GiB are there"
    free, wanted = facts.get("free_bytes"), facts.get("desired_bytes", facts.get("requested_bytes"))
    if isinstance(free, int) and isinstance(wanted, int):
        return f": {free / GIB:.2f} GiB were free and {wanted / GIB:.2f} GiB were wanted"
    return ""


# Each takes the text of a cause and what the log told before it; numbers in bytes and tokens.

_FREE_ON_START = re.compile(rf"\({AMOUNT}? ?/ ?{AMOUNT}\).*?utilization \(([\d.]*\d), {AMOUNT}\)")
_FREE_ON_NODE = re.compile(
    rf"memory on node \d+ \({AMOUNT}? ?/ ?{AMOUNT}\).*?requested memory for kv \({AMOUNT}\)"
)
_PROFILE_FREE = re.compile(rf"[Ii]nitial free memory {AMOUNT}.*?current free memory {AMOUNT}")
_NEEDED = re.compile(rf"\(?{AMOUNT} KV cache is needed.*?KV cache memory \({AMOUNT}\)")
_WINDOW_ASKED = re.compile(r"max seq(?:uence)? len(?:gth)? \(([\d,]+)\)")
_ESTIMATE = re.compile(
    r"estimated maximum model length is ([\d,]*\d)|can be stored in (?:the )?KV cache \(([\d,]+)\)"
)
_SEQUENCES = re.compile(r"max_num_seqs \(?=?([\d,]+)\)?.*?\(([\d,]+)\)")
_AT_MOST = re.compile(r"max_num_seqs to at most ([\d,]+)")
_SCHEDULED = re.compile(r"max_num_scheduled_tokens is set to (-?\d+)")
_SLOTS = re.compile(r"max_num_batched_tokens=(\d+).*?num_lookahead_tokens=(\d+)")
_DIVISIBLE = re.compile(r"num_speculative_tokens:? ?=?(\d+) must be divisible by n_predict=(\d+)")
_DERIVED = re.compile(r"max_model_len \((\d+)\).*?\(\w+=([\d.]+)")
_MULTIPLE = re.compile(r"multiple of (\d+) .*? and (\d+) \(tensor_parallel")
_PORT = re.compile(r"(?:[:,] ?|port )(\d{2,5})\b(?!\d|\.\d)")
_STATUS = re.compile(r"\b(40[134]) Client Error")
_PROGRESS = re.compile(r"Capturing CUDA ?graphs?.*?(\d+)/(\d+)")


def _numbers(reading: Reading, cause: Cause) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
    """Return the numbers that a refusal states, and the settings that they make worth a try."""
    text = "\n".join((cause.line, *cause.after))
    facts: dict[str, Scalar] = {}
    following: dict[str, Scalar] = {}

    def whole(word: str) -> int:
        return int(number_of(word) or 0)

    if (found := _FREE_ON_START.search(text)) is not None:
        unit = found[2] or found[4]
        free, total = size_of(found[1], unit), size_of(found[3], found[4])
        facts.update(
            free_bytes=free, total_bytes=total, gpu_memory_utilization=number_of(found[5]),
            desired_bytes=size_of(found[6], found[7]),
        )  # fmt: skip
        if free is not None and total:
            following["gpu_memory_utilization"] = math.floor(100 * free / total) / 100
            wanted = facts["desired_bytes"]
            if isinstance(wanted, int) and wanted > free:
                facts["shortfall_bytes"] = wanted - free
    if (found := _FREE_ON_NODE.search(text)) is not None:
        free, requested = size_of(found[1], found[2] or found[4]), size_of(found[5], found[6])
        facts.update(
            requested_bytes=requested, free_bytes=free, total_bytes=size_of(found[3], found[4])
        )
        if free is not None and requested is not None and requested > free:
            facts["shortfall_bytes"] = requested - free
    if cause.sign.name is InfeasibleName.HOST_RAM_OOM and (found := TRIED.search(text)):
        facts["requested_bytes"] = size_of(found[1], found[2])
    if (found := _PROFILE_FREE.search(text)) is not None:
        facts["initial_free_bytes"] = size_of(found[1], found[2])
        facts["current_free_bytes"] = size_of(found[3], found[4])
    if cause.sign.name is InfeasibleName.OOM_KV_CACHE:
        if (found := _WINDOW_ASKED.search(text)) is not None:
            facts["requested_max_model_len"] = whole(found[1])
        if (found := _NEEDED.search(text)) is not None:
            needed, there = size_of(found[1], found[2]), size_of(found[3], found[4])
            facts.update(kv_needed_bytes=needed, kv_available_bytes=there)
            if needed is not None and there is not None:
                facts["shortfall_bytes"] = needed - there
        elif "kv_cache_bytes" in reading.facts.found:
            facts["kv_available_bytes"] = reading.facts.found["kv_cache_bytes"]
        if (found := _ESTIMATE.search(text)) is not None:
            estimate = whole(found[1] or found[2])
            facts["estimated_max_model_len"] = estimate
            if estimate > 0:
                following["max_model_len"] = estimate
    if cause.sign.name is InfeasibleName.CAPACITY_MAX_NUM_SEQS:
        if (found := _SEQUENCES.search(text)) is not None:
            facts.update(max_num_seqs=whole(found[1]), mamba_blocks=whole(found[2]))
            following["max_num_seqs"] = whole(found[2])
        if (found := _AT_MOST.search(text)) is not None:
            facts["suggested_max_num_seqs"] = following["max_num_seqs"] = whole(found[1])
        if not following.get("max_num_seqs"):
            following.pop("max_num_seqs", None)
    if (found := _SCHEDULED.search(text)) is not None:
        lacking = 1 - int(found[1])
        facts.update(max_num_scheduled_tokens=int(found[1]), missing_batched_tokens=lacking)
        tokens = reading.facts.number("max_num_batched_tokens")
        if tokens is not None:
            following["max_num_batched_tokens"] = int(tokens) + lacking
    if (found := _SLOTS.search(text)) is not None:
        facts.update(max_num_batched_tokens=int(found[1]), num_lookahead_tokens=int(found[2]))
        following["max_num_batched_tokens"] = max(int(found[1]), int(found[2])) + 1
    if (found := _DIVISIBLE.search(text)) is not None:
        drafts, layers = int(found[1]), int(found[2])
        facts.update(num_speculative_tokens=drafts, n_predict=layers)
        if layers > 0:
            following["n_max"] = max(drafts // layers, 1) * layers
    if "derived max_model_len" in text and (found := _DERIVED.search(text)) is not None:
        facts.update(requested_max_model_len=int(found[1]), derived_max_model_len=whole(found[2]))
        following["max_model_len"] = whole(found[2])
    if (found := _MULTIPLE.search(text)) is not None:
        facts.update(spec_plus_one=int(found[1]), tensor_parallel_size=int(found[2]))
    if cause.sign.name is BrokenName.PORT_IN_USE and (found := _PORT.search(text)) is not None:
        facts["port"] = int(found[1])
    if (found := _STATUS.search(text)) is not None:
        facts["http"] = int(found[1])
    if (found := _PROGRESS.search(cause.line)) is not None:
        facts.update(captured=int(found[1]), to_capture=int(found[2]))
    return {key: value for key, value in facts.items() if value is not None}, following


# --- a service that lives ---------------------------------------------------------------------

_LIMIT = re.compile(r"(?:maximum context length (?:is|of)|maximum model length of) ([\d,]+)")
_PROMPT = re.compile(
    r"(?<!upper bound for )\b(\d[\d,]*) (?:input|prompt) tokens|"
    r"\(?([\d,]+) in the (?:messages|prompt)|"
    r"prompt \(length ([\d,]+)\)"
)
_ANSWER = re.compile(
    r"too large: ([\d,]+)|requested ([\d,]+) output tokens|([\d,]+) in the completion"
)
_CHARACTERS = re.compile(r"contains ([\d,]+) characters")


def _service(reading: Reading) -> Failure | None:
    """Return what is wrong with an engine that lives and has not failed."""
    if reading.chat_template:
        return Broken(
            name=BrokenName.CHAT_TEMPLATE_FAILURE,
            finding=reading.finding(
                "it serves, but the model's chat template cannot be used", reading.chat_template,
                phase=Phase.SERVING,
            ),
        )  # fmt: skip
    if reading.context_400:
        return _too_long(reading)
    if reading.drafts:
        (best, _), (final, line) = reading.drafts
        if best >= 0.2 and final <= min(0.05, best / 5):
            return Unfit(
                name=UnfitName.GARBAGE_OUTPUT,
                finding=reading.finding(
                    f"drafts were accepted at {best:.0%} and then at {final:.0%}: what it writes "
                    "has most likely broken down",
                    line, phase=Phase.SERVING,
                    facts={"best_acceptance": best, "last_acceptance": final},
                ),
            )  # fmt: skip
        enough = reading.drafted is None or reading.drafted >= _LEAST_DRAFTED
        if best <= 0.03 and enough:
            return Unfit(
                name=UnfitName.DRAFT_INEFFECTIVE,
                finding=reading.finding(
                    f"tokens are drafted, and {best:.1%} of them are accepted",
                    line, phase=Phase.SERVING, facts={"acceptance": best},
                ),
            )  # fmt: skip
    if reading.idle_waits and (never := _never_scheduled(reading)) is not None:
        return never
    stuck = reading.shm_waits >= (2 if reading.up or reading.phase is Phase.SPAWN else 5)
    if reading.idle_waits >= 2 or stuck:
        boot = stuck and not reading.up and reading.phase is not Phase.SPAWN
        _, generated, running, waiting = reading.stats or (0.0, 0.0, 0.0, 0.0)
        return Broken(
            name=BrokenName.HANG_BOOT if boot else BrokenName.HANG_RUNTIME,
            finding=reading.finding(
                "its processes wait for each other"
                if stuck
                else f"{waiting + running:.0f} requests are open and no token moves",
                reading.last if stuck else reading.stats_line,
                phase=None if boot else Phase.SERVING,
                facts={} if stuck else {
                    "running": int(running), "waiting": int(waiting), "gen_tok_s": generated,
                },
            ),
        )  # fmt: skip
    if reading.http_500:
        return Broken(
            name=BrokenName.HTTP_500,
            finding=reading.finding(
                "the server answered a request with an error",
                reading.last_error or reading.http_500, phase=Phase.SERVING,
            ),
        )  # fmt: skip
    return _reduced(reading)


_FILLED = 0.98
"""A window above this share of the KV pool may never be filled; one of this share may."""
_BLOCK_TOKENS = 16


def _silent(reading: Reading, detail: str) -> Failure:
    """Return what it means that an engine lives, and sent nothing for as long as it may."""
    if (failure := _caused(reading, reading.cause, lives=True)) is not None:
        return failure
    if (never := _never_scheduled(reading, silent=True)) is not None:
        return never
    return Broken(
        name=BrokenName.HANG_RUNTIME,
        finding=reading.finding(
            "it lives, and sent nothing for as long as it may be silent",
            reading.stats_line or detail, phase=Phase.SERVING,
        ),
    )  # fmt: skip


def _never_scheduled(reading: Reading, *, silent: bool = False) -> Unfit | None:
    """Return that a request waits for ever for a KV pool that it would fill to the last block.

    The log has to show that the window is as large as the pool, or not to show otherwise where
    the engine was seen to be silent.
    """
    *_, running, waiting = reading.stats or (0.0, 0.0)
    if running > 0 or waiting < 1:
        return None
    pool = reading.facts.number("kv_pool_tokens")
    window = _fact(reading.facts.pairs(), "effective_context_tokens")
    known = pool is not None and window is not None
    if not (known or silent):
        return None
    facts: dict[str, Scalar] = {"waiting": int(waiting)}
    following: dict[str, Scalar] = {}
    why = "most likely the window is as large as the KV pool"
    if pool is not None:
        facts["kv_pool_tokens"] = int(pool)
        smaller = int(pool * _FILLED) // _BLOCK_TOKENS * _BLOCK_TOKENS
        if window is not None and window <= smaller:
            return None
        if smaller > 0:
            following["max_model_len"] = smaller
        if window is not None:
            why = f"the window ({window:.0f} tokens) and the KV pool ({pool:.0f}) are equally large"
    return Unfit(
        name=UnfitName.DEGRADED_CAPACITY,
        finding=reading.finding(
            f"the scheduler never runs the request: {why}, and a request that fills the window "
            "cannot be scheduled",
            reading.stats_line, phase=Phase.SERVING, facts=facts, try_next=following,
        ),
    )  # fmt: skip


def _too_long(reading: Reading) -> Unfit:
    text = reading.context_400
    facts: dict[str, Scalar] = {}
    for key, pattern in (
        ("max_context_tokens", _LIMIT), ("input_tokens", _PROMPT), ("max_tokens", _ANSWER),
        ("input_characters", _CHARACTERS),
    ):  # fmt: skip
        if (found := pattern.search(text)) is not None:
            word = next(each for each in found.groups() if each is not None)
            facts[key] = int(number_of(word) or 0)
    window, prompt = facts.get("max_context_tokens"), facts.get("input_tokens")
    if isinstance(window, int) and isinstance(prompt, int):
        facts["feasible_max_tokens"] = max(window - prompt, 0)
    return Unfit(
        name=UnfitName.HTTP_400_CONTEXT,
        finding=reading.finding(
            "a request was longer than the window that is served", text, phase=Phase.SERVING,
            facts=facts,
        ),
    )  # fmt: skip


def _reduced(reading: Reading) -> Unfit | None:
    """Return in what the engine says to run less than it was asked for."""
    if reading.unspeculative:
        return Unfit(
            name=UnfitName.SILENT_FALLBACK,
            finding=reading.finding(
                "it serves without the speculation that was asked for", reading.unspeculative,
                phase=Phase.READY,
            ),
        )  # fmt: skip
    sequences = reading.facts.found.get("max_concurrency")
    if isinstance(sequences, int | float) and 0 < sequences < 1:
        return Unfit(
            name=UnfitName.DEGRADED_CAPACITY,
            finding=reading.finding(
                f"the KV cache holds {sequences:.2f} sequences of the full window", "",
                phase=Phase.READY, facts={"max_concurrency": sequences},
            ),
        )  # fmt: skip
    said = reading.observed
    if not said:
        return None
    found = CAPPED.search(said) or TRUNCATED.search(said)
    assert found is not None
    effective = int(number_of(found[found.re.groups]) or 0)
    batch = reading.facts.number("max_num_seqs")
    drafts = reading.facts.number("num_speculative_tokens") or 0
    if batch is not None and effective >= batch * (1 + drafts):
        return None
    facts: dict[str, Scalar] = {"effective_capture": effective}
    if found.re is CAPPED:
        facts["requested_capture"] = int(number_of(found[1]) or 0)
    return Unfit(
        name=UnfitName.SILENT_FALLBACK
        if found.re is CAPPED
        else UnfitName.DEGRADED_THROUGHPUT,
        finding=reading.finding(
            f"CUDA graphs are captured for batches up to {effective} only: larger ones run "
            "without",
            said, phase=Phase.READY, facts=facts,
        ),
    )  # fmt: skip


def _unexplained(reading: Reading, code: int | None) -> Failure:
    """Return what an end means of which the log says nothing."""
    how = _exit_in_words(code)
    said = reading.last_error or reading.last
    if code in (-7, 135):
        return Broken(
            name=BrokenName.SHM_EXHAUSTED,
            finding=reading.finding(f"the server {how}: shared memory was used up", said),
        )
    # The executor watches over its workers once it is ready.
    gone = reading.worker_gone and reading.phase is Phase.SPAWN and not reading.boot_failed
    if reading.up or gone:
        return Broken(
            name=BrokenName.ENGINE_DIED_MID_BENCHMARK,
            finding=reading.finding(
                f"the server {how} while it was serving",
                reading.worker_gone or said,
                phase=Phase.SERVING,
            ),
        )
    if reading.compiling and reading.last == reading.compiling:
        return HostFault(
            name=HostFaultName.TOOLCHAIN_JIT_FAILURE,
            finding=reading.finding(
                f"the server {how} while it compiled a kernel", reading.compiling
            ),
        )
    killed = code is not None and (code < 0 or code in (134, 137, 139))
    if not killed and (reading.boot_failed or reading.phase is Phase.SPAWN):
        return _unknown(
            reading, f"the server {how} before it was ready, and the log does not hold the cause"
        )
    memory = ": the host may have run out of memory" if code in (-9, 137) else ""
    return Broken(
        name=BrokenName.ENGINE_CRASH,
        finding=reading.finding(f"the server {how} before it was ready{memory}", said),
    )


def _exit_in_words(code: int | None) -> str:
    if code is None:
        return "stopped answering"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


# --- what runs against what was asked ---------------------------------------------------------

_Differs: TypeAlias = tuple[UnfitName, str, dict[str, Scalar]]


def contradiction(settings: VllmSettings, facts: Pairs) -> Unfit | None:
    """Return in what way that matters the running engine is not what was asked for."""
    for judge in (_context_of, _kv_dtype_of, _speculation_of, _backend_of, _graphs_of):
        if (found := judge(settings, facts)) is not None:
            name, said, numbers = found
            return Unfit(
                name=name,
                finding=Finding(
                    phase=Phase.READY, cause=said, explanation=said, facts=Pairs(numbers)
                ),
            )
    return None


def _fact(facts: Pairs, name: str) -> float | None:
    value = facts.get(name)
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and value is not None else None


def _context_of(settings: VllmSettings, facts: Pairs) -> _Differs | None:
    asked, runs = settings.max_model_len, _fact(facts, "effective_context_tokens")
    if isinstance(asked, int) and runs is not None and runs < asked:
        return (
            UnfitName.SILENT_CONTEXT_TRUNCATION,
            f"a window of {asked} tokens was asked for, and {runs:.0f} are served",
            {"effective_context_tokens": int(runs), "requested_context_tokens": asked},
        )
    pool = _fact(facts, "kv_pool_tokens")
    concurrency = _fact(facts, "max_concurrency")
    if concurrency is not None and concurrency < 1:
        return (
            UnfitName.DEGRADED_CAPACITY,
            f"the KV cache holds {concurrency:.2f} sequences of the full window",
            {"max_concurrency": concurrency, "kv_pool_tokens": None if pool is None else int(pool)},
        )
    return None


def _kv_dtype_of(settings: VllmSettings, facts: Pairs) -> _Differs | None:
    def same(kind: str) -> str:
        return {"fp8": "fp8_e4m3", "half": "float16"}.get(kind.lower(), kind.lower())

    asked, runs = settings.kv_cache_dtype, facts.get("kv_cache_dtype")
    if asked is None or asked.lower() == "auto" or not isinstance(runs, str):
        return None
    if same(asked) == same(runs):
        return None
    return (
        UnfitName.SILENT_FALLBACK,
        f"a KV cache of {asked} was asked for, and {runs} is in effect",
        {"kv_cache_dtype": runs},
    )


def _speculation_of(settings: VllmSettings, facts: Pairs) -> _Differs | None:
    runs = facts.get("spec_method")
    if not settings.speculates or runs is None:
        return None
    if runs == "none":
        return (
            UnfitName.SILENT_FALLBACK,
            f"speculation by {settings.spec_method} was asked for, and none is in effect",
            {"spec_method": runs},
        )
    drafts = _fact(facts, "spec_tokens")
    if settings.n_max is not None and drafts is not None and drafts != settings.n_max:
        return (
            UnfitName.SILENT_FALLBACK,
            f"drafts of {settings.n_max} tokens were asked for, and {drafts:.0f} are made",
            {"spec_tokens": int(drafts)},
        )
    return None


def _backend_of(settings: VllmSettings, facts: Pairs) -> _Differs | None:
    def plain(name: str) -> str:
        return name.upper().replace("-", "_").removesuffix("_VLLM_V1")

    asked = settings.attention_backend
    runs = str(facts.get("attention_backends") or facts.get("attention_backend") or "")
    if asked is None or asked.lower() == "auto" or not runs:
        return None
    if plain(asked) in [plain(each) for each in runs.split()]:
        return None
    return (
        UnfitName.SILENT_FALLBACK,
        f"attention by {asked} was asked for, and {runs} is in effect",
        {"attention_backend": runs},
    )


def _graphs_of(settings: VllmSettings, facts: Pairs) -> _Differs | None:
    if settings.largest_capture == 0:
        return None
    mode = facts.get("cudagraph_mode")
    if settings.cudagraph_mode is not None and mode not in (None, settings.cudagraph_mode):
        return (
            UnfitName.SILENT_FALLBACK,
            f"graphs of {settings.cudagraph_mode} were asked for, and {mode} is in effect",
            {"cudagraph_mode": mode},
        )
    capped = _fact(facts, "capture_capped_to")
    cut = _fact(facts, "capture_truncated_to")
    effective = min((each for each in (capped, cut) if each is not None), default=None)
    if effective is None:
        return None
    wanted = settings.largest_capture
    if settings.max_num_seqs is not None:
        # A graph larger than the largest batch is never used.
        drafts = (settings.n_max or 0) if settings.speculates else 0
        batch = settings.max_num_seqs * (1 + drafts)
        wanted = batch if wanted is None else min(wanted, batch)
    if wanted is None or effective >= wanted:
        return None
    return (
        UnfitName.DEGRADED_THROUGHPUT if effective == cut else UnfitName.SILENT_FALLBACK,
        f"graphs for batches up to {wanted} were asked for, and {effective:.0f} is the largest",
        {"effective_capture": int(effective), "requested_capture": wanted},
    )
