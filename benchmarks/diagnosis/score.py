"""Scores the naming of endings: every case of a file, and every log of a folder.

    python benchmarks/diagnosis/score.py                         the project's own cases and logs
    python benchmarks/diagnosis/score.py CASES.jsonl [LOGS ...]  other ones in the same form

A case is one JSON object a line: `id`, `engine` (else told by the file's name), `log` (the decisive
lines), `exit` (the exit code, or how it ended in words; none for what lives), `outcome` (the right
answer; `benign_*` is `none`), `phase` if it is to be right too, and `decidable` (whether log and
exit are enough). A folder of logs has an `expected.jsonl` with `log`, `engine` (if the folder's
name does not tell), `exit_code`, `outcome` and `phase`.

A case that must not be mistaken, whatever its name: infeasible for broken, or the reverse.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeper.core.outcome import BrokenName, HostFaultName, InfeasibleName, UnfitName, kind, name
from sweeper.diagnose import lines_of
from sweeper.engines import load_engine

ROOT = Path(__file__).resolve().parents[2]
OWN_CASES = sorted((ROOT / "tests" / "engines").glob("cases_*.jsonl"))
OWN_LOGS = sorted(
    path.parent for path in (ROOT / "tests" / "engines").glob("logs/*/expected.jsonl")
)
KINDS = (
    ("infeasible", InfeasibleName),
    ("unfit", UnfitName),
    ("broken", BrokenName),
    ("host_fault", HostFaultName),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One question with the right answer and ours."""

    label: str
    decidable: bool
    right: str
    ours: str
    right_phase: str | None
    our_phase: str
    right_kind: str
    our_kind: str

    @property
    def correct(self) -> bool:
        """Whether outcome and, where one is given, phase are right."""
        return self.right == self.ours and self.right_phase in (None, self.our_phase)

    @property
    def mistaken(self) -> bool:
        """Whether something infeasible was called broken, or the reverse."""
        return {self.right_kind, self.our_kind} == {"infeasible", "broken"}


def kind_of(outcome: str) -> str:
    """Return the kind of an outcome by its name."""
    return next((word for word, names in KINDS if outcome in list(names)), "none")


def exit_code_of(words: str) -> int | None:
    """Return the exit code that a person's words about an end mean, None for one that lives.

    Signals by number or name are negative; `exits` without a number is 1.
    """
    said = words.lower()
    if found := re.search(r"exit(?:s|ed)?(?: with)?(?: status| code)? (-?\d+)", said):
        code = int(found[1])
        return 128 - code if 128 < code <= 192 else code
    for word, code in (("sigsegv", -11), ("segfault", -11), ("segmentation", -11), ("sigkill", -9),
                       ("killed", -9), ("sigabrt", -6), ("abort", -6)):  # fmt: skip
        if word in said:
            return code
    lives = (
        "continues",
        "serves",
        "recovers",
        "keeps running",
        "alive",
        "hangs",
        "frozen",
        "stays",
    )
    if any(word in said for word in lives):
        return None
    return 1 if re.search(r"exit|dies|died|crash|fails|stops|terminat|shut", said) else None


def answers_of_cases(path: Path) -> Iterator[Answer]:
    """Yield our answer to every case of a file."""
    for line in path.read_text().splitlines():
        case = json.loads(line)
        said = case.get("engine", path.stem)
        right = "none" if case["outcome"].startswith("benign") else case["outcome"]
        log, ended = case["log"], case.get("exit")
        yield _asked(
            f"{path.stem} {case['id']}",
            "vllm" if "vllm" in said else "llamacpp",
            log.splitlines() if isinstance(log, str) else log,
            exit_code_of(ended) if isinstance(ended, str) else ended,
            (right, case.get("phase")),
            decidable=case.get("decidable", True),
        )


def answers_of_logs(folder: Path) -> Iterator[Answer]:
    """Yield our answer to every whole log of a folder."""
    for line in (folder / "expected.jsonl").read_text().splitlines():
        row = json.loads(line)
        engine = row.get("engine") or ("llamacpp" if "llamacpp" in folder.name else "vllm")
        with (folder / row["log"]).open("rb") as file:
            yield _asked(
                f"{folder.name}/{row['log']}",
                engine,
                list(lines_of(file)),
                row["exit_code"],
                (row["outcome"], row.get("phase")),
                decidable=True,
            )


def _asked(
    label: str,
    engine: str,
    log: list[str],
    exit_code: int | None,
    right_answer: tuple[str, str | None],
    *,
    decidable: bool,
) -> Answer:
    right, phase = right_answer
    found: Any = load_engine(engine).diagnose(log, exit_code)
    return Answer(
        label=label,
        decidable=decidable,
        right=right,
        ours=name(found),
        right_phase=phase,
        our_phase=found.finding.phase.value,
        right_kind=kind_of(right),
        our_kind=kind(found),
    )


def main(arguments: list[str]) -> int:
    """Print every wrong answer and the score; return 1 if a decidable one is wrong."""
    files = [Path(each) for each in arguments if not Path(each).is_dir()] or (
        [] if arguments else OWN_CASES
    )
    folders = [Path(each) for each in arguments if Path(each).is_dir()] or (
        [] if arguments else OWN_LOGS
    )
    answers = [each for file in files for each in answers_of_cases(file)]
    answers += [each for folder in folders for each in answers_of_logs(folder)]
    for each in answers:
        if not each.correct or each.mistaken:
            print(
                f"{'WRONG' if each.decidable else 'open '} {each.label}: {each.ours} "
                f"({each.our_kind}, {each.our_phase}), right is {each.right} "
                f"({each.right_kind}{', ' + each.right_phase if each.right_phase else ''})"
            )
    decidable = [each for each in answers if each.decidable]
    right = sum(each.correct for each in decidable)
    mistaken = sum(each.mistaken for each in decidable)
    all_right = sum(each.correct for each in answers)
    print(
        f"{right} of {len(decidable)} decidable named right; {all_right} of {len(answers)} in all; "
        f"{mistaken} decidable ones mistaken between infeasible and broken"
    )
    return 0 if right == len(decidable) and mistaken == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
