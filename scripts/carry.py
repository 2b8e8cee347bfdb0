"""Prepare sweeper for a machine without a network: its wheel and those it needs there, in a folder.

    python scripts/carry.py FOLDER [--python 3.12] [--platform TAG ...] [--list FILE] [--there FILE]

FOLDER gets `wheels/` and `install.sh`. Copy it over, then `bash install.sh [TARGET]` there: into
the environment of `python3` (PYTHON=... names another), or into the folder TARGET, to be put on
PYTHONPATH. Nothing is fetched there and nothing that is there is replaced.

FILE of `--list` names what to carry, one requirement a line (`optuna==5.0.0`); without it, all that
sweeper needs. FILE of `--there` is `pip freeze` of that machine: what it has is not carried, and
anything that sweeper needs and neither has is an error now, not there.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess  # noqa: TID251 - runs pip, which ends by itself
import sys
import tempfile
import zipfile
from collections.abc import Collection, Iterable, Sequence
from email.parser import HeaderParser
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
# Newest first; pip takes each tag as it stands, so older ones are named too.
LINUX = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 26, 24, 17, 12, 5)),
    "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64",
)  # fmt: skip
INSTALL = """#!/usr/bin/env bash
# Install the wheels beside this script, without a network and without touching what is there.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec "${PYTHON:-python3}" -m pip install --quiet --no-index --no-deps --no-cache-dir \\
    ${1:+--target "$1"} "$here"/wheels/*.whl
"""


class CarryError(Exception):
    """Something that would be missing on the other machine; says what."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the folder; return 0, or 1 with a message about what cannot be carried."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="of the other machine")
    parser.add_argument("--platform", nargs="+", default=LINUX, metavar="TAG", help="of its wheels")
    parser.add_argument("--list", type=Path, help="what to carry; without it all that is needed")
    parser.add_argument("--there", type=Path, help="pip freeze of the other machine")
    given = parser.parse_args(arguments)
    try:
        carry(
            given.folder,
            python=given.python,
            platforms=tuple(given.platform),
            listed=None if given.list is None else _requirements(given.list),
            there=frozenset() if given.there is None else names(given.there),
        )
    except (CarryError, OSError) as error:
        print(f"carry: {error}", file=sys.stderr)
        return 1
    return 0


def carry(
    folder: Path,
    *,
    python: str,
    platforms: tuple[str, ...],
    listed: tuple[Requirement, ...] | None,
    there: frozenset[str],
) -> None:
    """Write `wheels/` and `install.sh`; raises CarryError for what cannot be had or is missing."""
    wheels = folder / "wheels"
    if wheels.exists():
        shutil.rmtree(wheels)  # of two versions of one package pip installs neither
    wheels.mkdir(parents=True)
    _pip("wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT))
    own = next(iter(wheels.glob("*.whl")))
    there_is = environment(python)
    waiting = list(listed) if listed is not None else needs(own, there_is)
    have = {*there, canonicalize_name("sweeper")}
    while waiting:
        wanted = waiting.pop(0)
        name = canonicalize_name(wanted.name)
        if name in have:
            continue
        have.add(name)
        wheel = _fetch(wanted, wheels, python, platforms)
        if listed is None:
            waiting += needs(wheel, there_is)
    lacking = missing(sorted(wheels.glob("*.whl")), have, there_is)
    if lacking and (listed is None or there):
        raise CarryError(
            "neither carried nor there: "
            + ", ".join(f"{name} (for {wheel})" for name, wheel in lacking.items())
        )
    write_install(folder)
    size = sum(each.stat().st_size for each in wheels.glob("*.whl"))
    count = len(list(wheels.glob("*.whl")))
    print(f"{count} wheels, {size / 2**20:.1f} MiB, in {wheels}; there: bash install.sh")
    if lacking:
        print(f"must be there already: {', '.join(lacking)}")


def environment(python: str) -> dict[str, str]:
    """Return the markers of the other machine: Linux as here, with that Python."""
    here = {str(name): str(value) for name, value in default_environment().items()}
    return {**here, "python_version": python, "python_full_version": f"{python}.0", "extra": ""}


def missing(
    wheels: Iterable[Path], have: Collection[str], environment: dict[str, str]
) -> dict[str, str]:
    """Return what wheels need and nobody has, with the wheel that needs it."""
    return {
        canonicalize_name(need.name): wheel.name
        for wheel in wheels
        for need in needs(wheel, environment)
        if canonicalize_name(need.name) not in have
    }


def write_install(folder: Path) -> Path:
    """Write the script that installs the wheels in the folder, and return it."""
    install = folder / "install.sh"
    install.write_text(INSTALL)
    install.chmod(0o755)
    return install


def needs(wheel: Path, environment: dict[str, str]) -> list[Requirement]:
    """Return what a wheel needs in this environment, extras left out."""
    with zipfile.ZipFile(wheel) as archive:
        told = next(
            name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)
        )
        headers = HeaderParser().parsestr(archive.read(told).decode())
    stated = [Requirement(each) for each in headers.get_all("Requires-Dist", [])]
    return [each for each in stated if each.marker is None or each.marker.evaluate(environment)]


def _fetch(wanted: Requirement, wheels: Path, python: str, platforms: tuple[str, ...]) -> Path:
    """Download a wheel that fits there; one that must be built is built, if it fits any machine."""
    tags = [word for tag in platforms for word in ("--platform", tag)]
    with tempfile.TemporaryDirectory() as folder:
        asked = str(Requirement(f"{wanted.name}{wanted.specifier}"))
        try:
            _pip(
                "download", "--no-deps", "--only-binary=:all:", "--python-version", python,
                "--implementation", "cp", *tags, "--dest", folder, asked,
            )  # fmt: skip
        except CarryError:
            _pip("wheel", "--no-deps", "--wheel-dir", folder, asked)
        (found,) = Path(folder).glob("*.whl")
        _, _, _, kinds = parse_wheel_filename(found.name)
        if not any(kind.platform in ("any", *platforms) for kind in kinds):
            raise CarryError(f"{asked}: {found.name} was built for this machine, not for that one")
        return Path(shutil.move(found, wheels / found.name))


def _pip(*words: str) -> None:
    done = subprocess.run(  # noqa: S603 - words of our own and of the lists that were given
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise CarryError(f"pip {words[0]} {words[-1]}: {said[-1] if said else done.returncode}")


def _lines(path: Path) -> Iterable[str]:
    for line in path.read_text().splitlines():
        said = line.partition("#")[0].strip()
        if said:
            yield said


def _requirements(path: Path) -> tuple[Requirement, ...]:
    return tuple(Requirement(line) for line in _lines(path))


def names(path: Path) -> frozenset[str]:
    """Return the packages that a machine has: `name==1.0`, `name @ file:...` or only `name`."""
    words = (re.split(r"[\s=@<>!~;\[]", line, maxsplit=1)[0] for line in _lines(path))
    return frozenset(canonicalize_name(word) for word in words if not word.startswith("-"))


if __name__ == "__main__":
    raise SystemExit(main())
