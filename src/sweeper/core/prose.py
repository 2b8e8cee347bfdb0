"""Text to fill a prompt with: varied like prose, the same for the same seed, of any length."""

from __future__ import annotations

import random

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


def _sentence(source: random.Random) -> str:
    return (
        f"The {source.choice(_QUALITIES)} {source.choice(_NOUNS)} {source.choice(_VERBS)} the "
        f"{source.choice(_NOUNS)} {source.choice(_JOINS)} {source.randrange(2, 990)} "
        f"{source.choice(_QUALITIES)} {source.choice(_NOUNS)}s wait near the "
        f"{source.choice(_NOUNS)}."
    )
