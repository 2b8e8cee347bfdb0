"""How often a load is repeated: when the server is warm, and when enough has been seen.

Nothing here measures or waits. `Repetition.next` says what to do next from the speeds seen so far,
in the order of time, and always says the same for the same speeds.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from sweeper.core.doubts import LEAST_VALUES, SUSPICIOUS, doubts_of
from sweeper.core.stats import Doubt, Summary, student_quantile, summarise
from sweeper.core.workload import Repeats


class Finished(enum.StrEnum):
    """Why no more repeats are made."""

    TIGHT = "tight"
    """The interval of the median is as narrow as was asked, and nothing looks suspicious."""
    AHEAD = "ahead"
    """It reaches the front, by the whole interval; the confirmation will measure it closely."""
    RACED = "raced"
    """It cannot better the front any more, at the stated confidence."""
    MOST = "most"
    """As many repeats were made as are allowed."""
    TIME = "time"
    """The workload's minutes are over."""

    @property
    def words(self) -> str:
        """The reason in words for people."""
        match self:
            case Finished.TIGHT:
                return "the interval is narrow enough"
            case Finished.AHEAD:
                return "it reaches the front for certain"
            case Finished.RACED:
                return "it cannot reach the front"
            case Finished.MOST:
                return "the limit of repeats is reached"
            case Finished.TIME:
                return "its minutes are over"


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpStep:
    """Send one more warm-up request; `short`: with an answer of at most `warmup_tokens`."""

    short: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureStep:
    """Measure one more request; `short`: with an answer of at most `warmup_tokens`."""

    short: bool = False


Step: TypeAlias = WarmUpStep | MeasureStep | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How much repeats differ within one boot: their coefficient of variation, as a share.

    `dof` are the degrees of freedom behind it.
    """

    cv: float
    dof: int

    @staticmethod
    def pooled(attempts: Iterable[Sequence[float]]) -> Noise | None:
        """Return the noise that several attempts have in common; None where none can tell.

        The pooled variance of the logarithms, each attempt about its own mean: the sum of all
        squares over the sum of all n - 1. An attempt of fewer than five repeats, or with a doubt
        about them, is left out: one stray run among few would be taken for the noise of all.
        """
        squares, dof = 0.0, 0
        for speeds in attempts:
            if len(speeds) < LEAST_VALUES or doubts_of(speeds):
                continue
            squares += statistics.variance([math.log(each) for each in speeds]) * (len(speeds) - 1)
            dof += len(speeds) - 1
        return Noise(cv=math.sqrt(squares / dof), dof=dof) if dof > 0 else None


_USUAL_CV = 0.01
"""The noise that is assumed for the end of the warm-up as long as none has been seen."""
_RISE = 0.02
"""A rise of the speed during warm-up that does not matter."""
_COLD_MARGIN = 0.7
"""How much faster a server that has answered little may still become: 40 % slower at first."""
_SHORT_MARGIN = 0.1
"""How much faster a long answer may be than a short one: drafts that are accepted later on."""
_SETTLED = 4
"""From so many warm-up answers on, steady ones are believed to be of a warm server."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """The decisions of one load's repeats.

    `noise` is what earlier attempts had (None: not known). `bar` is the decode speed that must be
    beaten to reach the front: the largest lower bound of its members with as large a window, 0
    where there is none. None means no race: the number is wanted for itself, as tight as asked.
    `max_tokens` is the length of a full answer (None: longer than a warm-up answer).

    Run i of the measured ones asks prompt i mod `prompts`. Some texts are drafted better than
    others, so a decision by numbers falls after whole rounds of the prompts only, and what repeats
    say against their own median is looked for within prompts.
    """

    repeats: Repeats
    noise: Noise | None = None
    bar: float | None = None
    max_tokens: int | None = None
    prompts: int = 1

    def next(self, warmup: Sequence[float], measured: Sequence[float]) -> Step:
        """Return what to do after these speeds of warm-up and of measured requests."""
        repeats = self.repeats
        if not measured:
            if self._hopeless(warmup):
                return MeasureStep(short=True)
            if len(warmup) < repeats.warmup_min or (
                len(warmup) < repeats.warmup_max and not self.steady(warmup)
            ):
                return WarmUpStep()
            return MeasureStep()
        if self._raced(warmup, measured):
            return Finished.RACED
        if len(measured) >= repeats.most:
            return Finished.MOST
        found = summarise(measured, confidence=repeats.confidence)
        if Doubt.TOO_FEW in found.doubts or len(measured) % self.prompts:
            return MeasureStep()
        tight = len(measured) >= repeats.least and self._tight(found)
        if (tight or self._ahead(found)) and not doubts_of(
            self._within(measured), before=warmup, levels=SUSPICIOUS
        ):
            return Finished.TIGHT if tight else Finished.AHEAD
        return MeasureStep()

    def steady(self, warmup: Sequence[float]) -> bool:
        """Tell whether the latest warm-up speeds show no rise beyond noise.

        The mean logarithm of the latest two against that of the two before them (of two or three
        speeds: of the latest against the one before). A rise is one of more than 2 % and of more
        than two standard errors. Their sigma is the largest of the noise of earlier attempts, 1 %
        where there is none, and the scatter about a straight line of at least five speeds: 1.4826
        times the median of their absolute second differences, over sqrt(6), which a steady rise
        leaves at nought. A single speed says nothing; it must do where no more are allowed.
        """
        if len(warmup) < 2:
            return self.repeats.warmup_max < 2
        logs = [math.log(each) for each in warmup]
        sigma = _USUAL_CV if self.noise is None else self.noise.cv
        if len(logs) >= 5:
            bends = [abs(logs[i] - 2 * logs[i - 1] + logs[i - 2]) for i in range(2, len(logs))]
            sigma = max(sigma, 1.4826 * statistics.median(bends) / math.sqrt(6))
        width = min(len(logs) // 2, 2)
        rise = statistics.fmean(logs[-width:]) - statistics.fmean(logs[-2 * width : -width])
        return rise <= max(_RISE, 2 * sigma * math.sqrt(2 / width))

    def doubts(
        self,
        warmup: Sequence[float],
        measured: Sequence[float],
        *,
        gaps: Sequence[Sequence[float]] = (),
    ) -> tuple[Doubt, ...]:
        """Return what the repeats say against their own median, a warm-up without end included.

        `gaps` are the times between pieces of text of each measured answer.
        """
        doubts = list(doubts_of(self._within(measured), before=warmup, gaps=gaps))
        cold = (
            len(warmup) >= max(self.repeats.warmup_max, 2)
            and not self._hopeless(warmup)
            and not self.steady(warmup)
        )
        if cold and Doubt.WARMING not in doubts:
            doubts.insert(0, Doubt.WARMING)
        return tuple(doubts)

    def summary(
        self,
        measured: Sequence[float],
        doubts: Iterable[Doubt] = (),
        *,
        warmup: Sequence[float] = (),
    ) -> Summary:
        """Return the median of the measured speeds with its interval and all these doubts.

        With the warm-up at hand it is marked `short` where only a short answer was measured.
        """
        found = summarise(measured, confidence=self.repeats.confidence)
        return replace(
            found,
            doubts=tuple(dict.fromkeys((*found.doubts, *doubts))),
            short=len(measured) == 1 and self._hopeless(warmup) and self._short_margin > 0,
        )

    def _within(self, measured: Sequence[float]) -> list[float]:
        return within_prompts(measured, [i % self.prompts for i in range(len(measured))])

    @property
    def _short_margin(self) -> float:
        same = self.max_tokens is not None and self.max_tokens <= self.repeats.warmup_tokens
        return 0.0 if same else _SHORT_MARGIN

    def _hopeless(self, warmup: Sequence[float]) -> bool:
        """Tell from warm-up alone that the front is out of reach, by a generous margin.

        The fastest of at least two answers is what counts, so that a slow one among them says
        nothing. The server may become faster by 70 % still; once four answers and more are steady,
        only as much as a long answer may be faster than a short one, and three times the noise.
        """
        if not self.bar or not self.repeats.racing or len(warmup) < 2:
            return False
        margin = _COLD_MARGIN
        if len(warmup) >= _SETTLED and self.noise is not None and self.steady(warmup):
            margin = self._short_margin + 3 * self.noise.cv
        return max(warmup) * (1 + margin) < self.bar

    def _raced(self, warmup: Sequence[float], measured: Sequence[float]) -> bool:
        """Tell whether the median cannot better the front, at the stated confidence.

        Looked at after 1, 2, 4, 8, ... repeats, each time at an equal part of the error
        (Bonferroni), so that all looks together keep the confidence. The upper bound is
        exp(m + t s sqrt(1/n)) with m the mean of the logarithms, from three repeats on
        exp(m + t s sqrt(pi/2n)) with m their median (its asymptotic error on normal noise), t the
        one-sided quantile of Student's distribution with the degrees of freedom of s. That is the
        noise of earlier attempts or, where these repeats have more, theirs. One or two repeats need
        the former, and none of them may be a tenth slower than the warm-up: as a stray run is.

        The bar is a lower bound, so the median behind it lies up to about one `interval` above it.
        To better the front is to be above that median by another: what is not, and so far lies
        below that median (half a sigma above the bar, at most), ties with it at best.
        """
        n = len(measured)
        if not self.bar or not self.repeats.racing:
            return False
        if self._hopeless(warmup) and max(measured) * (1 + self._short_margin) < self.bar:
            return True
        rounds, rest = divmod(n, self.prompts)
        if rest or rounds & (rounds - 1):
            return False
        logs = [math.log(each) for each in measured]
        cv, dof = (0.0, 0) if self.noise is None else (self.noise.cv, self.noise.dof)
        middle, variance = statistics.fmean(logs), 1 / n
        if n >= 3:
            middle, variance = statistics.median(logs), math.pi / 2 / n
            if rounds > 1 or self.prompts == 1:
                own = statistics.stdev(map(math.log, self._within(measured)))
                if dof == 0 or own > cv:
                    cv, dof = own, n - self.prompts
            elif dof == 0:
                return False  # each prompt was asked once, which says nothing of noise
        elif dof == 0 or self._odd(warmup, measured):
            return False
        looks = self.repeats.most.bit_length()
        t = student_quantile(1 - (1 - self.repeats.confidence) / looks, dof)
        upper = math.exp(middle + t * cv * math.sqrt(variance))
        interval = self.repeats.interval or 0.0
        beaten = math.exp(middle) < self.bar * (1 + min(interval, cv) / 2)
        return beaten and upper < self.bar * (1 + 2 * interval)

    @staticmethod
    def _odd(warmup: Sequence[float], few: Sequence[float]) -> bool:
        """Tell whether one of few repeats is too slow beside the warm-up to be believed."""
        return bool(warmup) and min(few) < 0.9 * statistics.median(warmup[-3:])

    def _tight(self, found: Summary) -> bool:
        interval = self.repeats.interval
        return (
            interval is not None
            and found.high <= found.median * (1 + interval)
            and found.low >= found.median * (1 - interval)
        )

    def _ahead(self, found: Summary) -> bool:
        """Tell whether the whole interval lies above the bar, but for one `interval`."""
        interval = self.repeats.interval
        return (
            self.bar is not None
            and self.repeats.racing
            and interval is not None
            and found.low > self.bar * (1 - interval)
        )


def within_prompts(speeds: Sequence[float], prompts: Sequence[int]) -> list[float]:
    """Return speeds as they would be if all prompts had the same median: that of all.

    What is left of a speed beside its prompt's median is widened by sqrt((n - 1) / (n - k)) for n
    speeds and k prompts, as each median takes a degree of freedom. A prompt with a single speed
    says nothing of noise, and its speed becomes the median of all.
    """
    kinds = len(set(prompts))
    if kinds < 2:
        return list(speeds)
    by_prompt: dict[int, list[float]] = {}
    for speed, prompt in zip(speeds, prompts, strict=True):
        by_prompt.setdefault(prompt, []).append(speed)
    medians = {prompt: statistics.median(several) for prompt, several in by_prompt.items()}
    middle = statistics.median(speeds)
    wider = math.sqrt((len(speeds) - 1) / max(len(speeds) - kinds, 1))
    return [
        middle * (speed / medians[prompt]) ** wider
        for speed, prompt in zip(speeds, prompts, strict=True)
    ]


__all__ = [
    "Finished",
    "MeasureStep",
    "Noise",
    "Repetition",
    "Step",
    "WarmUpStep",
    "within_prompts",
]
