"""The sampler through Optuna, and searches against tables."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from sweeper.cli import main
from sweeper.core.evidence import Evidence, Prior, Role
from sweeper.core.space import Axis, Condition, Space
from sweeper.replay import ReplayError, read_table, replay
from sweeper.search.frontier import EVIDENCE, WHY, FrontierSampler

GIB = 2**30
CONTEXTS = (4096, 8192, 16384, 32768, 65536)
WEIGHTS = {"q3": 3.0, "q4": 4.0, "q6": 6.0}
KV = {"f16": 131072.0, "q8": 52224.0}


def axis(name: str, *values: Any, ordered: bool = False, when: tuple[Condition, ...] = ()) -> Axis:
    return Axis(name=name, values=values, ordered=ordered, sets=(name,), when=when)


ENGINE = Space(
    axes=(
        axis("quant", *WEIGHTS),
        axis("kv", *KV),
        axis("ctx", *CONTEXTS, ordered=True),
        axis("spec", "off", "mtp"),
        axis("k", 1, 2, 4, ordered=True, when=(Condition(axis="spec", op="in", operand=("mtp",)),)),
        axis("fa", "on", "off"),
    )
)
ROLES = {
    "quant": Role.WEIGHTS,
    "kv": Role.KV_DTYPE,
    "ctx": Role.CONTEXT,
    "spec": Role.DRAFT_METHOD,
    "k": Role.DRAFT_LENGTH,
    "fa": Role.BACKEND,
}
PRIOR = Prior(
    capacity_bytes=8 * GIB,
    weights_bytes=tuple(sorted((name, size * GIB) for name, size in WEIGHTS.items())),
    kv_bytes_per_token=tuple(sorted(KV.items())),
)


def boot(point: dict[str, Any]) -> Evidence:
    """Return what a small engine shows for a point: memory, a refused pair, drafts."""
    if point["kv"] == "q8" and point["fa"] == "off":
        return Evidence(
            outcome="unsupported_combination", kind="infeasible", phase="config", boot_s=2
        )
    weights, context = WEIGHTS[point["quant"]], CONTEXTS[point["ctx"]]
    drafts = (1, 2, 4)[point["k"]] if point["spec"] == "mtp" else 0
    need = weights + context * KV[point["kv"]] / GIB + 0.5 + (0.4 if drafts else 0)
    known = {"weights_bytes": weights * GIB, "kv_bytes_per_token": KV[point["kv"]]}
    if need > 8:
        return Evidence(
            outcome="oom_kv_cache",
            kind="infeasible",
            phase="kv",
            shortfall_bytes=(need - 8) * GIB,
            boot_s=5,
            **known,
        )
    shares = tuple(0.8 ** (i + 1) for i in range(drafts))
    step = (weights / 200 + 0.002 + 0.001 * drafts) * (1.1 if point["kv"] == "q8" else 1.0)
    return Evidence(
        outcome="measured",
        kind="measured",
        phase="ready",
        acceptance=shares,
        decode_tok_s=(1 + sum(shares)) / step,
        step_s=step,
        boot_s=8,
        **known,
    )


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    point: dict[str, Any] = {}
    point["quant"] = trial.suggest_categorical("quant", list(WEIGHTS))
    point["kv"] = trial.suggest_categorical("kv", list(KV))
    point["ctx"] = trial.suggest_int("ctx", 0, len(CONTEXTS) - 1)
    point["spec"] = trial.suggest_categorical("spec", ["off", "mtp"])
    if point["spec"] == "mtp":
        point["k"] = trial.suggest_int("k", 0, 2)
    point["fa"] = trial.suggest_categorical("fa", ["on", "off"])
    return point


def tell(study: optuna.Study, trial: optuna.Trial, point: dict[str, Any]) -> Evidence:
    shown = boot(point)
    trial.set_user_attr(EVIDENCE, shown.as_json())
    if shown.kind == "measured":
        assert shown.decode_tok_s is not None
        study.tell(trial, [shown.decode_tok_s, math.log2(CONTEXTS[point["ctx"]])])
    else:
        trial.set_constraint("works", 1.0)
        study.tell(trial, state=TrialState.PRUNED)
    return shown


def search(seed: int, boots: int, **given: Any) -> tuple[optuna.Study, FrontierSampler]:
    sampler = FrontierSampler(
        **{"space": ENGINE, "roles": ROLES, "prior": PRIOR, **given}, seed=seed
    )
    study = optuna.create_study(directions=["maximize", "maximize"], sampler=sampler)
    for _ in range(boots):
        trial = study.ask()
        tell(study, trial, suggest(trial))
    return study, sampler


def points(study: optuna.Study) -> list[dict[str, Any]]:
    return [trial.params for trial in study.get_trials(deepcopy=False)]


def test_the_same_seed_proposes_the_same_points() -> None:
    assert points(search(3, 12)[0]) == points(search(3, 12)[0])


def test_no_point_is_proposed_twice_and_the_space_gives_out() -> None:
    space = Space(axes=(axis("quant", *WEIGHTS), axis("fa", "on", "off")))
    sampler = FrontierSampler(space, seed=0)
    study = optuna.create_study(directions=["maximize", "maximize"], sampler=sampler)
    seen = set()
    for _ in range(6):
        trial = study.ask()
        quant = trial.suggest_categorical("quant", list(WEIGHTS))
        seen.add((quant, trial.suggest_categorical("fa", ["on", "off"])))
        study.tell(trial, [WEIGHTS[quant], 1.0])
    assert len(seen) == 6
    study.ask().suggest_categorical("quant", list(WEIGHTS))
    assert sampler.remaining_improvement == 0.0


def test_the_front_is_found_in_a_few_boots() -> None:
    study, sampler = search(0, 20)
    rates = [each.values[0] for each in study.best_trials]
    # q3 with four drafts is the fastest there is; q8 holds the longest window.
    assert max(rates) == pytest.approx(
        boot({"quant": "q3", "kv": "f16", "ctx": 0, "spec": "mtp", "k": 2, "fa": "on"}).decode_tok_s
    )
    assert max(each.values[1] for each in study.best_trials) == 16.0
    assert sampler.remaining_improvement < 0.05


def test_boots_that_fail_are_few() -> None:
    study, _ = search(1, 20)
    assert sum(trial.state is TrialState.PRUNED for trial in study.trials) <= 7


def test_asks_in_parallel_do_not_collide() -> None:
    study, _ = search(0, 6)
    waiting = [study.ask() for _ in range(4)]
    together = [tuple(sorted(suggest(trial).items())) for trial in waiting]
    assert len(set(together)) == 4
    # Not suggested before the next was asked for, they still differ: a proposal is remembered.
    assert not {tuple(sorted(p.items())) for p in points(study)[:6]} & set(together)


def test_a_choice_is_explained_and_the_reason_stored() -> None:
    study, sampler = search(0, 8)
    said = sampler.why(7)
    assert study.trials[7].system_attrs[WHY] == said
    for words in ("tok/s expected", "tokens of context", "likely to work", "memory to spare"):
        assert words in said


def test_a_resumed_search_goes_on_with_what_was_learnt() -> None:
    study, _ = search(0, 10)
    known = {tuple(sorted(params.items())) for params in points(study)}
    study.sampler = FrontierSampler(ENGINE, roles=ROLES, prior=PRIOR, seed=9)
    trial = study.ask()
    assert tuple(sorted(suggest(trial).items())) not in known
    assert isinstance(study.sampler, FrontierSampler)
    assert study.sampler.remaining_improvement < 0.5


def test_roles_and_priors_are_not_needed() -> None:
    study, _ = search(0, 25, roles=None, prior=None)
    assert max(each.values[0] for each in study.best_trials) > 150


def test_evidence_that_cannot_be_read_is_an_error() -> None:
    study, _ = search(0, 1)
    trial = study.ask()
    suggest(trial)
    trial.set_user_attr(EVIDENCE, {"outcome": "measured"})
    study.tell(trial, [1.0, 12.0])
    with pytest.raises(ValueError, match="evidence needs its kind"):
        suggest(study.ask())


# --- any Optuna study ---------------------------------------------------------------------------


def test_a_plain_study_with_one_objective_is_minimised() -> None:
    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", -5, 5)
        kind = trial.suggest_categorical("kind", ["a", "b"])
        n = trial.suggest_int("n", 1, 8)
        return (x - 1) ** 2 + (0 if kind == "b" else 3) + abs(n - 3)

    study = optuna.create_study(sampler=FrontierSampler(seed=0))
    study.optimize(objective, n_trials=30)
    assert study.best_value < 0.5


def test_a_plain_study_with_conditions_and_constraints_is_searched() -> None:
    study = optuna.create_study(
        directions=["maximize", "minimize"], sampler=FrontierSampler(seed=1)
    )
    for _ in range(35):
        trial = study.ask()
        kind = trial.suggest_categorical("kind", ["plain", "fancy"])
        x = trial.suggest_float("x", 0.01, 1.0, log=True)
        extra = trial.suggest_int("extra", 0, 4) if kind == "fancy" else 0
        trial.set_constraint("size", x + 0.2 * extra - 1.0)
        study.tell(trial, [x + 0.1 * extra, x * x])
    late = study.trials[15:]
    works = sum(all(v <= 0 for v in trial.constraints.values()) for trial in late)
    assert works >= 0.6 * len(late)
    assert max(trial.values[0] for trial in study.best_trials) > 0.75


def test_three_objectives_are_searched_too() -> None:
    study = optuna.create_study(directions=["maximize"] * 3, sampler=FrontierSampler(seed=0))
    for _ in range(12):
        trial = study.ask()
        x, y = trial.suggest_float("x", 0, 1), trial.suggest_float("y", 0, 1)
        study.tell(trial, [x, y, 2 - x - y])
    assert len(study.best_trials) > 3


def test_a_failed_trial_teaches_nothing_and_is_not_repeated() -> None:
    study, _ = search(0, 3)
    trial = study.ask()
    broken = suggest(trial)
    study.tell(trial, state=TrialState.FAIL)
    for _ in range(5):
        trial = study.ask()
        point = suggest(trial)
        assert point != broken
        tell(study, trial, point)


# --- tables -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a table of the small engine: a blank where an axis is not active, numbers as text."""
    folder = tmp_path_factory.mktemp("tables")
    lines = [
        "model,kv,window,spec,k,fa,outcome,phase,shortfall_gib,weights_gib,kv_bytes_per_token,decode_tok_s,acceptance,boot_s"
    ]
    for quant in WEIGHTS:
        for kv in KV:
            for ctx, tokens in enumerate(CONTEXTS):
                for k in (None, 0, 1, 2):
                    for fa in ("on", "off"):
                        point = {"quant": quant, "kv": kv, "ctx": ctx, "k": k, "fa": fa}
                        shown = boot({**point, "spec": "off" if k is None else "mtp"})
                        cells = [
                            quant, kv, f"{tokens}.0", "off" if k is None else "mtp",
                            "" if k is None else (1, 2, 4)[k], fa, shown.outcome, shown.phase,
                            "" if shown.shortfall_bytes is None else shown.shortfall_bytes / GIB,
                            "" if shown.weights_bytes is None else shown.weights_bytes / GIB,
                            shown.kv_bytes_per_token or "", shown.decode_tok_s or "",
                            " ".join(f"{share:.4f}" for share in shown.acceptance), shown.boot_s,
                        ]  # fmt: skip
                        lines.append(",".join(str(cell) for cell in cells))
    path = folder / "small.csv.gz"
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))
    (folder / "small.space.yaml").write_text(
        "axes:\n"
        "  model: {role: weights, ordered: false, values: [q3, q4, q6]}\n"
        "  kv: {role: kv_dtype, ordered: false, values: [f16, q8]}\n"
        f"  window: {{role: context, ordered: true, values: {list(CONTEXTS)}}}\n"
        "  spec: {role: draft_method, ordered: false, values: ['off', mtp]}\n"
        "  k: {role: draft_length, ordered: true, values: [1, 2, 4]}\n"
        "  fa: {role: backend, ordered: false, values: [on, off]}\n"
        "known: {capacity_gib: 8, weights_gib: {q3: 3.0, q4: 4.1}}\n"
    )
    return path


KEYS = (
    "sampler table seeds budget boots_90 boots_95 boots_99 score infeasible_first_30 infeasible "
    "wrong_skips sampler_s"
).split()


def test_every_sampler_plays_by_the_same_rules(table: Path) -> None:
    names = ["frontier", "tpe", "tpe_default", "nsga2", "random", "qmc", "grid"]
    results = replay(table, names, seeds=1, budget=16)
    assert [result["sampler"] for result in results] == names
    for result in results:
        assert list(result) == KEYS
        assert 0 <= result["score"] <= 1
        assert result["boots_90"] <= result["boots_95"] <= result["boots_99"] <= 17
        assert result["wrong_skips"] == 0


def test_our_search_needs_few_boots_of_a_table(table: Path) -> None:
    (result,) = replay(table, ["frontier"], seeds=3, budget=20)
    assert result["score"] >= 0.99
    assert result["boots_95"] <= 15


def test_the_score_counts_what_the_table_holds(table: Path) -> None:
    read = read_table(table)
    assert read.volume(list(range(len(read.codes)))) == pytest.approx(read.whole_volume)
    assert read.volume(read.front) == pytest.approx(read.whole_volume)
    assert read.volume(read.front[:1]) < read.whole_volume


def test_the_verb_prints_one_json_object_for_each_sampler(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["replay", str(table), "sampler=random,grid", "seeds=1", "budget=5"]
    assert main([*arguments, "output=json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["sampler"] for line in lines] == ["random", "grid"]
    assert main(arguments) == 0
    assert "random" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.csv.gz"], "no such file"),
        ([], "takes one table"),
        (["TABLE", "sampler=best"], "best is not one of frontier"),
        (["TABLE", "seeds=0"], "seeds: 0"),
        (["TABLE", "budget=x"], "budget: x"),
        (["TABLE", "output=xml"], "output: xml"),
        (["TABLE", "seed=3"], "did you mean seeds"),
    ],
)
def test_a_wrong_request_is_answered_in_one_line(
    table: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    given = [str(table) if each == "TABLE" else each for each in arguments]
    assert main(["replay", *given]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("outcome", "ending", "no column outcome"),
        ("q6,", "q9,", "q9, which is not one of its values"),
        ("16384.0", "many", "many, which is not one"),
    ],
)
def test_a_table_that_does_not_fit_its_space_is_refused(
    table: Path, tmp_path: Path, old: str, new: str, words: str
) -> None:
    text = gzip.decompress(table.read_bytes()).decode().replace(old, new)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "t.space.yaml").write_text((table.parent / "small.space.yaml").read_text())
    with pytest.raises(ReplayError, match=words):
        read_table(tmp_path / "t.csv.gz")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("role: weights", "role: size", "role: size is not one of"),
        ("values: [q3, q4, q6]", "values: 3", "needs a list of values"),
        ("known: {", "known: [", "is not YAML"),
        ("q4: 4.1", "q4: -1", "must be above 0"),
    ],
)
def test_a_sidecar_with_a_mistake_is_refused(
    table: Path, tmp_path: Path, old: str, new: str, words: str
) -> None:
    sidecar = (table.parent / "small.space.yaml").read_text().replace(old, new)
    (tmp_path / "t.csv.gz").write_bytes(table.read_bytes())
    (tmp_path / "t.space.yaml").write_text(sidecar)
    with pytest.raises(ReplayError, match=words):
        read_table(tmp_path / "t.csv.gz")
