"""Starts an engine, watches it, and makes sure it is gone: the only module with a subprocess.

It gathers evidence and judges nothing: what an end *means* is the adapter's business.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import psutil

from sweeper import gpu
from sweeper.core.launch import Attach, Death, Ended, Launch

TOKEN_VARIABLE = "SWEEPER_LAUNCH"  # noqa: S105 - the name of a variable, not a secret
_POLL_S = 0.05
_MEMORY_BACK_WITHIN_S = 30.0
_MEMORY_BACK_TOLERANCE_BYTES = 64 * 2**20
_SHIM = Path(__file__).with_name("_limited.py")

LineWatcher = Callable[[str], None]


def free_port() -> int:
    """Return a loopback port that was free a moment ago.

    Another process may still take it first; `serving` proves whose server answers.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Registry:
    """The engines that were started and not yet seen to end, kept in a file across crashes.

    Every engine carries a random token in its environment. An entry is written before its
    process exists, so that no kill of the orchestrator, at whatever moment, loses one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            entries: dict[str, dict[str, Any]] = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        return entries

    def _write(self, entries: dict[str, dict[str, Any]]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(entries, indent=1))
        partial.replace(self._path)

    def announce(self, token: str, stop_command: tuple[str, ...] = ()) -> None:
        """Record that a process with this token is about to be started, and what stops it."""
        entry = {"pid": None, "created": None, "stop_command": list(stop_command)}
        self._write({**self._read(), token: entry})

    def confirm(self, token: str, pid: int) -> None:
        """Record the process that was started under this token."""
        try:
            created: float | None = psutil.Process(pid).create_time()
        except psutil.NoSuchProcess:
            created = None
        entries = self._read()
        entries[token] = {**entries.get(token, {}), "pid": pid, "created": created}
        self._write(entries)

    def forget(self, token: str) -> None:
        """Record that nothing of this token is left."""
        entries = self._read()
        if entries.pop(token, None) is not None:
            self._write(entries)

    def reap(self) -> tuple[int, ...]:
        """End every engine that an earlier, killed orchestrator left; return their pids.

        A process is ours if it carries a registered token, or has a registered pid and still
        the start time that was recorded. Never by name.
        """
        entries = self._read()
        if not entries:
            return ()
        ended = []
        tokens = set(entries)
        births = {entry["pid"]: entry["created"] for entry in entries.values() if entry["pid"]}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.pid in births and births[process.pid] == process.create_time()
                if not ours and process.environ().get(TOKEN_VARIABLE) not in tokens:
                    continue
                if process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
                    ended.append(process)
        for entry in entries.values():
            _run_to_stop(tuple(entry.get("stop_command") or ()))
        deadline = time.monotonic() + 10.0
        while not all(_gone(process) for process in ended) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._write({})
        return tuple(process.pid for process in ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """How an engine went: the time it took in seconds, and whether it had to be killed.

    `held_bytes` is device memory that did not come back in time, None where there is no device.
    """

    took_s: float
    killed: bool
    held_bytes: int | None = None


class Server:
    """An engine that is up: the process is ours and it answers on its port."""

    def __init__(
        self,
        launch: Launch,
        process: _Process,
        ready_after_s: float,
        gpu_used_before: tuple[int, ...] | None = None,
    ) -> None:
        self.launch = launch
        self.gpu_used_before = gpu_used_before
        """Memory in use on each card before this engine was started; None where not known."""
        self.base_url = launch.base_url
        self.ready_after_s = ready_after_s
        self.ready_bytes = process.held_bytes()
        """Memory that it held when it was ready, counted as its limit counts; None where unknown.

        Without a limit that is what is resident. The process at the root of its tree alone.
        """
        self.ready_device_bytes = gpu.used_bytes()
        """Memory in use on each card at that moment, by all programs; None without a card."""
        self._process = process

    @property
    def pid(self) -> int | None:
        """The process at the root of the engine's tree; None where the server runs outside it."""
        return None if self.launch.detached else self._process.popen.pid

    @property
    def limit_bytes(self) -> int | None:
        """The limit on its address space that `peak_bytes` is held against; None without one."""
        return self.launch.memory_limit_bytes

    is_here = True
    """Whether the engine runs on this machine."""

    def alive(self) -> bool:
        """Tell whether the process still runs; reads what it has printed and takes its peak."""
        self._process.read_log()
        self._process.sample_peak()
        return self._process.alive()

    def peak_bytes(self) -> int | None:
        """Return the most memory the engine has held up to now, counted as its limit counts.

        Under a limit that is its address space, which the kernel compares with the limit at every
        mapping and whose largest size it keeps: nothing is missed between two looks. Without a
        limit it is the most that was resident. The process at the root of the engine's tree alone.
        """
        return self._process.sample_peak()

    def death(self, wait_s: float = 2.0) -> Death | None:
        """Return how the engine died, if it does within `wait_s` seconds; None if it lives.

        A broken connection is often seen a moment before the process is gone.
        """
        deadline = time.monotonic() + wait_s
        while self._process.alive():
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)
        return self._process.death(Ended.EXITED, was_ready=True)

    def complaint(self, detail: str, *, silent: bool = False) -> Death:
        """Return the evidence for an engine that lives but failed a request, or never answered."""
        ended = Ended.SILENT if silent else Ended.LIVES
        return self._process.death(ended, was_ready=True, detail=detail)


class Attached:
    """A server that somebody else runs: it is measured, and never stopped."""

    gpu_used_before: tuple[int, ...] | None = None
    """It ran before anybody looked."""

    def __init__(self, attach: Attach, ready_after_s: float) -> None:
        self.base_url = attach.base_url
        self.ready_after_s = ready_after_s
        self.ready_bytes: int | None = None
        self.ready_device_bytes = gpu.used_bytes() if self.is_here else None
        self.limit_bytes: int | None = None
        self._attach = attach
        self._began = time.monotonic()

    @property
    def pid(self) -> None:
        """None: somebody else's process is not ours to watch."""
        return

    @property
    def is_here(self) -> bool:
        """Whether the server runs on this machine, as its address tells."""
        host = httpx.URL(self.base_url).host
        return host in ("localhost", "::1") or host.startswith("127.")

    def alive(self) -> bool:
        """Tell whether it still answers."""
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            return _healthy(client, self._attach)

    def peak_bytes(self) -> int | None:
        """Return None: the memory of somebody else's process is not ours to see."""
        return None

    def death(self, wait_s: float = 2.0) -> Death | None:
        """Return that it is gone, if it does not answer within `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        while not self.alive():
            if time.monotonic() >= deadline:
                return self._evidence(Ended.EXITED, "it answers no longer")
            time.sleep(_POLL_S)
        return None

    def complaint(self, detail: str, *, silent: bool = False) -> Death:
        """Return the evidence for a server that lives but failed a request, or never answered."""
        return self._evidence(Ended.SILENT if silent else Ended.LIVES, detail)

    def _evidence(self, ended: Ended, detail: str) -> Death:
        after_s = time.monotonic() - self._began
        return Death(ended=ended, after_s=after_s, was_ready=True, detail=detail)


class _Process:
    """One engine process: its group, its log, the most memory it held."""

    def __init__(self, launch: Launch, log_path: Path, token: str, watch: LineWatcher) -> None:
        self.launch = launch
        self.token = token
        self.started = time.monotonic()
        self.peak: int | None = None
        self._watch = watch
        self._log_path = log_path
        self.port_was_free = not _answers(launch)
        self._partial_line = ""
        # Of a character that is half written the other half is waited for.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        argv = list(launch.argv)
        env = {
            **os.environ,
            **{name: str(value) for name, value in launch.env.items()},
            TOKEN_VARIABLE: token,
        }
        if launch.memory_limit_bytes is not None:
            # The shim always starts, so what it could not start must be found out before.
            if shutil.which(argv[0], path=env.get("PATH")) is None:
                raise FileNotFoundError(errno.ENOENT, "there is no such program", argv[0])
            limit = str(launch.memory_limit_bytes)
            argv = [sys.executable, "-I", "-S", str(_SHIM), limit, *argv]
        with log_path.open("wb") as log:
            self.popen = subprocess.Popen(  # noqa: S603 - argv is rendered from typed parts
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                # Its own session: a Ctrl-C at the terminal is for us, and the whole group can
                # be ended at once.
                start_new_session=True,
            )
        self._log = log_path.open("rb")

    def alive(self) -> bool:
        return self.exit_code() is None

    def exit_code(self) -> int | None:
        """Return how the process exited, negative for a signal, without reaping it.

        Until it is reaped its pid, and with it the id of the group, cannot be given to others;
        so the group may be signalled safely even after its leader has died.
        """
        if self.popen.returncode is not None:
            return self.popen.returncode
        seen = os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return None
        return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status

    def read_log(self) -> None:
        """Hand every line that is complete by now to the watcher; a carriage return ends one."""
        text = self._partial_line + self._decoder.decode(self._log.read())
        *lines, self._partial_line = text.replace("\r", "\n").split("\n")
        for line in lines:
            if line:
                self._watch(line)

    def sample_peak(self) -> int | None:
        seen = self._status("VmHWM" if self.launch.memory_limit_bytes is None else "VmPeak")
        if seen is not None:
            self.peak = max(self.peak or 0, seen)
        return self.peak

    def held_bytes(self) -> int | None:
        """Return what it holds now: its address space under a limit, else what is resident."""
        return self._status("VmRSS" if self.launch.memory_limit_bytes is None else "VmSize")

    def _status(self, field: str) -> int | None:
        """Return a size of the process in bytes, None where it has ended or nothing says so."""
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{self.popen.pid}/status").read_text().splitlines():
                if line.startswith(f"{field}:"):
                    return int(line.split()[1]) * 1024
        return None

    def owns_port(self) -> bool | None:
        """Tell whether the listening socket on our port is ours; None while nobody listens.

        A detached server's socket is nobody's in our tree: it counts as ours if nobody had the
        port when it was started.
        """
        if self.launch.detached:
            return self.port_was_free
        try:
            root = psutil.Process(self.popen.pid)
            family = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return None
        for process in family:
            with contextlib.suppress(psutil.Error):
                for connection in process.net_connections(kind="tcp"):
                    if (
                        connection.status == psutil.CONN_LISTEN
                        and connection.laddr.port == self.launch.port
                    ):
                        return True
        return False if _answers(self.launch) else None

    def death(self, ended: Ended, *, was_ready: bool, detail: str = "") -> Death:
        self.sample_peak()
        self.read_log()
        if self._partial_line:
            self._watch(self._partial_line)
            self._partial_line = ""
        return Death(
            ended=ended,
            after_s=time.monotonic() - self.started,
            was_ready=was_ready,
            exit_code=self.exit_code(),
            peak_bytes=self.peak,
            limit_bytes=self.launch.memory_limit_bytes,
            detail=detail,
        )

    def stop(self) -> Stopped:
        """End the whole group and wait until it is gone: ask, wait, kill, wait."""
        began = time.monotonic()
        family: list[psutil.Process] = []
        killed = False
        try:
            with contextlib.suppress(psutil.Error):
                family = psutil.Process(self.popen.pid).children(recursive=True)
            if self.alive():
                self._signal_group(signal.SIGTERM)
            killed = not self._wait(family, began + self.launch.stop_timeout_s)
        finally:
            # Also on a second Ctrl-C while waiting: nothing of ours is left behind. What has
            # left the process tree by re-parenting is still in the group.
            self._signal_group(signal.SIGKILL)
            for process in family:
                with contextlib.suppress(psutil.Error):
                    process.kill()  # compares start times first, so a reused pid is safe
            self.popen.wait()
            _run_to_stop(self.launch.stop_command)
            self._wait(family, time.monotonic() + 10.0)
            self._log.close()
        return Stopped(took_s=time.monotonic() - began, killed=killed)

    def _wait(self, family: list[psutil.Process], deadline: float) -> bool:
        """Wait until the process and its descendants are gone; tell whether they all are."""
        while self.alive() or not all(_gone(process) for process in family):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S / 2)
        return True

    def _signal_group(self, number: signal.Signals) -> None:
        if self.popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.popen.pid, number)


def _answers(launch: Launch) -> bool:
    """Tell whether anybody listens on the launch's port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((launch.host, launch.port)) == 0


def _run_to_stop(command: tuple[str, ...]) -> None:
    """Run a study's own command that removes a server which is not in our process tree.

    What it says is not ours to judge: it fails where the server went by itself.
    """
    if command:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(  # noqa: S603 - the words of the study, without a shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=60.0,
                check=False,
            )


def _gone(process: psutil.Process) -> bool:
    # An orphan that nobody reaps stays a zombie: it holds no memory and no port any more.
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Serving:
    """What `serving` yields: the server or its death, and, afterwards, how the stop went."""

    def __init__(self, result: Server | Attached | Death) -> None:
        self.result = result
        self.stopped: Stopped | None = None


@contextmanager
def serving(
    launch: Launch | Attach, *, log_path: Path, registry: Registry, watch: LineWatcher
) -> Iterator[Serving]:
    """Yield a running server, or how it failed to become one; leaving ends every trace of it.

    `watch` is called with each line of the log while it is written. On leaving, the process is
    terminated, then killed, waited for with its whole group, and taken off the registry.
    """
    if isinstance(launch, Attach):
        yield Serving(_attached(launch))
        return
    baseline = gpu.used_bytes()
    token = secrets.token_hex(16)
    registry.announce(token, launch.stop_command)
    try:
        process = _Process(launch, log_path, token, watch)
    except OSError as error:
        registry.forget(token)
        yield Serving(
            Death(
                ended=Ended.NOT_STARTED,
                after_s=0.0,
                was_ready=False,
                detail=f"cannot start {launch.argv[0]}: {error}",
            )
        )
        return
    outcome: Serving | None = None
    try:
        registry.confirm(token, process.popen.pid)
        outcome = Serving(_until_ready(process, baseline))
        yield outcome
    finally:
        stopped = replace(process.stop(), held_bytes=_held(baseline))
        if outcome is not None:
            outcome.stopped = stopped
        registry.forget(token)


def _until_ready(
    process: _Process, gpu_used_before: tuple[int, ...] | None = None
) -> Server | Death:
    """Wait for the first of: dead, ready, late. Asked in that order."""
    launch = process.launch
    deadline = process.started + launch.boot_timeout_s
    # trust_env: a proxy from the environment must not stand between us and loopback.
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while True:
            process.read_log()
            process.sample_peak()
            if not process.alive():
                return process.death(Ended.EXITED, was_ready=False)
            if _healthy(client, launch):
                ready_after_s = time.monotonic() - process.started
                owned = process.owns_port()
                if owned:
                    process.read_log()
                    return Server(launch, process, ready_after_s, gpu_used_before)
                if owned is False and process.alive():
                    return process.death(
                        Ended.PORT_TAKEN,
                        was_ready=False,
                        detail=f"port {launch.port} is answered by a process we did not start",
                    )
            if time.monotonic() >= deadline:
                return process.death(Ended.LATE, was_ready=False)
            time.sleep(_POLL_S)


def _attached(attach: Attach) -> Attached | Death:
    began = time.monotonic()
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        if _healthy(client, attach):
            return Attached(attach, time.monotonic() - began)
    return Death(
        ended=Ended.NOT_STARTED,
        after_s=time.monotonic() - began,
        was_ready=False,
        detail=f"nothing answers at {attach.base_url}{attach.health_path}",
    )


def _held(baseline: tuple[int, ...] | None) -> int | None:
    """Wait until device memory is back where it was; return how much is not, None without any.

    A driver frees a dead process's memory after its exit, and the next boot would find the card
    still full.
    """
    if baseline is None:
        return None
    deadline = time.monotonic() + _MEMORY_BACK_WITHIN_S
    while True:
        used = gpu.used_bytes()
        if used is None:
            return None
        held = sum(max(now - then, 0) for now, then in zip(used, baseline, strict=False))
        if held <= _MEMORY_BACK_TOLERANCE_BYTES:
            return 0
        if time.monotonic() >= deadline:
            return held
        time.sleep(_POLL_S)


def _healthy(client: httpx.Client, launch: Launch | Attach) -> bool:
    try:
        return client.get(launch.base_url + launch.health_path).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


@contextmanager
def terminating_as_interrupt(told: Callable[[], None] | None = None) -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C while inside: the engine is stopped, the finished is kept.

    `told` is called at once at either of them, in the middle of whatever is going on: it may only
    take note.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if told is not None:
            told()
        raise KeyboardInterrupt

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, interrupt)}
    # A terminal that is closed; under nohup it is ignored, and stays so.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, interrupt)
    # Where Ctrl-C is ignored, as in the background of a shell, it stays ignored.
    if told is not None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
