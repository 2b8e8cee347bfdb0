"""The independent client of `benchmarks/winners`: what it asks, counts and compares."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.shell.conftest import fake_launch

from sweeper.core.workload import Workload
from sweeper.server import Registry, Server, serving

CLIENT = Path(__file__).resolve().parents[2] / "benchmarks" / "winners" / "client.py"
ANY = 1e9


def asked(base_url: str, out: Path, *arguments: str) -> tuple[int, Any]:
    """Return the client's exit code, and what it wrote."""
    done = subprocess.run(
        [sys.executable, str(CLIENT), "--base-url", base_url, "--max-tokens", "24", "--out",
         str(out), *arguments],
        check=False, timeout=120,
    )  # fmt: skip
    return done.returncode, json.loads(out.read_text())


@pytest.mark.parametrize("n_max", [0, 4])
def test_ten_texts_are_asked_and_the_median_is_compared(
    n_max: int, tmp_path: Path, registry: Registry, mark: str
) -> None:
    launch = fake_launch(mark, n_max=n_max)
    with serving(
        launch, log_path=tmp_path / "log", registry=registry, watch=lambda _: None
    ) as started:
        server = started.result
        assert isinstance(server, Server)
        code, (row,) = asked(
            server.base_url, tmp_path / "out.json", "--expected", "1", "--tolerance", str(ANY)
        )
        assert code == 0
        assert [each["tokens"] for each in row["answers"]] == [24] * 10
        assert len({each["text"] for each in row["answers"]}) == 10
        assert row["tok_s"] == pytest.approx(1 + row["off"])
        assert (row["drafted"] > 0) is (n_max > 0)
        assert row["accepted"] <= row["drafted"]
        code, (row,) = asked(server.base_url, tmp_path / "out.json", "--expected", str(ANY))
        assert (code, row["within"]) == (1, False)


def test_its_texts_are_those_of_no_shipped_workload() -> None:
    prompts = json.loads((CLIENT.parent / "prompts.json").read_text())
    assert len(set(prompts)) == 10
    Workload(name="w", prompts=tuple(prompts), max_tokens=8, proof_answer_tokens=1)
    shipped = CLIENT.parents[2] / "conf" / "workload"
    said = " ".join(" ".join(each.read_text().split()) for each in shipped.glob("*.yaml"))
    assert not any(" ".join(each.split())[:40] in said for each in prompts)
