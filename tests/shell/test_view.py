"""What a person sees while a study runs: pictures of every size, lines elsewhere, the time left."""

from __future__ import annotations

import io
import math
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from tests.examples import broken_attempt, measured_attempt, oom_attempt
from tests.shell.conftest import Sweeper, fake_job, gone
from tests.shell.test_run import SLOW, nothing_is_half_done, wait_for_boot

from sweeper.core.eta import Kind, Left, Plan, Spent, expected_again, time_left
from sweeper.core.outcome import Attempt
from sweeper.core.pairs import Pairs
from sweeper.core.study import Confirm
from sweeper.engines import load_engine, told
from sweeper.measuring import Progress
from sweeper.server import Registry
from sweeper.trial import attempt
from sweeper.view import About, View
from sweeper.view.frame import bar, clock, left_words, stage_words
from sweeper.view.plot import ASCII, plot, short

ABOUT = About(
    study="qwen27b_mtp", engine="llamacpp", hardware="laptop_24g", simulated=True,
    confirm=Confirm(rounds=1, boots=8),
)  # fmt: skip
WHY = "expected to be 4 % faster than the front at 65,536 tokens, and 70 % likely to fit"
ATTEMPTS = (
    measured_attempt(1, decode_tok_s=40.0, context=32768),
    oom_attempt(2),
    measured_attempt(3, decode_tok_s=60.0, context=8192, n_max=2),
    broken_attempt(4),
    measured_attempt(5, decode_tok_s=30.0, context=131072, cache_type="q8_0"),
    measured_attempt(6, decode_tok_s=25.0, context=16384),
)
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def console(width: int = 80, height: int = 24, **options: Any) -> Console:
    environ = options.pop("environ", {"TERM": "xterm-256color"})
    return Console(
        file=io.StringIO(), width=width, height=height, _environ=environ,
        **{"force_terminal": True, **options},
    )  # fmt: skip


def printed(on: Console) -> str:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue()


def running(on: Console, attempts: Sequence[Attempt] = ATTEMPTS, **changes: Any) -> View:
    """Return a view in the middle of a study: these have ended, and one more is booting."""
    fields = {"budget_boots": 16, "budget_minutes": None, "about": ABOUT, **changes}
    view = View(on, **fields)
    for boots, each in enumerate(attempts):
        view.booting(each.number, boots, each.point)
        view.finished(each)
    view.booting(len(attempts) + 1, len(attempts), measured_attempt(1).point, why=WHY)
    view.progress(Progress(stage="boot", detail="loading weights 43 %", done=0.43))
    return view


def lines_of(view: View, width: int, height: int, *, ascii_only: bool = False) -> list[str]:
    plain = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    with plain.capture() as captured:
        plain.print(view.picture(width, height, ascii_only=ascii_only))
    return captured.get().splitlines()


# ---- The picture -------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("height", [12, 24, 50])
def test_the_picture_says_what_runs_how_far_it_is_and_what_was_found(
    width: int, height: int
) -> None:
    said = "\n".join(lines_of(running(console()), width, height))
    assert "qwen27b_mtp" in said
    assert "boot 7 of 16" in said
    assert re.search(r"about \d+ \w+ left", said)
    assert "attempt 7" in said
    assert "loading weights 43 %" in said
    assert "█" in said
    assert "why: expected" in said
    if height >= 24:
        assert re.search(r"front +tok/s", said)
        assert "last trials" in said
        assert "●" in said, "the plot"
        assert re.search(r"^ +3 +60\.0 ", said, re.MULTILINE), "the fastest"


def test_the_last_trials_have_their_reasons() -> None:
    said = "\n".join(lines_of(running(console()), 160, 50))
    for each in ATTEMPTS:
        assert re.search(rf"^ +{each.number} [✓✗!] ", said, re.MULTILINE)
    assert "engine_crash" in said


def test_the_first_line_has_the_engine_its_version_and_that_it_is_simulated() -> None:
    first, *_ = lines_of(running(console()), 160, 30)
    version = ATTEMPTS[-1].engine["engine_version"]
    assert first == f"qwen27b_mtp · llamacpp {version} SIMULATED · laptop_24g"


def test_before_the_first_boot_nothing_is_made_up() -> None:
    view = View(console(), budget_boots=5, budget_minutes=None, about=ABOUT)
    assert view.left_s() is None
    said = "\n".join(lines_of(view, 80, 24))
    assert "time left not known yet" in said
    assert "attempt" not in said


def test_a_resumed_study_shows_what_was_there_before() -> None:
    view = View(console(), budget_boots=16, budget_minutes=None, about=ABOUT, known=ATTEMPTS)
    said = "\n".join(lines_of(view, 120, 30))
    assert "boot 7 of 16" in said
    assert "60.0" in said
    assert view.left_s() is not None


def test_once_told_to_stop_it_says_so() -> None:
    view = running(console())
    view.stopping()
    assert "stopping" in "\n".join(lines_of(view, 40, 10))


def test_the_confirmation_counts_its_own_boots() -> None:
    view = running(console())
    view.confirming(3, 2, 3, ATTEMPTS[2].point)
    said = "\n".join(lines_of(view, 80, 24))
    assert "confirming 2 of 3" in said
    assert "attempt 3" in said


@given(
    width=st.integers(1, 200), height=st.integers(1, 70), count=st.integers(0, len(ATTEMPTS)),
    ascii_only=st.booleans(),
)  # fmt: skip
def test_the_picture_fits_every_terminal(
    width: int, height: int, count: int, ascii_only: bool
) -> None:
    view = running(console(), ATTEMPTS[:count])
    lines = lines_of(view, width, height, ascii_only=ascii_only)
    assert 1 <= len(lines) <= height
    assert all(cell_len(line.rstrip()) <= width for line in lines)
    if ascii_only:
        assert all(line.isascii() for line in lines)


@given(text=st.text(max_size=80))
def test_what_an_engine_says_cannot_break_the_picture(text: str) -> None:
    view = running(console())
    view.progress(Progress(stage="boot", detail=text))
    lines = lines_of(view, 60, 24)
    assert len(lines) <= 24
    assert all(cell_len(line.rstrip()) <= 60 for line in lines)
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (Progress(stage="boot", detail="capturing graphs 3/3"), "capturing graphs 3/3"),
        (Progress(stage="prove", detail="131,072 tokens"), "proving 131,072 tokens"),
        (
            Progress(stage="measure", detail="short, run 4 of at most 10"),
            "measuring short, run 4 of ≤ 10",
        ),
        (Progress(stage="warm up", detail="short"), "warming up: short"),
        (Progress(stage="first request"), "first request"),
    ],
)
def test_each_stage_has_its_words(progress: Progress, words: str) -> None:
    assert stage_words(progress) == words


# ---- Terminals ---------------------------------------------------------------------------------


def test_no_color_has_no_colour_and_says_the_same() -> None:
    colourless = console(100, 30, environ={"TERM": "xterm-256color", "NO_COLOR": "1"})
    colourful = console(100, 30)
    colourless.print(running(colourless).picture(100, 30))
    colourful.print(running(colourful).picture(100, 30))
    colours = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7]|38;[\d;]+)m")
    assert colours.search(printed(colourful))
    assert not colours.search(printed(colourless))
    assert ESCAPE.sub("", printed(colourless)) == ESCAPE.sub("", printed(colourful))


@pytest.mark.parametrize(
    "options",
    [{"force_terminal": False}, {"environ": {"TERM": "dumb"}}],
    ids=["no terminal", "a dumb one"],
)
def test_without_a_terminal_that_can_move_there_are_lines(options: dict[str, Any]) -> None:
    on = console(200, **options)
    view = View(on, budget_boots=2, budget_minutes=None, about=ABOUT)
    with view:
        view.say("this stays")
        view.booting(1, 0, ATTEMPTS[0].point, why=WHY)
        view.progress(Progress(stage="boot", detail="loading weights"))
        view.finished(ATTEMPTS[0])
        view.confirming(1, 1, 1, ATTEMPTS[0].point)
    said = printed(on)
    assert not re.search(r"\x1b\[[0-9;?]*[A-HJKhl]", said), "nothing moves the cursor"
    lines = ESCAPE.sub("", said).splitlines()
    assert lines[:3] == [
        "this stays",
        f"[1/2] attempt 1: {ATTEMPTS[0].point}",
        f"      why: {WHY}",
    ]
    assert lines[3].startswith("   1 40.0 tok/s, 32,752 tokens proven")
    assert " left" in lines[3]
    assert lines[4] == f"[confirming 1 of 1] attempt 1 again: {ATTEMPTS[0].point}"


def test_on_a_terminal_every_trial_is_kept_above_the_picture_once() -> None:
    on = console(120, 30)
    many = [measured_attempt(number, decode_tok_s=30.0 + number) for number in range(1, 12)]
    with View(on, budget_boots=20, budget_minutes=None, about=ABOUT) as view:
        for boots, each in enumerate(many):
            view.booting(each.number, boots, each.point)
            view.finished(each)
    kept = ESCAPE.sub("", printed(on)).replace("\r", "\n")
    for each in many:
        assert len(re.findall(rf"^ +{each.number} \d+\.\d tok/s", kept, re.MULTILINE)) == 1


def test_a_terminal_that_was_resized_gets_a_fresh_picture() -> None:
    on = console(120, 40)
    view = running(on)
    view._live.start()
    try:
        view._redraw()
        on.width, on.height = 50, 14
        before = len(printed(on))
        view._redraw()
        fresh = printed(on)[before:]
    finally:
        view._live.stop()
    assert "\x1b[2J" in fresh
    assert all(
        cell_len(line.rstrip()) <= 50
        for line in ESCAPE.sub("", fresh).replace("\r", "").split("\n")
    )


# ---- The plot ----------------------------------------------------------------------------------

PAIRS = st.lists(
    st.tuples(st.floats(1, 2**24), st.floats(0.01, 1e5)), min_size=0, max_size=12
)  # fmt: skip


@given(behind=PAIRS, front=PAIRS, width=st.integers(0, 120), height=st.integers(0, 40))
def test_a_plot_is_as_large_as_asked_or_not_there(
    behind: list[tuple[float, float]], front: list[tuple[float, float]], width: int, height: int
) -> None:
    lines = plot(behind, front, width=width, height=height)
    if not lines:
        assert width < 16 or height < 4 or not (behind or front)
        return
    assert len(lines) == height
    assert {len(line) for line in lines} == {width}
    assert all(
        line.isascii() for line in plot(behind, front, width=width, height=height, marks=ASCII)
    )
    if front:
        assert any("●" in line for line in lines)


def test_a_plot_is_a_staircase_from_the_fastest_to_the_longest() -> None:
    lines = plot([(8192, 20.0)], [(4096, 60.0), (16384, 40.0)], width=32, height=9)
    assert lines == [
        " 60┤●                           ",
        "   ┤│                           ",
        "   ┤│                           ",
        " 37┤╰──────────────────────────●",
        "   ┤                            ",
        "   ┤              ∙             ",
        " 14┤                            ",
        "   └────────────────────────────",
        "    4K   tok/s over context  16K",
    ]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [(512, "512"), (8176, "8K"), (131072, "128K"), (2**20, "1M"), (1536, "1.5K")],
)
def test_token_counts_are_said_as_people_say_them(tokens: int, words: str) -> None:
    assert short(tokens) == words


# ---- The time left -----------------------------------------------------------------------------

SPENT = st.lists(
    st.builds(
        lambda kind, seconds, share: Spent(kind=kind, seconds=seconds, measure_s=seconds * share),
        st.sampled_from(Kind), st.floats(0, 1e5), st.floats(0, 1),
    ),
    min_size=1, max_size=30,
)  # fmt: skip


PLANS = st.builds(
    Plan, boots=st.integers(0, 500), again=st.integers(0, 16), running_s=st.floats(0, 1e5),
    seconds=st.none() | st.floats(0, 1e6), confirming=st.booleans(),
)  # fmt: skip


@given(spent=SPENT, plan=PLANS)
def test_the_time_left_is_a_time_within_its_spread(spent: list[Spent], plan: Plan) -> None:
    left = time_left(spent, plan)
    assert left is not None
    assert 0 <= left.low <= left.seconds <= left.high
    assert math.isfinite(left.high)


@given(spent=SPENT, boots=st.integers(0, 200))
def test_more_boots_never_take_less_time(spent: list[Spent], boots: int) -> None:
    fewer = time_left(spent, Plan(boots=boots, again=0))
    more = time_left(spent, Plan(boots=2 * boots + 2, again=0))
    assert fewer is not None
    assert more is not None
    assert more.seconds >= fewer.seconds * 0.999


def test_no_attempt_no_estimate_and_nothing_to_come_no_time() -> None:
    assert time_left([], Plan(boots=5, again=1)) is None
    done = time_left([Spent(kind=Kind.FULL, seconds=60.0)], Plan(boots=0, again=0))
    assert done == Left(seconds=0.0, low=0.0, high=0.0)


def test_equal_boots_take_as_long_as_they_did() -> None:
    spent = [Spent(kind=Kind.RACED, seconds=60.0, measure_s=0.0)] * 40
    left = time_left(spent, Plan(boots=10, again=0))
    assert left is not None
    assert left.seconds == pytest.approx(600, rel=0.1)
    assert left.low < 600 < left.high


def test_the_time_that_is_allowed_ends_the_search_but_not_the_confirmation() -> None:
    spent = [Spent(kind=Kind.FULL, seconds=60.0, measure_s=30.0)] * 10
    limited = time_left(spent, Plan(boots=100, again=0, seconds=120.0))
    confirmed = time_left(spent, Plan(boots=100, again=4, seconds=120.0))
    assert limited is not None
    assert confirmed is not None
    assert 120 <= limited.seconds <= 180
    assert confirmed.seconds == pytest.approx(limited.seconds + 240, rel=0.2)


@given(
    front=st.integers(0, 50), done=st.integers(0, 200), left=st.integers(0, 200),
    rounds=st.integers(0, 3), most=st.integers(0, 20),
)  # fmt: skip
def test_the_confirmation_is_never_longer_than_allowed(
    front: int, done: int, left: int, rounds: int, most: int
) -> None:
    again = expected_again(front=front, boots_done=done, boots_left=left, rounds=rounds, most=most)
    assert 0 <= again <= most


@given(st.floats(0, 1e7), st.floats(0, 1), st.integers(0, 200))
def test_times_and_bars_are_written_for_every_value(
    seconds: float, share: float, width: int
) -> None:
    assert re.fullmatch(r"(\d+:)?\d{1,2}:\d{2}", clock(seconds))
    assert len(bar(share, width)) == width
    assert "left" in left_words(Left(seconds=seconds, low=seconds / 2, high=seconds * 2))


# ---- What engines tell of their boots ----------------------------------------------------------

LOGS = Path(__file__).parents[1] / "engines" / "logs"


@pytest.mark.parametrize(
    ("engine", "line", "parts"),
    [
        (
            "vllm",
            "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  67%|██████▋   | 34/51 "
            "[00:03<00:03,  4.53it/s]",
            (34, 51),
        ),
        (
            "vllm",
            "(EngineCore pid=7) Loading safetensors checkpoint shards:  25% Completed | 1/4 "
            "[00:00<00:00, 408.92it/s]",
            (1, 4),
        ),
        ("fake", "fake: loading weights 43%", (43, 100)),
        ("fake", "fake: loading draft", None),
        ("llamacpp", "0.00.191.938 I srv    load_model: loading model '/models/m.gguf'", None),
    ],
)
def test_an_engine_tells_how_much_of_a_phase_is_done(
    engine: str, line: str, parts: tuple[int, int] | None
) -> None:
    assert told(load_engine(engine), line) == parts


def test_the_bars_in_real_logs_of_vllm_belong_to_phases() -> None:
    engine = load_engine("vllm")
    found = 0
    for log in sorted(LOGS.glob("vllm*/*.log")):
        for line in re.split(r"[\r\n]+", log.read_text(errors="replace")):
            parts = told(engine, line)
            if parts is not None and engine.milestone(line) is not None:
                found += 1
                assert 0 <= parts[0] <= parts[1]
    assert found > 40


@given(st.sampled_from(["vllm", "fake", "llamacpp"]), st.text())
def test_no_line_tells_nonsense(engine: str, line: str) -> None:
    parts = told(load_engine(engine), line)
    assert parts is None or 0 <= parts[0] <= parts[1]


def test_an_attempt_passes_on_what_the_engine_tells(tmp_path: Path) -> None:
    seen: list[Progress] = []
    attempt(
        fake_job(boot_s=1.0, time_scale=10), Pairs(context=512), number=1, trial=0,
        folder=tmp_path, registry=Registry(tmp_path / "started.json"), watch=seen.append,
    )  # fmt: skip
    told_of = [each for each in seen if each.stage == "boot" and each.done is not None]
    assert Progress(stage="boot", detail="loading weights 100 %", done=1.0) in told_of


# ---- Stopping ----------------------------------------------------------------------------------


def test_a_second_ctrl_c_does_not_wait_for_an_engine_that_will_not_go(sweeper: Sweeper) -> None:
    stubborn = ("+engine.params.ending=ignores-sigterm", "engine.stop_timeout_s=1000")
    stopped = sweeper.start("budget.boots=5", *SLOW, *stubborn)
    engine = wait_for_boot(sweeper, 1)
    stopped.send_signal(signal.SIGINT)
    assert stopped.stderr is not None
    assert any(line.startswith("stopping: ") for line in stopped.stderr)
    assert engine.is_running()
    stopped.send_signal(signal.SIGINT)
    said, _ = stopped.communicate(timeout=60)
    assert stopped.returncode == 130
    assert "interrupted: 0 boots in this run, 0 in all" in said
    assert gone(engine.pid)
    assert nothing_is_half_done(sweeper)
