"""What is done with a server that is up: asked once, guarded, proven, measured, guarded again."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sweeper.bench import Client, RequestFailure, RequestTrouble
from sweeper.core.acceptance import identity
from sweeper.core.known import Known
from sweeper.core.launch import Phase
from sweeper.core.looping import Answer, Looks, looks
from sweeper.core.outcome import (
    Broken,
    BrokenName,
    Failure,
    Figures,
    Finding,
    Measured,
    Outcome,
    ProvenContext,
    Quality,
    Unfit,
    UnfitName,
)
from sweeper.core.pairs import Pairs, Scalar
from sweeper.core.protocol import Finished, MeasureStep, Repetition, WarmUpStep
from sweeper.core.quality import (
    GREEDY_PROMPTS,
    GREEDY_TOKENS,
    Guard,
    agreement,
    collapsed,
    degenerate,
    judge,
    remark,
)
from sweeper.core.sample import DraftCounters, Purpose, Sample
from sweeper.core.stats import Doubt, summarise, telemetry_doubts
from sweeper.core.telemetry import Telemetry
from sweeper.core.workload import Load, Repeats, Workload
from sweeper.engines import Clocked, Engine, ModelFacts, foreign_template, without_template
from sweeper.scoring import fixed_text_logprob
from sweeper.server import Attached, Server
from sweeper.telemetry import watching

_CLOCKS_TOLERANCE = 0.03
_EARLY_SHARE = 0.9
_DEAD_DRAFT_TOKENS = 50
_BRIEF_TOKENS = 32
_LITTLE_TOKENS = 512
_LEAST_SHARE = 0.97
"""The part of the window that must be proven: what holds less is not what was asked for."""
_BRACKET_SHARE = 1 / 64
"""How narrow, as a share of the window, the bracket around the largest proven context becomes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where an attempt is: its phase in words, and how much of it is done (0..1) if known."""

    stage: str
    detail: str = ""
    done: float | None = None


Watch = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """What is measured and how: the compared workload, further ones, and the guard's limits.

    Without a guard its questions are not asked either; where the context is not to be proven, a
    few hundred tokens of it are.
    """

    workload: Workload
    also: tuple[Workload, ...] = ()
    guard: Guard | None = field(default_factory=Guard)
    prove: bool = True

    def brief(self, *, prove: bool = True) -> Protocol:
        """Return what shows whether the context holds and every stream answers, and no more.

        Without the proof: where all memory is taken at boot.
        """
        once = Repeats(least=1, most=1, interval=None, racing=False, warmup_min=0, warmup_max=0)
        workload = replace(
            self.workload, repeats=once, cached_runs=0, minutes=None,
            max_tokens=min(self.workload.max_tokens, _BRIEF_TOKENS),
        )  # fmt: skip
        return Protocol(workload=workload, guard=None, prove=prove)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metrics:
    """One reading of an engine's metrics page: sums since it started."""

    drafts: DraftCounters | None = None
    clocks: Pairs = Pairs()


class Session:
    """The part of an attempt in which the server is up; keeps every sample that it takes."""

    def __init__(
        self,
        *,
        engine: Engine,
        settings: Any | None,
        window: int | None = None,
        model: ModelFacts,
        protocol: Protocol,
        known: Known,
        first_request_timeout_s: float,
        brings_template: bool = False,
        began: float,
        log: list[str],
        watch: Watch,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._model = model
        self._protocol = protocol
        self._known = known
        self._brings_template = brings_template
        self._first_request_timeout_s = first_request_timeout_s
        self._began = began
        self._log = log
        self._watch = watch
        # Without settings there is nothing to compare what runs with, and the window is given.
        self.window = (window or 0) if settings is None else engine.context_tokens(settings)
        self.samples: list[Sample] = []
        self.notes: list[str] = []
        self.prove_s: float | None = None
        self.measure_s: float | None = None
        self.dead_at_tokens: int | None = None
        """How many tokens the request held that the engine did not survive, in the proof."""

    def measure(self, server: Server | Attached) -> Outcome:
        """Return what the running server is worth; whatever it does is an outcome."""
        with self._client(server, self._protocol.workload) as client:
            if (first := self._first(client, server)) is not None:
                return first
            answers: list[str] = []
            quality = Quality()
            if self._protocol.guard is not None:
                given = self._answers(client, server)
                if not isinstance(given, list):
                    return given
                answers, quality = given, self._quality(client, given)
                if (unfit := self._judged(quality)) is not None:
                    return unfit
            began = time.monotonic()
            context = self._prove(client, server)
            self.prove_s = time.monotonic() - began
            if not isinstance(context, ProvenContext):
                return context
        began = time.monotonic()
        outcome = self._measured(server, context, answers, quality)
        self.measure_s = time.monotonic() - began
        return outcome

    def prove_only(self, server: Server | Attached, tokens: int) -> bool:
        """Tell whether this many tokens of context, prompt and answer, are survived."""
        with self._client(server, self._protocol.workload) as client:
            if self.window == 0:
                self.window = tokens
            return isinstance(self._fill(client, tokens), Sample)

    def _client(self, server: Server | Attached, workload: Workload) -> Client:
        return Client(
            server.base_url,
            self._engine.wire,
            self._model.served_name,
            workload,
            began=self._began,
            # A server that lives on may still hold the prompts of an earlier attempt.
            salt=f"{self._began}" if isinstance(server, Attached) else "",
        )

    # --- the first request --------------------------------------------------------------------

    def _first(self, client: Client, server: Server | Attached) -> Failure | None:
        """Return what is wrong with what runs, seen before anything is measured; None for nothing.

        Health says little: servers die, hang or compile for minutes on their first request, and
        serve with less than they were asked for.
        """
        self._watch(Progress(stage="first request"))
        sample = client.complete(
            "Hello", max_tokens=2, purpose=Purpose.FIRST, timeout_s=self._first_request_timeout_s
        )
        if isinstance(sample, RequestFailure):
            return self._failed(sample, server, Purpose.FIRST)
        self.samples.append(sample)
        server.alive()  # reads what the log has said since
        facts = self._engine.evidence(self._log)
        if self.window == 0:
            # The engine was asked to choose: what it chose is what is proven.
            chosen = facts.get("effective_context_tokens")
            if not isinstance(chosen, int) or chosen < 2:
                return Broken(
                    name=BrokenName.UNKNOWN,
                    finding=Finding(
                        phase=Phase.READY,
                        cause="",
                        explanation="the engine chose its context and did not say which: name a "
                        "length instead",
                    ),
                )
            self.window = chosen
        props = client.page(self._engine.wire.props_path)
        if (foreign := self._foreign_template(facts, props)) is not None:
            return foreign
        if self._settings is None:
            return None
        return self._engine.contradiction(self._settings, facts, props)

    def _foreign_template(self, facts: Pairs, props: str | None) -> Unfit | None:
        """Return that a chat would go through a template which the model does not know."""
        workloads = (self._protocol.workload, *self._protocol.also)
        chat = next((each for each in workloads if each.api == "chat"), None)
        if chat is None or self._brings_template:
            return None
        said = foreign_template(self._engine, facts, props)
        if said is None:
            return None
        return Unfit(
            name=UnfitName.SILENT_FALLBACK,
            finding=Finding(
                phase=Phase.READY, cause=said,
                explanation=without_template(chat.name, self._model.name),
            ),
        )  # fmt: skip

    # --- the guard ----------------------------------------------------------------------------

    def _answers(self, client: Client, server: Server | Attached) -> list[str] | Failure:
        """Return the greedy answers to the guard's questions, or that they are broken."""
        answers = self._asked(client)
        if isinstance(answers, RequestFailure):
            if answers.trouble is RequestTrouble.CONTEXT_EXCEEDED:
                return []  # a window too small for a sentence is asked nothing
            return self._failed(answers, server, Purpose.GUARD)
        if (why := collapsed(answers)) is not None:
            return self._unfit(UnfitName.GARBAGE_OUTPUT, why)
        return answers

    def _asked(self, client: Client, when: str = "") -> list[str] | RequestFailure:
        """Ask every question of the guard and return the answers."""
        answers: list[str] = []
        for number, question in enumerate(GREEDY_PROMPTS, start=1):
            self._watch(Progress(stage="guard", detail=f"question {number}{when}"))
            sample = self._greedy(client, question)
            if isinstance(sample, RequestFailure):
                return sample
            self.samples.append(sample)
            answers.append(sample.text)
        return answers

    def _greedy(self, client: Client, question: str) -> Sample | RequestFailure:
        tokens = min(GREEDY_TOKENS, max(self.window // 2, 2))
        return client.complete(question, max_tokens=tokens, purpose=Purpose.GUARD, temperature=0.0)

    def _quality(self, client: Client, answers: Sequence[str]) -> Quality:
        """Return how the answers stand beside the reference's, and what the engine can say."""
        reference = self._known.reference
        quality = Quality(mean_logprob=self._logprob(client))
        if reference is None or len(reference.answers) != len(answers):
            return quality
        ours, theirs = _tokens(client, answers), _tokens(client, reference.answers)
        same = None if ours is None or theirs is None else agreement(theirs, ours)
        if same is None:
            return replace(quality, reference=reference.attempt)
        return replace(
            quality,
            reference=reference.attempt,
            prefix_tokens=same.tokens,
            prefix_share=same.share,
        )

    def _judged(self, quality: Quality) -> Unfit | None:
        """Return why this quality must not win; what is worth a remark becomes a note."""
        guard = self._protocol.guard
        assert guard is not None
        reference = self._known.reference
        held = quality
        if reference is not None and not reference.trusted:
            # One against one: the reference may be the broken one. It is kept as a figure.
            held = replace(quality, prefix_tokens=None)
        best = (
            None
            if self._known.best_logprob is None
            else Quality(mean_logprob=self._known.best_logprob)
        )
        broken = judge(guard, held, best)
        if broken is not None:
            return self._unfit(*broken, facts=_facts_of(quality))
        said = remark(guard, quality, best)
        if said is not None and said not in self.notes:
            self.notes.append(said)
        return None

    def _logprob(self, client: Client) -> float | None:
        if self._engine.wire.scoring is None:
            return None
        self._watch(Progress(stage="guard", detail="log-probability of a fixed text"))
        return fixed_text_logprob(
            client.post_json, self._engine.wire, self._model.served_name, self.window
        )

    def _still_sound(
        self, client: Client, server: Server | Attached, answers: Sequence[str], quality: Quality
    ) -> Quality | Failure:
        """Ask the questions of the beginning again: what collapsed under load must not win."""
        if not answers:
            return quality  # the window was too small for them at the beginning as well
        again = self._asked(client, " once more")
        if isinstance(again, RequestFailure):
            return self._failed(again, server, Purpose.GUARD)
        if (why := collapsed(again)) is not None:
            return self._unfit(
                UnfitName.GARBAGE_OUTPUT, f"sound at first, but after the measurement {why}"
            )
        ours, first = _tokens(client, again), _tokens(client, answers)
        same = None if ours is None or first is None else agreement(first, ours)
        if same is not None:
            quality = replace(quality, end_prefix_share=same.share)
        unfit = self._judged(quality)
        return quality if unfit is None else unfit

    # --- the proof ----------------------------------------------------------------------------

    def _prove(self, client: Client, server: Server | Attached) -> ProvenContext | Failure:
        """Fill the window with one prompt and its answer, then ask for more than it holds.

        Where the engine survives but does not hold the window, the largest context that it does
        hold is found by bisection and said; what holds noticeably less than its window is unfit.
        """
        if not self._protocol.prove:
            little = min(self.window, _LITTLE_TOKENS)
            began = self._fill(client, little)
            if isinstance(began, RequestFailure):
                return self._failed(began, server, Purpose.PROOF)
            return self._held(began, little, refuses_more=None)
        self._watch(Progress(stage="prove", detail=f"{self.window:,} tokens"))
        filled = self._fill(client, self.window)
        proven = self.window
        if isinstance(filled, RequestFailure):
            self.dead_at_tokens = self.window
            outcome = self._failed(filled, server, Purpose.PROOF)
            survived = filled.trouble in _SURVIVED and server.alive()
            bracketed = self._bracket(client, server) if survived else None
            if isinstance(bracketed, RequestFailure):
                return self._failed(bracketed, server, Purpose.PROOF)
            if bracketed is None:
                return outcome
            filled, proven = bracketed
            if proven < self.window * _LEAST_SHARE:
                return _with_facts(outcome, largest_proven_tokens=proven)
            self.notes.append(
                f"of the configured window of {self.window:,} tokens {proven:,} could be filled"
            )
        if (cut := self._truncated(filled)) is not None:
            return cut
        if (grown := self._grow(client, proven)) is not None:
            self.dead_at_tokens = proven
            return self._failed(grown, server, Purpose.PROOF)
        refuses = self._refuses_more(client)
        if isinstance(refuses, RequestFailure):
            return self._failed(refuses, server, Purpose.OVERFLOW)
        return self._held(filled, proven, refuses_more=refuses)

    def _held(self, filled: Sample, proven: int, *, refuses_more: bool | None) -> ProvenContext:
        held = filled.prompt_tokens + filled.completion_tokens
        ended_by_window = filled.finish_reason == "length" and held < proven
        return ProvenContext(
            configured_tokens=self.window,
            proven_tokens=held,
            reserved_tokens=proven - held if ended_by_window else 0,
            prompt_tokens=filled.prompt_tokens,
            completion_tokens=filled.completion_tokens,
            prefill_tok_s=filled.prefill_tok_s or 0.0,
            decode_tok_s=filled.decode_tok_s,
            refuses_more=refuses_more,
        )

    def _fill(self, client: Client, tokens: int) -> Sample | RequestFailure:
        """Send one prompt that, with its answer, holds so many tokens."""
        answer_tokens = min(self._protocol.workload.proof_answer_tokens, tokens - 1)
        text = client.tokens(tokens, tokens - answer_tokens)
        if isinstance(text, RequestFailure):
            return text
        sample = client.complete(text, max_tokens=answer_tokens, purpose=Purpose.PROOF)
        if isinstance(sample, Sample):
            self.samples.append(replace(sample, prompt_length=len(text)))
        return sample

    def _truncated(self, filled: Sample) -> Unfit | None:
        sent = self.samples[-1].prompt_length or 0
        if filled.prompt_tokens >= sent:
            return None
        return self._unfit(
            UnfitName.SILENT_CONTEXT_TRUNCATION,
            f"of a prompt of {sent:,} tokens the server read only {filled.prompt_tokens:,}, and "
            "did not say so",
            facts={"sent_tokens": sent, "read_tokens": filled.prompt_tokens},
        )

    def _bracket(
        self, client: Client, server: Server | Attached
    ) -> tuple[Sample, int] | RequestFailure | None:
        """Return the longest prompt and answer that this server holds, by bisection; None: none."""
        good, bad = 0, self.window
        best: Sample | None = None
        while bad - good > max(int(self.window * _BRACKET_SHARE), 1):
            middle = (good + bad) // 2
            if middle < 2:
                break
            self._watch(Progress(stage="prove", detail=f"{middle:,} of {self.window:,} tokens"))
            tried = self._fill(client, middle)
            if isinstance(tried, Sample):
                good, best = middle, tried
            elif tried.trouble in _SURVIVED and server.alive():
                bad = middle
            else:
                self.dead_at_tokens = middle
                return tried
        return None if best is None else (best, good)

    def _grow(self, client: Client, window: int) -> RequestFailure | None:
        """Let a conversation grow turn by turn until it fills the window; None where it lives."""
        turns = self._protocol.workload.proof_turns
        if turns == 0:
            return None
        answer_tokens = min(self._protocol.workload.proof_answer_tokens, window - 1)
        text = client.tokens(window + 1, window - answer_tokens)
        if isinstance(text, RequestFailure):
            return text
        for turn in range(1, turns + 1):
            length = max(len(text) * turn // turns, 1)
            self._watch(Progress(stage="prove", detail=f"turn {turn} of {turns}"))
            sample = client.complete(
                text[:length],
                max_tokens=answer_tokens,
                purpose=Purpose.PROOF,
                # Each turn continues the last one, as a conversation does.
                extras=self._engine.wire.cached_extras,
            )
            if isinstance(sample, RequestFailure):
                return sample
            self.samples.append(replace(sample, prompt_length=length, run=turn))
        return None

    def _refuses_more(self, client: Client) -> bool | RequestFailure | None:
        """Tell whether one token more than the window is refused cleanly."""
        # The prompt takes all of the window, so that its answer would be one token too much.
        text = client.tokens(self.window, self.window + 1)
        if isinstance(text, RequestFailure):
            return text
        over = client.complete(text, max_tokens=1, purpose=Purpose.OVERFLOW)
        match over:
            case RequestFailure(
                trouble=RequestTrouble.CONTEXT_EXCEEDED | RequestTrouble.CLIENT_ERROR
            ):
                return True
            case Sample():
                self.notes.append(
                    f"a prompt of {len(text):,} tokens was answered although the window is "
                    f"{self.window:,}"
                )
                return False
            case RequestFailure():
                return over

    # --- the measurement ----------------------------------------------------------------------

    def _measured(
        self,
        server: Server | Attached,
        context: ProvenContext,
        answers: Sequence[str],
        quality: Quality,
    ) -> Outcome:
        """Measure every load of every workload, then make sure that it still answers soundly."""
        bar = self._known.bar(context.window_tokens)
        figures: list[Figures] = []
        for workload in (self._protocol.workload, *self._protocol.also):
            with self._client(server, workload) as client:
                for load in workload.loads(self.window):
                    # What cannot reach the front by its first load is not measured any further.
                    first = not figures
                    if not first and figures[0].ended == Finished.RACED.value:
                        break
                    found = self._load(client, server, workload, load, bar if first else None)
                    if not isinstance(found, Figures):
                        return found
                    figures.append(found)
                if not any(each.workload == workload.name for each in figures):
                    if figures:
                        self.notes.append(
                            f"workload {workload.name} has no prompt that the window of "
                            f"{self.window:,} tokens could hold"
                        )
                        continue
                    return self._unfit(
                        UnfitName.DEGRADED_CAPACITY,
                        f"the window of {self.window:,} tokens holds no prompt of workload "
                        f"{workload.name}",
                    )
        with self._client(server, self._protocol.workload) as client:
            sound = self._still_sound(client, server, answers, quality)
        if not isinstance(sound, Quality):
            return sound
        peak = server.peak_bytes()
        if not server.alive():
            death = server.death(0.0)
            assert death is not None
            return self._engine.verdict(death, self._log)
        compared = figures[0]
        return Measured(
            decode_tok_s=compared.decode_tok_s,
            ttft_s=compared.ttft_s,
            prefill_tok_s=compared.prefill_tok_s,
            context=context,
            drafts=compared.drafts,
            peak_bytes=peak,
            ready_bytes=server.ready_bytes,
            ready_device_bytes=(
                None if server.ready_device_bytes is None else sum(server.ready_device_bytes)
            ),
            figures=tuple(figures),
            telemetry=compared.telemetry,
            quality=sound,
        )

    def _load(
        self,
        client: Client,
        server: Server | Attached,
        workload: Workload,
        load: Load,
        bar: float | None,
    ) -> Figures | Failure:
        """Repeat one load until its number is known well enough, and return its figures."""
        repetition = Repetition(
            workload.repeats,
            noise=self._known.noise,
            bar=bar,
            max_tokens=self._room(workload, load, [], short=False),
            prompts=max(len(workload.texts), 1),
        )
        label = _label(workload, load)
        warm: list[tuple[Sample, ...]] = []
        timed: list[tuple[Sample, ...]] = []

        # However long the warm-up was, measured run i asks the same, with the same seed.
        first_run = workload.repeats.warmup_max

        def ask(purpose: Purpose, *, short: bool) -> RequestFailure | None:
            warming = purpose is Purpose.WARMUP
            rounds = warm if warming else timed
            samples = client.ask(
                load,
                run=len(warm) if warming else first_run + len(timed),
                purpose=purpose,
                max_tokens=self._room(workload, load, [*warm, *timed], short=short),
                # Warm-up answers are compared with each other, so they are all of one prompt.
                prompt=0 if warming else len(timed),
            )
            if isinstance(samples, RequestFailure):
                return samples
            self.samples += samples
            rounds.append(samples)
            return None

        while isinstance(step := repetition.next(_speeds(warm), []), WarmUpStep):
            self._watch(Progress(stage="warm up", detail=label))
            if (failure := ask(Purpose.WARMUP, short=step.short)) is not None:
                return self._failed(failure, server, Purpose.WARMUP)
            if len(warm) >= workload.repeats.warmup_max:
                break  # answers too short to be timed never become steady
        before = self._metrics(client)
        began = time.monotonic()
        with watching(
            server.pid, engine_is_here=server.is_here, used_before=server.gpu_used_before
        ) as telemetry:
            while True:
                gone_s = time.monotonic() - began
                decided = _decided(repetition, workload, warm, timed, gone_s)
                if isinstance(decided, Finished):
                    break
                self._watch(_measuring(label, workload, len(timed), gone_s))
                if (failure := ask(Purpose.MEASURE, short=decided.short)) is not None:
                    return self._failed(failure, server, Purpose.MEASURE)
        if telemetry.trouble is not None:
            self.notes.append(f"the machine could not be watched: {telemetry.trouble}")
        after = self._metrics(client)
        cached = self._cached(client, server, workload, load)
        if not isinstance(cached, list):
            return cached
        return self._figures(
            workload, load, timed, warm=warm, drafts=_between(before.drafts, after.drafts),
            clocks=_elapsed(before.clocks, after.clocks), telemetry=telemetry.result(),
            cached=cached, ended=decided, repetition=repetition,
        )  # fmt: skip

    def _room(
        self,
        workload: Workload,
        load: Load,
        rounds: Sequence[tuple[Sample, ...]],
        *,
        short: bool,
    ) -> int:
        """Return how many tokens an answer may take in this window."""
        wanted = workload.max_tokens
        if short:
            wanted = min(wanted, workload.repeats.warmup_tokens)
        if load.prompt_tokens is not None:
            left = self.window - load.prompt_tokens
        elif rounds:
            # Another prompt than the last may come, and be longer by as much as its text is.
            longest = max(len(each) for each in workload.texts)
            left = self.window - 8
            left -= max(
                math.ceil(each.prompt_tokens * longest / max(len(workload.texts[each.prompt]), 1))
                for each in rounds[-1]
            )
        else:
            left = self.window // 2  # how long the prompt is has not been seen yet
        return max(min(wanted, left), 2)

    def _cached(
        self, client: Client, server: Server | Attached, workload: Workload, load: Load
    ) -> list[Sample] | Failure:
        """Ask the same prompt again and again: the warm-cache figures, by their own name."""
        samples: list[Sample] = []
        if workload.cached_runs == 0:
            return samples
        for run in range(workload.cached_runs + 1):
            self._watch(Progress(stage="measure", detail=f"{workload.name}, warm cache"))
            asked = client.ask(
                replace(load, streams=1), run=run, purpose=Purpose.CACHED, max_tokens=2,
                cached=True,
            )  # fmt: skip
            if isinstance(asked, RequestFailure):
                return self._failed(asked, server, Purpose.CACHED)
            self.samples += asked
            if run > 0:  # the first one fills the cache
                samples += asked
        return samples

    def _figures(
        self,
        workload: Workload,
        load: Load,
        timed: Sequence[tuple[Sample, ...]],
        *,
        warm: Sequence[tuple[Sample, ...]],
        drafts: DraftCounters | None,
        clocks: Pairs,
        telemetry: Telemetry,
        cached: Sequence[Sample],
        ended: Finished,
        repetition: Repetition,
    ) -> Figures | Unfit:
        flat = [each for round_ in timed for each in round_]
        if (why := _no_answer([each.text for each in flat])) is not None:
            return self._unfit(UnfitName.GARBAGE_OUTPUT, f"an answer cannot be one: {why}")
        if drafts is not None and drafts.accepted == 0 and drafts.drafted >= _DEAD_DRAFT_TOKENS:
            return self._unfit(
                UnfitName.DRAFT_INEFFECTIVE,
                f"{drafts.drafted} tokens were drafted and none was accepted",
                facts={"drafted_tokens": drafts.drafted},
            )
        seen = looks(self._answered(workload, load, timed))
        if (unfit := self._caused(workload, seen)) is not None:
            return unfit
        speeds = _speeds(timed)
        if not speeds:
            return self._unfit(
                UnfitName.DEGRADED_THROUGHPUT,
                "no answer was long enough to time: "
                f"{[each.completion_tokens for each in flat]} tokens",
            )
        doubts = [
            *repetition.doubts(
                _speeds(warm), speeds, gaps=[each.gaps_s for each in flat if each.gaps_s]
            ),
            *telemetry_doubts(telemetry),
            *_doubts_of(flat, drafts, clocks, ignore_eos=workload.ignore_eos),
            *((Doubt.LOOPING,) if seen.doubtful else ()),
        ]
        if seen.doubtful:
            self.notes.append(
                f"{workload.name}: {seen.count} of {seen.of} answers represent nothing; of the "
                f"first of them, {seen.why}"
            )
        gaps = [gap for each in flat for gap in each.gaps_s]
        prefill = [each.prefill_tok_s for each in flat if each.prefill_tok_s is not None]
        confidence = workload.repeats.confidence
        return Figures(
            workload=workload.name,
            prompt_length=load.prompt_tokens,
            streams=load.streams,
            decode_tok_s=repetition.summary(speeds, doubts, warmup=_speeds(warm)),
            ttft_s=summarise([each.ttft_s for each in flat], confidence=confidence),
            prefill_tok_s=summarise(prefill, confidence=confidence) if prefill else None,
            total_tok_s=(
                summarise([_total_tok_s(each) for each in timed], confidence=confidence)
                if load.streams > 1
                else None
            ),
            itl_s=(
                summarise(
                    [statistics.median(each.gaps_s) for each in flat if each.gaps_s],
                    confidence=confidence,
                )
                if gaps
                else None
            ),
            itl_p99_s=_percentile(gaps, 0.99) if gaps else None,
            cached_ttft_s=(
                summarise([each.ttft_s for each in cached], confidence=confidence)
                if cached
                else None
            ),
            drafts=drafts,
            telemetry=telemetry,
            ended=ended.value,
            tokens=sum(each.completion_tokens for each in flat),
            server=clocks,
            answers=seen.of,
            looping=seen.count,
        )

    def _answered(
        self, workload: Workload, load: Load, timed: Sequence[tuple[Sample, ...]]
    ) -> list[Answer]:
        """Return the measured answers with what they were asked for."""
        generated = load.prompt_tokens is not None
        return [
            Answer(
                text=each.text,
                prompt="" if generated else workload.texts[each.prompt],
                tokens=each.completion_tokens,
                asked=each.asked_tokens,
            )
            for round_ in timed
            for each in round_
        ]

    def _caused(self, workload: Workload, seen: Looks) -> Unfit | None:
        """Return that the setting makes answers loop which the reference's do not; None: not."""
        reference = self._known.reference
        if (
            not seen.doubtful
            or reference is None
            or reference.looks is None
            or workload.digest() != reference.workload
            or not seen.caused(reference.looks)
        ):
            return None
        theirs = reference.looks
        return self._unfit(
            UnfitName.GARBAGE_OUTPUT,
            f"{seen.count} of {seen.of} measured answers represent nothing, and {theirs.count} of "
            f"{theirs.of} of the reference, attempt {reference.attempt}; of the first of them, "
            f"{seen.why}",
            facts={"looping_answers": seen.count, "answers": seen.of},
        )

    def _metrics(self, client: Client) -> _Metrics:
        page = client.page(self._engine.wire.metrics_path)
        if page is None:
            return _Metrics()
        engine = self._engine
        clocks = engine.clocks(page) if isinstance(engine, Clocked) else Pairs()
        return _Metrics(drafts=engine.draft_counters(page), clocks=clocks)

    # --- what went wrong ----------------------------------------------------------------------

    def _failed(
        self, failure: RequestFailure, server: Server | Attached, purpose: Purpose
    ) -> Failure:
        """Return what a failed request means: a dead engine is asked first what it died of."""
        if failure.trouble in (
            RequestTrouble.CONNECTION_LOST,
            RequestTrouble.SERVER_ERROR,
            RequestTrouble.ERROR_IN_STREAM,
            # A server that is ending may still close its stream as if all were well.
            RequestTrouble.NO_USAGE,
            RequestTrouble.SILENCE,
        ):
            silent = failure.trouble is RequestTrouble.SILENCE
            death = server.death() or server.complaint(failure.detail, silent=silent)
            verdict = self._engine.verdict(death, self._log)
            return _with_facts(verdict, failed_during=purpose.value)
        during = f"during the {purpose.value} request"
        asked: dict[str, Scalar] = {"window_tokens": self.window, **failure.server}
        match failure.trouble:
            case RequestTrouble.CONTEXT_EXCEEDED:
                what = (
                    f"the server refuses a prompt that its configured window of {self.window:,} "
                    "tokens should hold"
                    if purpose is Purpose.PROOF
                    else f"the workload's prompt does not fit the window of {self.window:,} tokens"
                )
                return self._unfit(
                    UnfitName.HTTP_400_CONTEXT, f"{what}: {failure.detail}", facts=asked
                )
            case RequestTrouble.EMPTY_ANSWER:
                return self._unfit(
                    UnfitName.GARBAGE_OUTPUT, f"an empty answer {during}: {failure.detail}"
                )
            case _:
                name, what = BrokenName.UNKNOWN, "the request failed while the server lived on"
        return Broken(
            name=name,
            finding=Finding(
                phase=Phase.SERVING,
                cause=failure.detail,
                explanation=f"{what} {during}: {failure.detail}",
                facts=Pairs(asked),
            ),
        )

    def _unfit(
        self, name: UnfitName, explanation: str, *, facts: Mapping[str, Scalar] | None = None
    ) -> Unfit:
        return Unfit(
            name=name,
            finding=Finding(
                phase=Phase.SERVING, cause=explanation, explanation=explanation,
                facts=Pairs(facts or {}),
            ),
        )  # fmt: skip


def _no_answer(texts: Sequence[str]) -> str | None:
    """Return why one of these texts comes from no working model; None where all may."""
    return next((why for each in texts if (why := degenerate(each)) is not None), None)


def _tokens(client: Client, texts: Sequence[str]) -> list[tuple[int, ...]] | None:
    """Return the texts cut by the server's tokenizer; None where it has none."""
    found = []
    for each in texts:
        tokens = client.tokenize(each)
        if not isinstance(tokens, tuple):
            return None
        found.append(tokens)
    return found


_SURVIVED = (
    RequestTrouble.CONTEXT_EXCEEDED,
    RequestTrouble.CLIENT_ERROR,
    RequestTrouble.SERVER_ERROR,
    RequestTrouble.ERROR_IN_STREAM,
)
"""What a server may answer to a prompt that is too long for it, and live."""


def _with_facts(failure: Failure, **facts: Scalar) -> Failure:
    more = Pairs({**failure.finding.facts, **facts})
    return replace(failure, finding=replace(failure.finding, facts=more))


def _facts_of(quality: Quality) -> dict[str, Scalar]:
    return {name: value for name, value in asdict(quality).items() if value is not None}


def _label(workload: Workload, load: Load) -> str:
    parts = [workload.name]
    if load.prompt_tokens is not None:
        parts.append(f"{load.prompt_tokens:,} tokens")
    if load.streams > 1:
        parts.append(f"{load.streams} streams")
    return ", ".join(parts)


def _decided(
    repetition: Repetition,
    workload: Workload,
    warm: Sequence[tuple[Sample, ...]],
    timed: Sequence[tuple[Sample, ...]],
    gone_s: float,
) -> MeasureStep | Finished:
    """Return whether one more round is measured: by the repeats, or by the workload's minutes."""
    if workload.minutes is not None:
        return Finished.TIME if timed and gone_s >= workload.minutes * 60 else MeasureStep()
    if len(timed) >= workload.repeats.most:
        return Finished.MOST  # also where no answer was long enough to be timed
    step = repetition.next(_speeds(warm), _speeds(timed))
    return MeasureStep() if isinstance(step, WarmUpStep) else step


def _measuring(label: str, workload: Workload, done: int, gone_s: float) -> Progress:
    if workload.minutes is not None:
        whole_s = workload.minutes * 60
        left_s = max(whole_s - gone_s, 0.0)
        return Progress(
            stage="measure", detail=f"{label}, {left_s:.0f} s to go", done=1 - left_s / whole_s
        )
    most = workload.repeats.most
    return Progress(
        stage="measure", detail=f"{label}, run {done + 1} of at most {most}", done=done / most
    )


def _speeds(rounds: Sequence[tuple[Sample, ...]]) -> list[float]:
    """Return one decode speed a round, the median of its streams, where one could be timed."""
    found = []
    for each in rounds:
        speeds = [sample.decode_tok_s for sample in each if sample.decode_tok_s is not None]
        if speeds:
            found.append(statistics.median(speeds))
    return found


def _total_tok_s(streams: Sequence[Sample]) -> float:
    """Return all streams' tokens over the time from the first request to the last text."""
    began = min(each.began_s for each in streams)
    ended = max(each.began_s + each.ttft_s + each.decode_s for each in streams)
    return sum(each.completion_tokens for each in streams) / (ended - began)


def _percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def _between(before: DraftCounters | None, after: DraftCounters | None) -> DraftCounters | None:
    return None if before is None or after is None else after.since(before)


def _elapsed(before: Pairs, after: Pairs) -> Pairs:
    """Return what an engine's clocks showed between two readings."""
    found: dict[str, Scalar] = {}
    for name, value in after.items():
        earlier = before.get(name, 0)
        assert isinstance(value, int | float)
        assert isinstance(earlier, int | float)
        found[name] = value - earlier
    return Pairs(found)


def _doubts_of(
    timed: Sequence[Sample], drafts: DraftCounters | None, clocks: Pairs, *, ignore_eos: bool
) -> list[Doubt]:
    """Return the doubts that the requests themselves raise."""
    doubts = []
    if _clocks_disagree(timed) or _histograms_disagree(timed, clocks):
        doubts.append(Doubt.CLOCKS_DISAGREE)
    asked = max((each.completion_tokens for each in timed), default=0)
    if ignore_eos and any(each.completion_tokens < asked * _EARLY_SHARE for each in timed):
        doubts.append(Doubt.EARLY_STOP)
    if drafts is not None and drafts.drafted > 0:
        tokens = sum(each.completion_tokens for each in timed)
        apart = identity(drafts, completion_tokens=tokens, requests=len(timed))
        if apart is not None and abs(apart) > _CLOCKS_TOLERANCE:
            doubts.append(Doubt.ACCEPTANCE_DISAGREES)
    return doubts


def _clocks_disagree(timed: Sequence[Sample]) -> bool:
    """Tell whether the server's own decode time differs from ours by more than 3 %."""
    ratios = []
    for sample in timed:
        n, ms = sample.server.get("predicted_n"), sample.server.get("predicted_ms")
        ours = sample.decode_tok_s
        if isinstance(n, int) and isinstance(ms, int | float) and ms > 0 and n > 1 and ours:
            ratios.append(ours / ((n - 1) / ms * 1000))
    return bool(ratios) and abs(statistics.median(ratios) - 1) > _CLOCKS_TOLERANCE


def _histograms_disagree(timed: Sequence[Sample], clocks: Pairs) -> bool:
    """Tell whether the engine's sum of decode times over these requests differs by more than 3 %.

    Where the engine counted other requests as well, or not all of these, nothing is said.
    """
    theirs = clocks.get("decode_s")
    if clocks.get("requests") != len(timed) or not isinstance(theirs, int | float) or theirs <= 0:
        return False
    return abs(sum(each.decode_s for each in timed) / theirs - 1) > _CLOCKS_TOLERANCE


__all__ = ["Progress", "Protocol", "Session", "Watch"]
