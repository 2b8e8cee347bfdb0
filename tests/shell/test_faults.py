"""Two hundred boots with faults at random moments: whatever happens, nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
from tests.shell.conftest import MARK, SHORT, engines_of, fake_job

from sweeper.core.outcome import Attempt, Broken, kind
from sweeper.core.pairs import Pairs
from sweeper.engines.fake_server import ENDINGS
from sweeper.server import Registry
from sweeper.trial import attempt

BOOTS = 200
AT_ONCE = 4
FAULTS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGSEGV, None)


def _strike(folder: Path, fault: signal.Signals, after_s: float, done: threading.Event) -> None:
    """Send the signal to the engine that the registry names, once, at this moment or never."""
    if done.wait(after_s):
        return
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        for entry in json.loads((folder / "started.json").read_text()).values():
            if entry["pid"] is not None:
                process = psutil.Process(entry["pid"])
                if process.create_time() == entry["created"]:
                    os.kill(process.pid, fault)


def _boot(number: int, root: Path, mark: str) -> tuple[Attempt, int]:
    luck = random.Random(number)
    folder = root / str(number)
    folder.mkdir()
    job = fake_job(
        env=Pairs({MARK: mark}),
        ending=luck.choice((*ENDINGS, *["none"] * len(ENDINGS))),
        n_max=luck.choice((0, 4)),
        capacity_mib=luck.choice((900.0, 4096.0)),
        boot_s=luck.choice((0.0, 2.0)),
        ending_after=luck.randrange(5),
        runtime_oom_tokens=400,
        boot_timeout_s=2.0,
        stop_timeout_s=0.3,
        workload=replace(SHORT, silence_timeout_s=1.0),
    )
    fault = luck.choice(FAULTS)
    done = threading.Event()
    striker = threading.Thread(
        target=_strike, args=(folder, fault or signal.SIGKILL, luck.uniform(0.0, 0.8), done)
    )
    if fault is not None:
        striker.start()
    try:
        made = attempt(
            job,
            next(job.space.points()),
            number=1,
            trial=0,
            folder=folder,
            registry=Registry(folder / "started.json"),
            watch=lambda _: None,
        )
    finally:
        done.set()
        if fault is not None:
            striker.join()
    return made, int(made.argv[made.port_argument or 0])


def test_two_hundred_boots_with_faults_leave_no_process_no_port_and_no_entry(
    tmp_path: Path, mark: str
) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        boots = list(pool.map(lambda number: _boot(number, tmp_path, mark), range(BOOTS)))
    assert engines_of(mark) == []
    for number, (_, port) in enumerate(boots):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
        assert json.loads((tmp_path / str(number) / "started.json").read_text()) == {}
    kinds = {kind(made.outcome) for made, _ in boots}
    assert {"measured", "infeasible", "broken"} <= kinds
    struck = [made for made, _ in boots if isinstance(made.outcome, Broken)]
    assert all(made.outcome.finding.explanation for made in struck)
