"""The model on this host: found, assembled once, and checked before anything is booted."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_hf import write_tiny_hf

from sweeper.core.architecture import from_facts
from sweeper.core.pairs import Pairs
from sweeper.models import (
    ModelChoice,
    ModelError,
    cache_dir,
    checksum,
    described_models,
    resolve_models,
)

Packaged = Callable[..., ModelChoice]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SWEEPER_CACHE", str(folder))
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", layers=1)


@pytest.fixture
def packaged(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Packaged:
    """Return a maker of models in packages, whose module notes each time that it assembles."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    (tmp_path / "site").mkdir()

    def maker(module: str, *, fails: bool = False) -> ModelChoice:
        (tmp_path / "site" / f"{module}.py").write_text(
            "import pathlib, shutil\n"
            "def assemble(path):\n"
            f"    with open({str(tmp_path / 'assembled')!r}, 'a') as notes:\n"
            "        notes.write(f'{path}\\n')\n"
            f"    shutil.copy({str(tiny)!r}, path)\n"
            + ("    raise OSError('no space left')\n" if fails else "")
        )
        sys.modules.pop(module, None)
        return ModelChoice(name=module, package=module.replace("_", "-"), package_module=module)

    return maker


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_model_is_read_for_its_facts(tiny: Path) -> None:
    (facts,) = resolve_models(ModelChoice(name="tiny", path=str(tiny))).values()
    assert (facts.name, facts.served_name, facts.path) == ("tiny", "tiny", str(tiny))
    assert (facts.size_bytes, facts.sha256) == (tiny.stat().st_size, sha256(tiny))
    assert (facts.facts["layers"], facts.facts["architecture"]) == (1, "llama")
    assert (facts.draft_path, facts.draft_size_bytes) == (None, 0)


def test_stated_facts_beat_those_of_the_file(tiny: Path) -> None:
    choice = ModelChoice(name="tiny", path=str(tiny), facts=Pairs(layers=7, extra="x"))
    (facts,) = resolve_models(choice).values()
    assert (facts.facts["layers"], facts.facts["extra"]) == (7, "x")
    assert facts.facts["heads"] == 4


def test_a_model_without_a_file_says_how_to_name_one() -> None:
    with pytest.raises(ModelError, match=r"names no file: set model\.path="):
        resolve_models(ModelChoice(name="unnamed"))


@pytest.mark.parametrize("field", ["path", "draft_path"])
def test_a_missing_file_is_named_with_its_setting(field: str, tiny: Path, tmp_path: Path) -> None:
    choice = replace(ModelChoice(name="m", path=str(tiny)), **{field: str(tmp_path / "none.gguf")})
    with pytest.raises(ModelError, match=rf"model m: .*none\.gguf; correct model\.{field}"):
        resolve_models(choice)


def test_a_path_may_start_at_home(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tiny.parent))
    choice = ModelChoice(name="m", path="~/tiny.gguf", draft_path="~/tiny.gguf")
    (facts,) = resolve_models(choice).values()
    assert facts.path == facts.draft_path == str(tiny)
    assert facts.draft_size_bytes == tiny.stat().st_size


def test_the_right_checksum_passes_in_either_case(tiny: Path) -> None:
    choice = ModelChoice(name="m", path=str(tiny), sha256=sha256(tiny))
    assert resolve_models(choice)
    assert resolve_models(replace(choice, sha256=sha256(tiny).upper()))


def test_a_wrong_checksum_is_refused_with_both(tiny: Path) -> None:
    with pytest.raises(ModelError) as refused:
        resolve_models(ModelChoice(name="m", path=str(tiny), sha256="0" * 64))
    for part in (str(tiny), sha256(tiny), "0" * 64, "model.sha256"):
        assert part in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF\x03\x00\x00\x00\x01"])
def test_a_file_that_is_no_whole_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "half.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"half\.gguf .*not a whole GGUF model"):
        resolve_models(ModelChoice(name="m", path=str(tmp_path / "half.gguf")))


def test_a_file_of_another_format_is_taken_without_facts(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"12345")
    (facts,) = resolve_models(ModelChoice(name="m", path=str(tmp_path / "weights.bin"))).values()
    assert (facts.size_bytes, facts.facts) == (5, Pairs())


def test_a_folder_of_safetensors_has_the_size_of_its_weights(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    for name, size in (("a.safetensors", 10), ("b.safetensors", 5), ("tokenizer.json", 99)):
        (folder / name).write_bytes(bytes(size))
    choice = ModelChoice(name="m", path=str(folder), facts=Pairs(layers=3))
    (facts,) = resolve_models(choice).values()
    assert (facts.size_bytes, facts.sha256, facts.facts) == (15, "", Pairs(layers=3))


# ---- Hugging Face folders, split files ---------------------------------------------------------


def test_a_folder_is_read_for_its_facts(tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "hf")
    (facts,) = resolve_models(ModelChoice(name="m", path=str(folder))).values()
    assert facts.facts["layers"] == 2
    assert facts.facts["vocabulary"] == 512
    assert from_facts(facts.facts).kv_bytes_per_token(16) == 2048
    assert facts.facts["embedding_bytes"] == facts.facts["output_bytes"] == 512 * 64 * 4
    weights = facts.facts["weights_bytes"]
    assert isinstance(weights, int)
    assert facts.size_bytes - 10_000 < weights < facts.size_bytes


def drafting_folder(folder: Path, stated: int, *tensors: str) -> ModelChoice:
    write_tiny_hf(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": stated}))
    header = json.dumps({name: {"data_offsets": [0, 6]} for name in tensors}).encode()
    more = len(header).to_bytes(8, "little") + header
    (folder / "model-mtp.safetensors").write_bytes(more)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    return ModelChoice(name="m", path=str(folder))


def test_draft_layers_are_those_that_have_weights(tmp_path: Path) -> None:
    both = drafting_folder(tmp_path / "a", 1, "model.layers.2.mlp.up_proj.weight")
    (facts,) = resolve_models(both).values()
    assert (facts.facts["draft_layers"], facts.facts["draft_weights_bytes"]) == (1, 6)
    left_out = drafting_folder(tmp_path / "b", 1, "model.layers.1.mlp.more.weight")
    (facts,) = resolve_models(left_out).values()
    assert (facts.facts["draft_layers"], facts.facts["draft_weights_bytes"]) == (0, 0)
    assert "draft_kv_heads" not in facts.facts
    unsaid = drafting_folder(tmp_path / "c", 0, "mtp.layers.0.mlp.up_proj.weight")
    (facts,) = resolve_models(unsaid).values()
    assert from_facts(facts.facts).draft.heads == 4


def test_a_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "hf")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        resolve_models(ModelChoice(name="m", path=str(folder)))


def test_a_split_file_is_one_model(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-{number:05}-of-00002.gguf" for number in (1, 2)]
    write_tiny_gguf(parts[0], layers=1)
    choice = ModelChoice(name="m", path=str(parts[0]))
    with pytest.raises(ModelError, match=r"one of 2 parts, and there is no .*00002-of-00002"):
        resolve_models(choice)
    write_tiny_gguf(parts[1], layers=1)
    (facts,) = resolve_models(choice).values()
    assert facts.size_bytes == sum(each.stat().st_size for each in parts)
    (one,) = resolve_models(
        ModelChoice(name="m", path=str(write_tiny_gguf(tmp_path / "one.gguf", layers=1)))
    ).values()
    assert facts.facts["weights_bytes"] == 2 * int(str(one.facts["weights_bytes"]))


# ---- Models that are only described ------------------------------------------------------------

DESCRIBED = Pairs(layers=2, kv_heads=4, key_length=64, value_length=64, weights_bytes=1000)


def test_a_described_model_can_be_planned_and_not_run() -> None:
    choice = ModelChoice(name="m", facts=DESCRIBED)
    models, problems = described_models(choice)
    assert list(models) == [None]
    assert (models[None].size_bytes, models[None].facts) == (1000, DESCRIBED)
    assert "is described by model.facts and names no file" in problems[0]
    assert "(planned from model.facts)" in problems[0]
    with pytest.raises(ModelError, match=r"model m is described .*set model\.path="):
        resolve_models(choice)


def test_a_described_model_that_lacks_a_fact_says_which() -> None:
    _, problems = described_models(ModelChoice(name="m", facts=Pairs(weights_bytes=1)))
    assert "without the KV cache: it does not say kv_heads_global" in problems[0]
    _, problems = described_models(ModelChoice(name="m"))
    assert "planned" not in problems[0]


def test_variants_are_described_each_with_what_differs(tiny: Path, tmp_path: Path) -> None:
    choice = ModelChoice(
        name="m",
        variants=Pairs(here=str(tiny), small=str(tmp_path / "s"), large=str(tmp_path / "l")),
        facts=DESCRIBED,
        variant_facts=(("large", Pairs(weights_bytes=2000)),),
    )
    models, problems = described_models(choice)
    assert (models["small"].size_bytes, models["large"].size_bytes) == (1000, 2000)
    assert models["here"].size_bytes == tiny.stat().st_size
    assert len(problems) == 2
    assert models["small"].path == str(tmp_path / "s")


def test_stated_heads_replace_those_that_were_read(tiny: Path) -> None:
    choice = ModelChoice(name="m", path=str(tiny), facts=Pairs(kv_heads=1, kv_layers=1))
    (facts,) = resolve_models(choice).values()
    assert from_facts(facts.facts).full.heads == 1


# ---- Variants ----------------------------------------------------------------------------------


def test_every_variant_is_a_model_of_its_own(tmp_path: Path, tiny: Path) -> None:
    larger = write_tiny_gguf(tmp_path / "larger.gguf", layers=2)
    choice = ModelChoice(name="m", variants=Pairs(small=str(tiny), large=str(larger)))
    models = resolve_models(choice)
    assert set(models) == {"small", "large"}
    assert [models[each].name for each in ("small", "large")] == ["m:small", "m:large"]
    assert {each.served_name for each in models.values()} == {"m"}
    assert models["large"].facts["layers"] == 2
    assert models["large"].sha256 != models["small"].sha256


def test_a_missing_variant_is_named(tmp_path: Path, tiny: Path) -> None:
    choice = ModelChoice(name="m", variants=Pairs(small=str(tiny), large=str(tmp_path / "no")))
    with pytest.raises(ModelError, match="model m:large: there is no file"):
        resolve_models(choice)


# ---- Models in packages ------------------------------------------------------------------------


def test_a_packaged_model_is_assembled_once(
    packaged: Packaged, tmp_path: Path, cache: Path
) -> None:
    choice = packaged("model_for_tests_a")
    (first,) = resolve_models(choice).values()
    (second,) = resolve_models(choice).values()
    assert first == second
    assert Path(first.path) == cache / "models" / "model_for_tests_a.gguf"
    assert first.facts["layers"] == 1
    assert len((tmp_path / "assembled").read_text().splitlines()) == 1
    # It was written under another name first: a file of the final name is always whole.
    assert first.path not in (tmp_path / "assembled").read_text()


def test_what_an_interrupted_assembly_left_is_no_model(
    packaged: Packaged, tmp_path: Path, cache: Path
) -> None:
    choice = packaged("model_for_tests_b", fails=True)
    with pytest.raises(ModelError, match=r"could not put it together: OSError.*no space left"):
        resolve_models(choice)
    assert not (cache / "models" / "model_for_tests_b.gguf").exists()
    packaged("model_for_tests_b")
    assert resolve_models(choice)
    assert len((tmp_path / "assembled").read_text().splitlines()) == 2


def test_a_package_that_is_not_installed_is_named_with_its_command() -> None:
    for module in ("no_such_package_here", "no_such_package_here.inner"):
        choice = ModelChoice(name="m", package="no-such-package", package_module=module)
        with pytest.raises(ModelError, match="pip install no-such-package"):
            resolve_models(choice)
    with pytest.raises(ModelError, match="pip install no_such_package_here"):
        resolve_models(ModelChoice(name="m", package_module="no_such_package_here"))


def test_a_path_beats_a_package(packaged: Packaged, tiny: Path, cache: Path) -> None:
    choice = replace(packaged("model_for_tests_c"), path=str(tiny))
    (facts,) = resolve_models(choice).values()
    assert facts.path == str(tiny)
    assert not (cache / "models").exists()


# ---- The cache ---------------------------------------------------------------------------------


def test_the_cache_is_where_the_environment_says(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_dir() == cache
    assert cache.is_dir()
    monkeypatch.delenv("SWEEPER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "sweeper"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "sweeper"


def test_a_checksum_is_remembered_until_the_file_changes(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"one")
    assert checksum(file) == sha256(file)
    # What is remembered is what is told: nobody reads 20 GB again for the same file.
    known = cache / "checksums.json"
    table = json.loads(known.read_text())
    table[str(file)]["sha256"] = "remembered"
    known.write_text(json.dumps(table))
    assert checksum(file) == "remembered"
    stamp = file.stat().st_mtime_ns
    file.write_bytes(b"two")
    os.utime(file, ns=(stamp + 1, stamp + 1))
    assert checksum(file) == sha256(file)


def test_a_damaged_memory_of_checksums_is_made_anew(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"one")
    cache.mkdir()
    (cache / "checksums.json").write_text('{"half": ')
    assert checksum(file) == sha256(file)
    assert str(file) in json.loads((cache / "checksums.json").read_text())
