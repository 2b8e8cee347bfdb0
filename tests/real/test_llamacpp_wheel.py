"""The launcher of the llama.cpp in the xllamacpp wheel: real processes serving a tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_gguf import kv_bytes_per_token, write_tiny_gguf

pytestmark = pytest.mark.llamacpp

MODULE = "sweeper.engines.llamacpp_wheel"
ENDING_S = 20.0
# One thread: a second one would only wait for the first, spinning, on a machine that others use.
QUICK = (
    *("-c", "1024", "-np", "1", "-t", "1", "-cram", "0"),
    *("-fit", "off", "--no-ui", "--no-warmup"),
)
SPECULATES = (
    *("--spec-type", "ngram-simple"),
    *("--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "16"),
)
LIMITED = (
    "import os, resource, sys; limit = int(sys.argv[1]); "
    "resource.setrlimit(resource.RLIMIT_AS, (limit, limit)); os.execv(sys.argv[2], sys.argv[2:])"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("xllamacpp")
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context_length=4096)


@pytest.fixture(scope="module")
def speculating(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("speculating") / "log"
    with serving(model, log, "--metrics", "--props", "--slots", *SPECULATES) as (url, _):
        yield url


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def command(model: Path, port: int, *flags: str) -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", MODULE),
        *("-m", str(model), "-a", "tiny", "--port", str(port)),
        *QUICK,
        *flags,
    )


def ended(argv: Sequence[str], *, limit_bytes: int | None = None) -> tuple[int, str]:
    """Return exit code and output of a launcher that is expected to end by itself."""
    if limit_bytes is not None:
        argv = (sys.executable, "-c", LIMITED, str(limit_bytes), *argv)
    done = subprocess.run(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=ENDING_S,
        check=False,
        # One arena instead of one a thread: address space is then used for data only.
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )
    return done.returncode, done.stdout


@contextlib.contextmanager
def serving(model: Path, log: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Boot the launcher and yield its address and process once it is healthy."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(command(model, port, *flags), stdout=out, stderr=out)
    try:
        wait_for_health(url, process, log)
        yield url, process
    finally:
        process.kill()
        process.wait()


def wait_for_health(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + ENDING_S
    while True:
        assert process.poll() is None, log.read_text(errors="replace")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.02)


def events(url: str, **request: Any) -> list[dict[str, Any]]:
    """Return the decoded events of one streamed completion."""
    body = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "cache_prompt": False,
        **request,
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=ENDING_S) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1] if not line.startswith(":")]


def counter(url: str, name: str) -> float:
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith(f"llamacpp:{name} "):
            return float(line.split()[1])
    raise AssertionError(f"/metrics has no {name}")


def test_the_launcher_answers_health_props_slots_and_tokenize(speculating: str) -> None:
    assert httpx.get(f"{speculating}/health").json() == {"status": "ok"}
    props = httpx.get(f"{speculating}/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 1024
    assert props["model_alias"] == "tiny"
    assert len(httpx.get(f"{speculating}/slots").json()) == 1
    tokens = httpx.post(f"{speculating}/tokenize", json={"content": "any ASCII ~!{}"}).json()
    assert len(tokens["tokens"]) > 4


def test_the_usage_of_a_stream_adds_up(speculating: str) -> None:
    prompt = "the quick brown fox"
    tokens = httpx.post(f"{speculating}/tokenize", json={"content": prompt}).json()["tokens"]
    last = events(speculating, prompt=prompt, max_tokens=33)[-1]
    assert last["usage"]["prompt_tokens"] == len(tokens)
    assert last["usage"]["completion_tokens"] == 33
    assert last["usage"]["total_tokens"] == len(tokens) + 33
    assert last["timings"]["predicted_n"] == 33
    assert last["timings"]["prompt_n"] == len(tokens)


def test_speculation_drafts_and_is_counted(speculating: str) -> None:
    drafted = counter(speculating, "spec_decode_num_draft_tokens_total")
    accepted = counter(speculating, "spec_decode_num_accepted_tokens_total")
    timings = events(speculating, prompt="round and round", max_tokens=200)[-1]["timings"]
    assert timings["draft_n"] > 0
    assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]
    new = counter(speculating, "spec_decode_num_draft_tokens_total") - drafted
    assert new == timings["draft_n"]
    new = counter(speculating, "spec_decode_num_accepted_tokens_total") - accepted
    assert new == timings["draft_n_accepted"]


def test_a_prompt_beyond_the_context_is_refused_with_its_size(speculating: str) -> None:
    body = {"prompt": [1] * 2000, "max_tokens": 1}
    response = httpx.post(f"{speculating}/v1/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (2000, 1024)


def test_a_context_of_zero_is_that_of_the_model(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "log", "-c", "0") as (url, _):
        slots = httpx.get(f"{url}/slots").json()
    assert [slot["n_ctx"] for slot in slots] == [4096]


def test_a_taken_port_is_fatal(model: Path, speculating: str) -> None:
    port = httpx.URL(speculating).port
    assert port is not None
    code, output = ended(command(model, port))
    assert code == 1
    assert f"couldn't bind HTTP server socket, hostname: 127.0.0.1, port: {port}" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_while_a_request_is_open(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    body = {"prompt": "on and on", "max_tokens": 100_000, "stream": True}
    with serving(model, tmp_path / "log", "-c", "65536") as (url, process):
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            assert next(response.iter_lines()).startswith("data: ")
            process.send_signal(number)
            assert process.wait(ENDING_S) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_a_context_beyond_the_memory_limit_ends_in_llama_cpps_own_words(model: Path) -> None:
    limit, tokens = 1 << 30, 1 << 20
    assert tokens * kv_bytes_per_token() > limit
    code, output = ended(command(model, free_port(), "-c", str(tokens)), limit_bytes=limit)
    assert code == 1
    assert "failed to allocate buffer for kv cache" in output
    line = output.strip().splitlines()[-1]
    assert line.startswith("sweeper: address space in use at the failure: ")
    assert line.endswith(f" bytes, limit {limit} bytes")


def test_threads_have_small_stacks_under_a_memory_limit(model: Path, tmp_path: Path) -> None:
    port = free_port()
    argv = (sys.executable, "-c", LIMITED, str(1 << 30), *command(model, port))
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out)
    try:
        wait_for_health(f"http://127.0.0.1:{port}", process, log)
        maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        threads = len(list(Path(f"/proc/{process.pid}/task").iterdir()))
    finally:
        process.kill()
        process.wait()
    sizes = [
        int(end, 16) - int(start, 16)
        for line in maps
        for start, end in [line.split()[0].split("-")]
        if len(line.split()) == 5  # memory that belongs to no file
    ]
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    # The first thread's stack is the kernel's. Neighbours may be shown as one.
    assert sizes.count(1 << 20) >= (threads - 1) / 2
    assert stack == 1 << 20 or sizes.count(stack) == 0
    assert f"limit on the address space {1 << 30} bytes, stack of a thread {1 << 20} bytes" in (
        log.read_text(errors="replace")
    )


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    code, output = ended(command(tmp_path / "nothing.gguf", free_port()))
    assert code == 1
    assert f"failed to load model, '{tmp_path / 'nothing.gguf'}'" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--no-such-flag",), "error: invalid argument: --no-such-flag"),
        (
            ("-ctk", "q9_9"),
            'error while handling argument "-ctk": Unsupported cache type: q9_9',
        ),
        (("-c",), 'error while handling argument "-c": expected value for argument'),
        (("-c", "many"), "error while handling argument \"-c\": not a whole number: 'many'"),
        (
            ("--spec-type", "guess"),
            'error while handling argument "--spec-type": unknown speculative type: guess',
        ),
        (
            ("--chat-template-kwargs", "[]"),
            "error while handling argument \"--chat-template-kwargs\": not a JSON object: '[]'",
        ),
        (("--no-warmup",), "error: --model is required"),
    ],
)
def test_a_wrong_command_line_is_refused_as_upstream_does(
    flags: tuple[str, ...], message: str
) -> None:
    code, output = ended((sys.executable, "-m", MODULE, *flags))
    assert (code, output.strip()) == (1, message)


def test_help_and_wrong_flags_do_not_import_the_wheel() -> None:
    for flags in (["--help"], ["--no-such-flag"]):
        argv = (sys.executable, "-X", "importtime", "-m", MODULE, *flags)
        _, output = ended(argv)
        assert "xllamacpp" not in [line.split("|")[-1].strip() for line in output.splitlines()]


def test_version_names_the_wheel() -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    code, output = ended((sys.executable, "-m", MODULE, "--version"))
    assert code == 0
    assert output.startswith(f"version: xllamacpp {xllamacpp.__version__} (llama.cpp build ")
