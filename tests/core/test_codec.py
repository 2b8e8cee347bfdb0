from __future__ import annotations

import enum
import json
import typing
from dataclasses import fields, is_dataclass, replace
from types import UnionType
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.examples import (
    broken_attempt,
    host_fault_attempt,
    measured_attempt,
    oom_attempt,
    unfit_attempt,
    unsupported_attempt,
)

from sweeper.core.memory import Footprint
from sweeper.core.outcome import Attempt, HostFault, Measured
from sweeper.core.pairs import Pairs
from sweeper.record.codec import (
    CodecError,
    decode_attempt,
    encode_attempt,
    looks_secret,
    redact,
    redact_argv,
    redacted,
    secret_values,
)

EVERY_KIND = [
    measured_attempt(),
    oom_attempt(),
    unsupported_attempt(),
    unfit_attempt(),
    broken_attempt(),
    host_fault_attempt(),
]

words = st.text(max_size=12)
# Not-a-number is no field of an equal value: it is not equal to itself. Inside Pairs it may occur.
floats = st.floats(allow_nan=False)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | words
pairs = st.dictionaries(words, scalars, max_size=4).map(Pairs)
sizes = st.dictionaries(words, st.integers(min_value=0) | st.floats(min_value=0), max_size=4)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for any value that a field of this type may hold."""
    if typing.get_origin(hint) in (UnionType, typing.Union):
        return st.one_of([values_of(each) for each in typing.get_args(hint)])
    if typing.get_origin(hint) is tuple:
        return st.lists(values_of(typing.get_args(hint)[0]), max_size=3).map(tuple)
    if hint is Footprint:
        return st.builds(Footprint, parts=sizes.map(Pairs), alike=pairs)
    if is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        cls: Any = hint
        return st.builds(cls, **{each.name: values_of(hints[each.name]) for each in fields(cls)})
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(list(hint))
    plain: dict[Any, st.SearchStrategy[Any]] = {
        Pairs: pairs,
        str: words,
        int: st.integers(),
        float: floats,
        bool: st.booleans(),
        type(None): st.none(),
    }
    return plain[hint]


@settings(max_examples=150, deadline=None)
@given(values_of(Attempt))
def test_every_attempt_comes_back_from_strict_json_as_it_was(attempt: Attempt) -> None:
    assume(not secret_values(attempt))  # else it is hidden wherever it stands, in notes as well
    text = json.dumps(encode_attempt(attempt), allow_nan=False)
    again = decode_attempt(json.loads(text))
    assert again == redacted(attempt)
    assert repr(again) == repr(redacted(attempt))  # == takes 1, 1.0 and True for the same.


@pytest.mark.parametrize("attempt", EVERY_KIND, ids=lambda attempt: type(attempt.outcome).__name__)
def test_an_attempt_without_secrets_is_kept_to_the_letter(attempt: Attempt) -> None:
    assert decode_attempt(json.loads(json.dumps(encode_attempt(attempt)))) == attempt


def test_an_outcome_says_which_kind_it_is_and_other_values_do_not() -> None:
    data = encode_attempt(host_fault_attempt())
    assert data["schema"] == 2
    assert data["outcome"]["type"] == HostFault.__name__
    assert "type" not in data["timings"]


@pytest.mark.parametrize("schema", [0, 1, "2", True, None])
def test_another_schema_is_refused_and_says_what_to_do(schema: object) -> None:
    data = {**encode_attempt(oom_attempt()), "schema": schema}
    with pytest.raises(CodecError, match=r"reads schema 2.*version of sweeper that wrote it"):
        decode_attempt(data)


@pytest.mark.parametrize(
    ("place", "value", "path"),
    [
        (("surprise",), 1, "surprise"),
        (("outcome", "finding", "surprise"), 1, "outcome.finding.surprise"),
        (("outcome", "name"), "oom_soul", "outcome.name"),
        (("outcome", "type"), "Lost", "outcome.type"),
        (("timings", "total_s"), "12", "timings.total_s"),
        (("number",), True, "number"),
        (("argv",), "server --port 1", "argv"),
        (("argv",), ["server", 1], "argv[1]"),
        (("env", "A"), [1], "env.A"),
        (("footprint", "parts", "weights"), -1, "footprint"),
        (("point", "context"), {"float": "big"}, "point.context.float"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(
    place: tuple[str, ...], value: object, path: str
) -> None:
    data = encode_attempt(oom_attempt())
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(CodecError) as caught:
        decode_attempt(data)
    assert caught.value.path == path


def test_a_missing_field_is_refused_and_one_with_a_default_is_not() -> None:
    data = encode_attempt(oom_attempt())
    del data["notes"]
    assert decode_attempt(data) == oom_attempt()
    del data["study"]
    with pytest.raises(CodecError, match="study: is missing"):
        decode_attempt(data)


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "OPENAI_API_KEY",
        "API_KEY_2",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "BASIC_AUTH",
        "dbPassword",
        "apiKey",
        "--hf-token",
        "passwd",
    ],
)
def test_a_secret_is_known_by_its_name(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "KEYBOARD",
        "kv_key_bits",
        "cache_type_k",
        "--max-tokens",
        "n_tokens",
        "MAX_NUM_BATCHED_TOKENS",
        "token_count",
        "--eos-token",
        "--kv-kib-per-token",
        "AUTHOR",
        "--api-key-file",
        "PATH",
        "",
    ],
)
def test_an_innocent_name_is_left_alone(name: str) -> None:
    assert not looks_secret(name)


def test_secret_values_become_stars_and_the_rest_stays() -> None:
    env = Pairs(
        HF_TOKEN="hf_abc",
        N_TOKENS=5,
        API_KEY=None,
        HTTPS_PROXY="http://me:secret@proxy:3128",
    )
    assert redact(env) == Pairs(
        HF_TOKEN="***", N_TOKENS=5, API_KEY=None, HTTPS_PROXY="http://***@proxy:3128"
    )


@pytest.mark.parametrize(
    ("argv", "safe"),
    [
        ("--api-key s3 --port 1", "--api-key *** --port 1"),
        ("--api-key=s3 --port 1", "--api-key=*** --port 1"),
        ("--api-key s3 s4 --port 1", "--api-key *** *** --port 1"),
        ("--api-key -s3cr3t -ngl 99", "--api-key *** -ngl 99"),
        ("-hft hf_x -c 4096", "-hft *** -c 4096"),
        ("env HF_TOKEN=x serve --max-tokens 9", "env HF_TOKEN=*** serve --max-tokens 9"),
        ("--cache-type-k q8_0 --no-auth --jinja", "--cache-type-k q8_0 --no-auth --jinja"),
    ],
)
def test_a_command_line_keeps_its_shape_and_loses_its_secrets(argv: str, safe: str) -> None:
    assert redact_argv(argv.split()) == tuple(safe.split())


def test_a_header_is_hidden_after_its_name() -> None:
    assert redact_argv(("-H", "Authorization: Bearer x")) == ("-H", "Authorization: ***")


@given(st.lists(words | st.sampled_from(["--api-key", "--x", "a=b", "TOKEN=x"])))
def test_hiding_twice_hides_no_more(argv: list[str]) -> None:
    once = redact_argv(argv)
    assert redact_argv(once) == once
    assert len(once) == len(argv)


def test_a_secret_never_reaches_the_record() -> None:
    attempt = replace(
        oom_attempt(), env=Pairs(HF_TOKEN="hf_s3cr3t"), argv=("serve", "--api-key", "hf_s3cr3t")
    )
    assert "s3cr3t" not in json.dumps(encode_attempt(attempt))


def test_an_attempt_from_before_answers_were_looked_at_is_read_as_not_looked_at() -> None:
    encoded = encode_attempt(measured_attempt())
    for load in encoded["outcome"]["figures"]:
        del load["answers"], load["looping"]
    for sample in encoded["samples"]:
        del sample["prompt"], sample["asked_tokens"]
    read = decode_attempt(encoded)
    assert isinstance(read.outcome, Measured)
    assert {(each.answers, each.looping) for each in read.outcome.figures} == {(None, None)}
    assert {(each.prompt, each.asked_tokens) for each in read.samples} == {(0, None)}
