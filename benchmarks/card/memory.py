"""Compare what was predicted of memory with what boots took, component by component.

    python benchmarks/card/memory.py boots FILE.jsonl [capacity=24GiB]
    python benchmarks/card/memory.py study STUDIES_DIR +study=NAME [KEY=VALUE ...] [held=BYTES]

`boots` reads what benchmarks/search/record_gpu.py has recorded, `study` the attempts of a study
(`held`: bytes of the card that others held all the while, such as ballast). Prints for every
component and for the whole the error before any boot, and after the first five boots as `plan`
learns from them, both as a share of the card; and how far boots of one point differ.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeper.conf import load, parse_bytes
from sweeper.core.memory import Boot, Estimate, MemoryModel, Size
from sweeper.core.pairs import Pairs
from sweeper.core.typed import FieldError
from sweeper.engines import estimated, shown
from sweeper.orchestrate import prepare
from sweeper.places import conf_dirs
from sweeper.record.attempts import Attempts

MIB, GIB = 2**20, 2**30
LEARNT_FROM = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One boot: what was thought of it, what it printed, and what the card said, in bytes."""

    number: int
    point: Pairs
    outcome: str
    estimate: Estimate
    shown: Pairs
    ready: float | None = None
    """More in use when it was ready than before it was started."""
    peak: float | None = None


def of_boots(path: Path) -> list[Seen]:
    """Return the boots of a recording."""
    found = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        memory = row["memory"]
        before = memory.get("before")

        def above(name: str, memory: Mapping[str, Any] = memory, before: Any = before) -> Any:
            used = memory.get(name)
            return None if used is None or before is None else float(used - before)

        found.append(
            Seen(
                number=row["number"],
                point=Pairs(row["point"]),
                outcome=row["outcome"],
                estimate=Estimate.of(
                    {k: Size(mean=mean, spread=sd) for k, (mean, sd) in row["estimate"].items()}
                ),
                shown=Pairs(row["shown"]),
                ready=above("ready"),
                peak=above("peak"),
            )
        )
    return found


def of_study(folder: Path, words: list[str]) -> list[Seen]:
    """Return the boots of a study's attempts."""
    held = next((float(w.removeprefix("held=")) for w in words if w.startswith("held=")), 0.0)
    loaded = load([each for each in words if not each.startswith("held=")], conf_dirs())
    job = prepare(loaded)
    found = []
    for each in Attempts(folder / loaded.study.name / "attempts").all():
        try:
            settings = job.settings(each.point)
        except FieldError:
            continue
        outcome = each.outcome
        telemetry = getattr(outcome, "telemetry", None)
        peak = None if telemetry is None else telemetry.gpu_peak_bytes
        found.append(
            Seen(
                number=each.number,
                point=each.point,
                outcome=getattr(outcome, "name", "measured"),
                estimate=estimated(job.engine, settings, job.model(each.point)),
                shown=shown(job.engine, settings, each.engine),
                peak=None if peak is None else peak - held,
            )
        )
    return found


def errors(boots: Iterable[Seen], model: MemoryModel) -> dict[str, list[tuple[float, Seen]]]:
    """Return by component how much more was predicted than seen, in bytes, for every boot."""
    found: dict[str, list[tuple[float, Seen]]] = defaultdict(list)
    for each in boots:
        corrected = model.corrected(each.estimate)
        for name, size in each.shown.items():
            together = [part for part in name.split("+") if part in dict(corrected.parts)]
            if together and isinstance(size, int | float):
                thought = sum(corrected.part(part).mean for part in together)
                found[name].append((thought - size, each))
        for name, seen in (("in all, ready", each.ready), ("in all, peak", each.peak)):
            if seen is not None:
                found[name].append((corrected.mean - seen, each))
        if each.ready is not None:
            printed = sum(v for v in each.shown.values() if isinstance(v, int | float))
            hidden = {n for name in each.shown for n in name.split("+")}
            rest = sum(size.mean for name, size in corrected.parts if name not in hidden)
            found["what is not printed"].append((rest - (each.ready - printed), each))
    return found


def compare(boots: list[Seen], capacity: float) -> None:
    """Print the errors before the first boot and after five, and the spread of equal boots."""
    learnt = MemoryModel.of(
        Boot(estimate=each.estimate, shown=each.shown) for each in boots[:LEARNT_FROM]
    )
    print(f"{len(boots)} boots; errors in MiB (% of the card): median of the size, largest")
    for title, model, those in (
        ("before the first boot", MemoryModel(), boots),
        (f"after {LEARNT_FROM} boots", learnt, boots[LEARNT_FROM:]),
    ):
        print(f"\n{title}")
        for name, found in sorted(errors(those, model).items()):
            sizes = [abs(error) for error, _ in found]
            worst, where = max(found, key=lambda pair: abs(pair[0]))
            beyond = sum(size > 0.03 * capacity for size in sizes)
            print(
                f"  {name:24} n={len(found):3}  {statistics.median(sizes) / MIB:8.0f} "
                f"({statistics.median(sizes) / capacity:6.2%})   {worst / MIB:+8.0f} "
                f"({abs(worst) / capacity:6.2%}), over 3 %: {beyond:3}  at "
                + " ".join(f"{axis}={value}" for axis, value in where.point.items())
            )
    again: dict[Pairs, list[Seen]] = defaultdict(list)
    for each in boots:
        again[each.point].append(each)
    print("\nfrom boot to boot of one point (pooled standard deviation, MiB)")
    for name in ("ready", "peak"):
        squares, freedom, widest = 0.0, 0, 0.0
        for those in again.values():
            known = [getattr(each, name) for each in those if getattr(each, name) is not None]
            if len(known) > 1:
                squares += sum((size - statistics.fmean(known)) ** 2 for size in known)
                freedom += len(known) - 1
                widest = max(widest, max(known) - min(known))
        if freedom:
            print(f"  {name}: {(squares / freedom) ** 0.5 / MIB:.2f}, widest {widest / MIB:.1f}, "
                  f"{freedom} degrees of freedom")  # fmt: skip


def main(words: list[str]) -> None:
    """Read the boots and print the comparison."""
    stated = next(
        (w.removeprefix("capacity=") for w in words if w.startswith("capacity=")), "24GiB"
    )
    words = [each for each in words if not each.startswith("capacity=")]
    capacity = float(parse_bytes(stated) or 0)
    match words:
        case ["boots", file]:
            compare(of_boots(Path(file)), capacity)
        case ["study", folder, *rest]:
            compare(of_study(Path(folder), rest), capacity)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
