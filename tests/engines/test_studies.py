"""The studies that ship: what is known of their setups comes out of a plan or of a boot's log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_hf import write_tiny_hf

from sweeper.cli import HOST_CANNOT, OK, WRONG_INPUT, main
from sweeper.conf import LeaderboardError, load
from sweeper.core.architecture import Architecture, from_facts
from sweeper.core.doubts import doubts_of
from sweeper.core.launch import Launch
from sweeper.core.memory import Boot, Estimate, Excess, MemoryModel, excess
from sweeper.core.outcome import Infeasible, Nothing, name
from sweeper.core.pairs import Pairs, Scalar
from sweeper.core.stats import Doubt
from sweeper.engines import (
    EngineOptions,
    ModelFacts,
    capacity_of,
    estimated,
    load_engine,
    refusal_of,
    shown,
)
from sweeper.engines.vllm_memory import hybrid_block, request_bytes
from sweeper.joining import job_of
from sweeper.models import described_models
from sweeper.places import ConfDirs, ConfError, conf_dirs
from sweeper.plan import leaderboard_plan, leaderboard_text, make_plan, plan_text
from sweeper.trial import Job

GB, GIB, MIB, KIB = 10**9, 2**30, 2**20, 2**10
LAPTOP = 23.42 * GIB
STUDIES = (
    "qwen35b_mtp", "nemotron_elastic_nvfp4", "qwen27b_mtp", "nemotron3_nano_spark",
    "gemma4_26b_awq", "qwen27b_dense_mtp", "beellama_27b_dflash",
)  # fmt: skip
BOARD = "leaderboard_24g"
VLLM, LLAMA = load_engine("vllm"), load_engine("llamacpp")


@pytest.fixture(autouse=True)
def _nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand on a machine without configs or weights of its own."""
    for variable in ("SWEEPER_CONF", "SWEEPER_MODELS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def shipped() -> ConfDirs:
    return conf_dirs(cwd=Path("/"))


@cache
def job(study: str) -> Job:
    loaded = load([f"study={study}"], shipped())
    return job_of(loaded, described_models(loaded.model)[0], loaded.options)


def at(study: str, **values: Scalar) -> Pairs:
    """Return a point of a study; what is not given is as in its first guess."""
    first = load([f"study={study}"], shipped()).study.enqueue[0]
    point = {**first, **values}
    return Pairs({axis: value for axis, value in point.items() if value != "absent"})


def needs(study: str, **values: Scalar) -> tuple[Estimate, Excess]:
    """Return what a point of a study needs, and by how much that is above what it may take."""
    here, point = job(study), at(study, **values)
    settings = here.settings(point)
    need = estimated(here.engine, settings, here.model(point))
    device = here.hardware["device_memory_bytes"]
    assert isinstance(device, int)
    return need, excess(need, capacity_of(here.engine, settings, device))


def job_is_vllm(study: str) -> bool:
    return study not in {"qwen35b_mtp", "qwen27b_dense_mtp", "beellama_27b_dflash"}


def architecture(study: str) -> Architecture:
    return from_facts(next(iter(job(study).models.values())).facts)


def planned(study: str, *overrides: str) -> dict[str, Any]:
    loaded = load([f"study={study}", *overrides], conf_dirs())
    return make_plan(loaded, [])


# ---- Every one of them -------------------------------------------------------------------------


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_is_planned_anywhere_without_its_weights(study: str) -> None:
    plan = planned(study)
    text = plan_text(plan)
    assert plan["points_left"] == sum(plan["points_by_fit"].values()) > 0
    assert plan["points_declared"] == plan["points_left"] + sum(plan["points_out_by_rule"].values())
    assert all(plan["points_out_by_rule"].values()), "a rule that rules nothing out"
    assert len(plan["first"]) == 10
    for each in plan["first"]:
        assert each["command"]
        assert "kv_cache" in each["memory_parts_bytes"]
        assert "(planned from model.facts)" in " ".join(plan["problems"])
        assert f"{each['fits']:.0%}" in text


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_says_all_that_makes_its_figures_comparable(study: str) -> None:
    loaded = load([f"study={study}"], shipped())
    assert loaded.study.device_memory_bytes is not None
    assert len(loaded.study.enqueue) >= 3
    assert loaded.study.description
    assert loaded.study.name == study
    spark = study == "nemotron3_nano_spark"
    assert loaded.study.unified_memory is spark
    measured = {loaded.study.workload.name, *(each.name for each in loaded.study.also)}
    assert ("ladder" if spark else "space_invaders") in measured
    if not spark:
        workload = next(
            each
            for each in (loaded.study.workload, *loaded.study.also)
            if each.name == "space_invaders"
        )
        assert (workload.temperature, workload.max_tokens) == (0.6, 2000)
        assert workload.request == Pairs(top_k=20, min_p=0.0)
        assert workload.chat_template == Pairs(enable_thinking=False)


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_without_its_files_says_what_is_missing_and_boots_nothing(
    study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"+study={study}"]) in (WRONG_INPUT, HOST_CANNOT)
    assert "no " in capsys.readouterr().err


# ---- A model of the user's own -----------------------------------------------------------------


def described(folder: Path, **more: str) -> None:
    path = folder / "conf" / "model" / "mine.yaml"
    path.parent.mkdir(parents=True)
    (folder / "conf" / "study").mkdir()
    path.write_text(
        "name: mine\nfacts: {layers: 24, kv_heads: 4, key_length: 128, value_length: 128, "
        "weights_bytes: 8000000000, draft_layers: 0}\n"
        + "".join(f"{key}: {value}\n" for key, value in more.items())
    )


def test_another_model_needs_its_own_file_and_no_study(tmp_path: Path) -> None:
    described(tmp_path)
    plan = planned("qwen35b_mtp", "model=mine")
    assert plan["model"] == "mine"
    # Its one file is its only variant, and the guesses of all else still stand.
    assert plan["points_declared"] == 1792 / 2
    assert plan["first"][0]["point"]["quant"] == "mine"
    assert "model mine" in plan["problems"][0]
    # It has no draft layers, and that is why six of seven draft lengths are out.
    (why, count), = plan["points_out_by_boots"].items()  # fmt: skip
    assert "no draft layers" in why
    assert count == 1792 / 2 * 6 / 7
    assert all(each["point"]["n_max"] == 0 for each in plan["first"])


def test_another_models_variants_are_the_axis(tmp_path: Path) -> None:
    described(tmp_path, variants="{small: /models/s.gguf, large: /models/l.gguf}")
    plan = planned("qwen35b_mtp", "model=mine")
    assert plan["points_declared"] == 1792
    assert {each["point"]["quant"] for each in plan["first"]} <= {"small", "large"}


def test_a_path_is_enough_and_its_header_beats_what_was_published(tmp_path: Path) -> None:
    tiny = write_tiny_gguf(tmp_path / "tiny.gguf", layers=3)
    for study in ("qwen35b_mtp", "qwen27b_dense_mtp", "beellama_27b_dflash"):
        loaded = load([f"study={study}", f"model.path={tiny}"], conf_dirs())
        assert not loaded.model.variants
        if loaded.model.draft_path is not None:
            loaded = load(
                [f"study={study}", f"model.path={tiny}", f"model.draft_path={tiny}"], conf_dirs()
            )
        (model,) = described_models(loaded.model)[0].values()
        assert model.path == str(tiny)
        assert model.facts["layers"] == 3
        assert "state_layers" not in model.facts
        plan = make_plan(loaded, [])
        if study == "qwen27b_dense_mtp":
            # Which only asks how long drafts should be, of a model that cannot draft.
            assert plan["points_left"] == 0
            assert all("no draft layers" in reason for reason in plan["points_out_by_boots"])
        else:
            assert str(tiny) in plan["first"][0]["command"]


@pytest.mark.parametrize("study", [each for each in STUDIES if job_is_vllm(each)])
def test_a_folder_is_enough_for_vllm(tmp_path: Path, study: str) -> None:
    folder = write_tiny_hf(tmp_path / "hf")
    plan = planned(study, f"model.path={folder}", "model.name=mine")
    assert not any("model" in problem for problem in plan["problems"] if "vLLM" not in problem)
    assert str(folder) in plan["first"][0]["command"]
    assert plan["first"][0]["memory_parts_bytes"]["weights"] < MIB


def test_facts_yield_to_the_files_only_where_the_model_says_so(tmp_path: Path) -> None:
    tiny = write_tiny_gguf(tmp_path / "tiny.gguf")
    overrides = ["study=qwen35b_mtp", f"model.path={tiny}"]
    stated = load([*overrides, "model.facts_yield=false"], conf_dirs())
    (model,) = described_models(stated.model)[0].values()
    assert model.facts["layers"] == 40


def test_a_guess_with_a_wrong_variant_among_right_ones_is_still_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "conf" / "study" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(
        "# @package _global_\ndefaults: [override /model: qwen36_27b_mtp]\nname: mine\n"
        "space: {quant: {sets: model.variant}, n_max: [0]}\n"
        "enqueue: [{quant: UD-Q4_K_XL, n_max: 0}, {quant: UD-Q5_K_XL, n_max: 0}]\n"
    )
    with pytest.raises(ConfError, match=r"enqueue\[1\]\.quant: UD-Q5_K_XL is not one of"):
        load(["study=mine"], conf_dirs())


def test_the_memory_of_another_card_is_one_word_on_the_command_line() -> None:
    small = planned("qwen35b_mtp", "hardware.device_memory=12GiB")
    assert small["points_by_fit"]["likely"] == 0
    assert planned("qwen35b_mtp", "hardware.device_memory=80GiB")["points_by_fit"]["hardly"] == 0
    with pytest.raises(ConfError, match=r"hardware\.device_memory: 'much' is not a size"):
        planned("qwen35b_mtp", "hardware.device_memory=much")


# ---- 35B-A3B on llama.cpp ----------------------------------------------------------------------


def test_the_longest_context_of_the_35b_takes_about_21_9_gb() -> None:
    need, beyond = needs("qwen35b_mtp", quant="UD-Q3_K_XL", kv_type="q4_0", context=262_144)
    assert need.mean == pytest.approx(21.9 * GB, rel=0.05)
    assert abs(need.mean - 21.9 * GB) < 2 * need.spread
    assert beyond.fits > 0.95


def test_the_larger_file_of_the_35b_loads_and_has_no_room_for_the_cache() -> None:
    need, beyond = needs("qwen35b_mtp", quant="UD-Q4_K_XL", kv_type="f16", context=131_072)
    assert need.part("weights").mean + need.part("draft_weights").mean == 22 * GB
    assert 22 * GB < LAPTOP
    assert beyond.fits < 0.05
    assert needs("qwen35b_mtp", quant="UD-Q4_K_XL", kv_type="q4_0", context=262_144)[1].fits < 0.2


LARGER = """\
0.00.118.201 I cmn  common_param:   - CUDA0   : NVIDIA GeForce RTX 5090 Laptop GPU (24463 MiB, 23982 MiB free)
0.00.131.530 I srv    load_model: loading model '/models/Qwen3.6-35B-A3B-MTP-UD-Q4_K_XL.gguf'
0.00.642.907 I load_tensors: loading model tensors, this can take a while... (load_mode = mmap)
0.01.120.416 I load_tensors: offloaded 42/42 layers to GPU
0.01.120.420 I load_tensors:   CPU_Mapped model buffer size =   515.31 MiB
0.01.120.421 I load_tensors:        CUDA0 model buffer size = 20465.77 MiB
0.09.870.334 I llama_context: constructing llama_context
0.09.870.340 I llama_context: n_ctx                 = 262144
0.09.904.655 E ggml_backend_cuda_buffer_type_alloc_buffer: allocating 5120.00 MiB on device 0: cudaMalloc failed: out of memory
0.09.906.018 E llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache
0.09.906.031 E cmn  common_init_: failed to create context with model '/models/Qwen3.6-35B-A3B-MTP-UD-Q4_K_XL.gguf'
0.09.951.440 E srv  llama_server: exiting due to model loading error
"""  # noqa: E501 - as it is printed


def test_its_log_says_that_the_cache_was_too_much_and_not_the_weights() -> None:
    found = LLAMA.diagnose(LARGER.splitlines(), 1)
    assert isinstance(found, Infeasible)
    assert name(found) == "oom_kv_cache"
    facts = LLAMA.evidence(LARGER.splitlines())
    assert facts["weights_gpu_bytes"] == pytest.approx(20_465.77 * MIB)
    # 10 layers x 2 x 2 heads x 256 values x 2 bytes x 262,144 tokens: as estimated, to the byte.
    asked = needs("qwen35b_mtp", quant="UD-Q4_K_XL", kv_type="f16", context=262_144)[0]
    assert asked.part("kv_cache").mean == 5120 * MIB


def test_the_acceptance_that_was_published_is_read_from_a_log() -> None:
    said = (
        "1.02.411.870 I slot print_timing: id  0 | task 0 | draft acceptance = 0.86600 ( 1299 "
        "accepted /  1500 generated), mean len =  3.60"
    )
    facts = LLAMA.evidence([said])
    assert (facts["accepted_tokens"], facts["drafted_tokens"]) == (1299, 1500)
    # A draft of 3, of which 86.6 % are accepted, and the token that the model adds itself.
    assert facts["mean_draft_tokens"] == pytest.approx(1 + 3 * 0.866, abs=0.005)


def test_a_file_without_draft_layers_is_told_by_its_facts() -> None:
    here = job("qwen35b_mtp")
    point = at("qwen35b_mtp")
    model = here.model(point)
    bare = ModelFacts(
        name="m", path="/m", served_name="m", size_bytes=1, sha256="",
        facts=model.facts.with_(draft_layers=0),
    )  # fmt: skip
    assert refusal_of(LLAMA, here.settings(point), model) is None
    assert "no draft layers" in str(refusal_of(LLAMA, here.settings(point), bare))
    without = here.settings(at("qwen35b_mtp", n_max=0))
    assert refusal_of(LLAMA, without, bare) is None
    assert refusal_of(load_engine("fake"), load_engine("fake").settings({}), bare) is None


# ---- Nemotron Elastic on vLLM ------------------------------------------------------------------

UP_TO_KV = """\
(APIServer pid=41) INFO 06-20 10:00:00 [utils.py:233] non-default args: {'max_model_len': 32768, 'max_num_seqs': 1}
(EngineCore pid=90) INFO 06-20 10:00:20 [core.py:109] Initializing a V1 LLM engine (v0.20.1) with config: model='/models/elastic'
(EngineCore pid=90) INFO 06-20 10:00:31 [gpu_model_runner.py:4879] Starting to load model /models/elastic...
(EngineCore pid=90) INFO 06-20 10:00:58 [default_loader.py:384] Loading weights took 25.10 seconds
(EngineCore pid=90) INFO 06-20 10:01:00 [gpu_model_runner.py:4959] Model loading took 17.71 GiB memory and 28.402113 seconds
(EngineCore pid=90) INFO 06-20 10:01:40 [gpu_worker.py:436] Available KV cache memory: 2.61 GiB
(EngineCore pid=90) INFO 06-20 10:01:40 [kv_cache_utils.py:1319] GPU KV cache size: 233,472 tokens
(EngineCore pid=90) INFO 06-20 10:01:40 [kv_cache_utils.py:1324] Maximum concurrency for 32,768 tokens per request: 7.13x
"""  # noqa: E501 - as it is printed
NO_ROOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 316.00 MiB. GPU 0 has a total "
    "capacity of 23.42 GiB of which 416.19 MiB is free. Including non-PyTorch memory, this process "
    "has 23.01 GiB memory in use."
)
CAPTURING = (
    "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  71%|#######   | 36/51 "
    "[00:09<00:03]\n"
)
UP = """\
(EngineCore pid=90) INFO 06-20 10:02:01 [core.py:281] init engine (profile, create kv cache, warmup model) took 61.00 s
(APIServer pid=41) INFO 06-20 10:02:02 [api_server.py:580] Starting vLLM server on http://127.0.0.1:8080
INFO:     Application startup complete.
"""  # noqa: E501 - as it is printed


def graphs(gib: str) -> str:
    return (
        f"(EngineCore pid=90) INFO 06-20 10:01:50 [gpu_model_runner.py:6126] Graph capturing "
        f"finished in 3 secs, took {gib} GiB\n"
    )


@pytest.mark.parametrize(
    ("where", "ending"),
    [(CAPTURING, "oom_cudagraph_capture"), (graphs("3.97") + UP, "oom_runtime")],
)
def test_the_defaults_of_the_elastic_end_at_capture_or_when_they_compute(
    where: str, ending: str
) -> None:
    log = UP_TO_KV + where + f"(EngineCore pid=90) ERROR 06-20 10:02:10 [core.py:1100] {NO_ROOM}\n"
    found = VLLM.diagnose(log.splitlines(), 1)
    assert isinstance(found, Infeasible)
    assert name(found) == ending
    facts = {**VLLM.evidence(log.splitlines()), **found.finding.facts}
    assert facts["requested_bytes"] == 316 * MIB
    assert facts["free_bytes"] == pytest.approx(416.19 * MIB, rel=1e-6)
    # More was free than was asked for, in pieces: nothing tells by how much it fell short.
    shortfall = facts.get("shortfall_bytes")
    assert shortfall is None or (isinstance(shortfall, int | float) and shortfall >= 0)


def test_three_graphs_take_a_hundredth_of_the_default_list() -> None:
    few, usual = (
        (UP_TO_KV + graphs(gib) + UP).splitlines() for gib in ("0.04", "3.97")
    )  # fmt: skip
    assert isinstance(VLLM.diagnose(few, None), Nothing)
    small, large = (VLLM.evidence(log)["graph_pool_bytes"] for log in (few, usual))
    assert isinstance(small, int | float)
    assert isinstance(large, int | float)
    assert small / GIB == pytest.approx(0.04, rel=0.01)
    assert large / GIB == pytest.approx(3.97, rel=0.01)
    need, beyond = needs("nemotron_elastic_nvfp4", context=4096)
    assert abs(need.part("graphs").mean - small) <= need.part("graphs").spread
    assert beyond.fits > 0.9
    # What one boot printed of its graphs is known of the next.
    settings = job("nemotron_elastic_nvfp4").settings(at("nemotron_elastic_nvfp4"))
    seen = MemoryModel.of([Boot(estimate=need, shown=shown(VLLM, settings, VLLM.evidence(few)))])
    assert seen.corrected(need).part("graphs").mean == pytest.approx(small, rel=0.1)


def test_about_290_mb_are_to_spare_beside_a_share_of_0_97() -> None:
    # The share is filled with the KV pool; graphs live in the rest, with what no profile counts.
    rest = LAPTOP * (1 - 0.97)
    assert rest - 0.04 * GIB > 290e6
    assert rest - 3.97 * GIB < 0
    assert LAPTOP * (1 - 0.90) - 3.97 * GIB < 0


def test_eager_has_no_graphs_and_needs_the_least() -> None:
    eager = needs(
        "nemotron_elastic_nvfp4", eager=True, graphs="absent", captures="absent", utilisation=0.90
    )
    assert eager[0].part("graphs").mean == 0
    assert eager[1].fits > 0.9
    settings = job("nemotron_elastic_nvfp4").settings(
        at("nemotron_elastic_nvfp4", eager=True, graphs="absent", captures="absent")
    )
    launch = VLLM.launch(settings, model_of("nemotron_elastic_nvfp4"), EngineOptions(), 1)
    assert isinstance(launch, Launch)
    assert "--enforce-eager" in launch.argv
    assert "--compilation-config" not in launch.argv


def model_of(study: str) -> ModelFacts:
    return next(iter(job(study).models.values()))


# ---- 27B on vLLM -------------------------------------------------------------------------------


def test_a_copy_of_the_vocabulary_makes_the_draft_head_2_37_gib() -> None:
    need, beyond = needs("qwen27b_mtp", quant="nvfp4_mtp", n=1, kv_type="fp8_e4m3", context=8192)
    assert need.part("draft_weights").mean == 248_320 * 5120 * 2
    assert need.part("draft_weights").mean / GIB == pytest.approx(2.37, abs=0.005)
    # What is free once the model and the engine itself are on the card.
    free = LAPTOP - need.part("weights").mean - 0.57 * GIB
    assert free / GIB == pytest.approx(2.25, abs=0.01)
    assert need.part("draft_weights").mean > free
    assert beyond.fits < 0.1
    alone = needs("qwen27b_mtp", quant="nvfp4_mtp", n=0, kv_type="fp8_e4m3", context=8192)
    assert alone[0].part("draft_weights").mean == 0
    assert alone[1].fits > 0.5


def test_its_log_says_that_the_draft_head_did_not_fit() -> None:
    log = """\
(EngineCore pid=77) INFO 05-02 09:00:11 [gpu_model_runner.py:4231] Starting to load model /models/nvfp4...
(EngineCore pid=77) INFO 05-02 09:00:52 [default_loader.py:384] Loading weights took 38.71 seconds
(EngineCore pid=77) INFO 05-02 09:00:53 [gpu_model_runner.py:4255] Loading drafter model...
(EngineCore pid=77) ERROR 05-02 09:00:54 [gpu_model_runner.py:4290] Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory for weights.
(EngineCore pid=77) ERROR 05-02 09:00:54 [core.py:1014] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.37 GiB. GPU 0 has a total capacity of 23.42 GiB of which 2.25 GiB is free.
"""  # noqa: E501 - as it is printed
    found = VLLM.diagnose(log.splitlines(), 1)
    assert isinstance(found, Infeasible)
    assert name(found) == "oom_draft_head"
    shortfall = found.finding.facts["shortfall_bytes"]
    assert isinstance(shortfall, int | float)
    assert shortfall / GIB == pytest.approx(0.12, abs=0.001)


def test_an_e5m2_cache_on_a_checkpoint_of_the_fp8_family_is_never_booted() -> None:
    plan = planned("qwen27b_mtp")
    (reason,) = (each for each in plan["points_out_by_rule"] if "fp8_e5m2" in each)
    assert plan["points_out_by_rule"][reason] == 3456 / 2 / 3
    # The rule is this study's; for any other checkpoint its own facts tell.
    for weights, refused in (("nvfp4", True), ("fp8", True), ("auto_round", False)):
        model = ModelFacts(
            name="m", path="/m", served_name="m", size_bytes=1, sha256="",
            facts=Pairs(quantization=weights),
        )  # fmt: skip
        why = refusal_of(VLLM, VLLM.settings({"kv_cache_dtype": "fp8_e5m2"}), model)
        assert (why is not None) is refused
        assert refusal_of(VLLM, VLLM.settings({"kv_cache_dtype": "fp8_e4m3"}), model) is None


POOL = """\
(EngineCore pid=77) INFO 05-02 09:10:00 [gpu_model_runner.py:4231] Starting to load model /models/int4...
(EngineCore pid=77) INFO 05-02 09:10:40 [gpu_model_runner.py:4310] Model loading took 16.87 GiB memory and 38.104920 seconds
(EngineCore pid=77) INFO 05-02 09:11:20 [gpu_worker.py:436] Available KV cache memory: 3.24 GiB
(EngineCore pid=77) INFO 05-02 09:11:20 [kv_cache_utils.py:1319] GPU KV cache size: 23,760 tokens
(EngineCore pid=77) INFO 05-02 09:11:20 [kv_cache_utils.py:1324] Maximum concurrency for 75,000 tokens per request: 1.17x
"""  # noqa: E501 - as it is printed


def test_the_pool_of_23_760_tokens_in_3_24_gib_holds_a_window_of_75_000() -> None:
    facts = VLLM.evidence(POOL.splitlines())
    assert facts["weights_bytes"] == pytest.approx(16.87 * GIB, rel=1e-6)
    assert facts["kv_pool_tokens"] == 23_760
    pool = 3.24 * GIB
    hybrid = architecture("qwen27b_mtp")
    # With one token drafted a block holds 1,584 tokens. 16 layers that attend and the draft layer
    # make a group of 17, the 48 others three more: of the blocks of the pool each group has a
    # fourth, and the engine prints the tokens of one.
    block, page = hybrid_block(hybrid, 8, drafts=1)
    blocks = int(pool // (17 * page))
    assert (block, blocks) == (1584, 63)
    assert blocks // 4 * block == 23_760
    # A window needs blocks for its tokens in one group only, and states in the others.
    for drafts in (1, 2, 3):
        window = request_bytes(hybrid, 75_000, 8, drafts=drafts, own_drafts=True)
        assert 23_760 / 75_000 < window / pool <= 1
    assert request_bytes(hybrid, 98_304, 8, drafts=3, own_drafts=True) > pool


def test_what_the_pool_shows_of_a_window_is_not_the_tokens_it_prints() -> None:
    settings = job("qwen27b_mtp").settings(at("qwen27b_mtp", n=1))
    printed = shown(VLLM, settings, VLLM.evidence(POOL.splitlines()))
    window = request_bytes(architecture("qwen27b_mtp"), 75_000, 8, drafts=1, own_drafts=True)
    assert printed["kv_cache"] == pytest.approx(window, rel=0.01)


def test_the_published_setup_of_the_27b_fits_with_any_draft_up_to_three() -> None:
    for n in (0, 1, 2, 3):
        need, beyond = needs("qwen27b_mtp", n=n)
        assert beyond.fits > 0.9
        loaded = need.part("weights").mean + need.part("draft_weights").mean
        if n:
            assert loaded / GIB == pytest.approx(16.87, abs=0.005)
    assert needs("qwen27b_mtp", context=131_072, utilisation=0.93)[1].fits < 0.5


def test_its_environment_and_a_wrapper_that_patches_are_part_of_the_command() -> None:
    loaded = load(
        ["study=qwen27b_mtp", "engine.prefix=[/opt/patched.sh]"], shipped()
    )  # fmt: skip
    here = job_of(loaded, described_models(loaded.model)[0], loaded.options)
    launch = here.launch(at("qwen27b_mtp"), 1)
    assert isinstance(launch, Launch)
    assert launch.argv[0] == "/opt/patched.sh"
    assert launch.env["VLLM_MARLIN_USE_ATOMIC_ADD"] == "1"
    spoken = json.loads(launch.argv[launch.argv.index("--speculative-config") + 1])
    assert spoken == {"method": "mtp", "num_speculative_tokens": 3}


# ---- Nemotron Nano on a Spark ------------------------------------------------------------------


def test_six_of_52_layers_keep_tokens_and_a_window_takes_less_than_a_gib() -> None:
    nano = architecture("nemotron3_nano_spark")
    assert (nano.layers, nano.full.layers) == (52, 6)
    need, beyond = needs("nemotron3_nano_spark", context=262_144, kv_type="auto")
    assert need.part("kv_cache").mean / 262_144 / KIB == pytest.approx(3.20, abs=0.005)
    assert need.part("kv_cache").mean < GIB
    assert beyond.fits > 0.99
    assert planned("nemotron3_nano_spark")["points_by_fit"]["hardly"] == 0


@pytest.mark.parametrize("study", ["nemotron3_nano_spark", "nemotron_elastic_nvfp4"])
def test_no_speculation_is_offered_and_the_reason_is_said(study: str) -> None:
    plan = planned(study)
    (note,) = plan["notes"]
    assert "no speculation offered: the checkpoint has no draft layers" in note
    assert note in plan_text(plan)
    asked = VLLM.settings({"spec_method": "mtp", "n_max": 1})
    assert "no draft layers" in str(refusal_of(VLLM, asked, model_of(study)))
    other = VLLM.settings({"spec_method": "ngram", "n_max": 1})
    assert refusal_of(VLLM, other, model_of(study)) is None


def test_a_draft_length_that_is_asked_for_all_the_same_is_out_with_the_reason() -> None:
    plan = planned(
        "nemotron3_nano_spark",
        "engine.params={max_num_seqs: 4, spec_method: mtp}",
        "+space.n_max=[0,2]",
        "enqueue=[]",
    )
    (why, count), = plan["points_out_by_boots"].items()  # fmt: skip
    assert why.startswith("model: the checkpoint has no draft layers")
    assert count == plan["points_left"] == 360
    assert plan["notes"] == []


# ---- Gemma under load --------------------------------------------------------------------------


def test_five_fast_runs_and_four_slow_ones_are_a_doubt() -> None:
    loaded = load(["study=gemma4_26b_awq"], shipped())
    assert loaded.study.workload.name == "sustained"
    assert loaded.study.workload.minutes == 10
    speeds = (101.2, 100.4, 101.0, 78.3, 77.9, 100.8, 78.1, 101.1, 77.6)
    assert Doubt.BIMODAL in doubts_of(speeds)
    assert doubts_of((*speeds[:3], 100.8, 101.1)) == ()


def test_only_five_of_thirty_layers_of_gemma_grow_with_the_context() -> None:
    gemma = architecture("gemma4_26b_awq")
    assert (gemma.full.layers, gemma.window.layers, gemma.window_tokens) == (5, 25, 1024)
    assert gemma.kv_bytes_per_token(16) == 5 * 2 * 2 * 512 * 2
    assert needs("gemma4_26b_awq", context=131_072, kv_type="fp8", utilisation=0.95)[1].fits > 0.9


# ---- The dense 27B on llama.cpp, and on a fork -------------------------------------------------


def test_the_dense_model_takes_64_kib_a_token_and_drafts_one_to_six() -> None:
    dense = architecture("qwen27b_dense_mtp")
    assert dense.kv_bytes_per_token(16) == 64 * KIB
    assert dense.draft_kv_bytes(262_144, 16) == GIB
    axes = {
        axis.name: axis for axis in load(["study=qwen27b_dense_mtp"], shipped()).study.space.axes
    }
    assert axes["n_max"].values == (1, 2, 3, 4, 5, 6)
    assert needs("qwen27b_dense_mtp", kv_type="f16", context=262_144)[1].fits < 0.01


def fork(**params: Any) -> tuple[str, ...]:
    settings = LLAMA.settings({"spec_type": "dflash", "n_max": 4, "version": 9400, **params})
    model = ModelFacts(
        name="m", path="/m", served_name="m", size_bytes=1, sha256="", draft_path="/d"
    )
    launch = LLAMA.launch(settings, model, EngineOptions(binary="/opt/bee"), 1)
    assert isinstance(launch, Launch)
    return launch.argv


def test_a_fork_is_served_by_what_its_config_says() -> None:
    first = planned("beellama_27b_dflash")["first"][1]
    command = first["command"]
    assert command[0] == "beellama-server"
    for flag, value in (
        ("--spec-type", "dflash"), ("--cache-type-k", "turbo3"), ("--cache-type-v", "turbo3"),
        ("--spec-draft-n-max", "4"), ("--spec-dflash-cross-ctx", "1024"),
    ):  # fmt: skip
        assert command[command.index(flag) + 1] == value
    assert command[command.index("--spec-draft-model") + 1].endswith("DFlash-Q8_0.gguf")
    assert first["memory_parts_bytes"]["kv_cache"] == 262_144 * 16 * 4 * 512 * 3.5 / 8
    assert first["memory_parts_bytes"]["draft"] == 1_836_000_000


def test_a_fork_may_call_flags_otherwise_or_not_have_them() -> None:
    argv = fork(flag_names={"--spec-draft-n-max": "--draft-max", "--cache-ram": None})
    assert argv[argv.index("--draft-max") + 1] == "4"
    assert "--spec-draft-n-max" not in argv
    assert "--cache-ram" not in argv
    assert "--cache-ram" in fork()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"cache_type_bits": {"turbo3": 0}}, "turbo3 must be bits a value"),
        ({"cache_type_bits": {"turbo3": "3"}}, "turbo3 must be bits a value"),
        ({"cache_type_bits": "[1]"}, "must be a JSON object"),
        ({"flag_names": {"--port": "--p"}}, "cannot rename --port"),
        ({"flag_names": {"port": "--p"}}, "cannot rename port"),
        ({"flag_names": {"--fit": "f"}}, "must be a flag, or null"),
    ],
)
def test_what_is_said_wrongly_of_a_fork_is_refused(params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LLAMA.settings(params)


def test_a_cache_type_of_which_nothing_is_known_makes_the_estimate_unsure() -> None:
    model = model_of("qwen27b_dense_mtp")

    def cache_of(**params: Any) -> tuple[float, float]:
        params = {"context": 65_536, "cache_type_k": "turbo3", "cache_type_v": "turbo3", **params}
        size = estimated(LLAMA, LLAMA.settings(params), model).part("kv_cache")
        return size.mean, size.spread

    unknown, known = cache_of(), cache_of(cache_type_bits={"turbo3": 3.5})
    assert known[0] == 65_536 * 64 * KIB * 3.5 / 16
    assert known[1] < 0.02 * known[0]
    assert unknown[0] > known[0]
    assert unknown[1] > 0.3 * unknown[0]
    footprint = LLAMA.footprint(
        LLAMA.settings({"cache_type_k": "turbo3", "cache_type_bits": {"turbo3": 3.5}}), model
    )
    assert footprint.alike["unknown_kv_types"] == ""


@pytest.mark.parametrize(
    ("line", "version", "build"),
    [
        ("version: 9420 (22d66b567)", "9420 (22d66b567)", 9420),
        ("build: 9459 (07ac3cec6) with GNU 14.2.0 for Linux x86_64", "9459 (07ac3cec6)", 9459),
        ("0.00.010.113 I build_info: b9459-07ac3cec6", "b9459-07ac3cec6", 9459),
        ("version: BeeLlama v0.3.2 (077605b)", "BeeLlama v0.3.2 (077605b)", None),
        ("version: 0 (unknown)", "0 (unknown)", None),
        ("beellama without any of it", None, None),
    ],
)
def test_whatever_version_a_fork_reports_is_taken_as_it_is(
    line: str, version: str | None, build: int | None
) -> None:
    facts: Mapping[str, Scalar] = LLAMA.evidence([line, "srv  llama_server: model loaded"])
    said = facts.get("engine_version")
    assert said is None if version is None else str(said).startswith(version)
    assert facts.get("engine_build") == build


# ---- The leaderboard ---------------------------------------------------------------------------


def test_a_leaderboard_is_shown_and_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ([], ["export"]):
        assert main([*verb, f"+study={BOARD}"]) == WRONG_INPUT
        said = capsys.readouterr().err
        assert "is a leaderboard, which is shown, not run" in said
        assert "qwen35b_mtp" in said
    with pytest.raises(LeaderboardError) as named:
        load([f"study={BOARD}"], shipped())
    board = named.value.board
    assert board.studies == (
        "qwen35b_mtp", "nemotron_elastic_nvfp4", "qwen27b_mtp", "gemma4_26b_awq",
        "qwen27b_dense_mtp", "beellama_27b_dflash",
    )  # fmt: skip
    assert board.workload == "space_invaders"


def test_its_plan_is_that_of_its_studies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"+study={BOARD}"]) == OK
    assert "plan +study=qwen35b_mtp" in capsys.readouterr().out
    assert main(["plan", f"+study={BOARD}", "output=json"]) == OK
    plan = json.loads(capsys.readouterr().out)
    assert [each["engine"] for each in plan["studies"]].count("vllm") == 3
    for each in plan["studies"]:
        study = load([f"study={each['study']}"], shipped()).study
        assert (each["engine"], each["description"]) == (study.engine_name, study.description)
        assert (each["model"], each["hardware"]) == (study.model_name, study.hardware_name)
        assert each["workloads"] == [study.workload.name, *(also.name for also in study.also)]
    # All of them measure the workload that they are compared on.
    assert all(plan["workload"] in each["workloads"] for each in plan["studies"])


@pytest.mark.parametrize(
    ("leaderboard", "words"),
    [
        ("{studies: [qwen35_mtp]}", r"leaderboard\.studies: there is no study called qwen35_mtp "
         r"\(did you mean qwen35b_mtp\?\) \(in conf/study/mine\.yaml\)"),
        ("{studies: [qwen35b_mtp], workload: laddder}", r"leaderboard\.workload: .*ladder\?"),
        ("{study: [qwen35b_mtp]}", r"leaderboard\.study: unknown key \(did you mean studies\?\)"),
    ],
)  # fmt: skip
def test_a_leaderboard_of_what_does_not_exist_is_refused(
    tmp_path: Path, leaderboard: str, words: str
) -> None:
    file = tmp_path / "conf" / "study" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"# @package _global_\nname: mine\nleaderboard: {leaderboard}\n")
    with pytest.raises(ConfError, match=words):
        load(["study=mine"], conf_dirs())


def test_a_leaderboard_may_leave_the_workload_to_its_studies(tmp_path: Path) -> None:
    file = tmp_path / "conf" / "study" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\nname: mine\nleaderboard: {studies: [quickstart]}\n")
    with pytest.raises(LeaderboardError) as named:
        load(["study=mine"], conf_dirs())
    plan = leaderboard_plan(named.value.board, conf_dirs())
    assert plan["workload"] is None
    assert plan["studies"][0]["workloads"] == ["short"]
    assert "also=" not in leaderboard_text(plan)
    assert "run it with also=[ladder]" in leaderboard_text({**plan, "workload": "ladder"})
