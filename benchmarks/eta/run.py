"""How well the time left is told: simulated studies, and tables of boots, against what they took.

    python benchmarks/eta/run.py [TABLE.csv.gz ...] [--studies 400] [--first-seed 1] [--out FILE]

After every boot the view's own estimate is asked for and compared with what was left. README.md
says what is drawn and how.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sweeper.core.eta import Kind, Plan, Spent, expected_again, time_left

if TYPE_CHECKING:
    from sweeper.replay import Table

AFTER = (3, 5, 10, 20)
CONFIRM_BOOTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One study as it went: its attempts in order, how large its front was after each."""

    spent: tuple[Spent, ...]
    fronts: tuple[int, ...]
    boots: int
    budget_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What is common to the boots of a study: a host, an engine, a workload."""

    boot_s: float
    varies: float
    cold: float
    prefill_tok_s: float
    answer_tokens: int
    overhead_s: float


def pace(chance: np.random.Generator) -> Pace:
    """Return a host and engine: boots of 5 s to 4 min, answers of 200 to 2,000 tokens."""
    return Pace(
        boot_s=float(np.exp(chance.uniform(np.log(5), np.log(240)))),
        varies=float(chance.uniform(0.1, 0.4)),
        cold=float(chance.uniform(1.0, 2.5)),
        prefill_tok_s=float(np.exp(chance.uniform(np.log(300), np.log(4000)))),
        answer_tokens=int(chance.integers(200, 2001)),
        overhead_s=float(chance.uniform(0.2, 2.0)),
    )


def attempt_s(
    chance: np.random.Generator, of: Pace, *, boot_s: float, context: float, speed: float,
    kind: Kind, first: bool,
) -> Spent:  # fmt: skip
    """Return the wall time of one attempt that came so far."""
    boot = boot_s * float(np.exp(chance.normal(0, of.varies))) * (of.cold if first else 1.0)
    if kind is Kind.FAILED:
        # Most of what cannot work ends at the weights or the cache, some of it after the proof.
        late = chance.random() < 0.1
        reached = 1.0 if late else float(chance.uniform(0.2, 1.0))
        proof = context / of.prefill_tok_s if late else 0.0
        return Spent(kind=kind, seconds=of.overhead_s + boot * reached + proof)
    # Filled for the proof, and again by the guard's and the warm-up's shorter requests.
    proof = context / of.prefill_tok_s + 128 / speed + 3.0
    answer = of.answer_tokens / speed
    match kind:
        case Kind.RACED:
            answers = float(chance.uniform(0.8, 2.5))  # short answers mostly
        case Kind.FULL:
            answers = float(chance.integers(5, 11))
        case _:
            answers = float(chance.integers(6, 13))
    measure_s = answers * answer
    seconds = of.overhead_s + boot + proof + measure_s
    return Spent(kind=kind, seconds=seconds, measure_s=measure_s)


def drawn(seed: int) -> Story:
    """Return a study whose outcomes are drawn: 20 to 60 % fail at first, fewer later."""
    chance = np.random.default_rng([seed, 5])
    of = pace(chance)
    boots = int(chance.integers(12, 81))
    fails, learns = float(chance.uniform(0.2, 0.6)), float(chance.uniform(0.3, 1.0))
    keen = float(chance.uniform(1.0, 2.5))
    spent: list[Spent] = []
    fronts: list[int] = []
    front = measured = 0
    speed = float(np.exp(chance.uniform(np.log(15), np.log(150))))
    budget_s = None
    if chance.random() < 0.3:
        budget_s = boots * (of.boot_s + 20 * of.answer_tokens / speed) * float(
            chance.uniform(0.2, 0.8)
        )  # fmt: skip
    gone = 0.0
    for boot in range(boots):
        if budget_s is not None and gone >= budget_s:
            break
        share = fails * (1 - (1 - learns) * boot / boots)
        kind = Kind.FAILED
        if chance.random() >= share:
            measured += 1
            reaches = chance.random() < min(1.0, keen / measured**0.8)
            kind = Kind.FULL if reaches else Kind.RACED
            if reaches:
                front += int(chance.random() < 1 / (1 + 0.35 * front))
        one = attempt_s(
            chance, of, boot_s=of.boot_s,
            context=float(2 ** chance.uniform(13, 17.5)),
            speed=speed * float(np.exp(chance.normal(0, 0.35))), kind=kind, first=boot == 0,
        )  # fmt: skip
        gone += one.seconds
        spent.append(one)
        fronts.append(front)
    return _confirmed(chance, of, spent, fronts, boots, budget_s, of.boot_s, speed)


def played(table: Table, sampler: str) -> Callable[[int], Story]:
    """Return what plays a study against a table: its boots' own times, speeds and front."""
    from sweeper.replay import Table as _Table
    from sweeper.search.game import Player

    assert isinstance(table, _Table)

    def play(seed: int) -> Story:
        chance = np.random.default_rng([seed, 6])
        of = pace(chance)
        boots = int(chance.integers(20, 61))
        player = Player(table, sampler, seed)
        spent: list[Spent] = []
        fronts: list[int] = []
        front: list[tuple[float, float]] = []
        usual = statistics.median(each.boot_s for each in table.evidence if each.boot_s)
        for boot in range(boots):
            row = player.ask()
            assert row is not None
            works = bool(table.measured[row])
            rate = float(table.decode_tok_s[row]) if works else 30.0
            context = float(table.context[row])
            kind = Kind.FAILED
            if works:
                here = rate, context
                reaches = not any(r >= rate * 0.99 and c >= context for r, c in front)
                kind = Kind.FULL if reaches else Kind.RACED
                if reaches:
                    front = [each for each in front if each[0] > here[0] or each[1] > here[1]] + [
                        here
                    ]
            boot_s = table.evidence[row].boot_s or usual
            if works:
                one = attempt_s(
                    chance, of, boot_s=boot_s, context=context, speed=rate, kind=kind,
                    first=boot == 0,
                )  # fmt: skip
            else:
                failed_s = boot_s * (of.cold if boot == 0 else 1.0) + of.overhead_s
                one = Spent(kind=kind, seconds=failed_s)
            player.tell(row, rate if works else None)
            spent.append(one)
            fronts.append(len(front))
        rates = [rate for rate, _ in front] or [30.0]
        return _confirmed(chance, of, spent, fronts, boots, None, usual, statistics.median(rates))

    return play


def _confirmed(
    chance: np.random.Generator, of: Pace, spent: list[Spent], fronts: list[int], boots: int,
    budget_s: float | None, boot_s: float, speed: float,
) -> Story:  # fmt: skip
    for _ in range(min(fronts[-1], CONFIRM_BOOTS)):
        again = attempt_s(
            chance, of, boot_s=boot_s, context=float(2 ** chance.uniform(13, 17.5)), speed=speed,
            kind=Kind.AGAIN, first=False,
        )  # fmt: skip
        spent.append(again)
    return Story(spent=tuple(spent), fronts=tuple(fronts), boots=boots, budget_s=budget_s)


def judged(story: Story) -> Iterator[tuple[int, float, float, bool]]:
    """Yield after each boot of the search: how many, the share gone, the error, held or not.

    The error is (told - true) / true.
    """
    total = sum(each.seconds for each in story.spent)
    gone = 0.0
    for done, front in enumerate(story.fronts, start=1):
        gone += story.spent[done - 1].seconds
        left = total - gone
        if left <= 0:
            return
        boots = story.boots - done
        out_of_time = story.budget_s is not None and gone >= story.budget_s
        boots = 0 if out_of_time else boots
        told = time_left(
            story.spent[:done],
            Plan(
                boots=boots,
                again=expected_again(
                    front=front, boots_done=done, boots_left=boots, rounds=1, most=CONFIRM_BOOTS
                ),
                seconds=None if story.budget_s is None else max(story.budget_s - gone, 0.0),
            ),
        )
        assert told is not None
        yield done, gone / total, (told.seconds - left) / left, told.low <= left <= told.high


def naive(story: Story) -> Iterator[tuple[int, float]]:
    """Yield the error of the mean of the boots so far times the boots left, after each boot."""
    total = sum(each.seconds for each in story.spent)
    gone = 0.0
    for done in range(1, len(story.fronts) + 1):
        gone += story.spent[done - 1].seconds
        left = total - gone
        if left <= 0:
            return
        told = gone / done * (story.boots - done)
        if story.budget_s is not None:
            told = min(told, max(story.budget_s - gone, 0) + gone / done / 2)
        yield done, (told - left) / left


def summed(stories: Sequence[Story]) -> dict[str, object]:
    """Return the errors over these studies after so many boots, and at half of their time."""
    at: dict[str, list[tuple[float, bool]]] = {f"after {n} boots": [] for n in AFTER}
    at["at half of the time"] = []
    plain: dict[str, list[float]] = {f"after {n} boots": [] for n in AFTER}
    for story in stories:
        half = False
        for done, share, error, held in judged(story):
            # What is left of a study that is nearly over is of no interest.
            if done in AFTER and share <= 0.9:
                at[f"after {done} boots"].append((error, held))
            if share >= 0.5 and not half:
                half = True
                at["at half of the time"].append((error, held))
        for done, error in naive(story):
            if f"after {done} boots" in plain:
                plain[f"after {done} boots"].append(error)
    return {
        when: {
            "studies": len(found),
            "median_error": round(statistics.median(abs(e) for e, _ in found), 3),
            "error_90": round(float(np.quantile([abs(e) for e, _ in found], 0.9)), 3),
            "bias": round(statistics.median(e for e, _ in found), 3),
            "within_25": round(sum(abs(e) <= 0.25 for e, _ in found) / len(found), 3),
            "interval_holds": round(sum(held for _, held in found) / len(found), 3),
            "median_error_of_the_plain_mean": round(
                statistics.median(abs(e) for e in plain[when]), 3
            )
            if plain.get(when)
            else None,
        }
        for when, found in at.items()
        if found
    }


def main() -> None:
    """Play all and print a line each; writes the results as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tables", nargs="*", type=Path, help="TABLE.csv.gz, its space beside it")
    parser.add_argument("--studies", type=int, default=400)
    parser.add_argument("--played", type=int, default=20, help="studies a table and sampler")
    parser.add_argument("--samplers", default="frontier,tpe,random")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.studies)
    # What was played before and is not played now stays.
    results: dict[str, object] = json.loads(options.out.read_text()) if options.out.exists() else {}
    results["drawn"] = summed([drawn(seed) for seed in seeds])
    for path in options.tables:
        from sweeper.replay import read_table

        table = read_table(path)
        for sampler in options.samplers.split(","):
            play = played(table, sampler)
            results[f"{table.name}, {sampler}"] = summed(
                [play(seed) for seed in seeds[: options.played]]
            )
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    for name, found in results.items():
        assert isinstance(found, dict)
        print(name)
        for when, figures in found.items():
            print(f"  {when:20}", "  ".join(f"{key} {value}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
