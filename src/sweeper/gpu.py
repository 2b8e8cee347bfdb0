"""What NVIDIA's management library says of the cards; nothing at all where there are none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sweeper.core.pairs import Pairs, Scalar


@contextmanager
def _library() -> Iterator[Any | None]:
    """Yield the initialised library, or None: not installed, no driver, no card."""
    try:
        import pynvml
    except ModuleNotFoundError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def used_bytes() -> tuple[int, ...] | None:
    """Return the memory in use on each card, by all processes together; None without a card."""
    with _library() as nvml:
        if nvml is None:
            return None
        cards = (nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount()))
        return tuple(int(nvml.nvmlDeviceGetMemoryInfo(card).used) for card in cards)


def gpu_facts() -> Pairs:
    """Return name, memory and count of the cards and the driver's version; empty without one."""
    with _library() as nvml:
        if nvml is None or nvml.nvmlDeviceGetCount() == 0:
            return Pairs()
        first = nvml.nvmlDeviceGetHandleByIndex(0)
        facts: dict[str, Scalar] = {
            "gpu": _text(nvml.nvmlDeviceGetName(first)),
            "gpu_count": int(nvml.nvmlDeviceGetCount()),
            "gpu_memory_bytes": int(nvml.nvmlDeviceGetMemoryInfo(first).total),
            "gpu_driver": _text(nvml.nvmlSystemGetDriverVersion()),
        }
        return Pairs(facts)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
