"""Untyped settings to typed ones: every mistake names its key and what would be right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.typed import FieldError, build

# No deadline: on a busy machine, time says nothing.
QUICK = settings(deadline=None, max_examples=50)


@dataclass(frozen=True, kw_only=True)
class Settings:
    context: int
    ratio: float = 0.5
    label: str = ""
    mmap: bool = True
    flash_attn: Literal["on", "off", "auto"] = "auto"
    n_max: int | None = None
    sizes: tuple[int, ...] = ()
    extra: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.context < 1:
            raise FieldError("context", f"must be at least 1, got {self.context}")


@QUICK
@given(
    st.fixed_dictionaries(
        {"context": st.integers(min_value=1)},
        optional={
            "ratio": st.floats(allow_nan=False) | st.integers(-(2**50), 2**50),
            "label": st.text(max_size=5),
            "mmap": st.booleans(),
            "flash_attn": st.sampled_from(["on", "off", "auto"]),
            "n_max": st.none() | st.integers(),
            "sizes": st.lists(st.integers(), max_size=3),
            "extra": st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2),
        },
    )
)
def test_what_fits_is_taken_as_it_is(mapping: dict[str, Any]) -> None:
    built = build(Settings, mapping)
    for name, value in mapping.items():
        assert getattr(built, name) == (tuple(value) if name == "sizes" else value)
    assert isinstance(built.ratio, float)


@pytest.mark.parametrize(
    ("mapping", "key", "message"),
    [
        ({}, "context", "is required"),
        ({"contxt": 1}, "contxt", "did you mean context?"),
        ({"context": 1, "zzz": 1}, "zzz", "there are: context, extra, flash_attn"),
        ({"context": 4096.0}, "context", "must be a whole number, got 4096.0"),
        ({"context": "4096"}, "context", "must be a whole number, got '4096'"),
        ({"context": None}, "context", "must be a whole number, got None"),
        ({"context": True}, "context", "must be a whole number, got True"),
        ({"context": 0}, "context", "must be at least 1, got 0"),
        ({"context": 1, "ratio": "half"}, "ratio", "must be a number, got 'half'"),
        ({"context": 1, "ratio": False}, "ratio", "must be a number, got False"),
        ({"context": 1, "label": 3}, "label", "must be text, got 3"),
        ({"context": 1, "mmap": 1}, "mmap", "must be true or false, got 1"),
        ({"context": 1, "flash_attn": "yes"}, "flash_attn", "one of on, off, auto, got 'yes'"),
        ({"context": 1, "n_max": "3"}, "n_max", "must be a whole number or null, got '3'"),
        ({"context": 1, "sizes": 3}, "sizes", "must be a list of a whole number, got 3"),
        ({"context": 1, "sizes": [1, "2"]}, "sizes[1]", "must be a whole number, got '2'"),
        ({"context": 1, "extra": [1]}, "extra", "must be a mapping, got [1]"),
        ({"context": 1, "extra": {"a": "b"}}, "extra.a", "must be a number, got 'b'"),
    ],
)
def test_a_mistake_names_its_key_and_what_would_be_right(
    mapping: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(FieldError) as refused:
        build(Settings, mapping)
    assert refused.value.key == key
    assert message in refused.value.message
    assert str(refused.value) == f"{key}: {refused.value.message}"


@pytest.mark.parametrize("name", ["flash_attn", "label", "context", "n_max"])
def test_a_boolean_in_the_place_of_a_word_reminds_of_yaml(name: str) -> None:
    with pytest.raises(FieldError, match="YAML reads on, off, yes and no as booleans"):
        build(Settings, {"context": 1, name: True})


def test_other_mistakes_do_not_speak_of_yaml() -> None:
    with pytest.raises(FieldError) as refused:
        build(Settings, {"context": 1, "flash_attn": "of"})
    assert "YAML" not in refused.value.message
