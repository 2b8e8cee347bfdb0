"""Hold all of a card's memory but so much, so that a large card behaves like a small one.

    python benchmarks/card/ballast.py 24GiB READY

What an engine finds free is then real, and so is running out of it. The bytes that are held are
written to READY when they are; SIGTERM gives them back. Plain allocations of the driver's own
interface, through ctypes: nothing has to be installed.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from pathlib import Path

from sweeper.conf import parse_bytes

_SLACK = 2 * 2**20
_PIECE = 8 * 2**30


class Card:
    """The first card that the driver shows."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._held: list[ctypes.c_uint64] = []
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._do("cuInit", ctypes.c_uint(0))
        self._do("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._do("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._do("cuCtxSetCurrent", context)

    def _do(self, function: str, *arguments: object) -> None:
        code = getattr(self._driver, function)(*arguments)
        if code != 0:
            raise OSError(f"{function}: CUDA error {code}")

    def memory(self) -> tuple[int, int]:
        """Return what is free and what there is, in bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._do("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def leave(self, wanted: int) -> int:
        """Allocate until no more than `wanted` bytes are free; return what is in use then."""
        while True:
            free, total = self.memory()
            size = min(free - wanted, _PIECE) // _SLACK * _SLACK
            if size < _SLACK:
                return total - free
            address = ctypes.c_uint64()
            self._do("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
            self._held.append(address)


def main(wanted: str, ready: str) -> None:
    """Hold what is too much until the process is asked to end."""
    size = parse_bytes(wanted)
    assert size is not None
    held = Card().leave(size)
    Path(ready).write_text(str(held))
    print(f"{held / 2**30:.2f} GiB are held", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main(*sys.argv[1:])
