"""Where configs are found and where results go. Light, so that `--help` needs nothing else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GROUPS = ("study", "engine", "model", "hardware", "workload", "tracking")


class ConfError(Exception):
    """A mistake in what the user wrote: what, where, and what would be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfDirs:
    """The config folders in order of precedence, and the folder that results go into."""

    dirs: tuple[Path, ...]
    root: Path

    def options(self, group: str) -> tuple[str, ...]:
        """Return the names of a group's configs over all folders."""
        return tuple(
            sorted({path.stem for each in self.dirs for path in (each / group).glob("*.yaml")})
        )


def conf_dirs(extra: Sequence[str] = (), cwd: Path | None = None) -> ConfDirs:
    """Return the config folders for a working directory.

    First those named by `--config-dir`, then $SWEEPER_CONF or the nearest `conf/` of the user
    (one that has a `study/` folder) upward from the working directory, then those that ship with
    sweeper. Results go beside the user's `conf/`, else into the working directory.
    """
    here = cwd if cwd is not None else Path.cwd()
    dirs = []
    for each in extra:
        path = Path(each).expanduser().resolve()
        if not path.is_dir():
            raise ConfError(f"--config-dir {each}: there is no such folder")
        dirs.append(path)
    root = here
    stated = os.environ.get("SWEEPER_CONF")
    if stated:
        path = Path(stated).expanduser().resolve()
        if not path.is_dir():
            raise ConfError(f"SWEEPER_CONF is {stated}, and there is no such folder")
        dirs.append(path)
    else:
        for parent in (here, *here.parents):
            if (parent / "conf" / "study").is_dir():
                dirs.append((parent / "conf").resolve())
                root = parent
                break
    shipped = _shipped_conf()
    return ConfDirs(dirs=tuple(dict.fromkeys((*dirs, shipped))), root=root.resolve())


def _shipped_conf() -> Path:
    here = Path(__file__).resolve().parent
    for candidate in (here / "conf", here.parent.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfError(f"this installation has no configs: neither {here}/conf nor a checkout's conf/")
