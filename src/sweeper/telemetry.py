"""Watches the machine beside a measurement: memory, power, heat, clocks, other people's work."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from sweeper import gpu
from sweeper.core.telemetry import Reading, Telemetry, telemetry
from sweeper.gpu import Cards

_LOOK_AROUND_S = 5.0
"""How often the process tree and the cards' processes are read anew: they cost the most."""
_END_WITHIN_S = 2.0
"""How long the end waits for a reading in progress; a driver that hangs holds nobody up."""


def watching(
    pid: int | None,
    *,
    period_s: float = 0.5,
    engine_is_here: bool = True,
    used_before: tuple[int, ...] | None = None,
) -> Watching:
    """Return what watches this host, and the engine with this process id, inside a `with`.

    None for an engine that is not in our process tree. With `engine_is_here` false the engine
    runs on another machine, and no card of this one is looked at. `used_before` is what
    `gpu.used_bytes` said before the engine was started.
    """
    cards = gpu.cards() if engine_is_here else None
    return Watching(pid, period_s=period_s, cards=cards, used_before=used_before)


class Watching:
    """Reads the machine every `period_s` seconds on a thread, from entering to leaving.

    What goes wrong in a reading is not raised, since a measurement is worth more than what is
    known beside it: it ends the watching, and `trouble` says what it was, None for nothing.
    """

    def __init__(
        self,
        pid: int | None,
        *,
        period_s: float,
        cards: Cards | None,
        used_before: tuple[int, ...] | None = None,
    ) -> None:
        self._before: dict[int, int] = {}
        if cards is not None and used_before is not None:
            self._before = dict(zip(cards.indexes, used_before, strict=False))
        self.trouble: str | None = None
        self._readings: list[Reading] = []
        self._period_s = period_s
        self._eyes = _Eyes(pid, cards)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="telemetry", daemon=True)

    def __enter__(self) -> Self:
        self._read()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(_END_WITHIN_S)
        if not self._thread.is_alive():
            self._read()

    @property
    def readings(self) -> tuple[Reading, ...]:
        """All that was read until now, in order of time."""
        return tuple(self._readings)

    def so_far(self) -> Telemetry:
        """Return what the readings come to until the last one; reads nothing anew."""
        found = telemetry(self.readings)
        used = {card.index for reading in self.readings for card in reading.cards}
        if not used or not used <= self._before.keys():
            return found
        return replace(found, gpu_before_bytes=sum(self._before[index] for index in used))

    def result(self) -> Telemetry:
        """Return what all readings come to, after leaving."""
        return self.so_far()

    def _watch(self) -> None:
        while not self._over.wait(self._period_s) and self.trouble is None:
            self._read()

    def _read(self) -> None:
        try:
            self._readings.append(self._eyes.read())
        except Exception as error:
            self.trouble = f"{type(error).__name__}: {error}"


class _Eyes:
    """Where a reading comes from; used by one thread at a time."""

    def __init__(self, pid: int | None, cards: Cards | None) -> None:
        self._pid = pid
        self._tree = None if pid is None else _Tree(pid)
        self._own = psutil.Process()
        self._cards = cards
        self._used: tuple[int, ...] = ()
        self._others: int | None = None
        self._looked_at_s: float | None = None

    def read(self) -> Reading:
        now_s = time.monotonic()
        if self._looked_at_s is None or now_s - self._looked_at_s >= _LOOK_AROUND_S:
            self._look_around()
            self._looked_at_s = now_s
        own = self._own.cpu_times()
        reading = Reading(at_s=time.monotonic(), own_cpu_s=own.user + own.system)
        reading = _with_processors(reading)
        if self._tree is not None:
            rss_bytes, cpu_s = self._tree.read()
            reading = replace(reading, engine_rss_bytes=rss_bytes, engine_cpu_s=cpu_s)
        if self._cards is not None and self._used:
            cards = tuple(self._cards.read(index) for index in self._used)
            reading = replace(reading, cards=cards, gpu_other_processes=self._others)
        return reading

    def _look_around(self) -> None:
        if self._tree is not None:
            self._tree.grow()
        if self._cards is not None:
            pids = None if self._tree is None else self._tree.pids
            self._used, self._others = cards_in_use(
                self._cards, pids, self._cards.visible(_visible_devices(self._pid))
            )


def cards_in_use(
    cards: Cards,
    pids: frozenset[int] | None,
    visible: tuple[int, ...],
    proc: Path = Path("/proc"),
) -> tuple[tuple[int, ...], int | None]:
    """Return the cards that an engine uses, and how many other processes compute on them.

    They are the cards on which the driver names one of `pids`, the engine's processes. A driver
    that names none of them, as in a container, leaves all that are `visible` to it, if one of them
    has opened a device at all; the number of others is then not known. Where `pids` is None, for
    an engine that is not in our process tree, every visible card on which somebody computes.
    """
    at = {index: cards.processes(index) for index in cards.indexes}
    if pids is None:
        return tuple(index for index in visible if at[index] is None or at[index]), None
    named = {index: found for index, found in at.items() if found is not None and found & pids}
    if named:
        return tuple(named), len(frozenset().union(*named.values()) - pids)
    if not pids or not opens_a_card(pids, proc):
        return (), None
    return visible, None


def opens_a_card(pids: Iterable[int], proc: Path = Path("/proc")) -> bool:
    """Tell whether a process has a device of NVIDIA's open; also if its files cannot be read."""
    for pid in pids:
        try:
            for entry in (proc / str(pid) / "fd").iterdir():
                try:
                    target = str(entry.readlink())
                except FileNotFoundError:
                    continue
                if target.startswith(("/dev/nvidia", "/dev/dxg")):
                    return True
        except FileNotFoundError:
            continue
        except OSError:
            return True
    return False


def _visible_devices(pid: int | None) -> str | None:
    """Return what says which cards an engine may use: its own environment, else ours."""
    name = "CUDA_VISIBLE_DEVICES"
    if pid is not None:
        with contextlib.suppress(psutil.Error, OSError):
            return psutil.Process(pid).environ().get(name)
    return os.environ.get(name)


def _with_processors(reading: Reading) -> Reading:
    """Add how all processors' time was spent since the start of the system."""
    try:
        times = psutil.cpu_times()
    except OSError:
        return reading
    # A guest's time is counted in the user's already.
    shares = {k: v for k, v in times._asdict().items() if not k.startswith("guest")}
    unused_s = sum(shares.get(name, 0.0) for name in ("idle", "iowait", "steal"))
    all_s = sum(shares.values())
    return replace(reading, busy_s=all_s - unused_s, stolen_s=shares.get("steal"), all_s=all_s)


class _Tree:
    """A process and its descendants; one that has ended keeps the time it used."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._alive: set[psutil.Process] = set()
        self._used_s: dict[psutil.Process, float] = {}
        self._before_s: dict[psutil.Process, float] | None = None

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(process.pid for process in self._alive)

    def grow(self) -> None:
        """Read anew who belongs to the tree."""
        try:
            root = psutil.Process(self._pid)
            self._alive |= {root, *root.children(recursive=True)}
        except psutil.NoSuchProcess:
            pass

    def read(self) -> tuple[int | None, float | None]:
        """Return the tree's resident memory now and its processor time since the first reading."""
        rss_bytes = 0
        try:
            for process in list(self._alive):
                try:
                    with process.oneshot():
                        rss_bytes += process.memory_info().rss
                        times = process.cpu_times()
                except psutil.NoSuchProcess:
                    self._alive.discard(process)
                else:
                    self._used_s[process] = times.user + times.system
        except (psutil.AccessDenied, OSError):
            return None, None
        if not self._used_s:
            return None, None
        if self._before_s is None:
            self._before_s = dict(self._used_s)
        # What was not there at the first reading was born since, and counts whole.
        cpu_s = sum(used_s - self._before_s.get(each, 0.0) for each, used_s in self._used_s.items())
        # A zombie, the only thing left of a tree, holds no memory.
        return rss_bytes or None, cpu_s
