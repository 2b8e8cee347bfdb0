"""The model on this host: found or assembled, checked, and read for the facts that need no boot."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sweeper.core.architecture import CannotTell, from_facts, weights_of
from sweeper.core.architecture_gguf import from_gguf
from sweeper.core.architecture_hf import hf_facts
from sweeper.core.pairs import Pairs, Scalar
from sweeper.engines import ModelFacts
from sweeper.gguf_header import GgufError, GgufHeader, read_gguf_header
from sweeper.safetensors_header import SafetensorsError, tensor_sizes, weight_files


class ModelError(Exception):
    """A model that cannot be used; the message says what, where, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """The model a study names: a path, or a package that carries the file.

    `variants` maps names to paths for an axis that sets `model.variant`; `facts` states what the
    files would say, for a `plan` on a machine that has none of them, and `variant_facts` what
    differs between the variants. What is stated beats what the files say; with `facts_yield` it
    is only for where there are none, as are figures that were published of a model.
    """

    name: str
    path: str | None = None
    package: str | None = None
    package_module: str | None = None
    sha256: str | None = None
    variants: Pairs = Pairs()
    draft_path: str | None = None
    facts_yield: bool = False
    facts: Pairs = Pairs()
    variant_facts: tuple[tuple[str, Pairs], ...] = ()

    def stated(self, variant: str | None) -> Pairs:
        """Return the facts that are stated of the model, or of one of its variants."""
        own = next((facts for name, facts in self.variant_facts if name == variant), Pairs())
        return _merged(self.facts, own)


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
    return {variant: _resolved(choice, variant) for variant in _variants(choice)}


def described_models(choice: ModelChoice) -> tuple[dict[str | None, ModelFacts], tuple[str, ...]]:
    """Return the models as their files say, else as the study says; and what is not here.

    For planning on a machine without the weights: a model of which only facts are stated is as
    good as one whose files were read, but that it cannot be served.
    """
    models: dict[str | None, ModelFacts] = {}
    problems: list[str] = []
    for variant in _variants(choice):
        try:
            models[variant] = _resolved(choice, variant)
        except ModelError as error:
            models[variant] = model = _as_stated(choice, variant)
            problems.append(str(error) if not model.facts else f"{error}{_goes_by_facts(model)}")
    return models, tuple(dict.fromkeys(problems))


def _goes_by_facts(model: ModelFacts) -> str:
    try:
        from_facts(model.facts)
    except CannotTell as lacks:
        return f" (planned from model.facts, without the KV cache: it {lacks})"
    return " (planned from model.facts)"


def _variants(choice: ModelChoice) -> tuple[str | None, ...]:
    return tuple(choice.variants) or (None,)


def _name(choice: ModelChoice, variant: str | None) -> str:
    return choice.name if variant is None else f"{choice.name}:{variant}"


def _resolved(choice: ModelChoice, variant: str | None) -> ModelFacts:
    name, stated = _name(choice, variant), choice.stated(variant)
    if variant is not None:
        return _facts(choice, Path(str(choice.variants[variant])), name, stated)
    if choice.path is not None:
        return _facts(choice, Path(choice.path), name, stated)
    if choice.package_module is not None:
        return _facts(choice, _assembled(choice), name, stated)
    described = "is described by model.facts and " if stated else ""
    raise ModelError(
        f"model {choice.name} {described}names no file: set model.path=/path/to/file.gguf, or "
        "choose another with model=NAME"
    )


def _as_stated(choice: ModelChoice, variant: str | None) -> ModelFacts:
    stated = choice.stated(variant)
    path = choice.path if variant is None else choice.variants[variant]
    return ModelFacts(
        name=_name(choice, variant),
        path="MODEL" if path is None else str(Path(str(path)).expanduser()),
        served_name=choice.name,
        size_bytes=_size_in(stated, "weights_bytes"),
        sha256="",
        facts=stated,
        draft_path=None if choice.draft_path is None else str(Path(choice.draft_path).expanduser()),
        draft_size_bytes=_size_in(stated, "draft_model_bytes"),
    )


def _size_in(facts: Pairs, name: str) -> int:
    size = facts.get(name, 0)
    return int(size) if isinstance(size, int | float) else 0


def _merged(read: Pairs, stated: Pairs) -> Pairs:
    """Return facts in which those that are stated replace those that were read."""
    kept = dict(read)
    if "kv_heads" in stated or "kv_layers" in stated:
        kept.pop("kv_heads_global", None)  # their product
    if "kv_heads_global" in stated:
        kept.pop("kv_heads", None)
    return Pairs({**kept, **stated})


def _facts(choice: ModelChoice, path: Path, name: str, stated: Pairs) -> ModelFacts:
    path = path.expanduser()
    if not path.exists():
        raise ModelError(
            f"model {name}: there is no file {path}; correct model.path or put the file there"
        )
    path = path.resolve()
    draft = None if choice.draft_path is None else Path(choice.draft_path).expanduser()
    if draft is not None and not draft.exists():
        raise ModelError(f"model {name}: there is no draft model {draft}; correct model.draft_path")
    digest = ""
    if not path.is_dir():
        digest = checksum(path)
        if choice.sha256 is not None and not choice.variants and digest != choice.sha256.lower():
            raise ModelError(
                f"model {name}: {path} has the checksum {digest}, but {choice.sha256} was asked "
                "for; the file is damaged or another one (remove it to have it made again, or "
                "correct model.sha256)"
            )
    read = _read_facts(path)
    return ModelFacts(
        name=name,
        path=str(path),
        served_name=choice.name,
        size_bytes=_size_of(path),
        sha256=digest,
        facts=read if choice.facts_yield and read else _merged(read, stated),
        draft_path=None if draft is None else str(draft.resolve()),
        draft_size_bytes=0 if draft is None else _size_of(draft),
    )


def _size_of(path: Path) -> int:
    """Return the size of a model's weights on disk, all parts of it."""
    files = weight_files(path) if path.is_dir() else _parts(path)
    return sum(each.stat().st_size for each in files)


def _parts(path: Path) -> Sequence[Path]:
    """Return the files of a GGUF that may be split; engines are given the first and find all."""
    found = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if found is None:
        return (path,)
    parts = [
        path.with_name(f"{found[1]}-{number:05}-of-{found[3]}.gguf")
        for number in range(1, int(found[3]) + 1)
    ]
    missing = next((each for each in parts if not each.exists()), None)
    if missing is not None:
        raise ModelError(f"{path} is one of {int(found[3])} parts, and there is no {missing}")
    return parts


def _read_facts(path: Path) -> Pairs:
    if path.is_dir():
        return _folder_facts(path)
    if path.suffix != ".gguf":
        return Pairs()
    try:
        first, *others = (read_gguf_header(each) for each in _parts(path))
        return gguf_facts(first, *others)
    except GgufError as error:
        raise ModelError(
            f"{error}; this is not a whole GGUF model, so no engine could load it"
        ) from error


def _folder_facts(folder: Path) -> Pairs:
    """Return the facts of a Hugging Face folder: its config, and the headers of its weights."""
    config = folder / "config.json"
    facts: dict[str, Scalar] = {}
    if config.is_file():
        try:
            described = json.loads(config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{config} is not JSON: {error}; no engine could load it") from error
        if isinstance(described, dict):
            facts |= hf_facts(described)
    if (template := _has_template(folder)) is not None:
        facts["chat_template"] = template
    layers = facts.get("layers")
    try:
        tensors = [tensor for file in weight_files(folder) for tensor in tensor_sizes(file)]
    except SafetensorsError:
        return Pairs(facts)
    if not tensors:
        return Pairs(facts)
    weights = weights_of(tensors, layers if isinstance(layers, int) else None)
    facts |= weights.facts()
    if not weights.tensors_in_draft and facts.get("draft_layers"):
        # Quantised copies often leave out the layers that the config still speaks of.
        facts = {name: value for name, value in facts.items() if not name.startswith("draft_")}
        facts |= {"draft_layers": 0, "draft_weights_bytes": 0}
    if weights.tensors_in_draft and facts.get("draft_layers") == 0:
        # Some configs leave their draft layer to the code; it is one like the others.
        facts["draft_layers"] = 1
    return Pairs(facts)


def _has_template(folder: Path) -> bool | None:
    """Tell whether a Hugging Face folder has a chat template; None where its files do not tell.

    It is a file of its own, or a part of the tokenizer's. Mistral's tokenizers have it built in.
    """
    if any((folder / f"chat_template.{kind}").is_file() for kind in ("jinja", "json")):
        return True
    if any(folder.glob("additional_chat_templates/*.jinja")):
        return True
    if any(folder.glob("tekken*.json")) or any(folder.glob("tokenizer.model.v*")):
        return None
    try:
        said = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return bool(said.get("chat_template")) if isinstance(said, dict) else None


def gguf_facts(header: GgufHeader, *more_parts: GgufHeader) -> Pairs:
    """Return the facts that decide memory, from a GGUF header and those of its other parts.

    The names are those of `sweeper.core.architecture.FACTS`; what the file does not tell is left
    out, and all of the architecture if a part of it cannot be told.
    """
    meta = header.metadata
    architecture = str(meta.get("general.architecture", ""))

    def number(key: str) -> int | None:
        value = meta.get(f"{architecture}.{key}")
        if isinstance(value, tuple):  # by layer
            value = max((each for each in value if isinstance(each, int)), default=None)
        return int(value) if isinstance(value, int | float) else None

    blocks = number("block_count")
    facts: dict[str, Scalar] = {
        "architecture": architecture,
        "layers": None if blocks is None else blocks - (number("nextn_predict_layers") or 0),
        "embedding_length": number("embedding_length"),
        "feed_forward_length": number("feed_forward_length"),
        "trained_context_tokens": number("context_length"),
        "vocabulary": number("vocab_size") or header.array_lengths.get("tokenizer.ggml.tokens"),
        "heads": number("attention.head_count"),
    }
    if "tokenizer.ggml.model" in meta:
        facts["chat_template"] = any(key.startswith("tokenizer.chat_template") for key in meta)
    layers = facts["layers"]
    with contextlib.suppress(CannotTell):
        facts |= from_gguf(meta).facts()
    facts |= weights_of(
        ((each.name, each.size_bytes) for part in (header, *more_parts) for each in part.tensors),
        layers if isinstance(layers, int) else None,
    ).facts()
    return Pairs({name: value for name, value in facts.items() if value is not None})


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
