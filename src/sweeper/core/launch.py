"""What is started, and how it ended: plain values between adapter and supervisor."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from sweeper.core.pairs import Pairs


class Phase(enum.StrEnum):
    """How far an engine came, in the order of a boot; every engine reports in these words."""

    SPAWN = "spawn"
    ARGS = "args"
    CONFIG = "config"
    DEVICE = "device"
    WEIGHTS = "weights"
    PROFILING = "profiling"
    CONTEXT = "context"
    KV = "kv"
    COMPUTE = "compute"
    DRAFT = "draft"
    CAPTURE = "capture"
    WARMUP = "warmup"
    READY = "ready"
    SERVING = "serving"

    @property
    def order(self) -> int:
        """The position of this phase in a boot, from 0."""
        return list(Phase).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One engine process to be: rendered once from typed parts and never read back.

    `argv` and `env` (added to the inherited environment) are exactly what runs;
    `memory_limit_bytes` is an address-space limit on the process, or None. Times in seconds.
    `port_argument` is the index in `argv` of the port, where it is an argument of its own.
    `detached` says that the server will run outside the process tree of what is started, as in a
    container; `stop_command` is then what makes sure that it is gone.
    """

    argv: tuple[str, ...]
    env: Pairs
    host: str
    port: int
    health_path: str
    boot_timeout_s: float
    stop_timeout_s: float = 10.0
    memory_limit_bytes: int | None = None
    port_argument: int | None = None
    detached: bool = False
    stop_command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at = self.port_argument
        if at is not None and self.argv[at] != str(self.port):
            raise ValueError(f"argument {at} is {self.argv[at]!r}, not the port {self.port}")
        if not self.argv or not all(isinstance(part, str) for part in self.argv):
            raise ValueError(f"argv must be strings and not empty, got {self.argv!r}")
        if self.host not in ("127.0.0.1", "::1"):
            raise ValueError(f"an engine binds to loopback only, got {self.host}")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes <= 0:
            raise ValueError(f"a memory limit must be positive, got {self.memory_limit_bytes}")

    def wrapped(
        self, prefix: tuple[str, ...], *, detached: bool, stop_command: tuple[str, ...]
    ) -> Launch:
        """Return this launch with words before its command: a container, a patching wrapper.

        `{port}` in a word stands for the port, so that each launch can have a name of its own.
        """
        at = self.port_argument

        def filled(words: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(word.replace("{port}", str(self.port)) for word in words)

        return replace(
            self,
            argv=(*filled(prefix), *self.argv),
            port_argument=None if at is None else at + len(prefix),
            detached=detached,
            stop_command=filled(stop_command),
        )

    @property
    def base_url(self) -> str:
        """The address that clients of this engine use."""
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """A server that runs already: it is measured, and never stopped."""

    base_url: str
    health_path: str


class Ended(enum.StrEnum):
    """How the supervisor saw an engine end, before anybody has judged why."""

    EXITED = "exited"
    """The process was gone: look at its exit code and its log."""
    LATE = "late"
    """It was alive but not ready when its boot deadline passed."""
    PORT_TAKEN = "port_taken"
    """Another process owns the listening socket on its port."""
    NOT_STARTED = "not_started"
    """The operating system could not start it at all."""
    SILENT = "silent"
    """It has not ended: it still runs, but sent nothing for as long as it may be silent."""
    LIVES = "lives"
    """It has not ended: it still runs, but a request to it failed (`detail` says how)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Evidence of an engine's end, or of its failing a request, gathered without judging it.

    `exit_code` is negative for a signal, None where there was no exit. `peak_bytes` is the
    largest address space seen; sizes in bytes, times in seconds since the start.
    """

    ended: Ended
    after_s: float
    was_ready: bool
    exit_code: int | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    detail: str = ""
