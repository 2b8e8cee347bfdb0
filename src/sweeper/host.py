"""Facts of the machine that make two measurements comparable."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil

from sweeper.core.pairs import Pairs, Scalar
from sweeper.gpu import gpu_facts


def host_facts() -> Pairs:
    """Return the processor, memory, limits and cards of this host; no names of people.

    What cannot be read, or is not limited, is left out.
    """
    allowed = _allowed_processors()
    facts: dict[str, Scalar] = {
        "cpu": _cpu_model(),
        "cpu_count": len(allowed),
        "cpu_governor": cpu_governor(allowed),
        "numa_nodes": _numa_nodes(),
        "cgroup_cpus": cgroup_cpus(),
        "cgroup_memory_bytes": cgroup_memory_bytes(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    known = {name: value for name, value in facts.items() if value is not None}
    return Pairs({**gpu_facts(), **known})


def available_bytes() -> int:
    """Return the memory that a new process could use now, in bytes."""
    return psutil.virtual_memory().available


def load() -> float:
    """Return the load average of the last minute per processor."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def cpu_governor(processors: frozenset[int], root: Path = Path("/")) -> str | None:
    """Return how the kernel chooses the clocks of these processors; several by comma."""
    governors = {
        text.strip()
        for number in processors
        if (text := _read(root / f"sys/devices/system/cpu/cpu{number}/cpufreq/scaling_governor"))
    }
    return ", ".join(sorted(governors)) or None


def cgroup_cpus(root: Path = Path("/")) -> float | None:
    """Return the processors' worth of time that our control groups allow; None without a limit."""
    limits = []
    for folder in _cgroups("cpu", root):
        quota, _, period = (_read(folder / "cpu.max") or "max").strip().partition(" ")
        if quota == "max":  # the second version's word; the first has files of its own
            quota = (_read(folder / "cpu.cfs_quota_us") or "-1").strip()
            period = (_read(folder / "cpu.cfs_period_us") or "").strip()
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def cgroup_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory that our control groups allow in bytes; None without a limit."""
    limits = []
    for folder in _cgroups("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = (_read(folder / name) or "").strip()
            # The first version says "none" by the largest number of pages that it can count.
            if text.isdigit() and int(text) < 2**60:
                limits.append(int(text))
    return min(limits, default=None)


def _cgroups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of our control groups, from our own up to the root of all.

    Inside a container the path may be the host's, of which only the last folder is mounted.
    """
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mounts = (root / "sys/fs/cgroup" / name for name in (controllers, controller))
            top = next((mount for mount in mounts if mount.is_dir()), root / "sys/fs/cgroup")
        else:
            continue
        inside = Path(path.strip("/"))
        for each in (inside, *inside.parents):
            if (folder := top / each).is_dir():
                yield folder


def _allowed_processors() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _numa_nodes() -> int | None:
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None


def _cpu_model() -> str:
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
