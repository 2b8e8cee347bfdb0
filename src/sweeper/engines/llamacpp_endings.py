"""What the end of a llama.cpp server means, and what a live one says of not being what it seems.

The phase decides, the text refines, the exit code is last.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

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
from sweeper.engines.llamacpp import DEFAULT_UBATCH, KV_BITS, LlamaCppSettings, no_engine
from sweeper.engines.llamacpp_log import (
    MIB,
    Allocation,
    Reading,
    Trouble,
    asked_for_no_layers,
    speculation_was_wanted,
)

_SIGKILL, _SIGINT, _SIGTERM = 9, 2, 15
_CRASHES = (4, 6, 7, 8, 11)
_WAITED = re.compile(r"(?:after|in) ?(\d+(?:\.\d+)?)")
_FLAG = re.compile(r"(?:argument|value for):? *\"?(-[\w-]+)")
_LONGEST_CAUSE = 500
_DEAD_DRAFT_TOKENS = 32
_DEAD_DRAFT_SHARE = 0.02

_MEMORY_NAMES = {
    Phase.WEIGHTS: (InfeasibleName.OOM_WEIGHTS, "the weights", "weights"),
    Phase.CONTEXT: (InfeasibleName.OOM_KV_CACHE, "the KV cache", "kv"),
    Phase.KV: (InfeasibleName.OOM_KV_CACHE, "the KV cache", "kv"),
    Phase.COMPUTE: (InfeasibleName.OOM_COMPUTE, "the compute buffers", "compute"),
    Phase.WARMUP: (InfeasibleName.OOM_COMPUTE, "the warm-up", "compute"),
}

_HOST: tuple[tuple[Trouble, HostFaultName, str], ...] = (
    (Trouble.NO_ENGINE, HostFaultName.ENGINE_NOT_FOUND,
     "the engine is not installed where the study points, or cannot be loaded there"),
    (Trouble.DRIVER, HostFaultName.DRIVER_MISMATCH,
     "the GPU driver does not fit this build of the engine"),
    (Trouble.TOOLCHAIN, HostFaultName.TOOLCHAIN_JIT_FAILURE,
     "the kernels of this build cannot be compiled on this host"),
    (Trouble.DISK, HostFaultName.DISK_FULL, "the disk is full"),
    (Trouble.MODEL_FILE, HostFaultName.MODEL_NOT_FOUND_OR_GATED,
     "the model file is missing, not to be had, or damaged"),
)  # fmt: skip

_POINT: tuple[tuple[Trouble, InfeasibleName, Phase, str, Mapping[str, Scalar]], ...] = (
    (Trouble.ARGUMENT, InfeasibleName.BAD_ARGUMENT, Phase.ARGS,
     "this build does not know one of the flags or values", {}),
    (Trouble.FLASH_FOR_V, InfeasibleName.UNSUPPORTED_COMBINATION, Phase.CONTEXT,
     "a quantised V cache needs flash attention", {"flash_attn": "on"}),
    (Trouble.NO_MTP, InfeasibleName.UNSUPPORTED_COMBINATION, Phase.DRAFT,
     "the model has no layers for this kind of speculation", {"spec_type": "none"}),
    (Trouble.ARCHITECTURE, InfeasibleName.MODEL_UNSUPPORTED_ARCH, Phase.WEIGHTS,
     "this build does not know the model's architecture or format", {}),
    (Trouble.COMBINATION, InfeasibleName.UNSUPPORTED_COMBINATION, Phase.CONTEXT,
     "the model or the build does not support this combination", {}),
    (Trouble.DRAFT_REFUSED, InfeasibleName.UNSUPPORTED_COMBINATION, Phase.DRAFT,
     "the draft does not go with this model", {"spec_type": "none"}),
    # Also said, and no matter then, while it measures what a draft would take.
    (Trouble.NEEDS_TARGET, InfeasibleName.UNSUPPORTED_COMBINATION, Phase.DRAFT,
     "a draft model cannot serve by itself, or this build cannot use it", {"spec_type": "none"}),
)  # fmt: skip


def _finding(
    reading: Reading, explanation: str, cause: str | None = None, *,
    facts: Mapping[str, Scalar] | None = None, phase: Phase | None = None,
    try_next: Mapping[str, Scalar] | None = None,
) -> Finding:  # fmt: skip
    return Finding(
        phase=phase if phase is not None else reading.reached,
        cause=(reading.cause if cause is None else cause)[:_LONGEST_CAUSE],
        explanation=explanation,
        facts=Pairs(facts or {}),
        try_next=Pairs(try_next or {}),
    )


def ending(reading: Reading, death: Death) -> Failure:
    """Return what an end means: the phase decides, the text refines, the exit code is last."""
    served = death.was_ready or reading.ready
    if death.ended is Ended.NOT_STARTED:
        return no_engine(death.detail)
    port = reading.at_all(Trouble.PORT)
    if death.ended is Ended.PORT_TAKEN or port is not None:
        return Broken(
            name=BrokenName.PORT_IN_USE,
            finding=_finding(
                reading, "another process holds the port", port.line if port else death.detail
            ),
        )
    judges: tuple[Callable[[Reading, Death], Failure | None], ...] = (
        (_memory, _no_thread, _killed, _no_driver, _request)
        if served
        else (_contended, _memory, _no_thread, _killed, _host, _point, _template, _unsaid_memory)
    )
    for judge in judges:
        if (verdict := judge(reading, death)) is not None:
            return verdict
    gave_up = None if served else reading.at_all(Trouble.GAVE_UP)
    if death.ended is Ended.LATE or gave_up is not None:
        return _late(reading, death, gave_up.line if gave_up else None)
    if death.ended is Ended.SILENT:
        return Broken(
            name=BrokenName.HANG_RUNTIME,
            finding=_finding(
                reading,
                f"the server lives, but went silent: {death.detail}",
                phase=Phase.SERVING,
            ),
        )
    if death.ended is Ended.LIVES:
        return Broken(
            name=BrokenName.HTTP_500,
            finding=_finding(
                reading,
                f"the server answered a request with an error: {death.detail}",
                phase=Phase.SERVING,
            ),
        )
    return _crash(reading, death, served=served)


def diagnosis(reading: Reading, exit_code: int | None) -> Diagnosis:
    """Return what a log alone means; a server that was asked to stop had come up before."""
    signal = _signal(exit_code)
    if not reading.ours and signal not in _CRASHES:
        if exit_code in (126, 127):
            return no_engine(reading.last_line or f"the program could not run ({exit_code})")
        return Broken(
            name=BrokenName.UNKNOWN,
            finding=_finding(
                reading,
                "this does not read like a log of llama.cpp's server",
                reading.cause if reading.cause.isprintable() else "",
                phase=Phase.SPAWN,
            ),
        )
    death = Death(
        ended=Ended.EXITED, after_s=0.0, was_ready=reading.ready, exit_code=exit_code
    )  # fmt: skip
    stopped = reading.up and (exit_code == 0 or signal in (_SIGINT, _SIGTERM))
    if not (exit_code is None or stopped) or _is_fatal(reading):
        return ending(reading, death)
    for judge in (_failed_request, _unfit):
        if (verdict := judge(reading)) is not None:
            return verdict
    if reading.up:
        survived = reading.survived
        return Nothing(
            finding=_finding(
                reading,
                "it came up and served"
                + ("; what was refused on the way was survived" if survived else ""),
                survived.line if survived else "",
                facts=_survived_facts(reading),
                phase=Phase.READY,
            )
        )
    return _unfinished(reading)


_LATER = (Trouble.DRAFT_REFUSED, Trouble.NEEDS_TARGET)
"""What a boot may say and still come up: fatal only if it is known to have ended."""


def _is_fatal(reading: Reading) -> bool:
    """Tell whether the log itself shows an end."""
    always = (Trouble.PORT, Trouble.ABORT, Trouble.DEVICE_ERROR, Trouble.KILLED_FOR_RAM)
    if reading.allocation is not None or reading.at_all(*always) is not None:
        return True
    booting = (
        *(trouble for trouble, *_ in _HOST),
        *(trouble for trouble, *_ in _POINT if trouble not in _LATER),
        Trouble.EXITING, Trouble.TEMPLATE, Trouble.DEVICE_FULL, Trouble.GAVE_UP,
    )  # fmt: skip
    if reading.before_ready(Trouble.DRIVER) is not None and not reading.gpu_found:
        return True
    return not reading.up and reading.before_ready(*booting) is not None


def _unfinished(reading: Reading) -> Diagnosis:
    """A log that shows neither an end nor a server that came up."""
    if (loading := reading.at_all(Trouble.STILL_LOADING)) is not None:
        return Broken(
            name=BrokenName.HANG_BOOT,
            finding=_finding(
                reading, "it only ever said that the model is still loading", loading.line
            ),
        )
    if (unsaid := _unsaid_memory(reading, _GONE)) is not None:
        return unsaid
    # An excerpt that complains of nothing that matters, or of what was survived.
    if reading.began and reading.survived is None:
        return Broken(
            name=BrokenName.UNKNOWN,
            finding=_finding(
                reading,
                "the log ends before the server was ready, and nothing in it says why; the last "
                f"phase it reached was {reading.reached.value}",
            ),
        )
    return Nothing(
        finding=_finding(
            reading,
            "nothing in this log keeps the server from serving",
            "",
            facts=_survived_facts(reading),
        )
    )  # fmt: skip


def _survived_facts(reading: Reading) -> Mapping[str, Scalar]:
    facts: dict[str, Scalar] = {}
    if reading.survived is not None and reading.survived.size_bytes is not None:
        facts["required_bytes"] = round(reading.survived.size_bytes)
    if (window := reading.number("effective_context_tokens")) is not None:
        facts["window_tokens"] = window
    return facts


# --- memory


def _memory(reading: Reading, death: Death) -> Failure | None:
    held = reading.allocation
    if held is None:
        return None
    name, what, kind, phase = _kind_of(reading, held, death)
    limit = reading.limit_bytes if reading.limit_bytes is not None else death.limit_bytes
    used = reading.used_bytes if reading.used_bytes is not None else death.peak_bytes
    facts: dict[str, Scalar] = {"kind": kind}
    free = None
    if limit is not None:
        facts["limit_bytes"] = limit
        free = max(limit - used, 0) if used is not None else None
    elif not held.on_host:
        free = reading.free_bytes(held.device)
    if free is not None:
        facts["free_bytes"] = free
    if held.device is not None:
        facts["device"] = int(held.device) if held.device.isdigit() else held.device
    said = ""
    required = held.size_bytes
    if required is not None:
        facts["required_bytes"] = round(required)
        said = f": {required / MIB:.1f} MiB were asked for"
        if free is not None:
            said += f" where {free / MIB:.1f} MiB were free"
            if required > free:
                facts["shortfall_bytes"] = round(required - free)
                said += f", {(required - free) / MIB:.1f} MiB too few"
    if limit is not None:
        said += _under(limit)
    for fact in ("context_tokens", "ubatch_tokens"):
        if (number := reading.number(fact)) is not None:
            facts[fact] = number
    return Infeasible(
        name=name,
        finding=_finding(
            reading,
            f"memory ran out for {what}{said}",
            held.line,
            facts=facts,
            phase=phase,
            try_next=_with_less(reading, name, required, free),
        ),
    )


def _under(limit_bytes: int) -> str:
    return f" under the limit of {limit_bytes / MIB:,.0f} MiB on the address space"


def _kind_of(
    reading: Reading, held: Allocation, death: Death
) -> tuple[InfeasibleName, str, str, Phase]:
    excerpt = held.phase.order < Phase.WEIGHTS.order and held.kind is None
    if death.was_ready or held.after_ready or (excerpt and held.in_pool and not held.drafting):
        return InfeasibleName.OOM_RUNTIME, "a request", "runtime", Phase.SERVING
    if held.drafting:
        part = _MEMORY_NAMES[held.kind][1] if held.kind in _MEMORY_NAMES else "the context"
        what = f"{part} of the draft"
        return InfeasibleName.OOM_DRAFT_HEAD, what, "draft", Phase.DRAFT
    phase = held.kind if held.kind is not None else held.phase
    if phase not in _MEMORY_NAMES:
        phase = Phase.WEIGHTS
    name, what, kind = _MEMORY_NAMES[phase]
    by_limit = held.by_limit or death.limit_bytes is not None or reading.limit_bytes is not None
    if phase is Phase.WEIGHTS and held.on_host and not by_limit:
        # Without a limit on address space only a machine that has no memory left refuses this.
        return InfeasibleName.HOST_RAM_OOM, "the weights in host RAM", "host", Phase.WEIGHTS
    return name, what, kind, Phase.KV if phase is Phase.CONTEXT else phase


def _with_less(
    reading: Reading, name: InfeasibleName, required: float | None, free: int | None
) -> Mapping[str, Scalar]:
    """Return settings that ask for less of what ran out."""
    context = reading.number("context_tokens")
    share = free / required if free is not None and required else 0.5
    share = share if 0 < share < 1 else 0.5
    ubatch = reading.number("ubatch_tokens") or DEFAULT_UBATCH
    match name:
        case InfeasibleName.OOM_KV_CACHE:
            if context is not None:
                return {"context": max(int(context * share) // 256 * 256, 256)}
            return {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attn": "on"}
        case InfeasibleName.OOM_COMPUTE | InfeasibleName.OOM_RUNTIME:
            return {"ubatch": max(ubatch // 2, 32)}
        case InfeasibleName.OOM_WEIGHTS:
            held = reading.allocation
            if held is not None and held.on_host:
                return {}
            layers = reading.number("layers")
            if layers is not None and free is not None:
                return {"gpu_layers": int(layers * share)}
            return {"gpu_layers": "auto", "fit": "on"}
        case InfeasibleName.OOM_DRAFT_HEAD:
            if required is not None and "fit" in reading.facts:
                # Fitting does not count all that a draft takes; its own margin is 1 GiB.
                mib = math.ceil(required / MIB)
                return {"fit_target_mib": mib if mib > 1024 else mib + 1024}
            if context is not None:
                return {"context": max(context // 2 // 256 * 256, 256)}
            return {"fit": "on", "spec_type": "none"}
        case InfeasibleName.HOST_RAM_OOM:
            return {"mmap": True, "cache_ram_mib": 0}
        case _:
            return {}


def _contended(reading: Reading, death: Death) -> Failure | None:
    """A GPU without room for even a driver context is full of somebody else's memory."""
    del death
    seen = reading.before_ready(Trouble.DEVICE_FULL)
    if seen is None:
        return None
    return Broken(
        name=BrokenName.GPU_MEMORY_CONTENDED,
        finding=_finding(
            reading, "the GPU was full before the engine asked for anything", seen.line,
            phase=Phase.DEVICE,
        ),
    )  # fmt: skip


def _no_thread(reading: Reading, death: Death) -> Failure | None:
    """A thread needs address space for its stack: under a limit, its lack is a lack of memory."""
    seen = reading.at_all(Trouble.NO_THREAD)
    limit = death.limit_bytes if death.limit_bytes is not None else reading.limit_bytes
    if seen is None or limit is None:
        return None
    facts: dict[str, Scalar] = {"kind": "stack", "limit_bytes": limit}
    said = ""
    # How much a stack takes is up to the system, and only our own launcher says it.
    if (stack := reading.number("thread_stack_bytes")) is not None:
        facts["required_bytes"] = stack
        said = f": {stack / MIB:.1f} MiB were asked for"
    serving = death.was_ready or reading.ready
    return Infeasible(
        name=InfeasibleName.OOM_RUNTIME if serving else InfeasibleName.OOM_COMPUTE,
        finding=_finding(
            reading,
            f"memory ran out for the stack of a thread{said}{_under(limit)}",
            seen.line,
            facts=facts,
            phase=Phase.SERVING if serving else None,
        ),
    )


def _killed(reading: Reading, death: Death) -> Failure | None:
    """The kernel's killer leaves only a signal; it takes a line that says so to blame memory."""
    seen = reading.at_all(Trouble.KILLED_FOR_RAM)
    if seen is None and _signal(death.exit_code) == _SIGKILL:
        seen = reading.at_all(Trouble.CACHE_OVER_LIMIT)
    evidence = seen.line if seen is not None else ""
    if not evidence and "oom" in death.detail.lower():
        evidence = death.detail
    if not evidence:
        return None
    return Infeasible(
        name=InfeasibleName.HOST_RAM_OOM,
        finding=_finding(
            reading,
            "the kernel killed the server because host RAM had run out",
            evidence,
            facts={"kind": "host"},
            phase=Phase.SERVING if reading.ready else None,
            try_next={"cache_ram_mib": 0},
        ),
    )


def _unsaid_memory(reading: Reading, death: Death) -> Failure | None:
    """A boot that dies right after moving layers off the GPU ran out of memory, unsaid."""
    seen = reading.before_ready(Trouble.MISSING_SUPPORT)
    if seen is None or death.ended is not Ended.EXITED or "device CPU but" not in seen.line:
        return None
    name = InfeasibleName.OOM_DRAFT_HEAD if reading.drafting else InfeasibleName.OOM_COMPUTE
    return Infeasible(
        name=name,
        finding=_finding(
            reading,
            "a layer was left in host RAM for want of GPU memory, and the boot ended there",
            seen.line,
            facts={"kind": "draft" if reading.drafting else "compute"},
            phase=Phase.DRAFT if reading.drafting else Phase.COMPUTE,
            try_next=_with_less(reading, name, None, None),
        ),
    )


# --- the host, the point, the engine


def _no_driver(reading: Reading, death: Death) -> Failure | None:
    """A GPU build whose driver does not fit may serve from the CPU: no point measures the GPU."""
    if reading.gpu_found or reading.before_ready(Trouble.DRIVER) is None:
        return None
    return _host(reading, death)


def _host(reading: Reading, death: Death) -> Failure | None:
    if death.exit_code in (126, 127) and not reading.ours:
        return no_engine(reading.cause or f"the program could not run ({death.exit_code})")
    for trouble, name, explanation in _HOST:
        if (seen := reading.before_ready(trouble)) is not None:
            return HostFault(name=name, finding=_finding(reading, explanation, seen.line))
    return None


def _point(reading: Reading, death: Death) -> Failure | None:
    if reading.up and death.exit_code is None:
        return None
    for trouble, name, phase, explanation, try_next in _POINT:
        if (seen := reading.before_ready(trouble)) is not None:
            drafting = reading.drafting and phase is Phase.CONTEXT
            flag = _FLAG.search(seen.line) if trouble is Trouble.ARGUMENT else None
            return Infeasible(
                name=name,
                finding=_finding(
                    reading,
                    explanation,
                    seen.line,
                    facts={} if flag is None else {"flag": flag[1]},
                    phase=Phase.DRAFT if drafting else phase,
                    try_next=try_next,
                ),
            )
    return None


def _template(reading: Reading, death: Death) -> Failure | None:
    del death
    seen = reading.at_all(Trouble.TEMPLATE)
    if seen is None:
        return None
    return Broken(
        name=BrokenName.CHAT_TEMPLATE_FAILURE,
        finding=_finding(
            reading,
            "the model's chat template cannot be used",
            seen.line,
            phase=Phase.SERVING if reading.ready else None,
            try_next={"jinja": False},
        ),
    )


def _request(reading: Reading, death: Death) -> Failure | None:
    """A server that lives and was brought to an error by a template."""
    if death.ended is not Ended.LIVES or (Trouble.TEMPLATE, True) not in reading.seen:
        return None
    return _template(reading, death)


def _late(reading: Reading, death: Death, gave_up: str | None) -> Failure:
    silent = reading.phase.order <= Phase.SPAWN.order and gave_up is None
    waited = _WAITED.search(gave_up) if gave_up is not None else None
    what = (
        "whoever started it stopped waiting for it"
        if gave_up is not None
        else f"it was not ready after {death.after_s:.0f} s"
    )
    return Broken(
        name=BrokenName.HANG_BOOT if silent else BrokenName.BOOT_TIMEOUT,
        finding=_finding(
            reading,
            f"{what}; the last phase it reached was {reading.reached.value}",
            gave_up,
            facts={} if waited is None else {"timeout_s": float(waited[1])},
        ),
    )


def _crash(reading: Reading, death: Death, *, served: bool) -> Failure:
    how = _exit_in_words(death.exit_code)
    error = reading.at_all(Trouble.DEVICE_ERROR, Trouble.ABORT)
    cause = error.line if error is not None else None
    # An excerpt that knows no boot, of a kernel that failed: kernels run for requests.
    excerpt = reading.phase is Phase.SPAWN and reading.at_all(Trouble.DEVICE_ERROR) is not None
    if served or reading.served or excerpt:
        return Broken(
            name=BrokenName.ENGINE_DIED_MID_BENCHMARK,
            finding=_finding(
                reading, f"the server {how} while it was serving", cause, phase=Phase.SERVING
            ),
        )
    return Broken(
        name=BrokenName.ENGINE_CRASH,
        finding=_finding(reading, f"the server {how} before it was ready", cause),
    )


# --- it serves, but


def _failed_request(reading: Reading) -> Failure | None:
    if (Trouble.TEMPLATE, True) in reading.seen:
        return _template(reading, _ALIVE)
    seen = reading.at_all(Trouble.FAILED_REQUEST)
    if seen is None:
        return None
    needed = reading.number("needed_ubatch_tokens")
    return Broken(
        name=BrokenName.HTTP_500,
        finding=_finding(
            reading,
            "the server answered a request with an error",
            seen.line,
            facts={} if needed is None else {"needed_ubatch_tokens": needed},
            phase=Phase.SERVING,
            try_next={} if needed is None else {"ubatch": needed, "batch": needed},
        ),
    )


def _unfit(reading: Reading) -> Unfit | None:
    """Return what a server that came up says of not being what it seems."""
    facts = reading.facts
    if (dead := _dead_drafts(reading.evidence())) is not None:
        return dead
    refused = reading.at_all(Trouble.REFUSED_PROMPT)
    # A server that answered more than it refused refused cleanly.
    if refused is not None and reading.counts[Trouble.REFUSED_PROMPT] >= reading.served:
        window = reading.number("refused_window_tokens")
        window = window if window is not None else reading.number("effective_context_tokens")
        prompt = reading.number("prompt_tokens")
        return _unfit_as(
            UnfitName.HTTP_400_CONTEXT,
            "a prompt did not fit the window that is served",
            refused.line,
            phase=Phase.SERVING,
            facts={"prompt_tokens": prompt, "window_tokens": window},
            try_next={} if prompt is None else {"context": _round_up(prompt + 1, 256)},
        )
    if (seen := reading.at_all(Trouble.CONTEXT_CAPPED)) is not None:
        trained = facts.get("trained_context_tokens")
        return _unfit_as(
            UnfitName.SILENT_CONTEXT_TRUNCATION,
            "each slot holds only as much as the model was trained on",
            seen.line,
            phase=Phase.READY,
            facts={"asked_tokens": facts.get("capped_from_tokens"), "window_tokens": trained},
            try_next={"context": trained},
        )
    if (seen := reading.at_all(Trouble.CONTEXT_REDUCED)) is not None:
        fits = facts.get("fit_context_tokens")
        return _unfit_as(
            UnfitName.SILENT_CONTEXT_TRUNCATION,
            "the context was reduced to fit the memory",
            seen.line,
            phase=Phase.READY,
            facts={"asked_tokens": facts.get("fit_from_tokens"), "window_tokens": fits},
            try_next={"context": fits, "fit": "off"},
        )
    off = reading.at_all(Trouble.SPECULATION_OFF, Trouble.DRAFT_REFUSED)
    if off is None and speculation_was_wanted(reading):
        off = reading.at_all(Trouble.NO_SPECULATION)
    if off is not None:
        return _unfit_as(
            UnfitName.SILENT_FALLBACK,
            "it serves without speculation",
            off.line,
        )
    ignored = reading.at_all(Trouble.DEVICE_INIT, Trouble.GPU_IGNORED)
    if ignored is not None and not reading.gpu_found:
        return _unfit_as(
            UnfitName.SILENT_FALLBACK,
            "it serves without a GPU",
            ignored.line,
        )
    if facts.get("offloaded_layers") == 0 and not asked_for_no_layers(reading):
        return _unfit_as(
            UnfitName.SILENT_FALLBACK,
            "there is a GPU, and no layer of the model is on it",
            f"offloaded 0/{facts['all_layers']} layers to GPU",
            phase=Phase.READY,
        )
    if reading.survived is not None and not reading.survived.drafting:
        some, layers = reading.number("offloaded_layers"), reading.number("all_layers")
        if some is not None and layers is not None and some < layers and reading.ready:
            return _unfit_as(
                UnfitName.SILENT_FALLBACK,
                f"memory was refused, and it came up with {some} of {layers} layers on the GPU",
                reading.survived.line,
                phase=Phase.READY,
                facts={"offloaded_layers": some, "all_layers": layers},
            )
    if (seen := reading.at_all(Trouble.FLASH_ELSEWHERE)) is not None:
        return _unfit_as(
            UnfitName.SILENT_FALLBACK,
            "flash attention does not run on the device of its layers",
            seen.line,
            phase=Phase.READY,
            try_next={"cache_type_k": "f16", "cache_type_v": "f16"},
        )
    return None


def _dead_drafts(facts: Pairs) -> Unfit | None:
    drafted, accepted = facts.get("drafted_tokens"), facts.get("accepted_tokens")
    if not isinstance(drafted, int) or not isinstance(accepted, int):
        return None
    if drafted < _DEAD_DRAFT_TOKENS or accepted > drafted * _DEAD_DRAFT_SHARE:
        return None
    return _unfit_as(
        UnfitName.DRAFT_INEFFECTIVE,
        f"of {drafted} drafted tokens {accepted} were accepted",
        f"draft acceptance: {accepted} accepted / {drafted} generated",
        phase=Phase.SERVING,
        facts={"drafted_tokens": drafted, "accepted_tokens": accepted},
        try_next={"spec_type": "none"},
    )


def _unfit_as(
    name: UnfitName,
    explanation: str,
    cause: str,
    *,
    facts: Mapping[str, Scalar] | None = None,
    try_next: Mapping[str, Scalar] | None = None,
    phase: Phase = Phase.READY,
) -> Unfit:
    known = {key: value for key, value in (facts or {}).items() if value is not None}
    tries = {key: value for key, value in (try_next or {}).items() if value is not None}
    return Unfit(
        name=name,
        finding=Finding(
            phase=phase,
            cause=cause,
            explanation=explanation,
            facts=Pairs(known),
            try_next=Pairs(tries),
        ),
    )


# --- asked against effective


def contradiction(settings: LlamaCppSettings, facts: Pairs, props: str | None) -> Unfit | None:
    """Return the first difference that matters, the gravest kind first.

    A window that was rounded up is more than was asked for, and a draft clamped to what its model
    was trained on is what any longer one would have been: neither matters. A window capped to the
    training context does: the objective is the window, and the one that was asked for is not there.
    """
    page = _properties(props)
    asked = settings.context if settings.kv_unified else settings.context // settings.parallel
    windows = [
        window
        for window in (page.get("n_ctx"), facts.get("effective_context_tokens"))
        if isinstance(window, int) and not isinstance(window, bool) and window > 0
    ]
    if windows and min(windows) < asked:
        return _unfit_as(
            UnfitName.SILENT_CONTEXT_TRUNCATION,
            f"a window of {asked} tokens was asked for, and {min(windows)} are served",
            f"n_ctx_slot = {min(windows)}",
            phase=Phase.READY,
            facts={"asked_tokens": asked, "window_tokens": min(windows)},
            try_next={"context": min(windows) * (1 if settings.kv_unified else settings.parallel)},
        )
    if settings.speculates:
        off = facts.get("speculation_off")
        if off or facts.get("speculation") == "none" or _says_no_drafts(settings, page):
            return _unfit_as(
                UnfitName.SILENT_FALLBACK,
                f"{settings.spec_type} was asked for, and it serves without speculation",
                str(off or "no implementations specified for speculative decoding"),
                phase=Phase.READY,
            )
        if (dead := _dead_drafts(facts)) is not None:
            return dead
    if (fallback := _layers_missing(settings, facts)) is not None:
        return fallback
    if settings.flash_attn == "on" and facts.get("flash_attention") == "disabled":
        return _unfit_as(
            UnfitName.SILENT_FALLBACK,
            "flash attention was asked for, and it is disabled",
            "Flash Attention disabled",
            phase=Phase.READY,
        )
    for side, kind in (("k", settings.cache_type_k), ("v", settings.cache_type_v)):
        real = str(facts.get(f"kv_type_{side}", kind)).lower()
        # A fork's own types print under names of their own.
        if real != kind.lower() and {real, kind.lower()} <= KV_BITS.keys():
            return _unfit_as(
                UnfitName.SILENT_FALLBACK,
                f"the {side.upper()} cache was to be {kind}, and is {real}",
                f"{side.upper()} ({real})",
                phase=Phase.READY,
            )
    slots = page.get("total_slots", facts.get("slots"))
    if isinstance(slots, int) and 0 < slots < settings.parallel:
        return _unfit_as(
            UnfitName.DEGRADED_CAPACITY,
            f"{settings.parallel} slots were asked for, and {slots} are there",
            f"n_slots = {slots}",
            phase=Phase.READY,
            facts={"asked_slots": settings.parallel, "slots": slots},
        )
    return None


def _layers_missing(settings: LlamaCppSettings, facts: Pairs) -> Unfit | None:
    asked = settings.gpu_layers
    if asked is None or asked in {"auto", 0}:
        return None
    wanted = asked if isinstance(asked, int) else None
    if facts.get("gpu_ignored") is True:
        return _unfit_as(
            UnfitName.SILENT_FALLBACK,
            f"{asked} layers were asked for on the GPU, and it serves without a GPU",
            "no usable GPU found",
            phase=Phase.READY,
        )
    some, layers = facts.get("offloaded_layers"), facts.get("all_layers")
    if not isinstance(some, int) or not isinstance(layers, int):
        return None
    if some >= (layers if wanted is None else min(wanted, layers)):
        return None
    return _unfit_as(
        UnfitName.SILENT_FALLBACK,
        f"{asked} layers were asked for on the GPU, and {some} of {layers} are there",
        f"offloaded {some}/{layers} layers to GPU",
        phase=Phase.READY,
        facts={"offloaded_layers": some, "all_layers": layers},
    )


def _says_no_drafts(settings: LlamaCppSettings, page: Mapping[str, Scalar]) -> bool:
    """Older builds said so of every server whose drafts come from n-grams."""
    ngrams = any(kind.startswith("ngram") for kind in settings.spec_kinds)
    return page.get("speculative") is False and not ngrams


_CHATML = (
    "{%- for message in messages -%} {{- '<|im_start|>' + message.role + ' ' + message.content + "
    "'<|im_end|> ' -}} {%- endfor -%} {%- if add_generation_prompt -%} "
    "{{- '<|im_start|>assistant ' -}} {%- endif -%}"
)
"""The template of a model that has none, as `/props` of llama.cpp shows it, blanks as one."""


def foreign_template(facts: Pairs, props: str | None) -> str | None:
    """Return what shows that a model without a template is served with ChatML, None if nothing.

    A model of ChatML ends its turns by `<|im_end|>`; one that was given the plainest form of it as
    its own template is no fallback.
    """
    if (said := facts.get("chat_template_fallback")) is not None:
        return str(said)
    page = _page(props)
    template, end = page.get("chat_template"), page.get("eos_token")
    if not isinstance(template, str) or end == "<|im_end|>":
        return None
    # `/props` has line breaks both as such and, within the quotes, as two characters.
    plain = " ".join(template.replace("\\n", " ").split())
    return (
        f"the server's chat template is ChatML's, and its end of text {end}"
        if (plain == _CHATML)
        else None
    )


def _properties(props: str | None) -> Mapping[str, Scalar]:
    """Return what the properties page says of a slot; nothing for a page that is not one."""
    page = _page(props)
    slot = page.get("default_generation_settings")
    found = {**page, **(slot if isinstance(slot, dict) else {})}
    names = ("n_ctx", "speculative", "total_slots")
    return {name: found[name] for name in names if isinstance(found.get(name), bool | int)}


def _page(props: str | None) -> dict[str, Any]:
    try:
        page = json.loads(props) if props else {}
    except json.JSONDecodeError:
        return {}
    return page if isinstance(page, dict) else {}


_GONE = Death(ended=Ended.EXITED, after_s=0.0, was_ready=False)
_ALIVE = Death(ended=Ended.LIVES, after_s=0.0, was_ready=True)


def _signal(code: int | None) -> int | None:
    """Return the signal that an exit code tells of, as a process says it or as a shell does."""
    if code is None:
        return None
    return -code if code < 0 else code - 128 if 128 < code < 160 else None


def _exit_in_words(code: int | None) -> str:
    if code is None:
        return "stopped answering"
    signal = _signal(code)
    return f"exited with code {code}" if signal is None else f"was killed by signal {signal}"


def _round_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step
