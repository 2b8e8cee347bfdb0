"""The adapter in docs/engines.md is real: it is run, counted, found and held to the contract."""

from __future__ import annotations

import enum
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
import yaml

from sweeper.core.launch import Death, Ended, Phase
from sweeper.core.outcome import BrokenName, HostFaultName, InfeasibleName, UnfitName, name
from sweeper.engines import Engine, load_engine
from sweeper.engines.contract import EngineContract

DOCS = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
ADAPTER, CONTRACT = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
TOML = re.findall(r"```toml\n(.*?)```", DOCS, re.DOTALL)[0]
YAML = re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)[0]


def run_block(module: str, source: str) -> types.ModuleType:
    """Return a block of the docs as a module that others can import by its name."""
    made = types.ModuleType(module)
    sys.modules[module] = made  # dataclasses look their types up there
    exec(compile(source, f"docs/engines.md:{module}", "exec"), made.__dict__)
    return made


TOY = run_block("sweeper_toy", ADAPTER)
TestToyAsDocumented = run_block("test_sweeper_toy", CONTRACT).TestToy


def test_the_contract_block_of_the_docs_is_a_contract() -> None:
    assert issubclass(TestToyAsDocumented, EngineContract)


def test_the_adapter_of_the_docs_has_at_most_a_hundred_lines_of_code() -> None:
    code = [line for line in ADAPTER.splitlines() if line.strip()]
    assert len(code) <= 100


def test_the_adapter_of_the_docs_is_an_engine_to_the_type_checker(tmp_path: Path) -> None:
    (tmp_path / "sweeper_toy.py").write_text(
        f"{ADAPTER}\nfrom sweeper.engines import Engine\nengine: Engine = Toy()\n"
    )
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-incremental",
         f"--config-file={source.parent / 'pyproject.toml'}", str(tmp_path / "sweeper_toy.py")],
        capture_output=True, text=True, timeout=100, cwd=source.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_an_installed_adapter_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = tomllib.loads(TOML)["project"]["entry-points"]["sweeper.engines"]
    info = tmp_path / "sweeper_toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sweeper-toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[sweeper.engines]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
    )
    monkeypatch.syspath_prepend(tmp_path)
    engine: Engine = load_engine(yaml.safe_load(YAML)["name"])
    assert engine.name == "toy"


def test_the_phase_decides_in_the_adapter_of_the_docs() -> None:
    death = Death(ended=Ended.EXITED, after_s=1.0, was_ready=False, exit_code=1)
    boot = ["toyserve 1.4", "weights", "cache", "ready"]
    said = [name(TOY.Toy().verdict(death, [*boot[:n], "out of memory"])) for n in (1, 2, 3, 4)]
    assert said == ["engine_crash", "oom_weights", "oom_kv_cache", "oom_runtime"]


@pytest.mark.parametrize("names", [InfeasibleName, UnfitName, BrokenName, HostFaultName])
def test_the_docs_name_the_whole_closed_set(names: type[enum.StrEnum]) -> None:
    assert not [each.value for each in names if f"`{each.value}`" not in DOCS]


def test_the_docs_name_every_phase_in_order() -> None:
    assert re.search(r",\s+".join(each.value for each in Phase), DOCS)


def test_the_docs_speak_of_every_method_of_the_protocol() -> None:
    methods = [each for each in vars(Engine) if not each.startswith("_")]
    assert not [each for each in methods if f"`{each}" not in DOCS]
