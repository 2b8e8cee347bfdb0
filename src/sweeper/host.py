"""Facts of the machine that make two measurements comparable."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

from sweeper.core.pairs import Pairs
from sweeper.gpu import gpu_facts


def host_facts() -> Pairs:
    """Return processor, cores, memory in bytes, kernel and interpreter; no names of people."""
    return gpu_facts().with_(
        cpu=_cpu_model(),
        cpu_count=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        memory_bytes=psutil.virtual_memory().total,
        system=platform.system(),
        kernel=platform.release(),
        machine=platform.machine(),
        python=platform.python_version(),
    )


def available_bytes() -> int:
    """Return the memory that a new process could use now, in bytes."""
    return psutil.virtual_memory().available


def load() -> float:
    """Return the load average of the last minute per processor."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
