"""The adapters that ship, held to the contract that ships."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sweeper.core.launch import Death, Ended
from sweeper.engines import Engine
from sweeper.engines.contract import EngineContract, _watched
from sweeper.engines.fake import Fake
from sweeper.engines.llamacpp import LlamaCpp
from sweeper.engines.openai import OpenAi
from sweeper.engines.vllm import Vllm

LLAMACPP_LOGS = Path(__file__).parent / "logs" / "llamacpp"
VLLM_LOGS = Path(__file__).parent / "logs" / "vllm"


def exited(code: int = 1) -> Death:
    return Death(ended=Ended.EXITED, after_s=3.0, was_ready=False, exit_code=code)


def llamacpp_log(name: str) -> list[str]:
    return (LLAMACPP_LOGS / f"{name}.log").read_text(errors="replace").splitlines()


def vllm_log(name: str) -> list[str]:
    return (VLLM_LOGS / f"{name}.log").read_text(encoding="utf-8").splitlines()


class TestLlamaCpp(EngineContract):
    def engine(self) -> Engine:
        return LlamaCpp()

    def growing(self) -> Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        yield {"context": 4096}, {"context": 8192}
        yield {"cache_type_k": "q4_0"}, {"cache_type_k": "q8_0"}
        yield {"ubatch": 128}, {"ubatch": 512}
        speculating = {"spec_type": "ngram-simple"}
        yield {**speculating, "n_max": 2}, {**speculating, "n_max": 8}

    def good_log(self) -> Sequence[str]:
        return llamacpp_log("ok")

    def endings(self) -> Iterable[tuple[Death, Sequence[str], str]]:
        yield exited(), llamacpp_log("oom_kv_cache"), "oom_kv_cache"
        yield exited(), llamacpp_log("port_in_use"), "port_in_use"
        yield exited(), llamacpp_log("bad_flag"), "bad_argument"


class TestFake(EngineContract):
    def engine(self) -> Engine:
        return Fake()

    def growing(self) -> Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        yield {"context": 4096}, {"context": 8192}
        yield {"kv_type": "q4_0"}, {"kv_type": "f16"}
        yield {"n_max": 0}, {"n_max": 4}
        yield {"batch": 128}, {"batch": 512}

    def good_log(self) -> Sequence[str]:
        return (
            "fake: engine fake 1.0",
            "fake: settings context=4096 kv_type=f16",
            "fake: loading weights",
            "fake: allocating kv_cache",
            "fake: allocating compute",
            "fake: warming up",
            "fake: ready on http://127.0.0.1:8000",
        )

    def endings(self) -> Iterable[tuple[Death, Sequence[str], str]]:
        log = [*self.good_log()[:4], "fake: cannot allocate 9.0 MiB for kv_cache, "]
        yield exited(), [log[0], "error: unknown argument: --x"], "bad_argument"
        yield exited(-11), log, "engine_crash"


class TestOpenAi(EngineContract):
    def engine(self) -> Engine:
        return OpenAi(self.params())

    def params(self) -> Mapping[str, Any]:
        return {
            "command": ["{python}", "-m", "toy", ["--port", "{port}"], ["--kv", "{kv}"]],
            "values": {"kv": "f16"},
            "ready": "listening",
            "milestones": [
                {"phase": "weights", "pattern": "^loading"},
                {"phase": "kv", "pattern": "^cache"},
            ],
            "signs": [{"pattern": "pool too small", "outcome": "oom_kv_cache", "phase": "kv"}],
        }

    def good_log(self) -> Sequence[str]:
        return ("loading shards", "cache of 4096 tokens", "listening on 127.0.0.1")

    def endings(self) -> Iterable[tuple[Death, Sequence[str], str]]:
        yield exited(), ["loading", "CUDA out of memory"], "oom_weights"
        yield exited(), ["loading", "cache", "pool too small"], "oom_kv_cache"
        yield exited(), ["loading", "pool too small"], "engine_crash"


class TestOpenAiOnABareCommand(EngineContract):
    def engine(self) -> Engine:
        return OpenAi().for_study(self.params())

    def params(self) -> Mapping[str, Any]:
        return {"command": ["server", "--port={port}"]}


class TestOpenAiAttached(EngineContract):
    def engine(self) -> Engine:
        return OpenAi(self.params())

    def params(self) -> Mapping[str, Any]:
        return {"url": "http://192.168.1.20:8000"}


class TestVllm(EngineContract):
    def engine(self) -> Engine:
        return Vllm()

    def params(self) -> Mapping[str, Any]:
        return {"max_model_len": 4096}

    def growing(self) -> Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        yield {"max_model_len": 4096}, {"max_model_len": 8192}
        yield {"max_num_seqs": 1}, {"max_num_seqs": 8}
        yield {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "auto"}

    def good_log(self) -> Sequence[str]:
        return vllm_log("ok")

    def endings(self) -> Iterable[tuple[Death, Sequence[str], str]]:
        yield exited(), vllm_log("oom_kv_cache"), "oom_kv_cache"
        yield exited(), vllm_log("swept_contended"), "gpu_memory_contended"
        yield exited(2), vllm_log("bad_flag"), "bad_argument"


def test_the_contract_sees_an_adapter_that_does_something(tmp_path: Path) -> None:
    class Curious(Fake):
        def milestone(self, line: str) -> None:
            (tmp_path / "note").write_text(line)

    class Test(EngineContract):
        def engine(self) -> Engine:
            return Curious()

    with pytest.raises(AssertionError, match=r"milestone\(\) touches the world"):
        Test().test_it_only_knows_and_never_does()


def test_the_contract_sees_an_adapter_that_swallows_unknown_settings() -> None:
    class Lenient(Fake):
        def settings(self, params: Mapping[str, Any]) -> Any:
            return super().settings({k: v for k, v in params.items() if k in self.setting_names()})

    class Test(EngineContract):
        def engine(self) -> Engine:
            return Lenient()

    with pytest.raises(AssertionError, match="sweeps nothing"):
        Test().test_an_unknown_setting_is_refused_by_its_name()


def test_the_contract_sees_an_adapter_that_blames_the_point_without_evidence() -> None:
    class Hasty(Fake):
        def verdict(self, death: Death, log: Iterable[str]) -> Any:
            del log
            words = ["fake: engine fake 1.0", "error: unknown argument: --x"]
            return (
                super().verdict(exited(), words) if death.exit_code else super().verdict(death, [])
            )

    class Test(EngineContract):
        def engine(self) -> Engine:
            return Hasty()

    with pytest.raises(AssertionError, match="bad_argument"):
        Test().test_an_end_without_words_is_never_the_points_fault()


def test_nothing_is_seen_of_what_happens_outside_of_the_watch(tmp_path: Path) -> None:
    with _watched() as seen:
        pass
    (tmp_path / "after").write_text("x")
    assert seen == []


def test_the_contract_needs_no_test_library_to_be_imported() -> None:
    source = Path(importlib.import_module("sweeper.engines.contract").__file__ or "").read_text()
    tops = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert not [line for line in tops if "hypothesis" in line or "pytest" in line]
