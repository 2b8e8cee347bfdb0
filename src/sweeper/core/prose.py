"""Text to fill a prompt with: varied like prose, the same for the same seed, of any length."""

from __future__ import annotations

import random
import re

_NOUNS = (
    "river stone engine market lantern bridge winter signal paper mountain garden window journey "
    "memory island copper machine story pattern harbour letter doctor village kitchen teacher "
    "forest question answer station picture captain reason shadow weather bottle ladder meadow"
).split()
_VERBS = (
    "carries follows repairs forgets paints measures visits opens crosses remembers collects "
    "describes hides answers borrows lifts watches builds counts promises loses explains trades"
).split()
_QUALITIES = (
    "quiet careful silver gentle broken distant early narrow heavy curious patient bright hollow "
    "ordinary sudden foreign honest clever tired empty familiar northern wooden certain"
).split()
_JOINS = ("because", "while", "although", "before", "after", "until", "where", "and", "but")


def prose(seed: int, sentences: int) -> str:
    """Return this many sentences; different seeds differ from the first words on.

    A cache of common prefixes must not make one prompt cheaper than another, so each text
    starts with its own number.
    """
    # Not for secrets: a seeded generator is what makes a prompt repeatable.
    source = random.Random(seed)  # noqa: S311
    opening = f"Report {source.randrange(10**9)} of day {source.randrange(10**6)}."
    return " ".join([opening, *(_sentence(source) for _ in range(sentences))])


_SHAPES = (
    "The {q} {n} {v} the {n} {j} {d} {q} {n}s wait near the {n}.",
    "{J} a {n} {v} {d} {n}s, nobody {v} the {q} {n}.",
    "A {q} {n} {v} what the {n} {v}, {j} the {n} {v} it too.",
    "In year {d} the {n} of the {n} was {q}, {q} and {q}.",
    "Every {n} {v} its {n}; the {q} one {v} {d}.",
    "Who {v} the {n} {j} the {q} {n} {v} a {n}? Page {d} answers: a {n}.",
    "{d} {n}s and a {q} {n} stand between the {n} and the {n}.",
    "It {v}, it {v}, and {j} evening comes the {n} {v} the {q} {n} again.",
)
"""Sentences of several shapes: speculation that copies from the prompt must not find it easy."""
_SLOT = re.compile(r"\{(\w)\}")


def _sentence(source: random.Random) -> str:
    def word(slot: re.Match[str]) -> str:
        match slot[1]:
            case "n":
                return source.choice(_NOUNS)
            case "v":
                return source.choice(_VERBS)
            case "q":
                return source.choice(_QUALITIES)
            case "j":
                return source.choice(_JOINS)
            case "J":
                return source.choice(_JOINS).capitalize()
            case _:
                return str(source.randrange(2, 9990))

    return _SLOT.sub(word, source.choice(_SHAPES))
