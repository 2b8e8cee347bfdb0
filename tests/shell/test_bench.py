"""The client: what a server sends becomes a sample, or exactly the failure that it was."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from tests.shell.conftest import SHORT, fake_launch, wait_until

from sweeper.bench import Client, RequestFailure, RequestTrouble
from sweeper.core.pairs import Pairs
from sweeper.core.sample import Purpose, Sample
from sweeper.core.workload import Load, Workload
from sweeper.engines import Wire
from sweeper.engines.fake import Fake
from sweeper.server import Registry, Server, serving

LENGTHS = replace(SHORT, prompt="", prompt_tokens=(96,))
CHAT = replace(SHORT, api="chat")
ONE = Load()
Engine = Callable[..., str]


@pytest.fixture
def engine(mark: str, registry: Registry, tmp_path: Path) -> Iterator[Engine]:
    """Return a starter of fake engines that returns the address; `log` gets its lines."""
    with contextlib.ExitStack() as stack:

        def start(log: list[str] | None = None, **params: Any) -> str:
            launch = fake_launch(mark, **{"context": 4096, "time_scale": 1e5, **params})
            lines = [] if log is None else log
            started = stack.enter_context(
                serving(
                    launch, log_path=tmp_path / "log", registry=registry, watch=lines.append
                )
            )  # fmt: skip
            assert isinstance(started.result, Server), started.result
            return started.result.base_url

        yield start


def client(url: str, workload: Workload = SHORT, wire: Wire = Fake.wire, **more: Any) -> Client:
    return Client(url, wire, "demo", workload, **more)


def asked(
    of: Client, load: Load = ONE, *, run: int = 0, cached: bool = False, max_tokens: int = 12
) -> tuple[Sample, ...]:
    made = of.ask(load, run=run, purpose=Purpose.MEASURE, max_tokens=max_tokens, cached=cached)
    assert not isinstance(made, RequestFailure), made
    return made


# ---- On the simulated engine -------------------------------------------------------------------


def test_a_request_becomes_a_sample_that_says_what_it_was(engine: Engine) -> None:
    with client(engine(), replace(SHORT, seed=40)) as of:
        (made,) = asked(of, run=2)
    assert (made.workload, made.prompt_length, made.purpose) == ("short", None, Purpose.MEASURE)
    assert (made.streams, made.run, made.stream, made.seed) == (1, 2, 0, 42)
    assert (made.completion_tokens, made.finish_reason) == (12, "length")
    assert made.frames == 12
    assert len(made.gaps_s) == 11
    assert 0 < made.ttft_s <= made.total_s
    assert sum(made.gaps_s) <= made.decode_s
    assert made.began_s > 0
    assert made.server["predicted_n"] == 12


def test_several_tokens_in_a_frame_are_counted_by_usage(engine: Engine) -> None:
    with client(engine(n_max=4, acceptance=1.0)) as of:
        (made,) = asked(of, max_tokens=11)
    assert made.completion_tokens == 11
    assert made.frames == 3  # the first token, and two steps of five
    assert len(made.text.split()) == 11
    assert (made.server["draft_n"], made.server["draft_n_accepted"]) == (8, 8)


@pytest.mark.parametrize("length", [1, 2, 96, 1000])
def test_a_prompt_has_exactly_the_length_that_was_asked_for(engine: Engine, length: int) -> None:
    with client(engine(), LENGTHS) as of:
        (made,) = asked(of, Load(prompt_tokens=length))
        assert (made.prompt_tokens, made.prompt_length) == (length, length)


def test_texts_of_the_same_seed_agree_and_of_others_differ_from_the_beginning(
    engine: Engine,
) -> None:
    with client(engine()) as of:
        one, again, other = of.tokens(1, 200), of.tokens(1, 300), of.tokens(2, 200)
    assert isinstance(one, tuple)
    assert isinstance(again, tuple)
    assert isinstance(other, tuple)
    assert (len(one), len(again)) == (200, 300)
    assert one == again[:200]
    assert one[:2] != other[:2]
    assert len(set(one)) > 50


def caching(extra: bool = True) -> Wire:
    """Return a wire that lets the server use its cache even where it should not help."""
    return replace(Fake.wire, completion_extras=Pairs(cache_prompt=extra))


@pytest.mark.parametrize(
    ("workload", "load"),
    [(SHORT, ONE), (CHAT, ONE), (LENGTHS, Load(prompt_tokens=96, streams=3))],
)
def test_two_requests_share_no_beginning(engine: Engine, workload: Workload, load: Load) -> None:
    with client(engine(), workload, caching()) as of:
        made = [*asked(of, load, run=0), *asked(of, load, run=1)]
        other = of.ask(load, run=1, purpose=Purpose.WARMUP, max_tokens=4)
    assert not isinstance(other, RequestFailure)
    # A word before the number, and the role before a chat's.
    assert all(int(str(each.server["cached_tokens"])) <= 2 for each in [*made, *other])


def test_a_workload_may_do_without_fresh_prefixes(engine: Engine) -> None:
    workload = replace(SHORT, fresh_prefix=False)
    with client(engine(), workload, caching()) as of:
        first, second = asked(of, run=0), asked(of, run=1)
    assert first[0].server["cached_tokens"] == 0
    assert second[0].server["cached_tokens"] == second[0].prompt_tokens - 1


@pytest.mark.parametrize("workload", [SHORT, CHAT, LENGTHS])
def test_cached_requests_ask_the_same_and_may_use_the_cache(
    engine: Engine, workload: Workload
) -> None:
    load = Load(prompt_tokens=workload.prompt_tokens[0] if workload.prompt_tokens else None)
    with client(engine(), workload) as of:
        (first,) = asked(of, load, run=0, cached=True)
        (second,) = asked(of, load, run=1, cached=True)
        (fresh,) = asked(of, load, run=1)
    assert second.server["cached_tokens"] == second.prompt_tokens - 1
    assert second.text == first.text
    # The ordinary request keeps the cache out.
    assert "cached_tokens" not in fresh.server


def test_a_salt_changes_every_generated_text(engine: Engine) -> None:
    url = engine()
    with client(url) as one, client(url, salt="b") as other, client(url) as again:
        texts = [asked(each)[0].text for each in (one, other, again)]
    assert texts[0] == texts[2] != texts[1]


def test_streams_are_asked_together_and_returned_in_order(engine: Engine) -> None:
    log: list[str] = []
    with client(engine(log, decode_tok_s=1e5), replace(LENGTHS, seed=100)) as of:
        made = asked(of, Load(prompt_tokens=96, streams=8), run=3)
    assert [each.stream for each in made] == list(range(8))
    assert [each.seed for each in made] == [100 + 3 * 8 + stream for stream in range(8)]
    assert {each.completion_tokens for each in made} == {12}
    assert {each.streams for each in made} == {8}
    assert len({each.text for each in made}) == 8
    # Every one began before the first had ended.
    ends = [each.began_s + each.total_s for each in made]
    assert max(each.began_s for each in made) < min(ends)


def test_a_stream_that_fails_is_what_the_round_came_to(engine: Engine) -> None:
    with client(engine(ending="error-in-stream", ending_after=5), LENGTHS) as of:
        made = of.ask(
            Load(prompt_tokens=96, streams=8), run=0, purpose=Purpose.MEASURE, max_tokens=12
        )
    assert isinstance(made, RequestFailure)
    assert made.trouble is RequestTrouble.ERROR_IN_STREAM
    assert "simulated failure" in made.detail


def test_an_engine_that_dies_under_several_streams_is_a_lost_connection(engine: Engine) -> None:
    with client(engine(ending="crash-serving"), LENGTHS) as of:
        made = of.ask(
            Load(prompt_tokens=96, streams=4), run=0, purpose=Purpose.MEASURE, max_tokens=12
        )
    assert isinstance(made, RequestFailure)
    assert made.trouble is RequestTrouble.CONNECTION_LOST


@pytest.mark.parametrize("streams", [1, 4])
def test_silence_is_told_from_a_lost_connection(engine: Engine, streams: int) -> None:
    with client(engine(ending="hang-serving"), replace(SHORT, silence_timeout_s=0.1)) as of:
        made = of.ask(Load(streams=streams), run=0, purpose=Purpose.MEASURE, max_tokens=4)
    assert isinstance(made, RequestFailure)
    assert made.trouble is RequestTrouble.SILENCE


@pytest.fixture
def hearing_ctrl_c() -> Iterator[None]:
    """Hear Ctrl-C: a shell that runs the tests in the background has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hearing_ctrl_c")
def test_ctrl_c_ends_a_round_and_leaves_nothing_behind(engine: Engine) -> None:
    log: list[str] = []
    url = engine(log, ending="hang-serving")
    before = threading.active_count()

    def press() -> None:
        # The log is on disk long before anyone reads it here; the server counts its requests.
        with client(url) as other:
            wait_until(
                lambda: "prompt_tokens_total 4" in (other.page("/metrics") or ""),
                "four requests",
            )
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    with client(url, replace(SHORT, prompt="Go", fresh_prefix=False)) as of:
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            of.ask(Load(streams=4), run=0, purpose=Purpose.MEASURE, max_tokens=4)
    presser.join()
    assert threading.active_count() == before


def test_a_chat_goes_through_the_template_and_its_thoughts_count(engine: Engine) -> None:
    url = engine(reasoning_tokens=5)
    silent = replace(CHAT, chat_template=Pairs(enable_thinking=False))
    with client(url, CHAT) as of:
        (thinking,) = asked(of)
    with client(url, silent) as of:
        (plain,) = asked(of)
    assert thinking.completion_tokens == plain.completion_tokens == 12
    assert thinking.frames == plain.frames == 12
    assert thinking.text == plain.text


def test_a_probe_may_be_greedy_and_have_fields_of_its_own(engine: Engine) -> None:
    with client(engine(), replace(SHORT, temperature=0.7)) as of:
        made = of.complete(
            [5, 6, 7], max_tokens=3, purpose=Purpose.GUARD, temperature=0.0,
            extras=Pairs(cache_prompt=True),
        )  # fmt: skip
    assert isinstance(made, Sample)
    assert (made.prompt_tokens, made.completion_tokens) == (3, 3)
    assert made.server["cached_tokens"] == 0
    assert made.prompt_length == 3


def test_a_prompt_beyond_the_window_says_so_with_its_numbers(engine: Engine) -> None:
    with client(engine(context=64)) as of:
        made = of.complete([1] * 65, max_tokens=1, purpose=Purpose.OVERFLOW)
    assert isinstance(made, RequestFailure)
    assert made.trouble is RequestTrouble.CONTEXT_EXCEEDED
    assert (made.server["n_prompt_tokens"], made.server["n_ctx"]) == (65, 64)


def test_a_prompt_larger_than_any_buffer_arrives_whole(engine: Engine) -> None:
    with client(engine(context=1_000_000, kv_kib_per_token=0.0)) as of:
        made = of.complete([31_000] * 600_000, max_tokens=2, purpose=Purpose.PROOF)
    assert isinstance(made, Sample)
    assert made.prompt_tokens == 600_000


def test_an_engine_without_a_tokenizer_has_no_tokens(engine: Engine) -> None:
    url = engine()
    with client(url, wire=replace(Fake.wire, tokenize_path=None)) as of:
        assert of.tokenize("word") is None
        made = of.tokens(1, 10)
    assert isinstance(made, RequestFailure)
    assert "tokenizer" in made.detail
    with client(url) as of:
        assert of.tokenize("the end") == of.tokenize("the end")


# ---- What a server may send, byte by byte ------------------------------------------------------


class Scripted:
    """A server that answers every request with the same bytes, and keeps what it was sent."""

    def __init__(self, answer: bytes, *, lingers: bool = False) -> None:
        self.answer = answer
        self.lingers = lingers
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self._held: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for each in (self._listener, *self._held):
            each.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock.makefile("rb") as reader:
                head = ""
                while (line := reader.readline().decode()) not in ("\r\n", ""):
                    head += line.lower()
                length = next(
                    int(each.split(":")[1])
                    for each in head.splitlines()
                    if each.startswith("content-length")
                )
                self.heads.append(head)
                self.bodies.append(json.loads(reader.read(length)))
            sock.sendall(self.answer)
            if self.lingers:
                self._held.append(sock)
            else:
                sock.close()


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}}
DONE = b"data: [DONE]\n\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def frame(data: object) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def word(text: str, **more: Any) -> bytes:
    return frame({"choices": [{"index": 0, "text": text, **more}]})


def delta(**fields: Any) -> bytes:
    return frame({"choices": [{"index": 0, "delta": fields}]})


def sent(answer: bytes, workload: Workload = SHORT, **more: Any) -> Sample | RequestFailure:
    with Scripted(answer, **more) as server, client(server.url, workload) as of:
        made = of.ask(ONE, run=0, purpose=Purpose.MEASURE, max_tokens=4)
    return made if isinstance(made, RequestFailure) else made[0]


def test_thoughts_calls_and_words_are_all_answers() -> None:
    made = sent(
        OK
        + delta(role="assistant", content="")
        + delta(reasoning_content="a", reasoning="a")
        + delta(reasoning="b", content=None)
        + delta(tool_calls=[{"function": {"name": "f", "arguments": "{}"}}, None, {}])
        + delta(content="c")
        + frame(USAGE)
        + DONE,
        CHAT,
    )
    assert isinstance(made, Sample)
    assert (made.text, made.frames, made.completion_tokens) == ("abf{}c", 4, 4)


def test_an_answer_of_white_space_is_an_answer() -> None:
    made = sent(OK + word("\n") + word("  ") + frame(USAGE) + DONE)
    assert isinstance(made, Sample)
    assert made.text == "\n  "


def test_a_token_without_text_still_takes_time() -> None:
    made = sent(OK + word("a") + word("") + word("", finish_reason="length") + frame(USAGE) + DONE)
    assert isinstance(made, Sample)
    assert (made.frames, made.gaps_s, made.finish_reason) == (1, (), "length")
    assert made.decode_s >= 0


def test_odd_lines_are_passed_over() -> None:
    made = sent(
        OK.replace(b"\r\n\r\n", b"\r\nX-Odd: 1\r\n\r\n")
        + b": ping\n\nevent: message\nid: 3\n"
        + frame([1, 2])
        + frame({"choices": None, "usage": None})
        + frame({"choices": ["no", {"text": 5}]})
        + word("a\u2028b").replace(b"\n", b"\r\n")
        + frame({**USAGE, "timings": {"predicted_n": 4, "nested": [1]}, "error": None})
        + DONE
    )
    assert isinstance(made, Sample)
    assert made.text == "a\u2028b"
    assert made.server == Pairs(predicted_n=4)


def test_what_the_server_took_from_its_cache_is_kept() -> None:
    usage = {**USAGE["usage"], "prompt_tokens_details": {"cached_tokens": 5}}  # type: ignore[dict-item]
    made = sent(OK + word("a") + frame({"choices": [], "usage": usage}) + DONE)
    assert isinstance(made, Sample)
    assert made.server == Pairs(cached_tokens=5)


def test_the_last_word_ends_an_answer_though_the_connection_stays() -> None:
    made = sent(OK + word("a") + frame(USAGE) + DONE, lingers=True)
    assert isinstance(made, Sample)


@pytest.mark.parametrize(
    ("answer", "trouble", "said"),
    [
        (OK + word("a") + DONE, RequestTrouble.NO_USAGE, "how many tokens"),
        (OK + b'{"error": {"message": "no"}}', RequestTrouble.NO_USAGE, '"no"'),
        (OK + frame(USAGE) + DONE, RequestTrouble.EMPTY_ANSWER, "4 tokens and no text"),
        (OK, RequestTrouble.NO_USAGE, "how many tokens"),
        (OK + word("a") + frame({"error": {"message": "x"}}), RequestTrouble.ERROR_IN_STREAM, "x"),
        (OK + b'error: {"message": "y"}\n\n', RequestTrouble.ERROR_IN_STREAM, "y"),
        (OK + b"data: {oh\n\n", RequestTrouble.ERROR_IN_STREAM, "not JSON: {oh"),
        (b"", RequestTrouble.CONNECTION_LOST, "RemoteProtocolError"),
        (b"what?\r\n\r\n", RequestTrouble.CONNECTION_LOST, "RemoteProtocolError"),
        (
            OK.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n") + b"5\r\nda",
            RequestTrouble.CONNECTION_LOST,
            "RemoteProtocolError",
        ),
        (
            b"HTTP/1.1 500 Oh\r\nContent-Length: 4\r\n\r\noops",
            RequestTrouble.SERVER_ERROR,
            "oops",
        ),
        (
            b"HTTP/1.1 400 No\r\n\r\n"
            b'{"error": {"message": "the maximum context length is 4", "type": "t"}}',
            RequestTrouble.CONTEXT_EXCEEDED,
            "maximum context",
        ),
        (b"HTTP/1.1 404 No\r\n\r\n[]", RequestTrouble.CLIENT_ERROR, "[]"),
    ],
)
def test_what_is_no_answer_is_named(answer: bytes, trouble: RequestTrouble, said: str) -> None:
    made = sent(answer)
    assert isinstance(made, RequestFailure)
    assert made.trouble is trouble
    assert said in made.detail


def test_a_server_that_is_not_there_is_a_lost_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with client(f"http://127.0.0.1:{port}") as of:
        for made in (
            of.ask(Load(streams=2), run=0, purpose=Purpose.MEASURE, max_tokens=2),
            of.tokens(0, 5),
        ):
            assert isinstance(made, RequestFailure)
            assert made.trouble is RequestTrouble.CONNECTION_LOST
        assert of.page("/health") is None


def body_of(workload: Workload, *, cached: bool = False, **wire: Any) -> dict[str, Any]:
    with Scripted(OK + word("a") + frame(USAGE) + DONE) as server:
        with client(server.url, workload, replace(Fake.wire, **wire)) as of:
            asked(of, cached=cached)
        (body,) = server.bodies
        assert "connection: close" in server.heads[0]
    return body


def test_a_chat_is_asked_with_all_that_the_workload_says() -> None:
    workload = replace(
        CHAT, temperature=0.6, seed=3, chat_template=Pairs(enable_thinking=False),
        request=Pairs(top_k=20, cache_prompt=True),
    )  # fmt: skip
    body = body_of(workload)
    (message,) = body.pop("messages")
    assert message["role"] == "user"
    assert message["content"].endswith("\n\n" + SHORT.prompt)
    assert message["content"] != SHORT.prompt
    assert body == {
        "model": "demo", "max_tokens": 12, "temperature": 0.6, "seed": 3, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True, "top_k": 20,
        "cache_prompt": True,  # what the workload says goes last
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip


def test_the_end_of_text_is_ignored_only_where_both_want_it() -> None:
    assert body_of(SHORT)["ignore_eos"] is True
    assert "ignore_eos" not in body_of(replace(SHORT, ignore_eos=False))
    assert "ignore_eos" not in body_of(SHORT, completion_extras=Pairs())


def test_no_seed_is_sent_where_there_is_none() -> None:
    assert "seed" not in body_of(replace(SHORT, seed=None))


def test_extras_for_the_cache_replace_those_against_it() -> None:
    body = body_of(SHORT, cached=True)
    assert (body["cache_prompt"], body["ignore_eos"]) == (True, True)
    assert body["prompt"] == SHORT.prompt
    assert body_of(SHORT)["cache_prompt"] is False


def test_a_password_in_the_address_is_sent_as_such() -> None:
    with Scripted(OK + word("a") + frame(USAGE) + DONE) as server:
        with client(server.url.replace("//", "//me:secret@") + "/under") as of:
            asked(of)
        assert "authorization: basic" in server.heads[0]
        assert server.heads[0].startswith("post /under/v1/completions http/1.1")
