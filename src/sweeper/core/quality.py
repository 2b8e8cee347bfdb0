"""Fast but broken: whether answers are sound, alone and beside those of a reference.

The cheap questions first. `degenerate` looks at one text and says only what no working model
writes; `agreement` compares greedy answers token by token; `judge` holds a measured quality
against the thresholds of a study. Small models at temperature 0 go round in circles, and a
quantised cache moves an answer: both are graded, and neither alone is broken.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sweeper.core.outcome import Quality, UnfitName

GREEDY_PROMPTS = (
    "one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve,",
    "The sun rises in the east and sets in the west. The sun rises in the east and sets in the",
    "The old lighthouse keeper climbed the stairs every evening to light the lamp. One night,",
)
"""What is asked of every server, greedily and without a chat template.

Any working model goes on with the first two in one way only, so that a small error leaves the
answer as it is and a broken engine does not; the third is open, and shows small errors.
"""

GREEDY_TOKENS = 48
"""How many tokens are asked for each."""

SCORED_TEXT = (
    "The harbour was quiet in the early morning. A fisherman pulled his boat onto the stones, "
    "looked at the sky, and decided that the rain would wait until noon. He had been wrong about "
    "the weather before, but never about the sea. When the first drops fell, his daughter was "
    "already standing at the door with a lamp in one hand and a letter in the other.\n\n"
    "Water boils at 100 degrees Celsius at sea level. At higher altitudes the air pressure is "
    "lower, so water boils at a lower temperature, and food takes longer to cook.\n\n"
    "def average(values):\n"
    '    """Return the arithmetic mean of a list of numbers."""\n'
    "    if not values:\n"
    '        raise ValueError("no values")\n'
    "    total = 0\n"
    "    for value in values:\n"
    "        total += value\n"
    "    return total / len(values)\n"
)
"""The text whose tokens are scored: prose, facts and code, of about 175 tokens."""

SCORED_TEXT_TOKENS = 160
"""So much of it is used: a window of a few tokens more holds it."""
SCORED_TOKENS = 48
"""The last ones of these are scored, each after all before it."""

CHANCE_LOGPROB = -8.0
"""Below this a text is drawn by chance: models that speak its language reach -1 to -3."""


# ---- One text ----------------------------------------------------------------------------------

_LINE_CHARACTERS = 200
_LEAST_CHARACTERS = 16
_TOKEN_CHARACTERS = 8
"""A unit up to this long may be one token."""
_LETTERS_LEAST = 48
_NO_TOKEN = re.compile(
    r"<\|?(?:pad|unk|unused_?\d*|0x[0-9A-F]{2})\|?>|\[(?:UNK|PAD)\]", re.IGNORECASE
)
"""How vocabularies write tokens that stand for no text."""
_WHOLE = 0.95
"""So much of a text is all of it: the first tokens can come before all goes wrong."""
_GARBAGE_LEAST = 4
_GARBAGE_SHARE = 0.1
_SALAD_SWITCHES = 16
_SALAD_SHARE = 0.25
_SALAD_FAMILIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The end of a text that is one unit, over and over: `share` of its characters, 0..1."""

    unit: str
    repeats: int
    share: float


def degenerate(text: str) -> str | None:
    """Return why no working model wrote this text, None where one may have.

    It is empty; nothing but one token; or garbage: characters that belong to no text, or words of
    many scripts thrown together. Says nothing of a text in one script that only makes no sense:
    what the reference answers tells that.
    """
    if not text.strip():
        return "it is empty" if not text else "it is nothing but white space"
    return _one_unit(text) or _not_text(text) or _salad(text)


def loop(text: str) -> Loop | None:
    """Return the unit that a text ends in over and over, None where it does not.

    At least three times in a row, over at least 16 characters; the last one may be cut off. Of all
    such units the one that takes up most of the text, and of equal ones the shortest. A small
    model that ends in a loop is no sign of a broken engine.
    """
    stripped = text.strip()
    if len(stripped) < _LEAST_CHARACTERS:
        return None
    best: Loop | None = None
    for length, covered in _periods(stripped):
        if covered < max(3 * length, _LEAST_CHARACTERS):
            continue
        share = covered / len(stripped)
        if best is None or share > best.share + 1e-9:
            start = len(stripped) - covered
            best = Loop(
                unit=stripped[start : start + length], repeats=covered // length, share=share
            )
    return best


def _periods(text: str) -> list[tuple[int, int]]:
    """Return for periods up to the longest line how much of the end of the text has them.

    From the shortest on; a period is told only where it covers more than all shorter ones.
    """
    found: list[tuple[int, int]] = []
    most = 0
    for length in range(1, min(_LINE_CHARACTERS, len(text) // 3) + 1):
        if any(length % shorter == 0 and length <= covered for shorter, covered in found):
            continue  # several units are a unit as well, and cover the same
        covered = length
        position = len(text) - length - 1
        while position >= 0 and text[position] == text[position + length]:
            position -= 1
            covered += 1
        if covered > most and covered > length:
            most = covered
            found.append((length, covered))
    return found


def _one_unit(text: str) -> str | None:
    """Return what a text that is nothing but one token repeats, where no model would.

    A word or number set apart by blanks or punctuation is none of these: asked to go on with a
    list, a small model at temperature 0 may say one word for ever (`collapsed` looks at several
    answers). Letters without an end to the word are laughter for a while, and broken from 48 on.
    """
    found = loop(text)
    if found is None or found.share < _WHOLE or found.repeats < 4:
        return None
    bare = found.unit.strip()
    if _NO_TOKEN.search(bare * 2):
        return _nothing_but(found)
    if len(bare) > _TOKEN_CHARACTERS or any(character.isspace() for character in bare):
        return None
    letters = [character.isalnum() for character in found.unit]
    if any(letters) and (not all(letters) or len(text.strip()) < _LETTERS_LEAST):
        return None
    return _nothing_but(found)


def collapsed(answers: Sequence[str]) -> str | None:
    """Return why these answers to different prompts come from no working engine, None if they may.

    One of them is degenerate, or each is nothing but one unit, whatever it was asked: one word or
    line for ever is what a small model can come to, but not with every prompt and from the first
    token on.
    """
    for count, answer in enumerate(answers, 1):
        if (why := degenerate(answer)) is not None:
            return f"of {len(answers)} answers, number {count} cannot be: {why}"
    loops = [loop(answer) for answer in answers]
    whole = [found for found in loops if found is not None and found.share >= _WHOLE]
    if len(whole) < 2 or len(whole) < len(answers) or any(each.repeats < 4 for each in whole):
        return None
    return f"each of {len(answers)} answers is one unit repeated; the first: " + _nothing_but(
        whole[0]
    )


def _nothing_but(found: Loop) -> str:
    return f"it is nothing but {shown_unit(found.unit)}, {found.repeats:,} times"


def _not_text(text: str) -> str | None:
    """Return why the characters of a text are none of a text.

    One replacement character stands for a character cut in two at the end; private-use characters
    are icons: a few of either are nothing.
    """
    counts = {"�": text.count("�"), "Cc": 0, "Co": 0, "Cs": 0}
    for character in text:
        kind = unicodedata.category(character)
        if kind in counts and character not in "\t\n\r\f\v\x1b":
            counts[kind] += 1
    named = {
        "�": "replacement characters: bytes that are no text",
        "Cc": "control characters",
        "Co": "private-use characters",
        "Cs": "halves of characters",
    }
    for kind, count in counts.items():
        if count >= _GARBAGE_LEAST and count > _GARBAGE_SHARE * len(text):
            return f"{count:,} of its {len(text):,} characters are {named[kind]}"
    return None


_SCRIPTS = (
    "LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "DEVANAGARI", "BENGALI", "GURMUKHI",
    "GUJARATI", "ORIYA", "TAMIL", "TELUGU", "KANNADA", "MALAYALAM", "SINHALA", "THAI", "LAO",
    "TIBETAN", "MYANMAR", "GEORGIAN", "ARMENIAN", "ETHIOPIC", "KHMER", "MONGOLIAN", "CHEROKEE",
)  # fmt: skip
_EAST_ASIAN = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO")
_WORD = re.compile(r"[^\W\d_]+")


def _script(character: str) -> str:
    name = unicodedata.name(character, "").removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ")
    first = name.partition(" ")[0]
    if first in _EAST_ASIAN:
        return "EAST ASIAN"  # one text mixes them
    return first if first in _SCRIPTS else ""


def _salad(text: str) -> str | None:
    """Return why the words of a text are of too many scripts to belong together.

    A list of languages sets them apart by lines and punctuation. Where every other word is of
    another script, with nothing or a single space between, and of four or more of them, it is
    tokens drawn by chance. Two or three scripts are a text about something foreign.
    """
    if text.isascii():
        return None
    runs: list[tuple[str, int, int]] = []
    for word in _WORD.finditer(text):
        for at, character in enumerate(word[0], word.start()):
            script = _script(character)
            if not script:
                continue
            if runs and runs[-1][0] == script and runs[-1][2] == at:
                runs[-1] = (script, runs[-1][1], at + 1)
            else:
                runs.append((script, at, at + 1))
    # Each pair of words once: a list of languages that is repeated is still a list.
    switches = {
        text[one[1] : other[2]]: (one[0], other[0])
        for one, other in pairwise(runs)
        if one[0] != other[0] and text[one[2] : other[1]] in ("", " ")
    }
    families = {script for pair in switches.values() for script in pair}
    often = [each for each in families if sum(each in pair for pair in switches.values()) >= 3]
    if (
        len(switches) >= _SALAD_SWITCHES
        and len(switches) >= _SALAD_SHARE * len({text[start:end] for _, start, end in runs})
        and len(often) >= _SALAD_FAMILIES
    ):
        return (
            f"its words change between {len(often)} scripts {len(switches):,} times, with nothing "
            "in between"
        )
    return None


def shown_unit(unit: str) -> str:
    """Return a repeated unit in quotes, cut where it is long."""
    return repr(unit if len(unit) <= 40 else unit[:37] + "...")


# ---- Beside the reference ----------------------------------------------------------------------


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common from their beginning on."""
    for count, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return count
    return min(len(a), len(b))


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far several answers are those of the reference, token by token from the beginning.

    `tokens` is the sum over the answers, `of` what it could have been, `share` the mean over the
    answers of what each has in common, in 0..1. `longest` is that of the answer that agrees most.
    """

    tokens: int
    of: int
    share: float
    longest: int


def agreement(
    reference: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> Agreement | None:
    """Return how far the answers agree with the reference's to the same prompts.

    Each answer is compared as far as the reference's goes; a reference of no tokens says nothing.
    None where nothing can be compared. Raises ValueError for different numbers of answers.
    """
    if len(reference) != len(answers):
        raise ValueError(f"{len(answers)} answers cannot be compared with {len(reference)}")
    found = [
        (common_prefix(theirs, ours), len(theirs))
        for theirs, ours in zip(reference, answers, strict=True)
        if theirs
    ]
    if not found:
        return None
    return Agreement(
        tokens=sum(count for count, _ in found),
        of=sum(length for _, length in found),
        share=sum(count / length for count, length in found) / len(found),
        longest=max(count for count, _ in found),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """When a quality is too low to win: the hard limits, and those worth a remark.

    `prefix_min_tokens` is how many tokens of the reference's greedy answers must be answered in
    the same way, all prompts together; fewer is another model. `end_prefix_min_share` is what must
    be left of the first answers when they are asked for again at the end. `logprob_drop_max` is
    how many nats a token the fixed text may lose against the reference, `mean_logprob_min` a floor
    that needs no reference. None switches a limit off.

    Below `prefix_warn_share`, or above `logprob_drop_warn`, it is said and nothing else.
    """

    prefix_min_tokens: int | None = 4
    end_prefix_min_share: float | None = 0.1
    logprob_drop_max: float | None = 0.5
    mean_logprob_min: float | None = None
    prefix_warn_share: float | None = 0.5
    logprob_drop_warn: float | None = 0.1

    def __post_init__(self) -> None:
        if self.prefix_min_tokens is not None and self.prefix_min_tokens < 0:
            raise ValueError(
                f"prefix_min_tokens: must not be negative, got {self.prefix_min_tokens}"
            )
        for name in ("end_prefix_min_share", "prefix_warn_share"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{name}: must be a share in 0..1, got {share}")
        for name in ("logprob_drop_max", "logprob_drop_warn"):
            drop = getattr(self, name)
            if drop is not None and not 0 <= drop < math.inf:
                raise ValueError(f"{name}: must be nats from 0 on, got {drop}")
        if self.mean_logprob_min is not None and not -math.inf < self.mean_logprob_min <= 0:
            raise ValueError(
                "mean_logprob_min: must be a natural log-probability, so not above 0, got "
                f"{self.mean_logprob_min}"
            )


def judge(
    guard: Guard, quality: Quality, reference: Quality | None = None
) -> tuple[UnfitName, str] | None:
    """Return why this quality must not win, in words with the numbers; None where it may.

    What was not measured, here or of the reference, is not held against it.
    """
    beside = _beside(quality)
    least = guard.prefix_min_tokens
    if (
        least is not None
        and quality.prefix_tokens is not None
        and quality.prefix_share is not None
        and quality.prefix_share < 1
        and quality.prefix_tokens < least
    ):
        return (
            UnfitName.GARBAGE_OUTPUT,
            f"only {quality.prefix_tokens} tokens of the greedy answers are those of {beside}, "
            f"and {least} are asked for",
        )
    share = guard.end_prefix_min_share
    if (
        share is not None
        and quality.end_prefix_share is not None
        and quality.end_prefix_share < share
    ):
        return (
            UnfitName.GARBAGE_OUTPUT,
            f"asked again at the end, only {quality.end_prefix_share:.0%} of the first greedy "
            f"answers came back, and {share:.0%} are asked for: what it answers changed while "
            "it was measured",
        )
    mean = quality.mean_logprob
    if mean is None:
        return None
    if guard.mean_logprob_min is not None and not mean >= guard.mean_logprob_min:
        return (
            UnfitName.GARBAGE_OUTPUT,
            f"the fixed text has a mean log-probability of {mean:.3f} nats a token, and "
            f"{guard.mean_logprob_min:.3f} is the least that is asked for",
        )
    drop = logprob_drop(quality, reference)
    most = guard.logprob_drop_max
    if drop is not None and most is not None and not drop <= most:
        return (
            UnfitName.GARBAGE_OUTPUT,
            f"the fixed text lost {drop:.3f} nats a token against {beside} (mean "
            f"log-probability {mean:.3f}), and {most:.3f} are allowed",
        )
    return None


def remark(guard: Guard, quality: Quality, reference: Quality | None = None) -> str | None:
    """Return what is worth saying of a quality that may win; None where there is nothing."""
    beside = _beside(quality)
    said = []
    share = guard.prefix_warn_share
    if share is not None and quality.prefix_share is not None and quality.prefix_share < share:
        said.append(f"{quality.prefix_share:.0%} of the greedy answers are those of {beside}")
    if (
        share is not None
        and quality.end_prefix_share is not None
        and quality.end_prefix_share < share
    ):
        said.append(
            f"asked again at the end, {quality.end_prefix_share:.0%} of the greedy answers came "
            "back"
        )
    drop = logprob_drop(quality, reference)
    warn = guard.logprob_drop_warn
    if drop is not None and warn is not None and not drop <= warn:
        said.append(f"the fixed text lost {drop:.3f} nats a token against {beside}")
    return "; ".join(said) or None


def logprob_drop(quality: Quality, reference: Quality | None) -> float | None:
    """Return how many nats a token were lost against the reference; negative: gained.

    None where either is not known, or where the reference finds the text no likelier than chance:
    then rounding alone moves it by many nats.
    """
    if reference is None or reference.mean_logprob is None or quality.mean_logprob is None:
        return None
    if reference.mean_logprob < CHANCE_LOGPROB:
        return None
    return reference.mean_logprob - quality.mean_logprob


def _beside(quality: Quality) -> str:
    if quality.reference is None:
        return "the reference"
    return f"the reference, attempt {quality.reference}"


__all__ = [
    "GREEDY_PROMPTS",
    "GREEDY_TOKENS",
    "SCORED_TEXT",
    "SCORED_TEXT_TOKENS",
    "SCORED_TOKENS",
    "Agreement",
    "Guard",
    "Loop",
    "agreement",
    "collapsed",
    "common_prefix",
    "degenerate",
    "judge",
    "logprob_drop",
    "loop",
    "remark",
    "shown_unit",
]
