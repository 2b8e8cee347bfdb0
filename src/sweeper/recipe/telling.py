"""What a recipe says of itself: figures, where they come from, what was not measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sweeper.core.objectives import counted_tok_s, why_counted
from sweeper.core.outcome import Attempt, Figures, Measured, name
from sweeper.core.pairs import Pairs, Scalar, text
from sweeper.core.reliability import Hold, margin_words
from sweeper.core.stats import Summary, explained
from sweeper.recipe.source import Export, Source, hub_model, lost


def figures(measured: Measured) -> list[str]:
    """Return the measured figures in words, one a line, with interval, count and doubts."""
    speed = measured.decode_tok_s
    lines = [
        f"decode {speed.median:.1f} tok/s, {speed.low:.1f} to {speed.high:.1f} "
        f"({speed.confidence:.0%} interval of the median, {speed.n} runs)",
        f"context {measured.context.proven_tokens:,} tokens proven with a real prompt "
        f"({measured.context.configured_tokens:,} configured)",
        f"time to first token {measured.ttft_s.median * 1000:.0f} ms",
    ]
    if measured.prefill_tok_s is not None:
        lines.append(f"prefill {measured.context.prefill_tok_s:.0f} tok/s over the proven context")
    if measured.drafts is not None and measured.drafts.acceptance is not None:
        lines.append(
            f"draft acceptance {measured.drafts.acceptance:.1%} "
            f"({measured.drafts.accepted} of {measured.drafts.drafted} tokens)"
        )
    if measured.peak_bytes is not None:
        lines.append(f"memory at its peak {measured.peak_bytes / 2**20:.0f} MiB")
    if measured.telemetry is not None and measured.telemetry.gpu_engine_bytes is not None:
        lines.append(
            f"memory of the cards at its peak {measured.telemetry.gpu_engine_bytes / 2**20:.0f} MiB"
        )
    if measured.quality is not None and measured.quality.prefix_share is not None:
        lines.append(
            f"answers: {measured.quality.prefix_share:.0%} of the reference's greedy text is "
            "answered in the same way"
        )
    if speed.doubts:
        lines.append(f"doubts: {', '.join(doubt.value for doubt in speed.doubts)}")
    if (counted := why_counted(measured)) is not None:
        lines.append(counted)
    # The first load is the compared one, told above.
    lines += [f"{load(each)}: {_load_figures(each)}" for each in measured.figures[1:]]
    return lines


def load(each: Figures) -> str:
    """Return what was asked in this load, in a few words."""
    prompt = (
        "own prompt" if each.prompt_length is None else f"prompts of {each.prompt_length:,} tokens"
    )
    streams = "" if each.streams == 1 else f", {each.streams} at once"
    return f"{each.workload}, {prompt}{streams}"


def _load_figures(each: Figures) -> str:
    said = [f"decode {interval(each.decode_tok_s)} tok/s ({each.decode_tok_s.n} runs)"]
    if each.total_tok_s is not None:
        said.append(f"{interval(each.total_tok_s)} tok/s of all streams")
    said.append(f"first token after {each.ttft_s.median * 1000:.0f} ms")
    doubts = doubts_of(each)
    return "; ".join([*said, f"doubts: {doubts}"] if doubts else said)


def doubts_of(each: Figures) -> str:
    """Return the doubts about a load's speed, "" for none."""
    return ", ".join(doubt.value for doubt in each.decode_tok_s.doubts)


def interval(summary: Summary) -> str:
    """Return a figure with its interval, in its own unit."""
    return f"{summary.median:.1f} ({summary.low:.1f} to {summary.high:.1f})"


def model_words(source: Source) -> str:
    """Return the model with what tells it from others: its checksum or its revision."""
    model = source.attempt.model
    hub = hub_model(str(model.get("path") or ""))
    if model.get("sha256"):
        known = f"SHA-256 {text(model['sha256'])}"
    elif hub is not None:
        known = f"{hub[0]} at revision {hub[1]}"
    else:
        known = "SHA-256 not taken"
    return f"{text(model.get('name', ''))}, {known}"


def host_words(source: Source) -> str:
    """Return cards with driver, processor and the study's name for the hardware."""
    host = source.attempt.host
    found: list[Scalar] = []
    if host.get("gpu") is not None:
        found.append(host["gpu"])
        if host.get("gpu_driver") is not None:
            found.append(f"driver {host['gpu_driver']}")
        if host.get("gpu_cuda") is not None:
            found.append(f"CUDA {host['gpu_cuda']}")
    found += [host[key] for key in ("cpu", "hardware") if host.get(key)]
    return ", ".join(text(each) for each in found)


def engine_words(source: Source) -> str:
    """Return the engine with its version."""
    engine = source.attempt.engine
    version = text(engine.get("engine_version") or "(version not printed)")
    return f"{text(engine.get('name', ''))} {version}"


def confirmation(source: Source) -> str:
    """Return whether the figures were seen twice."""
    if source.attempt.confirms is None:
        return "measured once, in the search; not measured again after it"
    return f"measured again after the search: this is attempt {source.attempt.confirms} once more"


_LOWER_FIRST = (
    "context", "max_model_len", "n_ctx", "ctx_size", "gpu_memory_utilization", "utilisation",
    "ubatch", "batch", "max_num_batched_tokens", "parallel", "max_num_seqs", "n_max",
)  # fmt: skip
"""What takes memory, in the order in which it is given up for least, as axes are usually called."""


def margin(source: Source) -> list[str]:
    """Return what all boots of this point say of the next one: the margin, and what to do."""
    hold = source.hold
    if hold is None:
        return []
    boots = ", ".join(str(number) for number in source.boots)
    lines = [f"memory {margin_words(hold)} (attempts {boots})"]
    match hold.hold:
        case Hold.RELIABLE | Hold.UNKNOWN:
            return lines
        case Hold.FLAKY:
            lines.append("it does NOT work every time: it ran out of memory in some of its boots")
        case Hold.EDGE:
            lines.append("it leaves too little memory to work 19 times of 20")
        case Hold.SHORT:
            lines.append("it leaves less memory than the study asks for")
        case Hold.UNSURE:
            lines.append("it is not known whether it works 19 times of 20")
    lines.append(f"where it ends for lack of memory, lower {_lower_first(source)} first")
    return lines


def restarts(source: Source) -> str:
    """Return why a restart policy gives up soon, "" where the point works every time."""
    if source.hold is None or source.hold.hold in (Hold.RELIABLE, Hold.UNKNOWN):
        return ""
    return (
        "Few restarts, on purpose: this configuration leaves little memory, and where it ran out "
        f"of it, it would do so again. Lower {_lower_first(source)} first."
    )


def _lower_first(source: Source) -> str:
    axes = [axis for axis in _LOWER_FIRST if axis in source.attempt.point]
    return axes[0] if axes else "its context"


def head(source: Source, export: Export) -> list[str]:
    """Return the lines that begin a recipe, without the marks of a comment."""
    attempt = source.attempt
    lines = [f"{attempt.study}, attempt {attempt.number}: {attempt.point}", ""]
    if attempt.engine.get("simulated") is True:
        lines += [
            "SIMULATED: the engine is a fake with invented figures; nothing here was measured on "
            "a model.",
            "",
        ]
    lines += [
        f"Measured {attempt.started_at}:",
        *(f"  {line}" for line in figures(source.measured)),
        f"  {confirmation(source)}",
        *(f"  {line}" for line in margin(source)),
        f"Workload: {attempt.workload}",
        f"Engine: {engine_words(source)}",
        f"Model: {model_words(source)}",
        f"Host: {host_words(source)}",
        f"Record: {source.study_folder}, attempt {attempt.number}, trial {attempt.trial}",
        "",
        "Flags and environment are the measured ones, argument for argument."
        + (" Not measured:" if export.differs else ""),
        *(f"  - {each}" for each in export.differs),
        *secrets(source),
    ]
    return lines


def secrets(source: Source) -> list[str]:
    """Return what the reader must put in, since it is not kept."""
    lines = [
        f"{each} was set when this was measured; its value is secret, so set it yourself."
        for each in source.hidden
    ]
    if any(lost(each) for each in source.attempt.argv):
        lines.append(
            "*** in the command stands for a secret that is not kept: write it there yourself."
        )
    return lines


# --- the page ---------------------------------------------------------------------------------


def front_position(source: Source) -> str:
    """Return where on the front this attempt stands, in a sentence or two; "" if not known."""
    speed = counted_tok_s(source.measured)
    window = source.measured.context.window_tokens
    others = [each.outcome for each in source.front if isinstance(each.outcome, Measured)]
    if not others:
        return ""
    if source.attempt.number not in [each.number for each in source.front]:
        return "Not one of those that none other beats: chosen by hand."
    if len(others) == 1:
        return "Of all configurations that were measured, none is faster or has more context."
    fastest = max(counted_tok_s(each) for each in others)
    longest = max(each.context.window_tokens for each in others)
    place = f"One of {len(others)} configurations that none other beats in speed and context: "
    if speed >= fastest and window >= longest:
        return place + "the fastest, with the longest context."
    if speed >= fastest:
        return place + f"the fastest of them. The longest context is {longest:,} tokens."
    if window >= longest:
        return place + (
            f"the one with the longest context, at {speed / fastest:.0%} of the fastest's speed."
        )
    return place + (
        f"{speed / fastest:.0%} of the fastest's speed with {window / longest:.0%} of the longest "
        "context."
    )


def reasons(source: Source) -> list[tuple[str, str, str]]:
    """Return for each setting of the point its name, its value, and what the study saw of it."""
    found = []
    notes = {} if source.deployable is None else source.deployable.setting_notes
    for setting, value in source.attempt.point.items():
        why = [notes[setting]] if setting in notes else []
        why += _seen(source, setting, value)
        found.append((setting, text(value), "; ".join(why) or "chosen by the search"))
    return found


def _seen(source: Source, setting: str, value: Scalar) -> Iterable[str]:
    """Yield what became of points that differ in this setting alone."""
    for each in source.failed:
        if (other := _only_difference(source.attempt.point, each.point, setting)) is not None:
            yield f"{other} ended as {name(each.outcome)}"
    for each in source.front:
        if isinstance(each.outcome, Measured) and each.point.get(setting) != value:
            other = _only_difference(source.attempt.point, each.point, setting)
            if other is not None:
                yield (
                    f"{other} does {each.outcome.decode_tok_s.median:.1f} tok/s with "
                    f"{each.outcome.context.window_tokens:,} tokens"
                )


def _only_difference(one: Pairs, other: Pairs, setting: str) -> str | None:
    if setting not in other or one.with_(**{setting: other[setting]}) != other:
        return None
    return None if one.get(setting) == other[setting] else text(other[setting])


def troubles(failed: Sequence[Attempt]) -> list[tuple[str, int, Attempt]]:
    """Return how attempts of the study failed: the name, how many, and the last of each name."""
    found: dict[str, list[Attempt]] = {}
    for each in failed:
        if not isinstance(each.outcome, Measured):
            found.setdefault(name(each.outcome), []).append(each)
    return [(kind, len(several), several[-1]) for kind, several in found.items()]


def doubts_in_words(measured: Measured) -> list[str]:
    """Return the doubts about the compared figure as sentences."""
    counted = why_counted(measured)
    return [explained(doubt) for doubt in measured.decode_tok_s.doubts] + (
        [] if counted is None else [counted]
    )
