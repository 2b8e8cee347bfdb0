"""Does what `make run` exports boot and hold its speed, every time, in fresh clones?

    python benchmarks/winners/clones.py [--clones 5] [--verify 5] [--venv FOLDER] [--out FILE]

Clones the commit that is checked out, runs `make run` in each clone, then verifies each shell
recipe that it exported several times. README.md says more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE")
NO_ANSWER = "NO ANSWER"
"""`verify` itself could not say anything: this counts as no verdict, and is shown."""
STOP_S = 60.0
GIT = shutil.which("git") or "git"


def run(argv: Sequence[str], *, folder: Path, env: Mapping[str, str], log: Path) -> tuple[int, str]:
    """Run a command in a group of its own, its messages into the log; return code and stdout.

    On Ctrl-C it gets a Ctrl-C of its own, so that it stops its engine, and is waited for.
    """
    with log.open("ab") as messages:
        process = subprocess.Popen(  # noqa: S603 - words of our own, no shell
            argv, cwd=folder, env=dict(env), text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=messages,
        )  # fmt: skip
        try:
            said, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.communicate(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
            raise
    return process.returncode, said


def made(clone: Path, *, venv: Path | None, python: str, log: Path) -> tuple[float, list[Path]]:
    """Run `make run` in a clone; return its seconds and the recipes it exported.

    With an environment that is there already nothing is installed: it is left as it is, and the
    sources are those of the clone.
    """
    env = dict(os.environ)
    argv = ["make", "run", f"PYTHON={python}"]
    if venv is not None:
        env["PYTHONPATH"] = str(clone / "src")
        argv += [f"VENV={venv}", f"--old-file={venv}/installed-run"]
    began = time.monotonic()
    code, said = run(argv, folder=clone, env=env, log=log)
    seconds = time.monotonic() - began
    with log.open("a") as messages:
        messages.write(said)
    if code != 0:
        raise SystemExit(f"make run ended with code {code}:\n{log.read_text()[-2000:]}")
    return seconds, sorted(clone.glob("studies/*/recipes/*.sh"))


def verified(recipe: Path, *, clone: Path, venv: Path | None, log: Path) -> dict[str, Any]:
    """Verify a recipe once; return the verdict and the reasons, as `verify` gives them."""
    env = dict(os.environ)
    if venv is not None:
        env["PYTHONPATH"] = str(clone / "src")
    interpreter = (venv or clone / ".venv") / "bin" / "python"
    argv = [str(interpreter), "-m", "sweeper", "verify", str(recipe), "output=json"]
    began = time.monotonic()
    code, said = run(argv, folder=clone, env=env, log=log)
    seconds = time.monotonic() - began
    try:
        found = json.loads(said)
    except json.JSONDecodeError:
        return {
            "verdict": NO_ANSWER, "reasons": [f"verify ended with code {code}"], "seconds": seconds,
        }  # fmt: skip
    return {"verdict": found["verdict"], "reasons": found.get("reasons", []), "seconds": seconds}


def commit() -> tuple[str, bool]:
    """Return the commit that is cloned, and whether the checkout has changes beside it."""

    def git(*words: str) -> str:
        return subprocess.run(  # noqa: S603 - words of our own, no shell
            [GIT, "-C", str(CHECKOUT), *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))


def table(result: Mapping[str, Any]) -> str:
    """Return the result as lines: one for each recipe of each clone, then the sums."""
    lines = [f"{'clone':5} {'recipe':40} " + " ".join(f"{each:>12}" for each in VERDICTS)]
    total: Counter[str] = Counter()
    for number, clone in enumerate(result["clones"], 1):
        for name, tries in clone["recipes"].items():
            counts = Counter(each["verdict"] for each in tries)
            total += counts
            cells = " ".join(f"{counts[each]:>12}" for each in VERDICTS)
            lost = f"   {counts[NO_ANSWER]} without an answer" if counts[NO_ANSWER] else ""
            lines.append(f"{number:<5} {name:40} {cells}{lost}")
            lines += [
                f"        {each['verdict']}: {'; '.join(each['reasons'])}"
                for each in tries
                if each["verdict"] != "PASS"
            ]
    lines.append(f"{'':5} {'all':40} " + " ".join(f"{total[each]:>12}" for each in VERDICTS))
    seconds = [clone["make_run_s"] for clone in result["clones"]]
    if seconds:
        lines.append(
            f"make run: {min(seconds):.0f} to {max(seconds):.0f} s, median "
            f"{statistics.median(seconds):.0f} s, {result['make_run_includes']}"
        )
    if not result["complete"]:
        lines.append("interrupted: this is what was finished by then")
    return "\n".join(lines)


def main() -> int:
    """Run all clones; the exit code is 1 where a recipe failed or nothing was to verify."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clones", type=int, default=5)
    parser.add_argument("--verify", type=int, default=5, help="times that each recipe is verified")
    parser.add_argument("--venv", type=Path, help="use this environment and install nothing")
    parser.add_argument("--python", default=sys.executable, help="makes the environments else")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("clones.json"))
    asked = parser.parse_args()
    venv = None if asked.venv is None else asked.venv.resolve()
    head, changed = commit()
    if changed:
        print("the checkout has changes that are not committed: they are not cloned")
    result: dict[str, Any] = {
        "commit": head,
        "cpu_count": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "make_run_includes": "the installation too"
        if venv is None
        else "without any installation: one environment was reused",
        "complete": False,
        "clones": [],
    }
    folder = Path(tempfile.mkdtemp(prefix="sweeper-clones-"))
    try:
        for number in range(1, asked.clones + 1):
            clone, log = folder / f"clone-{number}", folder / f"clone-{number}.log"
            subprocess.run(  # noqa: S603 - words of our own, no shell
                [GIT, "clone", "--quiet", "--no-hardlinks", str(CHECKOUT), str(clone)], check=True
            )
            print(f"clone {number} of {asked.clones}: make run", flush=True)
            seconds, recipes = made(clone, venv=venv, python=asked.python, log=log)
            tries: dict[str, list[dict[str, Any]]] = {recipe.name: [] for recipe in recipes}
            result["clones"].append({"make_run_s": seconds, "recipes": tries})
            for recipe in recipes:
                for _ in range(asked.verify):
                    found = verified(recipe, clone=clone, venv=venv, log=log)
                    tries[recipe.name].append(found)
                    print(f"  {recipe.name}: {found['verdict']}", flush=True)
            shutil.rmtree(clone)
        result["complete"] = True
    except KeyboardInterrupt:
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    every = [
        each["verdict"]
        for clone in result["clones"]
        for tries in clone["recipes"].values()
        for each in tries
    ]
    bad = "FAIL" in every or NO_ANSWER in every or not every
    return 1 if bad or not result["complete"] else 0


if __name__ == "__main__":
    sys.exit(main())
