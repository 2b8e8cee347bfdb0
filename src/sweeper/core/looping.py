"""Text that represents nothing: answers that repeat themselves or the prompt, or are no answer.

A small model without a chat template goes round in circles, and drafts from the text so far guess a
circle perfectly: the speed of a text that nobody wants. `nothing` looks at one answer and its
prompt, `looks` at all answers of a load. Limits are tuned and errors measured in
`benchmarks/looping`.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from sweeper.core.quality import loop, shown_unit

LEAST_CHARACTERS = 64
"""Of shorter text nothing is said of loops: it is about sixteen tokens."""
ROUND_SHARE = 0.45
"""An answer of which so much goes round in a circle is a loop."""
COPIED_SHARE = 0.8
"""... and so is one of which so much stood before, in the prompt or the answer itself."""
LOAD_SHARE = 0.2
"""So many of its answers make a load doubtful, at least one."""
SURE_P = 0.02
"""How unlikely it must be that a setting which loops where the reference does not is no cause."""

_CIRCLE_CHARACTERS = 32
_COPY_CHARACTERS = 40
_COPY_PARTS = 10
_SMALLEST_MATCH = 4
_MOST_CHARACTERS = 12_000
_RECENT_NUMBERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """How much of an answer is no news, in shares of its characters.

    `round` is what stands in circles: text that follows itself, of any length, counters that go up
    by one included. `copied` is what stands in long unbroken copies of the prompt or of the answer
    so far. `characters` counts blanks in a row once.
    """

    characters: int
    round: float
    copied: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer with its prompt; `asked` is how many tokens it was to have, `tokens` has."""

    text: str
    prompt: str = ""
    tokens: int | None = None
    asked: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """How many of so many answers represent nothing, and why the first of these does."""

    count: int
    of: int
    why: str = ""

    @property
    def doubtful(self) -> bool:
        """Whether that is enough to doubt what was measured with them."""
        return self.count >= max(1, math.ceil(self.of * LOAD_SHARE))

    def caused(self, reference: Looks) -> bool:
        """Tell whether the setting is the cause, where the reference's answers are not doubtful.

        Fisher's exact test, one-sided, of the shares of both. Most of the answers must be named.
        """
        if reference.doubtful or self.count * 2 < self.of or reference.of == 0:
            return False
        named, everyone = self.count + reference.count, self.of + reference.of
        ways = sum(
            math.comb(self.of, k) * math.comb(reference.of, named - k)
            for k in range(self.count, min(named, self.of) + 1)
        )
        return ways / math.comb(everyone, named) < SURE_P


def looks(answers: Iterable[Answer]) -> Looks:
    """Return how many answers represent nothing."""
    found = [nothing(each) for each in answers]
    named = [each for each in found if each is not None]
    return Looks(count=len(named), of=len(found), why=named[0] if named else "")


def nothing(answer: Answer) -> str | None:
    """Return why an answer represents nothing, in words; None where it may be one."""
    return (
        ends_at_once(answer)
        or foreign(answer.text, answer.prompt)
        or repeats(answer.text, answer.prompt)
    )


# ---- It repeats --------------------------------------------------------------------------------


def repeats(text: str, prompt: str = "") -> str | None:
    """Return in what way an answer only repeats itself or its prompt, None where it does not."""
    found = repetition(text, prompt)
    if found.characters < LEAST_CHARACTERS:
        return None
    if found.round >= ROUND_SHARE:
        unit = loop(text)
        what = "" if unit is None else f", at its end {shown_unit(unit.unit)}"
        return f"{found.round:.0%} of it goes round in a circle{what}"
    if found.copied >= COPIED_SHARE:
        return f"{found.copied:.0%} of it is copied from the prompt or from what it said before"
    return None


def repetition(text: str, prompt: str = "") -> Repetition:
    """Return how much of an answer to a prompt is no news.

    The answer is cut as Lempel & Ziv do (1977): each piece is the longest that stood before, in the
    prompt or the answer, and may run into itself. A loop is one endless piece, whatever the length
    of its unit; records of a table, which share their keys, break at each new value. A piece that
    runs into itself is a circle.

    The larger share counts of the text as it stands, and of the text with numbers that count on
    made equal, which takes counters out of circles and can put new breaks into plain copies.
    """
    recent: deque[int] = deque(maxlen=_RECENT_NUMBERS)
    plain = _measured(_flat(text), _flat(prompt))
    evened = _measured(*reversed([_evened(each, recent) for each in (prompt, text)]))
    return Repetition(
        characters=plain.characters,
        round=max(plain.round, evened.round),
        copied=max(plain.copied, evened.copied),
    )


def _measured(flat: str, before: str) -> Repetition:
    flat, before = flat[:_MOST_CHARACTERS], before[-_MOST_CHARACTERS:]
    if not flat:
        return Repetition(characters=0, round=0.0, copied=0.0)
    whole, at = f"{before}\x00{flat}", len(before) + 1
    circles = copies = 0
    for size in _pieces(whole, at):
        if size >= _CIRCLE_CHARACTERS:
            source = whole.rfind(whole[at : at + size], 0, at + size - 1)
            if at - source <= size:
                circles += size + at - source  # the first round stands before the piece
        if size >= max(_COPY_CHARACTERS, len(flat) / _COPY_PARTS):
            copies += size
        at += size
    return Repetition(
        characters=len(flat), round=min(circles / len(flat), 1.0), copied=copies / len(flat)
    )


def _pieces(whole: str, at: int) -> Iterable[int]:
    """Yield the lengths of the longest pieces that stood before, from a place on; 1 for none."""
    while at < len(whole):
        size = _SMALLEST_MATCH
        if not _stood(whole, at, size):
            yield 1
            at += 1
            continue
        step = 8
        while _stood(whole, at, size + step):
            size += step
            step *= 2
        while step:
            if _stood(whole, at, size + step):
                size += step
            step //= 2
        yield size
        at += size


def _stood(whole: str, at: int, size: int) -> bool:
    end = at + size
    return end <= len(whole) and whole.find(whole[at:end], 0, end - 1) >= 0


_NUMBER = re.compile(r"\d{1,9}(?!\d)")


def _evened(text: str, recent: deque[int]) -> str:
    """Return a text with blanks in a row as one, and a number that counts on as `#`."""

    def number(match: re.Match[str]) -> str:
        value = int(match[0])
        counts = value - 1 in recent
        recent.append(value)
        return "#" if counts else match[0]

    return _NUMBER.sub(number, _flat(text))


def _flat(text: str) -> str:
    return " ".join(text.split())


# ---- It is of another template -----------------------------------------------------------------

TEMPLATE_TOKENS = (
    "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<start_of_turn>", "<end_of_turn>", "[INST]",
    "[/INST]", "<<SYS>>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|user|>",
    "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>", "<|start|>assistant", "<|message|>",
    "<|turn_end|>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>",
)  # fmt: skip
"""What chat templates put around turns; an engine shows none of its own model's as text."""
_FOREIGN_LEAST = 2


def foreign(text: str, prompt: str = "") -> str | None:
    """Return which token of a chat template stands in an answer as text, None where none does.

    Twice at least, so that a text about templates may name one, and not those that the prompt has.
    """
    counts = {each: text.count(each) for each in TEMPLATE_TOKENS if each not in prompt}
    if sum(counts.values()) < _FOREIGN_LEAST:
        return None
    most = max(counts, key=lambda each: counts[each])
    return (
        f"{most} stands in it as text, {counts[most]:,} times: a chat template that is not the "
        "model's"
    )


# ---- It ends at once ---------------------------------------------------------------------------

_ASKED_LEAST = 16
_AT_ONCE = 16
_TEXTLESS = 8
"""Fewer than one character in so many tokens: a server that hides thoughts shows more."""


def ends_at_once(answer: Answer) -> str | None:
    """Return how an answer ends as good as before it began, None where it does not.

    After a sixteenth of the tokens that were asked for; or its tokens have hardly any text, as an
    end of text that is ignored has none.
    """
    asked, tokens = answer.asked, answer.tokens
    if asked is None or tokens is None or asked < _ASKED_LEAST:
        return None
    if tokens * _AT_ONCE <= asked:
        return f"it ends after {tokens:,} of {asked:,} tokens"
    characters = len(answer.text.strip())
    if characters * _TEXTLESS < tokens:
        return f"its {tokens:,} tokens have only {characters:,} characters"
    return None


__all__ = [
    "COPIED_SHARE",
    "LEAST_CHARACTERS",
    "LOAD_SHARE",
    "ROUND_SHARE",
    "SURE_P",
    "TEMPLATE_TOKENS",
    "Answer",
    "Looks",
    "Repetition",
    "ends_at_once",
    "foreign",
    "looks",
    "nothing",
    "repeats",
    "repetition",
]
