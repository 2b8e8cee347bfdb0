"""What NVIDIA's management library says of the cards; nothing at all where there are none."""

from __future__ import annotations

import functools
import re
from typing import Any

from sweeper.core.pairs import Pairs, Scalar
from sweeper.core.telemetry import CardReading

_THROTTLE_BITS = {
    0x04: "power_cap",
    0x08: "hw_slowdown",
    0x20: "thermal_sw",
    0x40: "thermal_hw",
    0x80: "power_brake",
}
"""Why clocks are held down; the other bits (idle, clocks as set) hold nobody back."""
_IDLE_BIT = 0x01


@functools.cache
def library() -> Any | None:
    """Return the initialised library, once and for good; None: not installed, no driver, no card.

    It is not shut down before the process ends: each start of it costs up to a second where no
    other program keeps the driver loaded.
    """
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


class Cards:
    """The cards of this host, by number; a figure that a card or driver refuses is None."""

    def __init__(self, nvml: Any) -> None:
        """Ask `nvml`, the module pynvml or what answers like it, which cards there are."""
        self._nvml = nvml
        count = self._ask("nvmlDeviceGetCount") or 0
        found = ((i, self._ask("nvmlDeviceGetHandleByIndex", i)) for i in range(count))
        self._handles = {index: handle for index, handle in found if handle is not None}

    @property
    def indexes(self) -> tuple[int, ...]:
        """The numbers of the cards that answer."""
        return tuple(self._handles)

    def used_bytes(self, index: int) -> int | None:
        """Return the memory in use on a card, by all processes together."""
        return self._memory(index, "used")

    def read(self, index: int) -> CardReading:
        """Return what a card says of itself at this moment."""
        power_mw = self._of(index, "nvmlDeviceGetPowerUsage")
        energy_mj = self._of(index, "nvmlDeviceGetTotalEnergyConsumption")
        temperature = self._of(index, "nvmlDeviceGetTemperature", 0)  # 0: of the chip
        clock = self._of(index, "nvmlDeviceGetClockInfo", 1)  # 1: of the multiprocessors
        mask = self._of(index, "nvmlDeviceGetCurrentClocksEventReasons")
        if mask is None:  # the name that drivers before 535 know
            mask = self._of(index, "nvmlDeviceGetCurrentClocksThrottleReasons")
        idle = mask is not None and bool(mask & _IDLE_BIT)
        return CardReading(
            index=index,
            used_bytes=self.used_bytes(index),
            power_w=None if power_mw is None else power_mw / 1000,
            energy_j=None if energy_mj is None else energy_mj / 1000,
            temperature_c=None if temperature is None else float(temperature),
            clock_mhz=None if clock is None or idle else float(clock),
            throttle_reasons=frozenset() if mask is None else throttle_reasons(mask),
        )

    def processes(self, index: int) -> frozenset[int] | None:
        """Return the ids of the processes that compute on a card, as the driver counts them.

        Inside a container these may be ids of the host, or none at all; None where not supported.
        """
        found = self._of(index, "nvmlDeviceGetComputeRunningProcesses")
        return None if found is None else frozenset(int(process.pid) for process in found)

    def visible(self, listed: str | None) -> tuple[int, ...]:
        """Return the cards that a value of CUDA_VISIBLE_DEVICES leaves; all without one.

        As CUDA reads it: numbers or beginnings of UUIDs, up to the first that names no card. What
        names a part of a card (MIG) stands for the whole, since a part has no power of its own.
        """
        if listed is None or listed.strip().startswith("MIG-"):
            return self.indexes
        chosen: list[int] = []
        for word in (part.strip() for part in listed.split(",")):
            if re.fullmatch(r"\d+", word):
                matching = [int(word)] if int(word) in self._handles else []
            else:
                matching = [
                    index
                    for index in self._handles
                    if word.startswith("GPU-") and self._uuid(index).startswith(word)
                ]
            if len(matching) != 1:
                break
            chosen += [index for index in matching if index not in chosen]
        return tuple(chosen)

    def facts(self) -> Pairs:
        """Return what of the cards decides their speed; what they do not tell is left out.

        Facts that differ from card to card are joined by commas, each value once.
        """
        if not self._handles:
            return Pairs()
        facts: dict[str, Scalar] = {
            "gpu": self._joined([_text(self._of(i, "nvmlDeviceGetName")) for i in self._handles]),
            "gpu_count": len(self._handles),
            "gpu_memory_bytes": self._memory(next(iter(self._handles)), "total"),
            "gpu_driver": _text(self._ask("nvmlSystemGetDriverVersion")),
            "gpu_cuda": self._cuda(),
            "gpu_power_limit_w": self._joined([self._power_limit_w(i) for i in self._handles]),
            "gpu_clocks_policy": self._joined([self._clocks_policy(i) for i in self._handles]),
            "gpu_mig": self._joined([self._mode(i, "nvmlDeviceGetMigMode") for i in self._handles]),
            "gpu_ecc": self._joined([self._mode(i, "nvmlDeviceGetEccMode") for i in self._handles]),
        }
        return Pairs({name: value for name, value in facts.items() if value is not None})

    def _ask(self, name: str, *arguments: Any) -> Any | None:
        """Return what a function answers; None if the library or the driver has it not."""
        function = getattr(self._nvml, name, None)
        if function is None:
            return None
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None

    def _of(self, index: int, name: str, *arguments: Any) -> Any | None:
        return self._ask(name, self._handles[index], *arguments)

    def _memory(self, index: int, what: str) -> int | None:
        # Where the processor's memory is the card's as well, the driver refuses to say.
        memory = self._of(index, "nvmlDeviceGetMemoryInfo")
        value = getattr(memory, what, None)
        return None if value is None else int(value)

    def _uuid(self, index: int) -> str:
        return _text(self._of(index, "nvmlDeviceGetUUID")) or ""

    def _cuda(self) -> str | None:
        version = self._ask("nvmlSystemGetCudaDriverVersion")
        return None if version is None else f"{version // 1000}.{version % 1000 // 10}"

    def _power_limit_w(self, index: int) -> float | None:
        limit_mw = self._of(index, "nvmlDeviceGetEnforcedPowerLimit")
        return None if limit_mw is None else limit_mw / 1000

    def _clocks_policy(self, index: int) -> str | None:
        """Return persistence, application clocks and whether the card may boost by itself.

        Clocks that were locked (`nvidia-smi --lock-gpu-clocks`) the library does not tell.
        """
        persistence = self._of(index, "nvmlDeviceGetPersistenceMode")
        parts = [] if persistence is None else [f"persistence {_on(persistence)}"]
        for name, clock in (("graphics", 0), ("memory", 2)):
            application = self._of(index, "nvmlDeviceGetApplicationsClock", clock)
            if application is not None:
                default = self._of(index, "nvmlDeviceGetDefaultApplicationsClock", clock)
                said = " (default)" if application == default else ""
                parts.append(f"{name} {application} MHz{said}")
        boosted = self._of(index, "nvmlDeviceGetAutoBoostedClocksEnabled")
        if boosted is not None:
            parts.append(f"auto boost {_on(boosted[0])}")
        return "; ".join(parts) or None

    def _mode(self, index: int, name: str) -> str | None:
        """Return whether a mode that has a current and a pending state is on now."""
        modes = self._of(index, name)
        return None if modes is None else _on(modes[0])

    @staticmethod
    def _joined(values: list[Any]) -> Scalar:
        """Return the one value of all cards, or the different ones in one text."""
        different = list(dict.fromkeys(values))
        if len(different) == 1:
            one: Scalar = different[0]
            return one
        return ", ".join("unknown" if each is None else str(each) for each in different)


@functools.cache
def cards() -> Cards | None:
    """Return the cards of this host; None if there is none, or none that can be asked."""
    nvml = library()
    found = None if nvml is None else Cards(nvml)
    return found if found is not None and found.indexes else None


def used_bytes() -> tuple[int, ...] | None:
    """Return the memory in use on each card, by all processes together; None if not known."""
    here = cards()
    if here is None:
        return None
    used = [here.used_bytes(index) for index in here.indexes]
    known = tuple(each for each in used if each is not None)
    return known if len(known) == len(used) else None


def gpu_facts() -> Pairs:
    """Return what of the cards decides their speed, and the driver's version; empty without one."""
    here = cards()
    return Pairs() if here is None else here.facts()


def throttle_reasons(mask: int) -> frozenset[str]:
    """Return the names of the reasons in NVML's bit mask for which clocks are held down."""
    return frozenset(name for bit, name in _THROTTLE_BITS.items() if mask & bit)


def _on(state: int) -> str:
    return "on" if state else "off"


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
