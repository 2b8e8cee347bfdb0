"""Asks a winner by another client, other texts: is it as fast as its study says?

    python benchmarks/winners/client.py RECIPE.sh ... [--out results.json]
    python benchmarks/winners/client.py --base-url http://127.0.0.1:8080 --expected 43.2

Boots each exported shell recipe (or connects), asks ten prompts that no workload has, five of prose
and five of code, to be gone on with at temperature 0.6, and compares the median decode speed with
the study's. Requests go through `http.client` and are timed here; of sweeper only the figure in the
recipe's header is read. Exit code 1 where one is off by more than the tolerance.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sweeper.recipe import read_recipe

PROMPTS: list[str] = json.loads((Path(__file__).parent / "prompts.json").read_text())
"""Ten texts of our own to be gone on with: five of prose, five of code."""
MAX_TOKENS = 96
"""Of each answer, where no study says how many."""
TOLERANCE = 0.05
SEED = 4242
BOOT_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One answer: its speed in tokens/s after the first token, and the server's draft counts."""

    tok_s: float
    tokens: int
    text: str
    drafted: int
    accepted: int


def main() -> int:
    """Compare every recipe; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipes", nargs="*", type=Path)
    parser.add_argument("--base-url")
    parser.add_argument("--expected", type=float, help="decode tok/s that the study reports")
    parser.add_argument(
        "--max-tokens", type=int, help="of each answer; default: as many as the study asked for"
    )
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    parser.add_argument("--texts", action="store_true", help="print what was answered")
    parser.add_argument("--out", type=Path)
    said = parser.parse_args()
    if bool(said.recipes) == bool(said.base_url):
        parser.error("name recipes, or a --base-url with what is --expected of it")
    rows = []
    if said.base_url:
        if said.expected is None:
            parser.error("--base-url needs --expected")
        tokens = said.max_tokens or MAX_TOKENS
        rows.append(compared("attached", said.base_url, said.expected, tokens, said))
    for recipe in said.recipes:
        expected = read_recipe(recipe).decode_tok_s.median
        with booted(recipe) as base_url:
            tokens = said.max_tokens or _asked_for(recipe)
            rows.append(compared(recipe.name, base_url, expected, tokens, said))
    if said.out is not None:
        said.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["within"] for row in rows) else 1


def _asked_for(recipe: Path) -> int:
    """Return how many tokens the study asked for: drafts find more in longer answers."""
    try:
        identity = json.loads((recipe.parent.parent / "study.json").read_text())["identity"]
        return int(identity["workload.max_tokens"])
    except (OSError, KeyError, ValueError):
        return MAX_TOKENS


def compared(
    name: str, base_url: str, expected: float, tokens: int, said: argparse.Namespace
) -> dict[str, object]:
    """Ask all prompts, print and return the comparison."""
    ask(base_url, "Hello, this is", 16, seed=1)  # the first request of a server is a slow one
    answers = [
        ask(base_url, prompt, tokens, seed=SEED + number) for number, prompt in enumerate(PROMPTS)
    ]
    speeds = [each.tok_s for each in answers]
    median = statistics.median(speeds)
    drafted = sum(each.drafted for each in answers)
    accepted = sum(each.accepted for each in answers)
    off = median / expected - 1
    print(
        f"{name}: {median:.1f} tok/s ({min(speeds):.1f} to {max(speeds):.1f}), the study says "
        f"{expected:.1f}: {off:+.1%}"
        + (f"; {accepted:,} of {drafted:,} drafted tokens accepted" if drafted else "; no drafts")
    )
    if said.texts:
        for each in answers:
            print(f"---\n{each.text}")
    return {
        "name": name, "tokens_asked": tokens, "tok_s": median, "expected_tok_s": expected,
        "off": off,
        "within": abs(off) <= said.tolerance, "drafted": drafted, "accepted": accepted,
        "answers": [asdict(each) for each in answers],
    }  # fmt: skip


def ask(base_url: str, prompt: str, max_tokens: int, *, seed: int) -> Asked:
    """Stream one completion and time it."""
    where = urlsplit(base_url)
    connection = http.client.HTTPConnection(where.hostname or "127.0.0.1", where.port, timeout=600)
    body = {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.6, "seed": seed,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    connection.request(
        "POST",
        f"{where.path}/v1/completions",
        json.dumps(body),
        {"content-type": "application/json"},
    )
    answer = connection.getresponse()
    if answer.status != http.client.OK:
        raise SystemExit(f"{base_url} answers {answer.status}: {answer.read(500)!r}")
    first = last = 0.0
    tokens = drafted = accepted = 0
    pieces = []
    for line in answer:
        now = time.perf_counter()
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("choices"):
            piece = event["choices"][0].get("text") or ""
            first = first or (now if piece else 0.0)
            last = now if piece else last
            pieces.append(piece)
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        timings = event.get("timings") or {}
        drafted = timings.get("draft_n", drafted)
        accepted = timings.get("draft_n_accepted", accepted)
    connection.close()
    if tokens < 2 or last <= first:
        raise SystemExit(f"{base_url} answered {tokens} tokens: nothing to time")
    return Asked(
        tok_s=(tokens - 1) / (last - first), tokens=tokens, text="".join(pieces), drafted=drafted,
        accepted=accepted,
    )  # fmt: skip


@contextmanager
def booted(recipe: Path) -> Iterator[str]:
    """Start a shell recipe on a free port, wait until it serves, and end its group afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Its output is kept beside nothing: a recipe that does not come up is started by hand to see.
    process = subprocess.Popen(  # noqa: S603 - an exported recipe
        ["bash", str(recipe)],  # noqa: S607
        env={**os.environ, "PORT": str(port)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while not serves(port):
            if process.poll() is not None:
                raise SystemExit(f"{recipe} ended with {process.returncode} before it served")
            if time.monotonic() > deadline:
                raise SystemExit(f"{recipe} does not serve after {BOOT_TIMEOUT_S:.0f} s")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def serves(port: int) -> bool:
    """Tell whether a server on this port says that it is healthy."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
