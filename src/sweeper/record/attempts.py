"""The folder of a study's attempts: each one whole, or not there."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

from sweeper.core.outcome import Attempt
from sweeper.record.codec import (
    CodecError,
    decode_attempt,
    encode_attempt,
    readable,
    samples_from_lines,
    samples_to_lines,
    scrub,
    secret_values,
)

ATTEMPT_JSON = "attempt.json"
SAMPLES_JSONL = "samples.jsonl"
ENGINE_LOG = "engine.log"

_COMMITTED = re.compile(r"\d{4,}")


class RecordError(RuntimeError):
    """A record on disk that cannot be read or written; says where, and what to do."""


class Attempts:
    """The attempts of one study on disk, each in a folder `NNNN/` of its own.

    It holds attempt.json, samples.jsonl and engine.log.
    An attempt grows in `.NNNN.partial/` and gets its name in one rename, so a folder with a
    number is complete, whatever killed the process and when.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._held: dict[int, weakref.finalize[..., Attempts]] = {}

    def folder(self, number: int) -> Path:
        """Return where this attempt lies once it is committed."""
        return self.root / f"{number:04d}"

    def _partial(self, number: int) -> Path:
        return self.root / f".{number:04d}.partial"

    def begin(self, number: int) -> Path:
        """Make and return the empty working folder of an attempt; the engine log goes there.

        What a killed process left under this number is removed. Raises RecordError where the
        attempt is recorded already, or another live process is writing it.
        """
        if number < 1:
            raise ValueError(f"attempts are counted from 1, got {number}")
        self._refuse_recorded(number)
        partial = self._partial(number)
        self._release(number)
        if partial.exists():
            self._hold(number)
            shutil.rmtree(partial)
            self._release(number)
        partial.mkdir(parents=True)
        self._hold(number)
        return partial

    def commit(self, attempt: Attempt) -> Path:
        """Write the attempt and give its folder its name; return it.

        After this the attempt survives a loss of power. Raises RecordError where it is recorded
        already or cannot be written; then the working folder stays, and nothing else changed.
        """
        self._refuse_recorded(attempt.number)
        partial, final = self._partial(attempt.number), self.folder(attempt.number)
        # ASCII, because a log line that was not UTF-8 may sit in a cause as lone surrogates.
        secrets = secret_values(attempt, os.environ)
        encoded = encode_attempt(attempt, secrets)
        lines = [json.dumps(each, allow_nan=False) + "\n" for each in samples_to_lines(encoded)]
        text = json.dumps(encoded, indent=2, allow_nan=False) + "\n"
        try:
            partial.mkdir(parents=True, exist_ok=True)
            _scrub_file(partial / ENGINE_LOG, secrets)
            (partial / ATTEMPT_JSON).write_text(text, encoding="ascii")
            (partial / SAMPLES_JSONL).write_text("".join(lines), encoding="ascii")
            for name in (ATTEMPT_JSON, SAMPLES_JSONL, ENGINE_LOG):
                if (partial / name).is_file():
                    _sync(partial / name)
            _sync(partial)
            partial.rename(final)
            _sync(self.root)
        except OSError as error:
            raise RecordError(
                f"attempt {attempt.number} could not be written to {partial}: "
                f"{error.strerror or error}; nothing was recorded under {final.name}. "
                "Mend that and start the study again: it repeats this attempt"
            ) from error
        self._release(attempt.number)
        return final

    def discard(self, number: int) -> None:
        """Remove the working folder of an attempt that is not to be recorded, if there is one."""
        shutil.rmtree(self._partial(number), ignore_errors=True)
        self._release(number)

    def all(self) -> list[Attempt]:
        """Return every committed attempt, in the order of their numbers.

        Raises RecordError where a record is damaged, naming it: a study that silently forgot a
        measurement would draw another front.
        """
        return [self.read(number) for number in self._numbers()]

    def read(self, number: int) -> Attempt:
        """Return one committed attempt; raises RecordError where it is missing or damaged."""
        path = self.folder(number) / ATTEMPT_JSON
        advice = f"restore the file, or move {path.parent} out of {self.root} to go on without it"
        try:
            encoded = readable(json.loads(path.read_text(encoding="utf-8")))
            samples = _samples(path.with_name(SAMPLES_JSONL))
            attempt = decode_attempt({**encoded, "samples": samples})
        except OSError as error:
            raise RecordError(
                f"{error.filename or path}: {error.strerror or error}; {advice}"
            ) from error
        except CodecError as error:
            raise RecordError(f"{path}: {error}; {advice}") from error
        except ValueError as error:  # Not JSON, or not UTF-8.
            raise RecordError(f"{path} is not readable JSON ({error}); {advice}") from error
        if attempt.number != number:
            raise RecordError(
                f"{path} says it is attempt {attempt.number}, its folder says {number}; {advice}"
            )
        return attempt

    def next_number(self) -> int:
        """Return the number after the last committed attempt, 1 for the first."""
        return max(self._numbers(), default=0) + 1

    def _numbers(self) -> list[int]:
        if not self.root.is_dir():
            return []
        return sorted(
            int(entry.name)
            for entry in self.root.iterdir()
            if _COMMITTED.fullmatch(entry.name) and entry.is_dir()
        )

    def _refuse_recorded(self, number: int) -> None:
        final = self.folder(number)
        if final.exists():
            raise RecordError(
                f"attempt {number} is recorded already in {final}, and a record is never "
                f"overwritten; take the next number ({self.next_number()})"
            )

    def _hold(self, number: int) -> None:
        """Lock the working folder while this process lives: a lock dies with its holder."""
        descriptor = os.open(self._partial(number), os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise RecordError(
                f"{self._partial(number)} is being written by another process; "
                "is this study running twice? Wait for the other one, or stop it"
            ) from None
        except OSError:
            pass  # NFS cannot lock a folder. The lock is a courtesy, the rename is the promise.
        self._held[number] = weakref.finalize(self, os.close, descriptor)

    def _release(self, number: int) -> None:
        held = self._held.pop(number, None)
        if held is not None:
            held()


def _samples(path: Path) -> list[Any]:
    with path.open(encoding="utf-8") as lines:
        try:
            return samples_from_lines(lines)
        except CodecError as error:
            raise CodecError(f"{path.name}, {error.path}", error.message) from error


def _scrub_file(path: Path, secrets: tuple[str, ...]) -> None:
    """Hide secrets in a log, line by line; an engine prints the arguments it was given."""
    if not secrets or not path.is_file():
        return
    clean = path.with_suffix(".clean")
    with (
        path.open("r", encoding="utf-8", errors="surrogateescape", newline="") as dirty,
        clean.open("w", encoding="utf-8", errors="surrogateescape", newline="") as out,
    ):
        for line in dirty:
            out.write(scrub(line, secrets))
    clean.replace(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
