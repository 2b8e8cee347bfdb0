"""The script that prepares sweeper for a machine without a network."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def carry() -> ModuleType:
    spec = importlib.util.spec_from_file_location("carry", ROOT / "scripts" / "carry.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _wheel(path: Path, *needs: str, module: str = "carried_thing") -> Path:
    """Write a wheel of one module that needs these."""
    info = f"{module}-1.0.dist-info"
    told = "\n".join(
        ["Metadata-Version: 2.1", f"Name: {module}", "Version: 1.0"]
        + [f"Requires-Dist: {need}" for need in needs]
    )
    files = {
        f"{module}.py": "ANSWER = 42\n",
        f"{info}/METADATA": told + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    where = path / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(where, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)
    return where


def test_what_only_another_python_or_an_extra_needs_is_not_carried(
    carry: ModuleType, tmp_path: Path
) -> None:
    wheel = _wheel(
        tmp_path,
        "optuna>=5",
        "tomli; python_version < '3.11'",
        "pynvml; extra == 'gpu'",
        "uvloop; python_version >= '3.12'",
    )

    found = carry.needs(wheel, carry.environment("3.12"))

    assert [each.name for each in found] == ["optuna", "uvloop"]


def test_a_freeze_of_the_other_machine_is_read_in_every_spelling(
    carry: ModuleType, tmp_path: Path
) -> None:
    freeze = tmp_path / "freeze.txt"
    freeze.write_text(
        "# a comment\nPyYAML==6.0\n-e git+https://example.org/x#egg=x\nscikit_learn>=1\n"
        "torch @ file:///wheels/torch.whl\nhttpx[http2]==1.0\nrich\n"
    )

    assert carry.names(freeze) == {"pyyaml", "scikit-learn", "torch", "httpx", "rich"}


def test_the_install_script_installs_what_lies_beside_it_without_an_index(
    carry: ModuleType, tmp_path: Path
) -> None:
    folder = tmp_path / "carried folder"
    (folder / "wheels").mkdir(parents=True)
    _wheel(folder / "wheels")
    script = carry.write_install(folder)

    target = tmp_path / "target"
    subprocess.run(
        ["bash", str(script), str(target)],
        check=True,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "HOME": str(tmp_path)},
    )

    assert (target / "carried_thing.py").read_text() == "ANSWER = 42\n"


def test_what_neither_is_carried_nor_there_is_named(carry: ModuleType, tmp_path: Path) -> None:
    wheels = [
        _wheel(tmp_path, "numpy>=1", "colorlog"),
        _wheel(tmp_path, "carried-thing", module="other"),
    ]

    missing = carry.missing(wheels, {"numpy", "carried-thing"}, carry.environment("3.12"))

    assert missing == {"colorlog": "carried_thing-1.0-py3-none-any.whl"}
