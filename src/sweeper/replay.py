"""Plays searches against tables: every boot of a space, recorded or computed beforehand.

A table is `NAME.csv.gz` with one row for every configuration, and `NAME.space.yaml` beside it with
its axes, their roles and what is known before any boot. A search sees a row only by booting it.
Objectives are `decode_tok_s` and log2 of the context, both maximised, above (half of the best
decode_tok_s, log2 of the smallest measured context minus 1); the score is the hypervolume found as
a share of the table's. A measured rate is seen with 1 % log-normal noise and scored without.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import yaml

from sweeper.core.evidence import Evidence, Prior, Role
from sweeper.core.front import hypervolume
from sweeper.core.outcome import BrokenName, HostFaultName, UnfitName
from sweeper.core.pairs import Scalar, text

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLERS = ("frontier", "tpe", "tpe_default", "nsga2", "random", "qmc", "grid")
_NOISE = 0.01
_GIB = float(2**30)
_SHARES = (0.9, 0.95, 0.99)
_CONTEXT_NAMES = ("context", "ctx", "n_ctx", "ctx_size", "max_model_len", "max_context")


class ReplayError(ValueError):
    """A table, its sidecar or a request that cannot be used; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableAxis:
    """An axis of a table: its values in order, and whether that order means anything."""

    name: str
    role: Role
    ordered: bool
    values: tuple[Scalar, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Every boot of a space. `codes[i, a]` is the value index of axis a in row i.

    Where an axis is blank in a row its code is the number of its values: it is not active there.
    """

    name: str
    axes: tuple[TableAxis, ...]
    codes: NDArray[np.int16]
    prior: Prior
    evidence: tuple[Evidence, ...]
    decode_tok_s: NDArray[np.float64]
    context: NDArray[np.float64]

    @cached_property
    def measured(self) -> NDArray[np.bool_]:
        """Which rows work."""
        return np.array([each.kind == "measured" for each in self.evidence])

    @cached_property
    def reference(self) -> tuple[float, float]:
        """The point that the hypervolume is measured from."""
        return (
            0.5 * float(self.decode_tok_s[self.measured].max()),
            math.log2(float(self.context[self.measured].min())) - 1,
        )

    @cached_property
    def front(self) -> tuple[int, ...]:
        """The rows that no other dominates, best rate first."""
        rows = np.flatnonzero(self.measured)
        order = sorted(rows.tolist(), key=lambda i: (-self.decode_tok_s[i], -self.context[i]))
        front: list[int] = []
        best: tuple[float, float] | None = None
        for row in order:
            here = float(self.decode_tok_s[row]), float(self.context[row])
            if best is None or here[1] > best[1] or here == best:
                front.append(row)
                best = here
        return tuple(front)

    def volume(self, rows: Sequence[int]) -> float:
        """Return the hypervolume of these rows, by the table's own values."""
        found = {
            (float(self.decode_tok_s[row]), math.log2(float(self.context[row])))
            for row in rows
            if self.measured[row]
        }
        return hypervolume(found, self.reference)

    @cached_property
    def whole_volume(self) -> float:
        """The hypervolume of the whole table."""
        return self.volume(self.front)


# --- reading --------------------------------------------------------------------------------------


def read_table(path: Path) -> Table:
    """Read a table and the sidecar beside it.

    Raises ReplayError, naming the file, column or value, for what is missing or does not fit.
    """
    name = path.name.removesuffix(".gz").removesuffix(".csv")
    sidecar = path.with_name(f"{name}.space.yaml")
    for each, what in ((path, "table"), (sidecar, "space of the table")):
        if not each.is_file():
            raise ReplayError(f"{each}: there is no such file; it should be the {what}")
    try:
        declared = yaml.safe_load(sidecar.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ReplayError(f"{sidecar}: is not YAML: {error}") from None
    axes = _axes(declared, sidecar)
    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, ValueError, EOFError, UnicodeDecodeError) as error:
        raise ReplayError(f"{path}: cannot be read as CSV: {error}") from None
    needed = [*(axis.name for axis in axes), "outcome", "decode_tok_s"]
    missing = [column for column in needed if column not in frame.columns]
    if missing:
        raise ReplayError(f"{path}: has no column {', '.join(missing)}")
    if not len(frame):
        raise ReplayError(f"{path}: has no rows")
    codes = np.stack([_codes(frame[axis.name], axis, path) for axis in axes], axis=1)
    numbers = {
        column: _numbers(frame[column], path)
        for column in (*_SIZES, *_PLAIN)
        if column in frame.columns
    }
    table = Table(
        name=name,
        axes=axes,
        codes=codes,
        prior=_prior(declared.get("known"), sidecar),
        evidence=tuple(_evidence(frame, numbers, path)),
        decode_tok_s=numbers["decode_tok_s"],
        context=_context(axes, codes, frame, path),
    )
    if not table.measured.any():
        raise ReplayError(f"{path}: no row is measured, so there is nothing to find")
    for values, what in ((table.decode_tok_s, "decode_tok_s"), (table.context, "context")):
        bad = np.flatnonzero(table.measured & ~(values > 0))
        if len(bad):
            raise ReplayError(
                f"{path}: row {bad[0] + 2} is measured, but its {what} is not above 0"
            )
    return table


def _axes(declared: Any, sidecar: Path) -> tuple[TableAxis, ...]:
    if not isinstance(declared, dict) or not isinstance(declared.get("axes"), dict):
        raise ReplayError(f"{sidecar}: needs a mapping `axes`")
    axes = []
    for name, axis in declared["axes"].items():
        if not isinstance(axis, dict) or not isinstance(axis.get("values"), list):
            raise ReplayError(f"{sidecar}: axes.{name} needs a list of values")
        values = tuple(axis["values"])
        if not values or not all(v is None or isinstance(v, str | int | float) for v in values):
            raise ReplayError(f"{sidecar}: axes.{name}.values must be scalars, at least one")
        role = axis.get("role")
        try:
            known = Role.OTHER if role is None else Role(str(role))
        except ValueError:
            raise ReplayError(
                f"{sidecar}: axes.{name}.role: {role} is not one of {', '.join(Role)}"
            ) from None
        axes.append(
            TableAxis(
                name=str(name), role=known, ordered=bool(axis.get("ordered", False)), values=values
            )
        )
    return tuple(axes)


def _spellings(value: Scalar) -> set[str]:
    """Return the texts that a cell may hold for a value: YAML reads `on` as true."""
    match value:
        case None:
            return {"null", "none", "None", "NULL"}
        case bool():
            return {"true", "True", "on", "yes"} if value else {"false", "False", "off", "no"}
        case _:
            return {text(value)}


def _codes(column: pd.Series[str], axis: TableAxis, path: Path) -> NDArray[np.int16]:
    by_text = {said: code for code, value in enumerate(axis.values) for said in _spellings(value)}
    by_number = {
        float(value): code
        for code, value in enumerate(axis.values)
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    found: dict[str, int] = {}
    for cell in column.unique():
        said = str(cell).strip()
        if said in by_text:
            found[cell] = by_text[said]
            continue
        try:
            found[cell] = by_number[float(said)]
        except (ValueError, KeyError):
            if said:
                raise ReplayError(
                    f"{path}: {axis.name} has {said}, which is not one of its values in the space"
                ) from None
            found[cell] = by_text.get("null", len(axis.values))
    return np.array([found[cell] for cell in column], dtype=np.int16)


def _numbers(column: pd.Series[str], path: Path) -> NDArray[np.float64]:
    stripped = column.str.strip()
    numbers = pd.to_numeric(stripped.where(stripped != "", None), errors="coerce")
    wrong = stripped[(stripped != "") & numbers.isna() & (stripped.str.lower() != "nan")]
    if len(wrong):
        raise ReplayError(f"{path}: {column.name} has {wrong.iloc[0]!r}, which is no number")
    return numbers.to_numpy(dtype=np.float64)


_SIZES = {
    "shortfall_gib": "shortfall_bytes",
    "weights_gib": "weights_bytes",
    "draft_gib": "draft_bytes",
    "compute_gib": "compute_bytes",
    "graph_gib": "graph_bytes",
}
_PLAIN = {
    "kv_bytes_per_token": "kv_bytes_per_token",
    "kv_pool_tokens": "kv_pool_tokens",
    "estimated_max_model_len": "estimated_context_tokens",
    "step_ms": "step_s",
    "boot_s": "boot_s",
    "decode_tok_s": "decode_tok_s",
}


def _evidence(
    frame: pd.DataFrame, numbers: Mapping[str, NDArray[np.float64]], path: Path
) -> list[Evidence]:
    scale = dict.fromkeys(_SIZES, _GIB) | {"step_ms": 1e-3}
    names = _SIZES | _PLAIN
    outcomes = frame["outcome"].str.strip().tolist()
    phases = frame["phase"].str.strip().tolist() if "phase" in frame.columns else [""] * len(frame)
    shares = frame["acceptance"].tolist() if "acceptance" in frame.columns else [""] * len(frame)
    result = []
    for row, (outcome, phase, accepted) in enumerate(zip(outcomes, phases, shares, strict=True)):
        facts: dict[str, Any] = {}
        for column, values in numbers.items():
            value = float(values[row]) * scale.get(column, 1.0)
            if not math.isnan(value):
                facts[names[column]] = value
        try:
            result.append(
                Evidence(
                    outcome=outcome,
                    kind=_kind(outcome),
                    phase=phase or None,
                    acceptance=tuple(float(each) for each in accepted.split()),
                    **facts,
                )
            )
        except ValueError as error:
            raise ReplayError(f"{path}: row {row + 2}: {error}") from None
    return result


def _kind(outcome: str) -> str:
    if outcome == "measured":
        return "measured"
    if outcome in set(UnfitName):
        return "unfit"
    if outcome in set(BrokenName) or outcome in set(HostFaultName):
        return "broken"
    return "infeasible"


def _context(
    axes: tuple[TableAxis, ...], codes: NDArray[np.int16], frame: pd.DataFrame, path: Path
) -> NDArray[np.float64]:
    named = [axis for axis in axes if axis.role is Role.CONTEXT] or [
        axis for axis in axes if axis.name.lower() in _CONTEXT_NAMES
    ]
    if named:
        axis = named[0]
        try:
            numbers = [float(str(value)) for value in axis.values]  # noqa: PD011 - no pandas
        except ValueError:
            raise ReplayError(f"{path}: the values of {axis.name} must be numbers") from None
        table = np.array([*numbers, math.nan])
        return table[codes[:, axes.index(axis)]]
    if "context" in frame.columns:
        return _numbers(frame["context"], path)
    raise ReplayError(f"{path}: no axis has the role context, and there is no column of that name")


def _prior(known: Any, sidecar: Path) -> Prior:
    if known is None:
        return Prior()
    if not isinstance(known, dict):
        raise ReplayError(f"{sidecar}: known must be a mapping")

    def several(key: str, scale: float) -> tuple[tuple[str, float], ...]:
        given = known.get(key) or {}
        if not isinstance(given, dict):
            raise ReplayError(f"{sidecar}: known.{key} must map values to numbers")
        pairs: dict[str, float] = {}
        for value, size in given.items():
            if size is None:
                continue
            if isinstance(size, bool) or not isinstance(size, int | float) or not size > 0:
                raise ReplayError(f"{sidecar}: known.{key}.{value} must be above 0, got {size}")
            pairs[text(value)] = float(size) * scale
        return tuple(sorted(pairs.items()))

    capacity = known.get("capacity_gib")
    if capacity is not None and (not isinstance(capacity, int | float) or not capacity > 0):
        raise ReplayError(f"{sidecar}: known.capacity_gib must be above 0, got {capacity}")
    return Prior(
        capacity_bytes=None if capacity is None else float(capacity) * _GIB,
        weights_bytes=several("weights_gib", _GIB),
        kv_bytes_per_token=several("kv_kib_per_token", 1024.0),
    )


# --- playing --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """One search played once: the score after each boot, and which boots failed."""

    scores: tuple[float, ...]
    failed: tuple[bool, ...]
    rows: tuple[int, ...]
    wrong_skips: int
    sampler_s: float

    def boots_to(self, share: float) -> int | None:
        """Return after how many boots the score reached a share; None if it never did."""
        return next((n for n, score in enumerate(self.scores, 1) if score >= share), None)


def summary(table: Table, sampler: str, games: Sequence[Game], budget: int) -> dict[str, Any]:
    """Return the medians over games; budget + 1 boots where a share was not reached.

    `wrong_skips` is the worst game's: points of the true front that were never booted because the
    search took them for impossible. `sampler_s` is the time in ask and tell of a whole game.
    """
    reached = {
        f"boots_{round(share * 100)}": statistics.median(
            game.boots_to(share) or budget + 1 for game in games
        )
        for share in _SHARES
    }
    return {
        "sampler": sampler,
        "table": table.name,
        "seeds": len(games),
        "budget": budget,
        **reached,
        "score": round(statistics.median(game.scores[-1] for game in games), 4),
        "infeasible_first_30": statistics.median(sum(game.failed[:30]) for game in games),
        "infeasible": statistics.median(sum(game.failed) for game in games),
        "wrong_skips": max(game.wrong_skips for game in games),
        "sampler_s": round(statistics.median(game.sampler_s for game in games), 3),
    }


def replay(
    path: Path,
    samplers: Sequence[str],
    *,
    seeds: int,
    budget: int,
    told: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Play each sampler against a table, once for each seed from 0, and return the summaries.

    `told` hears of progress. Raises ReplayError for a wrong table or request.
    """
    for sampler in samplers:
        if sampler not in SAMPLERS:
            raise ReplayError(f"sampler: {sampler} is not one of {', '.join(SAMPLERS)}")
    if seeds < 1 or budget < 1:
        raise ReplayError(f"seeds and budget must be at least 1, got {seeds} and {budget}")
    table = read_table(path)
    results = []
    for sampler in samplers:
        games = []
        for seed in range(seeds):
            games.append(play(table, sampler, seed=seed, budget=budget))
            told(f"{table.name}: {sampler}, seed {seed + 1} of {seeds}: {games[-1].scores[-1]:.3f}")
        results.append(summary(table, sampler, games, budget))
    return results


def play(table: Table, sampler: str, *, seed: int, budget: int) -> Game:
    """Play one search to the end of its budget, or of the table."""
    from sweeper.search.game import Player

    player = Player(table, sampler, seed)
    noise = np.random.default_rng([seed, 7]).normal(0.0, _NOISE, size=len(table.codes))
    scores: list[float] = []
    failed: list[bool] = []
    rows: list[int] = []
    spent = 0.0
    for _ in range(min(budget, len(table.codes))):
        began = time.perf_counter()
        row = player.ask()
        spent += time.perf_counter() - began
        if row is None:
            break
        rows.append(row)
        works = bool(table.measured[row])
        gains = works and (not scores or (table.decode_tok_s[row] > table.reference[0]))
        failed.append(not works)
        if gains or not scores:
            scores.append(table.volume(rows) / table.whole_volume)
        else:
            scores.append(scores[-1])
        seen = float(table.decode_tok_s[row] * math.exp(noise[row])) if works else None
        began = time.perf_counter()
        player.tell(row, seen)
        spent += time.perf_counter() - began
    left = budget - len(scores)
    return Game(
        scores=(*scores, *(scores[-1:] * left)),
        failed=tuple(failed),
        rows=tuple(rows),
        wrong_skips=player.wrong_skips([row for row in table.front if row not in set(rows)]),
        sampler_s=spent,
    )
