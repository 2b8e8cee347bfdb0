"""A headless Chromium, spoken to over its own debugging pipe: no driver and no further package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)

# Chromium reads its orders from descriptor 3 and answers on 4; the child moves them there itself,
# since these numbers may be anybody's in this process.
_EXEC = (
    "import os, sys; orders, answers = map(int, sys.argv[1:3]); "
    "os.dup2(orders, 3); os.dup2(answers, 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class BrowserError(RuntimeError):
    """What the browser refused or did not do in time."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """One line of the console, or an error nobody caught."""

    level: str
    text: str
    url: str


class Chromium:
    """One browser with one page. Use it in a `with`: leaving it ends the browser."""

    def __init__(self, binary: str, *, size: tuple[int, int] = (1600, 1000)) -> None:
        self._size = size
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self._log = (Path(self._profile.name) / "stderr").open("wb")
        orders, self._orders = _high_pipe()
        self._answers, answers = _high_pipe()
        self._process = subprocess.Popen(
            [
                sys.executable, "-S", "-c", _EXEC, str(orders), str(answers),
                binary, *OPTIONS, f"--window-size={size[0]},{size[1]}",
                f"--user-data-dir={self._profile.name}/profile", "about:blank",
            ],
            pass_fds=(orders, answers), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        os.close(orders)
        os.close(answers)
        self._received = b""
        self._last = 0
        self._session: str | None = None
        self.complaints: list[Complaint] = []
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser, and wait for it."""
        if self._process.poll() is None:
            try:
                self._send("Browser.close", session=False)
                self._process.wait(10)
            except (OSError, subprocess.TimeoutExpired):
                pass
        with contextlib.suppress(ProcessLookupError):  # Its helpers are in its group.
            os.killpg(self._process.pid, 9)
        self._process.wait(10)
        for descriptor in (self._orders, self._answers):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._log.close()
        self._profile.cleanup()

    def open(self, url: str) -> None:
        """Go to an address, and forget what was complained of before."""
        self.complaints.clear()
        # By way of an empty page: a change of the fragment alone would load nothing anew.
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(json.dumps(answer["exceptionDetails"])[:1000])
        return answer["result"].get("value")

    def text(self) -> str:
        """Return what a person can read on the page."""
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def wait(self, expression: str, *, deadline_s: float = 60.0) -> Any:
        """Return the value of an expression once it is truthy; fail when the deadline passes."""
        end = time.monotonic() + deadline_s
        while True:
            try:
                value = self.evaluate(expression)
            except BrowserError:  # The page was just being replaced.
                value = None
            if value:
                return value
            if time.monotonic() >= end:
                raise BrowserError(
                    f"waited {deadline_s:.0f} s in vain for {expression}; the page says:\n"
                    + self.text()[:3000]
                )
            # Answers to nothing we asked for arrive meanwhile.
            self._read_until(lambda message: False, time.monotonic() + 0.1)

    def wait_for_text(self, *words: str, deadline_s: float = 60.0) -> None:
        """Wait until all these words stand on the page."""
        self.wait(
            f"(t => {json.dumps(words)}.every(w => t.includes(w)))"
            "(document.body ? document.body.innerText : '')",
            deadline_s=deadline_s,
        )

    def screenshot(self, path: Path) -> None:
        """Write what is to be seen as PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def call(self, method: str, **params: Any) -> Any:
        """Give the page an order of the DevTools protocol and return the answer."""
        number = self._send(method, **params)
        answer = self._read_until(lambda message: message.get("id") == number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error'].get('message')}")
        return answer["result"]

    def _attach(self) -> None:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(each for each in targets if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=self._size[0], height=self._size[1],
            deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def _send(self, method: str, *, session: bool = True, **params: Any) -> int:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if session and self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._orders, data) :]
        return self._last

    def _read_until(
        self, wanted: Callable[[dict[str, Any]], bool], end: float | None = None
    ) -> dict[str, Any]:
        """Return the first message that is wanted; an empty one when a stated time is over."""
        limit = end if end is not None else time.monotonic() + 60.0
        while True:
            while b"\0" in self._received:
                line, _, self._received = self._received.partition(b"\0")
                message: dict[str, Any] = json.loads(line)
                self._note(message)
                if wanted(message):
                    return message
            ready, _, _ = select.select([self._answers], [], [], max(0.0, limit - time.monotonic()))
            if not ready:
                if end is not None:
                    return {}
                raise BrowserError("the browser did not answer for a minute")
            data = os.read(self._answers, 1 << 20)
            if not data:
                self._log.flush()
                said = (Path(self._profile.name) / "stderr").read_text(errors="replace")
                raise BrowserError(f"the browser has ended: {said[-1000:]}")
            self._received += data

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                said = details.get("exception", {}).get("description") or details.get("text", "")
                self.complaints.append(Complaint("exception", said, details.get("url", "")))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                said = " ".join(
                    str(each.get("value", each.get("description", ""))) for each in params["args"]
                )
                self.complaints.append(Complaint(params["type"], said, ""))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                entry = params["entry"]
                self.complaints.append(Complaint("log", entry["text"], entry.get("url", "")))


def _high_pipe() -> Sequence[int]:
    """Return a pipe whose descriptors are not those that Chromium's own are moved to."""
    low = os.pipe()
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in low]
    for each in low:
        os.close(each)
    return high
