from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.shell.conftest import wait_until

from sweeper.core.telemetry import CardReading
from sweeper.gpu import Cards, throttle_reasons
from sweeper.host import cgroup_cpus, cgroup_memory_bytes, cpu_governor, host_facts
from sweeper.telemetry import Watching, cards_in_use, opens_a_card, watching

BUSY = """
import os, sys, threading
block = bytearray(64 * 2**20)
print("burning", flush=True)
while True:
    sum(range(10000))
"""

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.readline()
child.kill()
child.wait()
print("alone", flush=True)
sys.stdin.readline()
"""


class NvmlError(Exception):
    """What the stand-in raises, as the library does, for what a card does not support."""


class Nvml:
    """A stand-in for the module pynvml, with the real names; what is not in a card is refused."""

    NVMLError = NvmlError

    def __init__(self, *cards: dict[str, Any], **system: Any) -> None:
        self._cards = cards
        self._system = system
        self.asked: list[str] = []

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:  # noqa: N802
        if self._cards[index].get("lost"):
            raise NvmlError("GPU is lost")
        return self._cards[index]

    def __getattr__(self, name: str) -> Any:
        if name == "nvmlDeviceGetCurrentClocksEventReasons" and self._system.get("old_driver"):
            raise AttributeError(name)

        def ask(*arguments: Any) -> Any:
            self.asked.append(name)
            source = arguments[0] if arguments else self._system
            key = (name, *arguments[1:]) if len(arguments) > 1 else name
            if key not in source:
                raise NvmlError("Not Supported")
            return source[key]

        return ask


def card(**changes: Any) -> dict[Any, Any]:
    """Return a card that tells all; `used` and `pids` are shorter to say."""
    made: dict[Any, Any] = {
        "nvmlDeviceGetName": b"NVIDIA H200",
        "nvmlDeviceGetUUID": "GPU-aaaa-1",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(
            used=changes.pop("used", 5 * 2**30), total=141 * 2**30
        ),
        "nvmlDeviceGetPowerUsage": 345_600,
        "nvmlDeviceGetTotalEnergyConsumption": 12_345_678,
        ("nvmlDeviceGetTemperature", 0): 61,
        ("nvmlDeviceGetClockInfo", 1): 1830,
        "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x20,
        "nvmlDeviceGetComputeRunningProcesses": [
            SimpleNamespace(pid=pid) for pid in changes.pop("pids", [])
        ],
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetPersistenceMode": 1,
        ("nvmlDeviceGetApplicationsClock", 0): 1980,
        ("nvmlDeviceGetDefaultApplicationsClock", 0): 1980,
        ("nvmlDeviceGetApplicationsClock", 2): 3201,
        ("nvmlDeviceGetDefaultApplicationsClock", 2): 2619,
        "nvmlDeviceGetMigMode": [0, 0],
        "nvmlDeviceGetEccMode": [1, 1],
    }
    return {**made, **changes}


SYSTEM = {
    "nvmlSystemGetDriverVersion": b"580.159.03",
    "nvmlSystemGetCudaDriverVersion": 13000,
}


@pytest.fixture
def family() -> Iterator[subprocess.Popen[str]]:
    """Yield a process that waits, whose only child burns processor time and holds 64 MiB."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, BUSY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    if process.poll() is None:
        process.communicate("\n\n", timeout=30)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def burnt(watch: Watching, seconds: float) -> bool:
    return (watch.so_far().engine_cpu_s or 0) >= seconds


# ---- A real process tree ------------------------------------------------------------------------


def test_the_time_and_memory_of_the_whole_tree_are_seen(family: subprocess.Popen[str]) -> None:
    assert line(family).isdigit()
    with watching(family.pid, period_s=0.02) as watch:
        wait_until(lambda: burnt(watch, 0.1), "a tenth of a second of processor time")
    found = watch.result()
    assert watch.trouble is None
    assert found.seconds > 0
    assert (found.engine_cpu_s or 0) >= 0.1
    assert (found.engine_rss_peak_bytes or 0) > 64 * 2**20
    assert found.others_share is not None
    assert 0 <= found.others_share <= 1


def test_a_child_that_ends_is_no_trouble_and_keeps_its_time(
    family: subprocess.Popen[str],
) -> None:
    assert line(family).isdigit()
    with watching(family.pid, period_s=0.02) as watch:
        wait_until(lambda: burnt(watch, 0.05), "some processor time")
        before = watch.so_far().engine_cpu_s
        tell(family)
        assert line(family) == "alone"
        read = len(watch.readings)
        wait_until(lambda: len(watch.readings) > read + 1, "readings without the child")
    assert watch.trouble is None
    assert before is not None
    assert (watch.result().engine_cpu_s or 0) >= before
    last, peak = watch.readings[-1].engine_rss_bytes, watch.result().engine_rss_peak_bytes
    assert last is not None
    assert peak is not None
    assert last < 64 * 2**20 < peak


def test_an_engine_that_dies_while_watched_is_no_trouble() -> None:
    engine = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    assert line(engine) == "burning"
    with watching(engine.pid, period_s=0.02) as watch:
        wait_until(lambda: burnt(watch, 0.03), "some processor time")
        engine.kill()
        wait_until(
            lambda: watch.readings[-1].engine_rss_bytes is None, "a reading without the engine"
        )
        engine.communicate()
        read = len(watch.readings)
        wait_until(lambda: len(watch.readings) > read, "a reading after it was reaped")
    assert watch.trouble is None
    assert (watch.result().engine_rss_peak_bytes or 0) > 64 * 2**20


def test_of_a_process_that_is_not_there_nothing_is_known() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with watching(ended.pid) as watch:
        pass
    found = watch.result()
    assert watch.trouble is None
    assert (found.engine_rss_peak_bytes, found.engine_cpu_s, found.others_share) == (None,) * 3


def test_an_engine_elsewhere_leaves_what_is_known_of_the_host() -> None:
    with Watching(None, period_s=0.02, cards=None) as watch:
        wait_until(lambda: watch.so_far().steal_share is not None, "processor time to pass")
    found = watch.result()
    assert found.engine_cpu_s is None
    assert found.others_share is None
    assert not found.saw_gpu
    assert found.gpu_other_processes is None


def test_a_short_measurement_is_read_at_its_begin_and_its_end() -> None:
    with Watching(os.getpid(), period_s=60.0, cards=None) as watch:
        assert len(watch.readings) == 1
    assert len(watch.readings) == 2
    assert watch.result().seconds > 0


# ---- How it ends --------------------------------------------------------------------------------


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_leaving_ends_the_thread_without_waiting_for_its_next_turn() -> None:
    with Watching(None, period_s=3600.0, cards=None):
        assert "telemetry" in threads()
    assert "telemetry" not in threads()


def test_an_interrupted_measurement_ends_it_too_and_is_not_swallowed() -> None:
    watch = Watching(None, period_s=3600.0, cards=None)

    def interrupted() -> None:
        with watch:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "telemetry" not in threads()
    assert len(watch.readings) == 2


def test_what_goes_wrong_is_kept_and_not_raised() -> None:
    class Torn(Nvml):
        def nvmlDeviceGetPowerUsage(self, _handle: Any) -> int:  # noqa: N802
            raise MemoryError("no room")

    torn = Cards(Torn(card(pids=[os.getpid()]), **SYSTEM))
    with Watching(os.getpid(), period_s=0.01, cards=torn) as watch:
        wait_until(lambda: "telemetry" not in threads(), "the end of the thread")
    assert watch.trouble == "MemoryError: no room"
    assert watch.result().seconds == 0


# ---- The cards ----------------------------------------------------------------------------------


def test_a_card_tells_its_figures_in_plain_units() -> None:
    assert Cards(Nvml(card())).read(0) == CardReading(
        index=0,
        used_bytes=5 * 2**30,
        power_w=345.6,
        energy_j=12345.678,
        temperature_c=61.0,
        clock_mhz=1830.0,
        throttle_reasons=frozenset({"power_cap"}),
    )


def test_what_a_card_does_not_support_is_none_and_never_zero() -> None:
    assert Cards(Nvml({})).read(0) == CardReading(index=0)
    refused = SimpleNamespace(used=None, total=None)
    assert Cards(Nvml({"nvmlDeviceGetMemoryInfo": refused})).read(0) == CardReading(index=0)


def test_an_old_library_is_asked_by_the_old_name() -> None:
    found = Cards(Nvml(card(), old_driver=True)).read(0)
    assert found.throttle_reasons == {"thermal_sw"}
    driver = {k: v for k, v in card().items() if k != "nvmlDeviceGetCurrentClocksEventReasons"}
    assert Cards(Nvml(driver)).read(0).throttle_reasons == {"thermal_sw"}


def test_an_idle_card_has_no_clock() -> None:
    idle = card(nvmlDeviceGetCurrentClocksEventReasons=0x1)
    assert Cards(Nvml(idle)).read(0).clock_mhz is None


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (0x0, set()),
        (0x1, set()),
        (0x2, set()),
        (0x4, {"power_cap"}),
        (0x8 | 0x40, {"hw_slowdown", "thermal_hw"}),
        (0x8 | 0x80, {"hw_slowdown", "power_brake"}),
        (0x20, {"thermal_sw"}),
        (0x10 | 0x100, set()),
        (0x1EF, {"hw_slowdown", "thermal_hw", "power_brake", "thermal_sw", "power_cap"}),
    ],
)
def test_bits_become_the_names_of_what_holds_clocks_down(mask: int, names: set[str]) -> None:
    assert throttle_reasons(mask) == names


def test_a_card_that_is_lost_is_left_out() -> None:
    cards = Cards(Nvml({"lost": True}, card()))
    assert cards.indexes == (1,)


@pytest.mark.parametrize(
    ("listed", "seen"),
    [
        (None, (0, 1, 2)),
        ("1", (1,)),
        ("2,0", (2, 0)),
        ("0, 1", (0, 1)),
        ("1,1", (1,)),
        ("", ()),
        ("-1", ()),
        ("1,7,0", (1,)),
        ("GPU-bbbb", (1,)),
        ("GPU-aaaa-1,GPU-cccc-3", (0, 2)),
        ("GPU-", ()),
        ("MIG-aaaa", (0, 1, 2)),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(
    listed: str | None, seen: tuple[int, ...]
) -> None:
    uuids = ("GPU-aaaa-1", "GPU-bbbb-2", "GPU-cccc-3")
    cards = Cards(Nvml(*(card(nvmlDeviceGetUUID=uuid) for uuid in uuids)))
    assert cards.visible(listed) == seen


# ---- Which cards the engine uses ----------------------------------------------------------------


def test_the_cards_that_hold_the_engines_processes_are_its_own() -> None:
    cards = Cards(Nvml(card(pids=[1, 50]), card(pids=[51, 1, 2]), card(pids=[3])))
    used, others = cards_in_use(cards, frozenset({50, 51, 52}), visible=(0, 1, 2))
    assert used == (0, 1)
    assert others == 2, "1, on both cards, and 2"


def test_a_driver_that_hides_processes_leaves_the_visible_cards_and_others_unknown(
    tmp_path: Path,
) -> None:
    cards = Cards(Nvml(card(), card(pids=[999]), card()))
    files = tmp_path / "77" / "fd"
    files.mkdir(parents=True)

    def found() -> tuple[tuple[int, ...], int | None]:
        return cards_in_use(cards, frozenset({77}), visible=(1, 2), proc=tmp_path)

    assert found() == ((), None), "it has no device open: it computes elsewhere"
    (files / "5").symlink_to("/dev/nvidia1")
    assert found() == ((1, 2), None)


@pytest.mark.parametrize("device", ["/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"])
def test_an_open_device_tells_that_a_process_uses_a_card(tmp_path: Path, device: str) -> None:
    files = tmp_path / "77" / "fd"
    files.mkdir(parents=True)
    (files / "0").symlink_to("/dev/null")
    assert not opens_a_card([77, 78], proc=tmp_path)
    (files / "5").symlink_to(device)
    assert opens_a_card([78, 77], proc=tmp_path)


def test_an_engine_outside_our_tree_is_on_the_cards_where_somebody_computes() -> None:
    unsupported = {k: v for k, v in card().items() if "Processes" not in str(k)}
    cards = Cards(Nvml(card(pids=[4]), card(), unsupported, card(pids=[4])))
    assert cards_in_use(cards, None, visible=(0, 1, 2)) == ((0, 2), None)


def test_what_others_held_before_is_not_the_engines_memory(family: subprocess.Popen[str]) -> None:
    child = int(line(family))
    nvml = Nvml(card(pids=[1], used=50), card(pids=[child], used=47), **SYSTEM)
    cards = Cards(nvml)
    with Watching(family.pid, period_s=0.02, cards=cards, used_before=(50, 40)) as watch:
        wait_until(lambda: len(watch.readings) > 2, "some readings")
    found = watch.result()
    assert (found.gpu_peak_bytes, found.gpu_before_bytes) == (47, 40), "of its own card only"
    assert found.gpu_engine_bytes == 7


def test_without_a_look_before_the_peak_is_all_that_is_known(family: subprocess.Popen[str]) -> None:
    child = int(line(family))
    with Watching(
        family.pid, period_s=0.02, cards=Cards(Nvml(card(pids=[child], used=47), **SYSTEM))
    ) as watch:
        wait_until(lambda: len(watch.readings) > 2, "some readings")
    found = watch.result()
    assert found.gpu_before_bytes is None
    assert found.gpu_engine_bytes == found.gpu_peak_bytes == 47


def test_the_cards_figures_come_with_the_engines(family: subprocess.Popen[str]) -> None:
    child = int(line(family))
    nvml = Nvml(card(pids=[1]), card(pids=[child, 1, 2], used=7), **SYSTEM)
    with Watching(family.pid, period_s=0.02, cards=Cards(nvml)) as watch:
        wait_until(lambda: len(watch.readings) > 3, "some readings")
    found = watch.result()
    assert watch.trouble is None
    assert found.gpu_peak_bytes == 7
    assert found.gpu_power_w == pytest.approx(345.6)
    assert found.gpu_energy_j == pytest.approx(345.6 * found.seconds)
    assert found.gpu_temperature_c == 61.0
    assert found.gpu_clock_min_mhz == found.gpu_clock_max_mhz == 1830.0
    assert found.throttle_reasons == ("power_cap",)
    assert found.gpu_other_processes == 2
    assert nvml.asked.count("nvmlDeviceGetComputeRunningProcesses") == 2, "once a card"


def test_an_engine_on_the_processor_leaves_the_cards_alone() -> None:
    with Watching(os.getpid(), period_s=60.0, cards=Cards(Nvml(card(pids=[1])))) as watch:
        pass
    assert not watch.result().saw_gpu
    assert watch.result().gpu_other_processes is None


# ---- Facts of the cards and the host ------------------------------------------------------------


def test_facts_of_a_card_decide_its_speed_and_identify_nobody() -> None:
    facts = Cards(Nvml(card(), **SYSTEM)).facts()
    assert dict(facts) == {
        "gpu": "NVIDIA H200",
        "gpu_count": 1,
        "gpu_memory_bytes": 141 * 2**30,
        "gpu_driver": "580.159.03",
        "gpu_cuda": "13.0",
        "gpu_power_limit_w": 700.0,
        "gpu_clocks_policy": "persistence on; graphics 1980 MHz (default); memory 3201 MHz",
        "gpu_mig": "off",
        "gpu_ecc": "on",
    }


def test_facts_that_differ_from_card_to_card_are_all_said() -> None:
    slower = {
        **card(nvmlDeviceGetName="NVIDIA L4", nvmlDeviceGetEnforcedPowerLimit=72_000),
        "nvmlDeviceGetMigMode": None,
    }
    facts = Cards(Nvml(card(), slower, card(), **SYSTEM)).facts()
    assert facts["gpu"] == "NVIDIA H200, NVIDIA L4"
    assert facts["gpu_power_limit_w"] == "700.0, 72.0"
    assert facts["gpu_mig"] == "off, unknown"
    assert facts["gpu_count"] == 3


def test_what_no_card_tells_is_left_out_of_the_facts() -> None:
    assert dict(Cards(Nvml({})).facts()) == {"gpu_count": 1}
    assert dict(Cards(Nvml()).facts()) == {}


def test_host_facts_say_what_there_is() -> None:
    facts = host_facts()
    assert isinstance(facts["cpu"], str)
    assert facts["cpu_count"] == len(os.sched_getaffinity(0))
    assert None not in facts.values()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_governor_is_that_of_the_processors_we_may_use(tmp_path: Path) -> None:
    for number, governor in enumerate(("performance", "performance", "powersave")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/cpufreq"
        write(folder / "scaling_governor", governor + "\n")
    assert cpu_governor(frozenset({0, 1}), tmp_path) == "performance"
    assert cpu_governor(frozenset({1, 2}), tmp_path) == "performance, powersave"
    assert cpu_governor(frozenset({5}), tmp_path) is None


def test_limits_of_the_second_version_are_the_tightest_on_the_way_up(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/system/engine\n")
    top = tmp_path / "sys/fs/cgroup"
    write(top / "system/engine/cpu.max", "max 100000\n")
    write(top / "system/engine/memory.max", "max\n")
    assert cgroup_cpus(tmp_path) is None
    assert cgroup_memory_bytes(tmp_path) is None
    write(top / "system/cpu.max", "150000 100000\n")
    write(top / "system/memory.max", f"{2**33}\n")
    write(top / "memory.max", f"{2**34}\n")
    assert cgroup_cpus(tmp_path) == 1.5
    assert cgroup_memory_bytes(tmp_path) == 2**33


def test_limits_of_the_first_version_are_found_where_only_the_last_folder_is_mounted(
    tmp_path: Path,
) -> None:
    write(
        tmp_path / "proc/self/cgroup",
        "9:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/\n",
    )
    top = tmp_path / "sys/fs/cgroup"
    write(top / "cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    write(top / "cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    write(top / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert cgroup_cpus(tmp_path) is None
    assert cgroup_memory_bytes(tmp_path) is None
    write(top / "cpu,cpuacct/cpu.cfs_quota_us", "400000\n")
    write(top / "memory/memory.limit_in_bytes", f"{2**32}\n")
    assert cgroup_cpus(tmp_path) == 4.0
    assert cgroup_memory_bytes(tmp_path) == 2**32


def test_a_system_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert cgroup_cpus(tmp_path) is None
    assert cgroup_memory_bytes(tmp_path) is None
