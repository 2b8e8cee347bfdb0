"""Speculation read off its counters: how much of it is accepted, and whether the counters hold.

A step drafts some tokens and verifies them at once: those accepted and one of its own are what it
yields. All shares here are unconditional: position i counts against all steps, as in
`DraftCounters.accepted_per_position`.
"""

from __future__ import annotations

import math

from sweeper.core.sample import DraftCounters


def mean_length(counters: DraftCounters) -> float | None:
    """Return the tokens that a step with a draft yields on average, its own one included.

    1.0 is a draft of which nothing is ever accepted; None where no step drafted.
    """
    return 1 + counters.accepted / counters.steps if counters.steps > 0 else None


def shares(counters: DraftCounters) -> tuple[float, ...]:
    """Return for each position of a draft the share of all steps in which it was accepted, 0..1.

    Empty where no step drafted or the engine does not count positions.
    """
    if counters.steps <= 0:
        return ()
    return tuple(count / counters.steps for count in counters.accepted_per_position)


def conditional_shares(counters: DraftCounters) -> tuple[float, ...]:
    """Return for each position the share accepted of the steps that had accepted all before it.

    Ends where nothing was accepted any more: beyond that nothing is known.
    """
    found: list[float] = []
    before = counters.steps
    for count in counters.accepted_per_position:
        if before <= 0:
            break
        found.append(count / before)
        before = count
    return tuple(found)


def tokens_per_step(counters: DraftCounters, n: int) -> float | None:
    """Return the tokens that a step of drafts of `n` tokens would yield, from longer drafts.

    A position is verified before those after it, so what was accepted up to `n` does not change
    when the draft ends there: 1 + the sum of the first n shares, exact for drafts of full length.
    Where the engine drafts less than it may (n-gram lookups, a least probability), this is what it
    would yield with the same drafts cut off. None for more positions than were counted.

    Raises ValueError for a negative `n`.
    """
    if n < 0:
        raise ValueError(f"a draft cannot have {n} tokens")
    profile = shares(counters)
    if counters.steps <= 0 or n > len(profile):
        return None
    return 1 + sum(profile[:n])


def profile(counters: DraftCounters) -> tuple[float, ...]:
    """Return the tokens a step for every draft length that was counted, from 0 upwards.

    Never falls: a longer draft is never accepted less. What it costs is another matter.
    """
    found = [1.0]
    for share in shares(counters):
        found.append(found[-1] + share)
    return tuple(found) if counters.steps > 0 else ()


def worth_verifying(counters: DraftCounters, *, draft_cost: float) -> int | None:
    """Return the draft length with the most tokens in a time, at this cost of a drafted token.

    `draft_cost` is the time that drafting and verifying one more token adds to a step, as a share
    of a step without a draft. Equal lengths: the shorter one. None where nothing was counted.
    """
    yields = profile(counters)
    if not yields:
        return None
    rates = [tokens / (1 + draft_cost * n) for n, tokens in enumerate(yields)]
    return rates.index(max(rates))


def consistent(counters: DraftCounters) -> str | None:
    """Return in what way the counters cannot be those of one speculation, None where they can."""
    for name in ("steps", "drafted", "accepted"):
        if getattr(counters, name) < 0:
            return f"{name} is {getattr(counters, name)}: the counters went backwards"
    if counters.accepted > counters.drafted:
        return f"{counters.accepted} tokens were accepted of {counters.drafted} drafted"
    at = counters.accepted_per_position
    if not at:
        return None
    if any(count < 0 for count in at):
        return "a position's counter went backwards"
    if any(later > earlier for earlier, later in zip((counters.steps, *at), at, strict=False)):
        return f"a later position was accepted more often than one before it: {list(at)}"
    if sum(at) != counters.accepted:
        return (
            f"the positions add up to {sum(at)} accepted tokens, and {counters.accepted} were "
            "counted"
        )
    return None


def identity(
    counters: DraftCounters,
    *,
    completion_tokens: int,
    requests: int,
    longest_draft: int | None = None,
    every_step_drafts: bool = False,
    tolerance: float = 0.02,
) -> float | None:
    """Return by what share of the tokens the counters contradict them; None where they do not.

    Of a completion's tokens the first comes from the prefill. The others are drafts that were
    accepted, the one that each counted step makes itself, or come from steps without a draft, which
    no counter has: where the engine drafts in every step (`every_step_drafts`) there are none but
    the last of a request, which needs no draft. A request's last step may accept more than was
    asked for: up to `longest_draft` tokens (None: as many positions as ever accepted one, or else
    the mean draft) are thrown away.

    Positive: the counters have more tokens than were answered. Negative: fewer. A disagreement
    within `tolerance`, a share of the tokens, is none; neither is one where nothing was drafted.
    """
    decoded = completion_tokens - requests
    if counters.steps <= 0 or decoded <= 0:
        return None
    if longest_draft is None:
        used = sum(count > 0 for count in counters.accepted_per_position)
        longest_draft = used or math.ceil(counters.drafted / counters.steps)
    counted = counters.steps + counters.accepted
    over = counted - requests * longest_draft - decoded
    under = decoded - counted - requests
    if over > tolerance * decoded:
        return over / decoded
    if every_step_drafts and under > tolerance * decoded:
        return -under / decoded
    return None


def from_timings(drafted: int, accepted: int, counters: DraftCounters) -> float | None:
    """Return how far what single answers reported is from the counters, as a share; None: not.

    `drafted` and `accepted` are sums over the answers' own reports (llama.cpp's `draft_n` and
    `draft_n_accepted`), over the same requests as the counters. The larger of both differences.
    """
    pairs = ((drafted, counters.drafted), (accepted, counters.accepted))
    found = max(abs(ours - theirs) / max(ours, theirs, 1) for ours, theirs in pairs)
    return found if found > 0 else None


def speed_identity(
    counters: DraftCounters,
    *,
    decode_tok_s: float,
    gap_s: float,
    piece_is_step: bool = False,
    tolerance: float = 0.1,
) -> float | None:
    """Return by what share acceptance and the client's clock contradict each other; None: not.

    `gap_s` is the mean time between one piece of text and the next, so a piece holds
    `decode_tok_s` x `gap_s` tokens. That is one where the engine sends every token by itself, and
    the mean length of a step where it sends a step at once and every step drafts
    (`piece_is_step`); steps without a draft lie between. Positive: the speed is higher than the
    counters explain. Negative: lower.
    """
    length = mean_length(counters)
    if length is None or gap_s <= 0:
        return None
    held = decode_tok_s * gap_s
    least = length if piece_is_step else 1.0
    for bound, beyond in ((length, held > length), (least, held < least)):
        if beyond and abs(held / bound - 1) > tolerance:
            return held / bound - 1
    return None


__all__ = [
    "conditional_shares",
    "consistent",
    "from_timings",
    "identity",
    "mean_length",
    "profile",
    "shares",
    "speed_identity",
    "tokens_per_step",
    "worth_verifying",
]
