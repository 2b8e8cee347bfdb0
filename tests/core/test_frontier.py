"""The models of the search by themselves: codes, memory, refusals, acceptance, speed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import (
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from sweeper.core.evidence import Evidence, Need, Prior, Role
from sweeper.core.space import Axis, AxisRef, Condition, Rule, Space
from sweeper.search.frontier_kernel import AnovaKernel
from sweeper.search.frontier_memory import GIB, LinearBelief, MemoryModel
from sweeper.search.frontier_model import Feasibility, Seen
from sweeper.search.frontier_model import _Features as Features
from sweeper.search.frontier_roles import guessed
from sweeper.search.frontier_space import CodedSpace, from_space, from_trials
from sweeper.search.frontier_speed import Acceptance, Speed, axis_tables
from sweeper.search.frontier_support import Suspicions

QUICK = settings(deadline=None, max_examples=30)


def axis(
    name: str, *values: object, ordered: bool = False, when: tuple[Condition, ...] = ()
) -> Axis:
    return Axis(name=name, values=values, ordered=ordered, sets=(name,), when=when)  # type: ignore[arg-type]


ENGINE = Space(
    axes=(
        axis("quant", "small", "large"),
        axis("kv", "f16", "q4"),
        axis("ctx", 4096, 32768, 131072, ordered=True),
        axis("spec", "none", "mtp"),
        axis("k", 1, 2, 4, ordered=True, when=(Condition(axis="spec", op="in", operand=("mtp",)),)),
        axis("chunk", 256, 1024, ordered=True),
    ),
    rules=(
        Rule(
            reason="more drafts than it batches",
            forbid=(
                Condition(axis="k", op="ge", operand=4),
                Condition(axis="chunk", op="lt", operand=1024),
            ),
        ),
    ),
)
ROLES = {
    "quant": Role.WEIGHTS,
    "kv": Role.KV_DTYPE,
    "ctx": Role.CONTEXT,
    "spec": Role.DRAFT_METHOD,
    "k": Role.DRAFT_LENGTH,
    "chunk": Role.PREFILL_CHUNK,
}
PRIOR = Prior(
    capacity_bytes=16 * GIB,
    weights_bytes=(("large", 12 * GIB), ("small", 7 * GIB)),
    kv_bytes_per_token=(("f16", 65536.0), ("q4", 18432.0)),
)


def coded() -> CodedSpace:
    return from_space(ENGINE, ROLES, seed=0)


def row_of(space: CodedSpace, **params: object) -> np.ndarray:
    row = space.encode(params)
    assert row is not None
    return row


# --- codes --------------------------------------------------------------------------------------


def test_the_coded_points_are_exactly_those_of_the_space() -> None:
    space = coded()
    names = {one.name: one for one in ENGINE.axes}
    found = set()
    for row in space.points:
        params = space.params(row)
        found.add(
            tuple(
                sorted(
                    (name, str(names[name].values[raw] if names[name].ordered else raw))  # type: ignore[index]
                    for name, raw in params.items()
                )
            )
        )
    declared = {
        tuple(sorted((name, str(value)) for name, value in point.items()))
        for point in ENGINE.points()
    }
    assert found == declared
    assert len(space.points) == len(declared)


def test_conditions_between_axes_are_kept_in_codes() -> None:
    space = Space(
        axes=(
            axis("a", 1, 2, 3, ordered=True),
            axis("b", 1, 2, 3, ordered=True),
        ),
        rules=(
            Rule(
                reason="a below b",
                forbid=(Condition(axis="a", op="lt", operand=AxisRef(axis="b")),),
            ),
        ),
    )
    assert len(from_space(space, {}, seed=0).points) == 6


def test_encoding_and_decoding_are_inverse() -> None:
    space = coded()
    for row in space.points:
        assert (row_of(space, **space.params(row)) == row).all()


def test_a_value_from_elsewhere_has_no_code() -> None:
    assert coded().encode({"quant": "huge"}) is None


def test_a_role_for_a_missing_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="quantisation"):
        from_space(ENGINE, {"quantisation": Role.WEIGHTS}, seed=0)


def test_a_space_too_large_to_hold_is_sampled() -> None:
    space = Space(axes=tuple(axis(f"a{i}", *range(12), ordered=True) for i in range(6)))
    sampled = from_space(space, {}, seed=0)
    assert not sampled.whole
    assert len(np.unique(sampled.keys(sampled.points))) == len(sampled.points) > 100_000


def test_axes_and_switches_are_learnt_from_trials() -> None:
    on = {
        "spec": CategoricalDistribution(["none", "mtp"]),
        "k": IntDistribution(1, 4),
        "lr": FloatDistribution(1e-3, 1.0, log=True),
    }
    off = {name: on[name] for name in ("spec", "lr")}
    space = from_trials(
        [
            ({"spec": "mtp", "k": 2, "lr": 0.1}, on),
            ({"spec": "none", "lr": 0.5}, off),
        ],
        {},
        seed=0,
    )
    assert space is not None
    by_name = {one.name: at for at, one in enumerate(space.axes)}
    switched = space.points[:, by_name["k"]] == space.axes[by_name["k"]].size
    none = space.points[:, by_name["spec"]] == space.axes[by_name["spec"]].code("none")
    assert (switched == none).all()


def test_nothing_seen_is_no_space() -> None:
    assert from_trials([], {}, seed=0) is None


# --- memory -------------------------------------------------------------------------------------


@QUICK
@given(st.floats(-5, 5), st.floats(0.01, 2))
def test_a_belief_moves_towards_what_it_observes_and_narrows(value: float, sd: float) -> None:
    belief = LinearBelief(np.zeros(2), np.ones(2))
    row = np.array([1.0, 0.5])
    before = belief.predict(row)
    belief.observe(row, value, sd)
    after = belief.predict(row)
    assert abs(after[0] - value) <= abs(before[0] - value) + 1e-12
    assert after[1] < before[1]


@QUICK
@given(st.booleans(), st.floats(-8, 8))
def test_a_belief_moves_to_the_side_that_it_is_told(above: bool, than: float) -> None:
    belief = LinearBelief(np.zeros(2), np.ones(2))
    row = np.array([1.0, -1.0])
    belief.observe_sign(row, above, than)
    mean, variance = belief.predict(row)
    assert (mean >= -1e-9) if above else (mean <= 1e-9)
    assert 0 < variance <= 2.0


def fits(model: MemoryModel, row: np.ndarray) -> float:
    return float(model.fits(model.rows(row[None, :]))[0])


def test_more_context_never_fits_better_before_any_boot() -> None:
    space = coded()
    model = MemoryModel(space, PRIOR)
    chances = [
        fits(model, row_of(space, quant="large", kv="f16", ctx=i, spec="none", chunk=0))
        for i in range(3)
    ]
    assert chances[0] > chances[1] > chances[2]
    assert chances[0] > 0.8
    assert chances[2] < 0.05


def test_a_shortfall_rules_out_what_needs_more_and_leaves_what_needs_less() -> None:
    space = coded()
    model = MemoryModel(space, PRIOR)
    failed = row_of(space, quant="large", kv="f16", ctx=1, spec="none", chunk=0)
    less = row_of(space, quant="small", kv="q4", ctx=0, spec="none", chunk=0)
    more = row_of(space, quant="large", kv="f16", ctx=2, spec="none", chunk=0)
    model.learn(
        failed,
        Evidence(
            outcome="oom_kv_cache",
            kind="infeasible",
            phase="kv",
            shortfall_bytes=0.4 * GIB,
            weights_bytes=12.1 * GIB,
            kv_bytes_per_token=65536.0,
        ),
        1,
    )
    assert fits(model, failed) < 0.1
    assert fits(model, more) < 0.02
    assert fits(model, less) > 0.9


def test_a_boot_that_serves_raises_the_chances_of_its_neighbours() -> None:
    space = coded()
    model = MemoryModel(space, Prior())
    small = row_of(space, quant="small", kv="q4", ctx=1, spec="none", chunk=0)
    before = fits(model, small)
    model.learn(
        row_of(space, quant="small", kv="q4", ctx=2, spec="none", chunk=0),
        Evidence(outcome="measured", kind="measured", phase="ready", weights_bytes=7 * GIB),
        1,
    )
    assert fits(model, small) > before


def test_what_a_boot_prints_replaces_what_was_assumed() -> None:
    space = coded()
    model = MemoryModel(space, PRIOR)
    row = row_of(space, quant="large", kv="q4", ctx=1, spec="none", chunk=0)
    before, _ = model.margin_bytes(row[None, :])
    model.learn(
        row_of(space, quant="large", kv="q4", ctx=0, spec="none", chunk=0),
        Evidence(
            outcome="measured",
            kind="measured",
            phase="ready",
            weights_bytes=10 * GIB,
            kv_bytes_per_token=18432.0,
        ),
        1,
    )
    after, _ = model.margin_bytes(row[None, :])
    # The weights are 2 GiB smaller than the file said.
    assert float(after[0] - before[0]) == pytest.approx(2 * GIB, rel=0.3)


# --- refusals -----------------------------------------------------------------------------------


def support(suspicions: Suspicions, row: np.ndarray) -> float:
    return float(suspicions.supported(suspicions.entries(row[None, :]))[0])


def test_a_pair_is_found_and_its_values_are_let_go() -> None:
    space = coded()
    suspicions = Suspicions(space, np.random.default_rng(0))
    number = 0
    for ctx in range(3):
        for quant in ("small", "large"):
            for kv, chunk in (("f16", 0), ("f16", 1), ("q4", 1), ("q4", 0)):
                row = row_of(space, quant=quant, kv=kv, ctx=ctx, spec="none", chunk=chunk)
                number += 1
                if kv == "q4" and chunk == 0:
                    suspicions.refused(row, 2, number)
                else:
                    suspicions.passed(row, 12)
    bad = row_of(space, quant="small", kv="q4", ctx=0, spec="mtp", k=0, chunk=0)
    words, guilt, behind = suspicions.suspect(bad)
    assert words == "kv=q4 with chunk=256"
    assert guilt > 0.9
    assert len(behind) == 6
    assert support(suspicions, bad) < 0.05
    assert (
        support(suspicions, row_of(space, quant="small", kv="q4", ctx=0, spec="none", chunk=1))
        > 0.9
    )


def test_a_refusal_with_several_suspects_condemns_none_of_them() -> None:
    space = coded()
    suspicions = Suspicions(space, np.random.default_rng(0))
    refused = row_of(space, quant="large", kv="q4", ctx=2, spec="none", chunk=0)
    suspicions.refused(refused, 2, 1)
    assert support(suspicions, refused) < 0.1
    for change in ({"quant": "small"}, {"kv": "f16"}, {"chunk": 1}):
        other = {"quant": "large", "kv": "q4", "ctx": 2, "spec": "none", "chunk": 0, **change}
        assert support(suspicions, row_of(space, **other)) > 0.1


def test_a_refusal_that_nothing_explains_is_handed_on() -> None:
    space = coded()
    suspicions = Suspicions(space, np.random.default_rng(0))
    row = row_of(space, quant="small", kv="f16", ctx=0, spec="none", chunk=0)
    suspicions.passed(row, 12)
    suspicions.refused(row, 2, 7)
    assert support(suspicions, row) > 0.9
    assert suspicions.unexplained == {7}


def test_passing_a_later_phase_clears_and_an_earlier_one_does_not() -> None:
    space = coded()
    early, late = (Suspicions(space, np.random.default_rng(0)) for _ in range(2))
    row = row_of(space, quant="small", kv="f16", ctx=0, spec="none", chunk=0)
    for suspicions, phase in ((early, 4), (late, 8)):
        suspicions.passed(row, phase)
        suspicions.refused(
            row_of(space, quant="small", kv="f16", ctx=0, spec="none", chunk=1), 6, 1
        )
    assert support(early, row) < support(late, row)


# --- what is known before any boot -------------------------------------------------------------

MIB = 2**20
SMALL = Space(
    axes=(
        axis("ctx", 512, 1024, 2048, 4096, ordered=True),
        axis("n", 0, 4, 16, ordered=True),
        axis("chunk", 128, 512, 2048, ordered=True),
    )
)
SMALL_ROLES = {"ctx": Role.CONTEXT, "n": Role.DRAFT_LENGTH, "chunk": Role.PREFILL_CHUNK}


def need(ctx: int, n: int, chunk: int) -> Need:
    """Return what a small engine on a small machine needs: some MiB of everything."""
    return Need(
        point=(("ctx", str(ctx)), ("n", str(n)), ("chunk", str(chunk))),
        parts=(
            ("weights", 240.0 * MIB, 2.0 * MIB),
            ("kv", ctx * 18432.0, 0.02 * ctx * 18432.0),
            ("draft", n * 2.0 * MIB, n * 0.5 * MIB),
            ("compute", chunk * 0.05 * MIB, chunk * 0.02 * MIB),
            ("overhead", 150.0 * MIB, 40.0 * MIB),
        ),
    )


def small_model(every: int) -> tuple[CodedSpace, MemoryModel]:
    """Return a model that was told what every so many-th point needs of 500 MiB."""
    needs = tuple(need(**each) for each in list(SMALL.points())[::every])  # type: ignore[arg-type]
    space = from_space(SMALL, SMALL_ROLES, seed=0)
    return space, MemoryModel(space, Prior(capacity_bytes=500.0 * MIB, needs=needs))


@pytest.mark.parametrize("every", [1, 2, 5])
def test_the_memory_of_all_points_follows_from_what_some_are_said_to_need(every: int) -> None:
    space, model = small_model(every)
    mean, sd = model.margin_bytes(space.points)
    for row, margin, spread in zip(space.points, mean, sd, strict=True):
        values = [one.values[code] for one, code in zip(space.axes, row, strict=True)]
        said = sum(size for _, size, _ in need(*values).parts)  # type: ignore[arg-type]
        # Within what the model's own doubt and the examples left out allow.
        assert margin / MIB == pytest.approx(500 - said / MIB, abs=12)
        assert 30 < spread / MIB < 110


def test_one_boot_settles_what_all_points_have_in_common() -> None:
    space, model = small_model(1)
    row = row_of(space, ctx=2, n=0, chunk=0)
    more = row_of(space, ctx=3, n=2, chunk=2)
    before = fits(model, more)
    model.learn(
        row,
        Evidence(
            outcome="oom_compute", kind="infeasible", phase="compute", shortfall_bytes=30.0 * MIB
        ),
        1,
    )
    assert fits(model, row) < 0.2
    assert fits(model, more) < 0.3 * before


def test_needs_of_another_space_say_nothing() -> None:
    space = from_space(SMALL, SMALL_ROLES, seed=0)
    prior = Prior(capacity_bytes=500.0 * MIB)
    other = replace(prior, needs=(need(8192, 0, 128),))
    mean, sd = MemoryModel(space, prior).margin_bytes(space.points)
    same, too = MemoryModel(space, other).margin_bytes(space.points)
    assert (mean == same).all()
    assert (sd == too).all()


def ended(space: CodedSpace, number: int, outcome: str, **params: object) -> Seen:
    evidence = Evidence(outcome=outcome, kind="infeasible", phase="serving")
    return Seen(number=number, row=row_of(space, **params), values=None, evidence=evidence)


def probability(feasibility: Feasibility, row: np.ndarray) -> float:
    codes = row[None, :]
    entries = feasibility.suspicions.entries(codes)
    memory = feasibility.memory.rows(codes)
    keys = np.zeros(1, dtype=np.int64)
    features = Features(codes=codes, keys=keys, memory=memory, entries=entries)
    return float(feasibility.probability(features, feasibility.fitting(features))[0])


def test_memory_that_runs_out_serving_where_it_was_short_anyway_tells_of_memory() -> None:
    space, model = small_model(1)
    feasibility = Feasibility(space, Prior(), np.random.default_rng(0))
    feasibility.memory = model
    tight = row_of(space, ctx=3, n=1, chunk=0)
    less = row_of(space, ctx=0, n=0, chunk=0)
    before = probability(feasibility, less)
    feasibility.learn(ended(space, 1, "oom_runtime", ctx=3, n=1, chunk=0))
    assert model.rests_on == [1]
    assert probability(feasibility, tight) < 0.3
    assert probability(feasibility, less) > 0.5 * before


def test_memory_that_runs_out_serving_with_plenty_to_spare_tells_nothing_of_sizes() -> None:
    space = from_space(SMALL, SMALL_ROLES, seed=0)
    needs = tuple(need(**each) for each in SMALL.points())  # type: ignore[arg-type]
    roomy = Prior(capacity_bytes=4.0 * GIB, needs=needs)
    feasibility = Feasibility(space, roomy, np.random.default_rng(0))
    before, _ = feasibility.memory.margin_bytes(space.points)
    feasibility.learn(ended(space, 1, "oom_runtime", ctx=1, n=1, chunk=1))
    after, _ = feasibility.memory.margin_bytes(space.points)
    assert (before == after).all()
    assert probability(feasibility, row_of(space, ctx=1, n=1, chunk=1)) < 0.5


def test_one_failure_of_an_unknown_kind_does_not_condemn_what_is_unlike_it() -> None:
    space = from_space(SMALL, SMALL_ROLES, seed=0)
    feasibility = Feasibility(space, Prior(), np.random.default_rng(0))
    feasibility.memory.informed = False
    feasibility.learn(ended(space, 1, "engine_crash", ctx=3, n=2, chunk=2))
    same = probability(feasibility, row_of(space, ctx=3, n=2, chunk=2))
    unlike = probability(feasibility, row_of(space, ctx=0, n=0, chunk=0))
    assert same < 0.5 < unlike


# --- speed --------------------------------------------------------------------------------------


def test_a_long_draft_predicts_the_shorter_ones() -> None:
    space = coded()
    acceptance = Acceptance(space)
    shares = (0.8, 0.6, 0.42, 0.28)
    acceptance.learn(
        row_of(space, quant="small", kv="f16", ctx=0, spec="mtp", k=2, chunk=1), shares
    )
    for at, length in enumerate((1, 2, 4)):
        row = row_of(space, quant="small", kv="f16", ctx=1, spec="mtp", k=at, chunk=1)
        mean, sd = acceptance.log_tokens(row[None, :])
        assert float(np.exp(mean[0])) == pytest.approx(1 + sum(shares[:length]), rel=0.06)
        assert float(sd[0]) < 0.1


@pytest.mark.parametrize("cost", [0.02, 0.6])
def test_what_a_drafted_token_costs_is_learnt_from_the_rates(cost: float) -> None:
    """Drafts are nearly free where weights are waited for, and not where arithmetic is."""
    space = from_space(SMALL, SMALL_ROLES, seed=0)
    speed = Speed(space, Prior())
    for at, length in ((0, 0), (1, 4)):
        row = row_of(space, ctx=1, n=at, chunk=0)
        speed.learn(row, 50.0 * (1 + 0.9 * length) / (1 + cost * length), (0.9,) * length)
    mean, sd = speed.predict(row_of(space, ctx=1, n=2, chunk=0)[None, :])
    # The share of drafts that is accepted keeps falling slowly beyond what was seen.
    least, most = np.array([0.6, 1.05]) * 50.0 * (1 + 0.9 * 16) / (1 + cost * 16)
    low, high = np.exp(mean[0] - 2 * sd[0]), np.exp(mean[0] + 2 * sd[0])
    assert low < most
    assert high > least
    assert 0.5 * least < float(np.exp(mean[0])) < 1.6 * most


def test_where_arithmetic_is_slow_a_long_draft_is_expected_to_gain_less() -> None:
    space = from_space(SMALL, SMALL_ROLES, seed=0)
    plain, long = (row_of(space, ctx=1, n=at, chunk=0)[None, :] for at in (0, 2))
    gains = []
    for cost in (0.03, 0.3):
        mean = Speed(space, Prior(draft_cost=cost)).predict(np.concatenate([plain, long]))[0]
        gains.append(float(np.exp(mean[1] - mean[0])))
    assert gains[1] < 0.6 * gains[0]


def test_no_draft_yields_one_token_per_step() -> None:
    space = coded()
    row = row_of(space, quant="small", kv="f16", ctx=0, spec="none", chunk=0)
    mean, sd = Acceptance(space).log_tokens(row[None, :])
    assert (float(mean[0]), float(sd[0])) == (0.0, 0.0)


def test_the_gradient_of_the_kernel_is_its_slope() -> None:
    space = coded()
    generator = np.random.default_rng(0)
    codes = space.points[generator.integers(len(space.points), size=6)].astype(float)
    tables = axis_tables(space)
    scales = generator.uniform(0.1, 1.0, size=len(tables) + 3)
    kernel = AnovaKernel(tables, scales)
    _, gradient = kernel(codes, eval_gradient=True)
    for at in range(len(scales)):
        moved = [
            AnovaKernel(tables, scales * np.exp(s * 1e-5 * np.eye(len(scales))[at]))
            for s in (1, -1)
        ]
        slope = (moved[0](codes) - moved[1](codes)) / 2e-5
        assert np.allclose(slope, gradient[:, :, at], atol=1e-6)


def test_the_quick_mean_is_near_the_exact_one() -> None:
    space = coded()
    speed = Speed(space, PRIOR)
    generator = np.random.default_rng(0)
    for row in space.points[generator.permutation(len(space.points))[:12]]:
        speed.learn(row, 50.0 + 10.0 * float(row[0]) + 3.0 * float(row[5]), ())
    tokens, _ = speed.acceptance.log_tokens(space.points)
    quick = speed.quick(space.points, tokens)
    exact, sd = speed.predict(space.points)
    assert np.abs(quick - exact).max() < 0.05
    assert (sd > 0).all()


# --- roles --------------------------------------------------------------------------------------


def test_roles_are_guessed_from_what_boots_print() -> None:
    space = from_space(ENGINE, {}, seed=0)
    seen = []
    sizes = {"small": 7.0, "large": 12.0}
    tokens = (4096, 32768, 131072)
    for number, (quant, kv, ctx, k) in enumerate(
        [
            ("small", "f16", 0, 2),
            ("large", "f16", 1, 1),
            ("small", "q4", 2, 2),
            ("large", "q4", 0, 1),
        ]
    ):
        seen.append(
            Seen(
                number=number,
                row=row_of(space, quant=quant, kv=kv, ctx=ctx, spec="mtp", k=k, chunk=1),
                values=(100.0, float(np.log2(tokens[ctx]))),
                evidence=Evidence(
                    outcome="measured",
                    kind="measured",
                    weights_bytes=sizes[quant] * GIB,
                    kv_bytes_per_token=65536.0 if kv == "f16" else 18432.0,
                    acceptance=(0.5,) * (1, 2, 4)[k],
                ),
            )
        )
    roles = guessed(space, seen)
    assert roles["ctx"] is Role.CONTEXT
    assert roles["kv"] is Role.KV_DTYPE
    assert roles["k"] is Role.DRAFT_LENGTH
    assert "chunk" not in roles


def test_no_role_is_guessed_from_nothing() -> None:
    assert guessed(from_space(ENGINE, {}, seed=0), []) == {}
