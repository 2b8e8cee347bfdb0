"""What sweeper itself costs: seconds a trial beside the engine's own, and seconds to start.

    python benchmarks/overhead/run.py [--boots 20] [--starts 10] [--out results.json]

Runs a study on the simulated engine in this process, with a clock around everything that waits for
the engine; the rest is ours. README.md says what counts as what.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

REALISTIC_TRIAL_S = 60.0
ENGINE, OURS = "engine", "ours"


class Clock:
    """Sums of wall time by name; a name inside another of the same group is not counted twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.cpu_s: dict[str, float] = defaultdict(float)
        self._inside: dict[str, int] = defaultdict(int)

    def around(self, owner: Any, method: str, name: str, group: str) -> None:
        """Put this clock around a function or method from now on."""
        inner: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside[group] += 1
            began, used = time.perf_counter(), _cpu_s()
            try:
                return inner(*args, **kwargs)
            finally:
                self._inside[group] -= 1
                if not self._inside[group]:
                    self.seconds[name] += time.perf_counter() - began
                    self.cpu_s[name] += _cpu_s() - used

        setattr(owner, method, timed)


def study(boots: int, tracking: str, folder: Path) -> dict[str, Any]:
    """Run the demonstration study and return where its time went."""
    from rich.console import Console

    from sweeper import bench, orchestrate, server
    from sweeper.conf import load
    from sweeper.places import conf_dirs
    from sweeper.record.attempts import Attempts
    from sweeper.record.tracking import Tracking
    from sweeper.search.study import Search
    from sweeper.view import View

    clock = Clock()
    for method in ("tokenize", "tokens", "ask", "complete", "page", "post_json"):
        clock.around(bench.Client, method, "requests", ENGINE)
    clock.around(server._Process, "__init__", "boot", ENGINE)  # noqa: SLF001 - seen from outside
    clock.around(server, "_until_ready", "boot", ENGINE)
    clock.around(server._Process, "stop", "stop", ENGINE)  # noqa: SLF001
    for owner, method, name in (
        (Search, "ask", "search: choosing"), (Search, "tell", "search: learning"),
        (Search, "booting", "search: noting"), (Attempts, "commit", "record: writing"),
        (Attempts, "read", "record: reading back"), (View, "finished", "view"),
        (View, "booting", "view"), (Tracking, "drain", "MLflow"),
        (Tracking, "attempt", "MLflow"),
        (orchestrate, "_track", "MLflow: opening, before the first boot"),
        (orchestrate, "known_from", "what is known"), (orchestrate, "front_among", "the front"),
    ):  # fmt: skip
        clock.around(owner, method, name, OURS)
    clock.around(orchestrate._Run, "to_the_end", "trials", "whole")  # noqa: SLF001
    clock.around(orchestrate._Run, "conclude", "end", "end")  # noqa: SLF001

    loaded = load(
        [
            "study=fake_demo", f"studies_dir={folder / 'studies'}", f"budget.boots={boots}",
            f"tracking={tracking}", "engine.params.time_scale=60", "confirm.rounds=0",
            *([f"tracking.uri=sqlite:///{folder / 'mlflow.db'}"] if tracking == "local" else []),
        ],
        conf_dirs(),
    )  # fmt: skip
    with (folder / "screen").open("w") as file:
        summary = orchestrate.run_study(loaded, Console(file=file))
    spent = dict(clock.seconds)
    trials = len(summary.attempts)
    engine = spent["boot"] + spent["requests"] + spent["stop"]
    ours = spent["trials"] - engine
    cpu = clock.cpu_s["trials"] - sum(clock.cpu_s[name] for name in ("boot", "requests", "stop"))
    names = ("trials", "end", "boot", "requests", "stop")
    return {
        "tracking": tracking,
        "trials": trials,
        "engine_s_a_trial": round(engine / trials, 3),
        "overhead_s_a_trial": round(ours / trials, 4),
        "share_of_a_60_s_trial": round(ours / trials / REALISTIC_TRIAL_S, 5),
        "end_s": round(spent["end"], 2),
        "overhead_cpu_s_a_trial": round(cpu / trials, 4),
        "parts_s_a_trial": {
            name: round(seconds / trials, 4)
            for name, seconds in sorted(spent.items(), key=lambda item: -item[1])
            if name not in names
        },
    }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def start(arguments: list[str], times: int, folder: Path) -> dict[str, Any]:
    """Return the medians of wall and processor time that a verb takes from start to end.

    As on any second start, Python finds its bytecode: the first start, which compiles, is not
    counted.
    """
    walls, cpus = [], []
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    argv = [sys.executable, "-m", "sweeper", *arguments]
    for _ in range(times + 1):
        began = time.perf_counter()
        null = os.open(os.devnull, os.O_WRONLY)
        actions = [(os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_CLOSE, null)]
        pid = os.posix_spawn(sys.executable, argv, environment, file_actions=actions)
        os.close(null)
        _, status, used = os.wait4(pid, 0)
        walls.append(time.perf_counter() - began)
        cpus.append(used.ru_utime + used.ru_stime)
        assert os.waitstatus_to_exitcode(status) == 0, argv
    walls, cpus = walls[1:], cpus[1:]
    return {
        "command": " ".join(arguments).replace(str(folder), "."),
        "wall_s": round(statistics.median(walls), 3),
        "cpu_s": round(statistics.median(cpus), 3),
        "least_cpu_s": round(min(cpus), 3),
    }


SHIPPED = (
    "qwen35b_mtp", "nemotron_elastic_nvfp4", "qwen27b_mtp", "nemotron3_nano_spark",
    "gemma4_26b_awq", "qwen27b_dense_mtp", "beellama_27b_dflash", "leaderboard_24g",
)  # fmt: skip


def main() -> None:
    """Measure both and write them as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--boots", type=int, default=20)
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--tracking", help="only a study with this tracking, as one line of JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.tracking:
            print(json.dumps(study(options.boots, options.tracking, folder)))
            return
        load_before = os.getloadavg()[0]
        starts = [
            start(arguments, options.starts, folder)
            for arguments in (
                ["--help"],
                ["plan", "+study=fake_demo", f"studies_dir={folder}/studies"],
                ["show", "+study=fake_demo", f"studies_dir={folder}/studies"],
            )
        ]
        # Planned without their weights and without a card: the larger spaces that ship.
        starts += [
            start(["plan", f"+study={each}", f"studies_dir={folder}/studies"], 3, folder)
            for each in SHIPPED
        ]
    studies = []
    for tracking in ("off", "local"):
        # A process each, since the clocks stay where they were put.
        command = [sys.executable, __file__, "--tracking", tracking, "--boots", str(options.boots)]
        with os.popen(" ".join(command)) as run:  # noqa: S605 - our own words
            studies.append(json.loads(run.read().splitlines()[-1]))
    results = {
        "processors": os.cpu_count(),
        "load_before": round(load_before, 2),
        "python": platform.python_version(),
        "starts": starts,
        "studies": studies,
    }
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
