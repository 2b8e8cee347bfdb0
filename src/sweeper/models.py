"""The model on this host: found or assembled, checked, and read for the facts that need no boot."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sweeper.core.pairs import Pairs, Scalar
from sweeper.engines import ModelFacts
from sweeper.gguf_header import GgufError, GgufHeader, read_gguf_header


class ModelError(Exception):
    """A model that cannot be used; the message says what, where, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """The model a study names: a path, or a package that carries the file.

    `variants` maps names to paths for an axis that sets `model.variant`; `facts` states what the
    files would say, for a `plan` on a machine that has none of them.
    """

    name: str
    path: str | None = None
    package: str | None = None
    package_module: str | None = None
    sha256: str | None = None
    variants: Pairs = Pairs()
    draft_path: str | None = None
    facts: Pairs = Pairs()


def cache_dir() -> Path:
    """Return the folder for assembled models and remembered checksums, made if missing."""
    root = os.environ.get("SWEEPER_CACHE") or str(
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sweeper"
    )
    path = Path(root)
    path.mkdir(parents=True, exist_ok=True)
    return path


def resolve_models(choice: ModelChoice) -> dict[str | None, ModelFacts]:
    """Return the facts of the model and of each variant, keyed by variant (None: no variant).

    Raises ModelError before anything is booted: nothing named, file missing, package missing,
    checksum wrong, not readable.
    """
    if choice.variants:
        return {
            variant: _facts(choice, Path(str(path)), f"{choice.name}:{variant}")
            for variant, path in choice.variants.items()
        }
    if choice.path is not None:
        return {None: _facts(choice, Path(choice.path), choice.name)}
    if choice.package_module is not None:
        return {None: _facts(choice, _assembled(choice), choice.name)}
    raise ModelError(
        f"model {choice.name} names no file: set model.path=/path/to/file.gguf, or choose another "
        "with model=NAME"
    )


def _facts(choice: ModelChoice, path: Path, name: str) -> ModelFacts:
    path = path.expanduser()
    if not path.exists():
        raise ModelError(
            f"model {name}: there is no file {path}; correct model.path or put the file there"
        )
    path = path.resolve()
    draft = None if choice.draft_path is None else Path(choice.draft_path).expanduser()
    if draft is not None and not draft.exists():
        raise ModelError(f"model {name}: there is no draft model {draft}; correct model.draft_path")
    if path.is_dir():
        # A Hugging Face folder: its files are read by the engine, its size is that of the weights.
        size = sum(each.stat().st_size for each in path.glob("*.safetensors"))
        digest, facts = "", choice.facts
    else:
        digest = checksum(path)
        size = path.stat().st_size
        if choice.sha256 is not None and not choice.variants and digest != choice.sha256.lower():
            raise ModelError(
                f"model {name}: {path} has the checksum {digest}, but {choice.sha256} was asked "
                "for; the file is damaged or another one (remove it to have it made again, or "
                "correct model.sha256)"
            )
        facts = Pairs({**_read_facts(path), **choice.facts})
    return ModelFacts(
        name=name,
        path=str(path),
        served_name=choice.name,
        size_bytes=size,
        sha256=digest,
        facts=facts,
        draft_path=None if draft is None else str(draft.resolve()),
        draft_size_bytes=0 if draft is None else draft.stat().st_size,
    )


def _read_facts(path: Path) -> Pairs:
    if path.suffix != ".gguf":
        return Pairs()
    try:
        return gguf_facts(read_gguf_header(path))
    except GgufError as error:
        raise ModelError(
            f"{error}; this is not a whole GGUF model, so no engine could load it"
        ) from error


_EVERY_NTH_LAYER_IS_GLOBAL = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4}
"""Sliding-window architectures whose files do not state the pattern; the engine hard-codes it."""


def gguf_facts(header: GgufHeader) -> Pairs:
    """Return the facts that decide memory, from a GGUF header.

    `kv_heads_global` and `kv_heads_window` sum the KV heads over all layers with full and with
    sliding-window attention; lengths in values a head, windows and contexts in tokens.
    """
    meta = header.metadata
    architecture = str(meta.get("general.architecture", ""))

    def number(key: str) -> int | None:
        value = meta.get(f"{architecture}.{key}")
        return int(value) if isinstance(value, int | float) else None

    layers = number("block_count")
    facts: dict[str, Scalar] = {
        "architecture": architecture,
        "layers": layers,
        "embedding_length": number("embedding_length"),
        "feed_forward_length": number("feed_forward_length"),
        "trained_context_tokens": number("context_length"),
        "vocabulary": number("vocab_size") or header.array_lengths.get("tokenizer.ggml.tokens"),
        "weights_bytes": header.data_bytes,
    }
    heads = meta.get(f"{architecture}.attention.head_count")
    most_heads = max(heads, default=0) if isinstance(heads, tuple) else heads
    if isinstance(most_heads, int):
        facts["heads"] = most_heads
    kv_heads = meta.get(f"{architecture}.attention.head_count_kv", most_heads)
    if layers is not None and isinstance(kv_heads, int | tuple):
        each = [int(n) for n in kv_heads] if isinstance(kv_heads, tuple) else [kv_heads] * layers  # type: ignore[arg-type]
        window = number("attention.sliding_window")
        slides = (
            _sliding_layers(
                meta.get(f"{architecture}.attention.sliding_window_pattern"), architecture, layers
            )
            if window
            else [False] * layers
        )
        facts["kv_heads_global"] = sum(n for n, s in zip(each, slides, strict=False) if not s)
        facts["kv_heads_window"] = sum(n for n, s in zip(each, slides, strict=False) if s)
        facts["window_tokens"] = window
        embedding = facts["embedding_length"]
        derived = (
            embedding // most_heads
            if isinstance(embedding, int) and isinstance(most_heads, int) and most_heads
            else None
        )
        facts["key_length"] = number("attention.key_length") or derived
        facts["value_length"] = number("attention.value_length") or derived
    return Pairs({name: value for name, value in facts.items() if value is not None})


def _sliding_layers(pattern: object, architecture: str, layers: int) -> list[bool]:
    if isinstance(pattern, tuple):
        return [bool(each) for each in pattern]
    every = pattern if isinstance(pattern, int) else _EVERY_NTH_LAYER_IS_GLOBAL.get(architecture)
    if not every:
        # Unknown: counting every layer as global errs on the side of more memory.
        return [False] * layers
    return [(layer + 1) % every != 0 for layer in range(layers)]


def _assembled(choice: ModelChoice) -> Path:
    """Return the path of a model that a Python package carries, put together once."""
    assert choice.package_module is not None
    target = cache_dir() / "models" / f"{choice.package_module}.gguf"
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if target.exists():
            return target
        if not _importable(choice.package_module):
            package = choice.package or choice.package_module
            raise ModelError(
                f"model {choice.name} comes in the package {package}, which is not "
                f"installed here: pip install {package}"
            )
        partial = target.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        module = importlib.import_module(choice.package_module)
        try:
            module.assemble(partial)
        except Exception as error:  # whatever a stranger's package raises
            partial.unlink(missing_ok=True)
            raise ModelError(
                f"model {choice.name}: {choice.package_module} could not put it together: "
                f"{type(error).__name__}: {error}"
            ) from error
        partial.replace(target)
    return target


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, remembered by size and time of change.

    Hashing 20 GB takes a minute, and the same file serves many studies.
    """
    stat = path.stat()
    known = cache_dir() / "checksums.json"
    with _locked(known.with_suffix(".lock")):
        try:
            table = json.loads(known.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            table = {}
        entry = table.get(str(path))
        stamp = [stat.st_size, stat.st_mtime_ns]
        if isinstance(entry, dict) and entry.get("stamp") == stamp:
            return str(entry["sha256"])
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        table[str(path)] = {"stamp": stamp, "sha256": digest}
        partial = known.with_suffix(".partial")
        partial.write_text(json.dumps(table, indent=1))
        partial.replace(known)
    return digest
