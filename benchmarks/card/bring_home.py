"""Copy a study into the repository, small: records and report as they are, logs trimmed.

    python benchmarks/card/bring_home.py FROM/studies/NAME studies/NAME

Of engine logs the end is kept, and before it of lines that differ in numbers alone the first two. A
trimmed log must be read and diagnosed as the whole one is: else it is kept whole, and that is said.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

from sweeper.core.outcome import kind, name
from sweeper.engines import Engine
from sweeper.engines.llamacpp import LlamaCpp
from sweeper.engines.vllm import Vllm

LAST, WIDTH, ALIKE = 40, 8000, 2
_COUNTED = re.compile("accept", re.IGNORECASE)
"""Counters of speculation are read off the sum of their lines: all of them are kept."""
_LEAVE = ("cache", "lock", "study.db", "started.json", "report.html")


def trimmed(lines: list[str]) -> list[str]:
    """Return a log without the lines that only repeat; says how many are not there."""
    found: list[str] = []
    seen: Counter[str] = Counter()
    gone = 0
    for number, line in enumerate(lines):
        shape = re.sub(r"[0-9a-f]*\d[0-9a-f]*|-", "#", line)[:60]
        seen[shape] += 1
        if seen[shape] <= ALIKE or number >= len(lines) - LAST or _COUNTED.search(line):
            if gone:
                found.append(f"... {gone} lines left out ...")
                gone = 0
            found.append(line[:WIDTH])
        else:
            gone += 1
    return found


def main(source: Path, target: Path) -> None:
    """Copy the study and trim its logs."""
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*_LEAVE))
    engines: dict[str, Engine] = {"llamacpp": LlamaCpp(), "vllm": Vllm()}
    before = after = 0
    for log in sorted(target.glob("attempts/*/engine*.log")):
        whole = log.read_text(errors="replace")
        engine = engines[json.loads((log.parent / "attempt.json").read_text())["engine"]["name"]]
        lines = whole.splitlines()
        short = trimmed(lines)
        ways = [engine.diagnose(each, None) for each in (lines, short)]
        same = [(kind(each), name(each), each.finding.facts) for each in ways]
        if same[0] == same[1] and engine.evidence(lines) == engine.evidence(short):
            log.write_text("\n".join(short) + "\n")
        else:
            print(f"{log}: kept whole, it would be read otherwise: {same}")
        before += len(whole)
        after += log.stat().st_size
    print(f"logs: {before / 2**10:.0f} KiB, of which {after / 2**10:.0f} are kept")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
