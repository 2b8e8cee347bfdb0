"""Record a table from llama.cpp on a card: every point of a study's space, booted and timed.

    python benchmarks/search/record_gpu.py boots FOLDER +study=NAME [KEY=VALUE ...] [minutes=9]
    python benchmarks/search/record_gpu.py table FOLDER

`boots` boots each point of the study once, in random order, and `REPEATED` of them three times in
all; each boot becomes a line of FOLDER/boots.jsonl when it is over, so that a run that is cut off
loses nothing and the same command goes on. A point costs a few seconds: what serves is timed at the
depths `DEPTHS`, each prompt going on from the one before; no context is proven by filling it. What
dies is judged from its log as in any study. `table` makes the table and its space from FOLDER.

The axis that is declared last is walked slowest: where time does not suffice for the whole space,
that of its first value is there.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from record import COLUMNS, GIB, TABLES, sidecar_of, write_table

from sweeper import gpu
from sweeper.bench import Client, RequestFailure
from sweeper.conf import load
from sweeper.core.acceptance import mean_length, shares
from sweeper.core.launch import Death, Launch
from sweeper.core.memory import Estimate
from sweeper.core.outcome import Failure, kind, name
from sweeper.core.pairs import Pairs, Point, text
from sweeper.core.sample import DraftCounters, Purpose, Sample
from sweeper.core.space import Space
from sweeper.engines import estimated, shown
from sweeper.job import Job
from sweeper.orchestrate import prepare
from sweeper.places import conf_dirs
from sweeper.server import Registry, Server, free_port, serving, terminating_as_interrupt
from sweeper.telemetry import watching

DEPTHS = (256, 2048, 8192)
"""Tokens before the ones that are timed."""
ANSWERS = {256: 3, 2048: 2, 8192: 2}
ANSWER_TOKENS = 64
REPEATED, TIMES = 20, 3
_OWN_WORDS = 8
"""At the end of each prompt, so that no two of a depth are answered alike."""
_TAIL = 25


def boots(folder: Path, words: list[str]) -> None:
    """Boot what is not booted yet, until all is or the minutes are over."""
    minutes = next((float(w.removeprefix("minutes=")) for w in words if w[:8] == "minutes="), 1e9)
    loaded = load([each for each in words if each[:8] != "minutes="], conf_dirs())
    study = loaded.study
    job = prepare(loaded)
    folder.mkdir(parents=True, exist_ok=True)
    capacity = float(study.device_memory_bytes or 0)
    (folder / "space.json").write_text(
        json.dumps(sidecar_of(study.space, job, device_memory_bytes=capacity), indent=1)
    )
    (folder / "host.json").write_text(json.dumps(dict(job.host), indent=1))
    path = folder / "boots.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    done = Counter(Pairs(json.loads(line)["point"]) for line in lines)
    number = len(lines)
    waiting = _order(study.space, done)
    began = time.monotonic()
    (folder / "logs").mkdir(exist_ok=True)
    with path.open("a") as file, terminating_as_interrupt():
        for count, point in enumerate(waiting):
            gone = time.monotonic() - began
            if gone > minutes * 60:
                print(f"{len(waiting) - count} boots were not made: the minutes are over")
                break
            number += 1
            row = boot(job, point, number, folder)
            file.write(json.dumps(row) + "\n")
            file.flush()
            speed = row["evidence"].get("decode_tok_s")
            said = f"{speed:.0f} tok/s" if speed else row.get("cause", "")[:60]
            print(
                f"{count + 1}/{len(waiting)} {gone:.0f} s: {text_of(point)}: {row['outcome']} "
                f"{row['total_s']:.1f} s {said}", flush=True,
            )  # fmt: skip


def text_of(point: Point) -> str:
    """Return the values of a point in a line."""
    return " ".join(f"{axis}={text(value)}" for axis, value in point.items())


def _order(space: Space, done: Counter[Pairs]) -> list[Point]:
    """Return the boots to be made: at random, the values of the last axis one after another."""
    chance = random.Random(0)  # noqa: S311 - an order, not a secret
    points = [point for point in space.points() if space.refused_by(point) is None]
    chance.shuffle(points)
    again = points[:REPEATED]
    last = space.axes[-1]
    order: list[Point] = []
    for value in last.values:
        part = [point for point in points if point.get(last.name) == value]
        part += [point for point in part if point in again for _ in range(TIMES - 1)]
        chance.shuffle(part)
        order += part
    left = []
    for point in order:
        if done[point] > 0:
            done[point] -= 1
        else:
            left.append(point)
    return left


def boot(job: Job, point: Point, number: int, folder: Path) -> dict[str, Any]:
    """Boot a point, time it if it serves, end it, and return all that was seen."""
    settings, model = job.settings(point), job.model(point)
    launch = job.launch(point, free_port())
    assert isinstance(launch, Launch)
    log: list[str] = []
    seen = _Seen(memory={"before": _used()})
    began = time.perf_counter()
    path = folder / "logs" / f"{number:04d}.log"
    with serving(
        launch, log_path=path, registry=Registry(folder / "started.json"), watch=log.append
    ) as started:
        match started.result:
            case Server() as server:
                seen.boot_s = server.ready_after_s
                seen.memory["ready"] = _used()
                failure = _timed(job, server, log, seen, number)
            case Death() as death:
                seen.died_s = death.after_s
                failure = job.engine.verdict(death, log)
            case _:
                raise AssertionError("a launch is never attached to")
    stopped = started.stopped
    facts = job.engine.evidence(log)
    sizes = shown(job.engine, settings, facts)
    row: dict[str, Any] = {
        "number": number,
        "point": dict(point),
        "outcome": "measured" if failure is None else name(failure),
        "kind": "measured" if failure is None else kind(failure),
        "engine": dict(facts),
        "shown": dict(sizes),
        "estimate": _told(estimated(job.engine, settings, model)),
        "memory": seen.memory,
        "depths": seen.depths,
        "drafts": None if seen.drafts is None else dataclasses.asdict(seen.drafts),
        "telemetry": seen.telemetry,
        "boot_s": seen.boot_s,
        "died_s": seen.died_s,
        "stop_s": None if stopped is None else stopped.took_s,
        "held_bytes": None if stopped is None else stopped.held_bytes,
        "total_s": time.perf_counter() - began,
        "argv": list(launch.argv),
    }
    if failure is not None:
        finding = failure.finding
        row |= {
            "phase": finding.phase.value, "cause": finding.cause,
            "explanation": finding.explanation, "facts": dict(finding.facts),
            "try_next": dict(finding.try_next), "log_tail": log[-_TAIL:],
        }  # fmt: skip
    row["evidence"] = _evidence(row, job.engine.context_tokens(settings))
    return row


@dataclasses.dataclass
class _Seen:
    """What is found out while a boot goes on."""

    memory: dict[str, int | None]
    depths: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    drafts: DraftCounters | None = None
    telemetry: dict[str, Any] | None = None
    boot_s: float | None = None
    died_s: float | None = None


def _timed(job: Job, server: Server, log: list[str], seen: _Seen, number: int) -> Failure | None:
    """Time decoding at every depth that the window holds; return how it failed, if it did."""
    wire = job.engine.wire
    chance = np.random.default_rng(number)
    deepest = chance.integers(1000, 9000, DEPTHS[-1]).tolist()
    with (
        Client(server.base_url, wire, "random", job.workload) as client,
        watching(server.pid, period_s=0.25) as watched,
    ):
        # Read on from what the last prompt left in the cache: else the deep ones cost the most.
        for depth in (0, *DEPTHS):
            drafts = _drafts(job, client)
            found: list[Sample] = []
            for _ in range(ANSWERS.get(depth, 1)):
                own = chance.integers(1000, 9000, _OWN_WORDS).tolist()
                prompt = deepest[: max(depth - _OWN_WORDS, 0)] + own
                said = client.complete(
                    prompt, max_tokens=ANSWER_TOKENS, purpose=Purpose.MEASURE, temperature=0.0,
                    extras=wire.cached_extras,
                )  # fmt: skip
                if isinstance(said, RequestFailure):
                    death = server.death() or server.complaint(said.detail)
                    return job.engine.verdict(death, log)
                found.append(said)
            if depth == 0:  # the first request of all warms up what the engine's own did not
                continue
            if depth == DEPTHS[0]:
                after = _drafts(job, client)
                if after is not None and drafts is not None:
                    seen.drafts = after.since(drafts)
            seen.depths.append(
                {
                    "depth": depth,
                    "decode_tok_s": [each.decode_tok_s for each in found],
                    "ttft_s": [each.ttft_s for each in found],
                    "server": [dict(each.server) for each in found],
                }
            )
    told = watched.result()
    seen.telemetry = dataclasses.asdict(told)
    seen.memory["peak"] = told.gpu_peak_bytes
    seen.memory["after"] = _used()
    return None


def _drafts(job: Job, client: Client) -> DraftCounters | None:
    page = client.page(job.engine.wire.metrics_path)
    return None if page is None else job.engine.draft_counters(page)


def _used() -> int | None:
    used = gpu.used_bytes()
    return None if used is None else sum(used)


def _told(needs: Estimate) -> dict[str, list[float]]:
    return {part: [size.mean, size.spread] for part, size in needs.parts}


def _evidence(row: dict[str, Any], window: int) -> dict[str, Any]:
    """Return the columns of the table that this boot has, by their names."""
    sizes, facts = row["shown"], row.get("facts", {})

    def gib(value: float | None) -> float | None:
        return None if value is None else round(value / GIB, 6)

    weights = sizes.get("weights", sizes.get("weights+draft_weights"))
    cache = sizes.get("kv_cache")
    found: dict[str, Any] = {
        "outcome": row["outcome"],
        "phase": row.get("phase", "ready"),
        "shortfall_gib": gib(facts.get("shortfall_bytes")),
        "weights_gib": gib(weights),
        "kv_bytes_per_token": round(cache / window, 1) if cache else None,
        "draft_gib": gib(sizes.get("draft")),
        "compute_gib": gib(sizes.get("compute")),
        "boot_s": round(row["boot_s"] or row["died_s"] or row["total_s"], 2),
    }
    for each in row["depths"]:
        rates = [rate for rate in each["decode_tok_s"] if rate is not None]
        if rates:
            at = "" if each["depth"] == DEPTHS[0] else f"_{each['depth']}"
            found[f"decode_tok_s{at}"] = round(statistics.median(rates), 3)
    if row["outcome"] == "measured":
        length = 1.0
        if row["drafts"] is not None and row["drafts"]["drafted"] > 0:
            counters = DraftCounters(
                **{
                    **row["drafts"],
                    "accepted_per_position": tuple(row["drafts"]["accepted_per_position"]),
                }
            )
            length = mean_length(counters) or 1.0
            found["acceptance"] = " ".join(f"{min(s, 1.0):.4f}" for s in shares(counters))
        found["step_ms"] = round(length / found["decode_tok_s"] * 1000, 4)
    memory = row["memory"]
    if memory.get("ready") is not None and memory.get("before") is not None:
        found["ready_gib"] = gib(memory["ready"] - memory["before"])
    if memory.get("peak") is not None and memory.get("before") is not None:
        found["peak_gib"] = gib(memory["peak"] - memory["before"])
    return {key: value for key, value in found.items() if value is not None}


def table(folder: Path, called: str, tables: Path = TABLES) -> None:
    """Write the table of the first boot of each point, and the space beside it."""
    rows: dict[str, dict[str, Any]] = {}
    space = json.loads((folder / "space.json").read_text())
    for line in (folder / "boots.jsonl").read_text().splitlines():
        row = json.loads(line)
        point = {axis: text(row["point"].get(axis)) for axis in space["axes"]}
        rows.setdefault(json.dumps(point), {**point, **row["evidence"]})
    columns = [*space["axes"], *COLUMNS]
    columns += sorted({key for row in rows.values() for key in row} - set(columns))
    write_table(called, columns, list(rows.values()), space, "record_gpu.py on a lent H200", tables)
    counts = Counter(row["outcome"] for row in rows.values())
    print(json.dumps({"rows": len(rows), **counts}))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["boots", folder, *words]:
            boots(Path(folder), words)
        case ["table", folder]:
            table(Path(folder), "llamacpp_h200_24g_recorded")
        case _:
            raise SystemExit(__doc__)
