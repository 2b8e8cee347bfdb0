"""What axes do to an engine, guessed from what boots print, where nobody said it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sweeper.core.evidence import Evidence, Role
from sweeper.search.frontier_space import CodedSpace

if TYPE_CHECKING:
    from sweeper.search.frontier_model import Seen


def guessed(space: CodedSpace, seen: Sequence[Seen]) -> dict[str, Role]:
    """Return roles for axes of role `other` that the trials so far show them to play.

    A role is only given where no axis has it, and only on what two different values have shown:
    the axis that alone decides the size of the weights holds the weights, and so on.
    """
    found: dict[str, Role] = {}
    free = [at for at, axis in enumerate(space.axes) if axis.role is Role.OTHER]

    def give(role: Role, fits: Callable[[int], bool]) -> None:
        if space.of_role(role):
            return
        several = [at for at in free if space.axes[at].name not in found and fits(at)]
        if len(several) == 1:
            found[space.axes[several[0]].name] = role

    give(Role.CONTEXT, lambda at: _is_second_objective(space, seen, at))
    give(Role.DRAFT_LENGTH, lambda at: _is_length(space, seen, at))
    give(Role.WEIGHTS, lambda at: _decides(seen, at, lambda shown: shown.weights_bytes))
    give(Role.KV_DTYPE, lambda at: _decides(seen, at, lambda shown: shown.kv_bytes_per_token))
    give(Role.GRAPHS, lambda at: _decides(seen, at, lambda shown: shown.graph_bytes))
    if any(each.evidence is not None and each.evidence.kv_pool_tokens for each in seen):
        give(Role.MEMORY_FRACTION, lambda at: _is_fraction(space, at))
    return found


def _is_second_objective(space: CodedSpace, seen: Sequence[Seen], at: int) -> bool:
    numbers = space.axes[at].numbers
    pairs = [
        (float(numbers[each.row[at]]), each.values[1])
        for each in seen
        if numbers is not None and each.values is not None and len(each.values) == 2
    ]
    if len({number for number, _ in pairs}) < 2 or not all(number > 0 for number, _ in pairs):
        return False
    return all(math.isclose(math.log2(n), v, rel_tol=1e-6) for n, v in pairs) or all(
        math.isclose(n, v, rel_tol=1e-6) for n, v in pairs
    )


def _is_length(space: CodedSpace, seen: Sequence[Seen], at: int) -> bool:
    numbers = space.axes[at].numbers
    if numbers is None:
        return False
    pairs = {
        (float(numbers[each.row[at]]), len(each.evidence.acceptance))
        for each in seen
        if each.values is not None and each.evidence is not None
    }
    return len(pairs) >= 2 and all(number == length for number, length in pairs)


def _decides(seen: Sequence[Seen], at: int, shown: Callable[[Evidence], float | None]) -> bool:
    """Tell whether a size is the same for equal values of an axis, and differs between them."""
    sizes: dict[int, list[float]] = {}
    total = 0
    for each in seen:
        size = None if each.evidence is None else shown(each.evidence)
        if size is not None:
            sizes.setdefault(int(each.row[at]), []).append(size)
            total += 1
    # Each value on its own decides anything: some must have been seen twice.
    if len(sizes) < 2 or total < len(sizes) + 2:
        return False
    if any(max(same) - min(same) > 0.003 * max(same) for same in sizes.values()):
        return False
    every = [same[0] for same in sizes.values()]
    return max(every) - min(every) > 0.01 * max(every)


def _is_fraction(space: CodedSpace, at: int) -> bool:
    axis = space.axes[at]
    numbers = axis.numbers
    if numbers is None or axis.size < 2:
        return False
    return bool((numbers[:-1] >= 0.3).all() and (numbers[:-1] <= 1.0).all())
