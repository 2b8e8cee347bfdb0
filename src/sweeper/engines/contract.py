"""What every adapter promises, as tests: subclass `EngineContract` in your own test suite.

    class TestMine(EngineContract):
        def engine(self) -> Engine:
            return Mine()

pytest runs all of it; the hooks at the top say more of your engine and switch further tests on.
Needs pytest to run and hypothesis to think of logs (`pip install sweeper[test]`).
"""

# ruff: noqa: D102 - the name of a test is its sentence

from __future__ import annotations

import copy
import dataclasses
import enum
import ipaddress
import math
import os
import sys
import threading
import unittest
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sweeper.core.launch import Attach, Death, Ended, Launch, Phase
from sweeper.core.memory import Footprint
from sweeper.core.outcome import (
    Broken,
    BrokenName,
    Diagnosis,
    Failure,
    Finding,
    HostFault,
    HostFaultName,
    Infeasible,
    InfeasibleName,
    Nothing,
    Unfit,
    UnfitName,
    name,
)
from sweeper.core.pairs import Pairs
from sweeper.core.typed import FieldError
from sweeper.engines import Engine, EngineOptions, ModelFacts, Wire

T = TypeVar("T")

SECRET = "sk-contract-0123456789"  # noqa: S105 - stands for a user's
LOG_EXAMPLES = 40

MODEL = ModelFacts(
    name="contract",
    path="/models/contract",
    served_name="contract",
    size_bytes=3 * 2**30,
    sha256="0" * 64,
    facts=Pairs(
        kv_heads_global=64, kv_heads_window=0, key_length=128, value_length=128, heads=32,
        embedding_length=2048, feed_forward_length=8192, vocabulary=32000, layers=16,
        trained_context_tokens=32768,
    ),
)  # fmt: skip

FOREIGN_LOGS: tuple[tuple[str, ...], ...] = (
    (),
    ("",),
    ("   ", "\t", "\x00\x00\x00"),
    ("\x7fELF\x02\x01\x01\x00\x00\x00", "\ufffd\ufffd\ufffd\x1b[31m\ufffd"),
    (
        "May 12 06:25:01 host CRON[4711]: pam_unix(cron:session): session opened for user root",
        "May 12 06:25:02 host CRON[4711]: pam_unix(cron:session): session closed for user root",
    ),
    ("PING example.org (192.0.2.1) 56(84) bytes of data.", "64 bytes from 192.0.2.1: ttl=58"),
    ("🐧 zażółć gęślą jaźń", "{", '{"a": [1, 2', "}" * 1000),
)
"""Logs of no inference engine at all."""

_NAMES: dict[type[Failure], type[enum.Enum]] = {
    Infeasible: InfeasibleName,
    Unfit: UnfitName,
    Broken: BrokenName,
    HostFault: HostFaultName,
}


class EngineContract:
    """The promises of the Engine protocol, one test each."""

    # ---- Hooks: what a subclass says of its engine ---------------------------------------------

    def engine(self) -> Engine:
        """Return the adapter under test, a new one at every call."""
        raise NotImplementedError("say which adapter this is: def engine(self): return Mine()")

    def params(self) -> Mapping[str, Any]:
        """Return parameters that are fine together; {} where every setting has a default."""
        return {}

    def model(self) -> ModelFacts:
        """Return a model that the engine could serve; no file of it has to exist."""
        return MODEL

    def options(self) -> EngineOptions:
        """Return options as `find` would return them; no program has to exist."""
        return EngineOptions(binary="/opt/contract/bin/server", python="/opt/contract/bin/python")

    def growing(self) -> Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """Return pairs of parameters, of which the second never needs less memory."""
        if "context" not in self.engine().setting_names():
            return ()
        return [({**self.params(), "context": 4096}, {**self.params(), "context": 8192})]

    def good_log(self) -> Sequence[str]:
        """Return the log of a boot that went well, up to ready; empty to leave its tests out."""
        return ()

    def endings(self) -> Iterable[tuple[Death, Sequence[str], str]]:
        """Return deaths with their logs and the names of the outcomes that they must get."""
        return ()

    # ---- Settings ------------------------------------------------------------------------------

    def test_its_name_is_a_word_and_it_says_whether_its_figures_are_invented(self) -> None:
        engine = self.engine()
        _check(engine.name.replace("-", "_").isidentifier(), f"name is {engine.name!r}")
        _check(isinstance(engine.simulated, bool), "simulated must be True or False")

    def test_settings_are_frozen_and_equal_for_equal_parameters(self) -> None:
        one, other = (self.engine().settings(self.params()) for _ in range(2))
        _check(one == other, "settings of equal parameters must be equal")
        made = getattr(type(one), "__dataclass_params__", None)
        _check(made is not None and made.frozen, "settings must be a frozen dataclass")

    def test_every_parameter_is_a_setting_and_the_names_are_unique(self) -> None:
        names = self.engine().setting_names()
        _check(len(set(names)) == len(names), f"setting_names() holds a name twice: {names}")
        _check(all(each.isidentifier() for each in names), f"names must be words: {names}")
        for each in self.params():
            _check(each in names, f"{each} is a parameter, and not in setting_names()")

    def test_an_unknown_setting_is_refused_by_its_name(self) -> None:
        unknown = "no_such_setting_anywhere"
        try:
            self.engine().settings({**self.params(), unknown: 1})
        except FieldError as error:
            _check(error.key == unknown, f"FieldError.key is {error.key}, not {unknown}")
            _check(bool(error.message.strip()), "the message must say what is wrong")
        else:
            raise AssertionError(f"settings() took {unknown}: a misspelt setting sweeps nothing")

    def test_the_context_is_a_positive_number_of_tokens(self) -> None:
        engine = self.engine()
        tokens = engine.context_tokens(engine.settings(self.params()))
        _check(type(tokens) is int and tokens > 0, f"context_tokens() returned {tokens!r}")

    # ---- Purity --------------------------------------------------------------------------------

    def test_it_only_knows_and_never_does(self) -> None:
        """Everything but `find` is pure: no file, socket, process or environment is touched."""
        engine = self.engine()
        params = dict(self.params())
        before = copy.deepcopy(params)
        environment = dict(os.environ)
        log = [*self.good_log(), "a line", "CUDA out of memory"]
        settings = engine.settings(params)
        calls: dict[str, Callable[[], object]] = {
            "settings": lambda: engine.settings(params),
            "setting_names": engine.setting_names,
            "context_tokens": lambda: engine.context_tokens(settings),
            "footprint": lambda: engine.footprint(settings, self.model()),
            "launch": lambda: engine.launch(settings, self.model(), self.options(), 8001),
            "milestone": lambda: [engine.milestone(line) for line in log],
            "evidence": lambda: engine.evidence(log),
            "verdict": lambda: [engine.verdict(each, log) for each in _deaths()],
            "diagnose": lambda: [engine.diagnose(log, code) for code in (None, 0, 1, -9)],
            "contradiction": lambda: engine.contradiction(settings, Pairs(), None),
            "draft_counters": lambda: engine.draft_counters("# no metrics\n"),
        }
        for method, call in calls.items():
            first = call()  # may import what it needs
            with _watched() as touched:
                second = call()
            _check(first == second, f"{method}() answers differently the second time")
            _check(not touched, f"{method}() touches the world: {touched}")
        _check(params == before, "settings() changes the parameters it is given")
        _check(dict(os.environ) == environment, "the environment was changed")

    def test_a_log_is_read_once_from_top_to_bottom(self) -> None:
        engine = self.engine()
        log = [*self.good_log(), "CUDA out of memory", "last words"]
        for death in _deaths():
            _check(
                engine.verdict(death, iter(log)) == engine.verdict(death, log),
                "verdict() must take any iterable, and read it once",
            )
        _check(engine.evidence(iter(log)) == engine.evidence(log), "evidence() must read once")
        _check(engine.diagnose(iter(log), 1) == engine.diagnose(log, 1), "diagnose() likewise")

    # ---- Footprint -----------------------------------------------------------------------------

    def test_the_footprint_is_finite_and_needs_as_much_as_itself(self) -> None:
        footprint = self._footprint(self.params())
        _check(math.isfinite(footprint.total_bytes), "a footprint must be finite")
        _check(footprint.needs_at_least(footprint), "a footprint must be comparable with itself")

    def test_the_footprint_grows_with_what_is_asked(self) -> None:
        for less, more in _given(self.growing(), "growing()"):
            small, large = self._footprint(less), self._footprint(more)
            _check(
                large.needs_at_least(small),
                f"{dict(more)} must need at least what {dict(less)} needs: {large} {small}",
            )

    def test_the_footprint_grows_with_the_model(self) -> None:
        engine = self.engine()
        settings, model = engine.settings(self.params()), self.model()
        larger = dataclasses.replace(model, size_bytes=model.size_bytes + 2**30)
        _check(
            engine.footprint(settings, larger).needs_at_least(engine.footprint(settings, model)),
            "a larger model must not need less",
        )

    # ---- Launch --------------------------------------------------------------------------------

    def test_the_command_line_is_strings_and_no_shell(self) -> None:
        launch = self._launch()
        for each in launch.argv:
            _check(type(each) is str and "\0" not in each, f"not an argument: {each!r}")
        program, second = Path(launch.argv[0]).name, (*launch.argv, "")[1]
        _check(
            not (program in ("sh", "bash", "dash", "zsh") and second.startswith("-")),
            f"a shell would read values as commands: {launch.argv[:3]}",
        )

    def test_the_port_is_on_the_command_line_where_it_says(self) -> None:
        one, other = self._launch(port=18001), self._launch(port=18002)
        _check(one.port == 18001, f"port is {one.port}")
        _check(any("18001" in each for each in one.argv), f"no port in {one.argv}")
        _check(
            tuple(each.replace("18001", "18002") for each in one.argv) == other.argv,
            "two launches may differ in nothing but the port",
        )
        at = one.port_argument
        _check(at is None or one.argv[at] == "18001", f"argument {at} is not the port")

    def test_it_listens_on_this_machine_only(self) -> None:
        launch = self._start(18001)
        if isinstance(launch, Attach):
            parts = urllib.parse.urlsplit(launch.base_url)
            _check("@" not in parts.netloc, "an address must not hold a password")
            near = parts.hostname == "localhost" or _is_private(parts.hostname or "")
            _check(near, f"{launch.base_url} is not near")
            return
        _check(ipaddress.ip_address(launch.host).is_loopback, f"host is {launch.host}")

    def test_the_options_of_the_study_are_in_the_launch(self) -> None:
        options = dataclasses.replace(
            self.options(),
            env=Pairs(SWEEPER_CONTRACT="1"),
            extra_args=("--contract-argument", "x"),
            boot_timeout_s=12.5,
            stop_timeout_s=3.5,
            memory_limit_bytes=2**33,
        )
        launch = self._launch(options=options)
        _check(launch.env.get("SWEEPER_CONTRACT") == "1", "env must reach the engine")
        _check(launch.argv[-2:] == options.extra_args, "extra_args go to the end, as they are")
        _check(launch.boot_timeout_s == 12.5, "boot_timeout_s is not kept")
        _check(launch.stop_timeout_s == 3.5, "stop_timeout_s is not kept")
        _check(launch.memory_limit_bytes == 2**33, "memory_limit_bytes is not kept")

    def test_a_secret_of_the_environment_is_not_on_the_command_line(self) -> None:
        """Command lines are seen by every user of the machine and written to every record."""
        options = dataclasses.replace(
            self.options(), env=Pairs(HF_TOKEN=SECRET, API_KEY=SECRET, VLLM_API_KEY=SECRET)
        )
        launch = self._launch(options=options)
        _check(not any(SECRET in each for each in launch.argv), f"a secret in {launch.argv}")

    def test_what_is_found_keeps_the_options_of_the_study(self) -> None:
        options = EngineOptions(env=Pairs(A="b"), extra_args=("--x",), boot_timeout_s=7.0)
        match self.engine().find(options):
            case EngineOptions() as found:
                kept = dataclasses.replace(found, binary=options.binary, python=options.python)
                _check(kept == options, f"find() may only add programs: {found}")
            case HostFault() as fault:
                _check(bool(fault.finding.explanation), "say what is missing and what to do")
            case other:
                raise AssertionError(f"find() returned {other}")

    def test_the_paths_start_with_a_slash(self) -> None:
        wire = self.engine().wire
        _check(isinstance(wire, Wire), f"wire is {wire!r}")
        for path in (wire.health_path, wire.completions_path, wire.chat_path):
            _check(path.startswith("/"), f"{path!r} does not start with a slash")
        for maybe in (
            wire.metrics_path, wire.props_path, wire.tokenize_path, wire.scoring_path,
        ):  # fmt: skip
            _check(maybe is None or maybe.startswith("/"), f"{maybe!r} does not either")
        _check(self._start(18001).health_path.startswith("/"), "nor does the launch's health_path")

    # ---- Log and verdict -----------------------------------------------------------------------

    def test_any_line_opens_a_phase_or_none(self) -> None:
        engine = self.engine()

        def is_phase(line: str) -> None:
            phase = engine.milestone(line)
            _check(phase is None or isinstance(phase, Phase), f"milestone() returned {phase!r}")

        _for_any(is_phase, _lines())

    def test_any_death_with_any_log_gets_a_verdict(self) -> None:
        engine, good = self.engine(), self.good_log()

        def has_verdict(log: list[str], cut: int) -> None:
            for death in _deaths():
                _check_failure(engine.verdict(death, log))
                _check_failure(engine.verdict(death, [*good[:cut], *log]))

        _for_any(has_verdict, _logs(), _cuts(len(good)))

    def test_any_log_gets_a_diagnosis_and_evidence(self) -> None:
        engine, good = self.engine(), self.good_log()

        def is_read(log: list[str], cut: int) -> None:
            for each in (log, [*good[:cut], *log]):
                for code in (None, 0, 1, 137, -6, -9, -11):
                    _check_diagnosis(engine.diagnose(each, code))
                _check(isinstance(engine.evidence(each), Pairs), "evidence() must return Pairs")

        _for_any(is_read, _logs(), _cuts(len(good)))

    def test_a_log_of_something_else_is_unknown(self) -> None:
        for log in FOREIGN_LOGS:
            diagnosis = self.engine().diagnose(log, None)
            _check(
                isinstance(diagnosis, Broken) and diagnosis.name is BrokenName.UNKNOWN,
                f"{log[:2]} is no log of this engine, and was read as {name(diagnosis)}",
            )

    def test_an_end_without_words_is_never_the_points_fault(self) -> None:
        """An outcome that blames the point teaches the search: it needs evidence."""
        for death in _deaths():
            verdict = self.engine().verdict(death, [])
            if death.ended is Ended.NOT_STARTED:
                _check(isinstance(verdict, HostFault), f"not started is {name(verdict)}")
            else:
                _check(isinstance(verdict, Broken), f"{death} without a log is {name(verdict)}")

    def test_how_it_ended_decides_before_the_log_does(self) -> None:
        expected = {
            Ended.PORT_TAKEN: {"port_in_use"},
            Ended.NOT_STARTED: {"engine_not_found"},
            Ended.LATE: {"boot_timeout", "hang_boot"},
        }
        for ended, names in expected.items():
            death = Death(ended=ended, after_s=9.0, was_ready=False, detail="as it was seen")
            verdict = self.engine().verdict(death, [])
            _check(name(verdict) in names, f"{ended} is {name(verdict)}, not one of {names}")
        died = Death(ended=Ended.EXITED, after_s=9.0, was_ready=True, exit_code=1)
        said = name(self.engine().verdict(died, []))
        _check(said == "engine_died_mid_benchmark", f"a death after ready is {said}")

    def test_the_known_endings_get_their_names(self) -> None:
        for death, log, expected in _given(self.endings(), "endings()"):
            verdict = self.engine().verdict(death, log)
            _check(name(verdict) == expected, f"{expected} was named {name(verdict)}: {verdict}")

    def test_a_good_boot_opens_its_phases_in_order_and_ends_ready(self) -> None:
        engine = self.engine()
        log = _given(self.good_log(), "good_log()")
        opened = [phase for line in log if (phase := engine.milestone(line)) is not None]
        first_seen = list(dict.fromkeys(opened))
        _check(Phase.READY in first_seen, f"the good log never opens ready, only {first_seen}")
        _check(
            first_seen == sorted(first_seen, key=lambda each: each.order),
            f"phases first open out of order: {first_seen}",
        )

    def test_a_good_boot_is_diagnosed_as_nothing(self) -> None:
        diagnosis = self.engine().diagnose(_given(self.good_log(), "good_log()"), None)
        _check(isinstance(diagnosis, Nothing), f"a good log is read as {name(diagnosis)}")

    def test_where_nothing_is_known_nothing_is_held_against_it(self) -> None:
        engine = self.engine()
        found = engine.contradiction(engine.settings(self.params()), Pairs(), None)
        _check(found is None, f"contradiction() without facts returned {found}")

    def test_a_page_without_counters_counts_no_drafts(self) -> None:
        for page in ("", "# HELP x y\n# TYPE x counter\nx_total 1.0\n"):
            found = self.engine().draft_counters(page)
            _check(found is None, f"draft_counters({page!r}) returned {found}")

    # ---- Helpers -------------------------------------------------------------------------------

    def _footprint(self, params: Mapping[str, Any]) -> Footprint:
        engine = self.engine()
        return engine.footprint(engine.settings(params), self.model())

    def _start(self, port: int, options: EngineOptions | None = None) -> Launch | Attach:
        engine = self.engine()
        return engine.launch(
            engine.settings(self.params()),
            self.model(),
            options if options is not None else self.options(),
            port,
        )

    def _launch(self, *, port: int = 18001, options: EngineOptions | None = None) -> Launch:
        launch = self._start(port, options)
        if isinstance(launch, Attach):
            raise unittest.SkipTest("it attaches: no process is started")
        return launch


def _check(holds: bool, otherwise: str) -> None:
    # pytest explains the asserts of test files only, so what is wrong is said here.
    if not holds:
        raise AssertionError(otherwise)


def _given(what: Iterable[T], hook: str) -> list[T]:
    found = list(what)
    if not found:
        raise unittest.SkipTest(f"{hook} names none")
    return found


def _deaths() -> Iterator[Death]:
    """Yield every kind of evidence that the supervisor can hand over."""
    for ended in Ended:
        for was_ready in (False, True):
            for code in (None, 0, 1, 137, -6, -9, -11) if ended is Ended.EXITED else (None,):
                yield Death(
                    ended=ended, after_s=1.5, was_ready=was_ready, exit_code=code, peak_bytes=2**30
                )


def _check_failure(verdict: Failure) -> None:
    names = _NAMES.get(type(verdict))
    if names is None:
        raise AssertionError(f"verdict() returned {verdict!r}, which is no failure")
    _check(isinstance(verdict.name, names), f"{verdict.name!r} is not in the closed set")
    _check_finding(verdict.finding)


def _check_diagnosis(diagnosis: Diagnosis) -> None:
    if isinstance(diagnosis, Nothing):
        _check_finding(diagnosis.finding)
    else:
        _check_failure(diagnosis)


def _check_finding(finding: Finding) -> None:
    _check(isinstance(finding.phase, Phase), f"{finding.phase!r} is not a phase")
    _check(bool(finding.explanation.strip()), "an explanation is for people, and cannot be empty")


def _is_private(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return False


# ---- Watching for deeds ------------------------------------------------------------------------

_DEEDS = (
    "open", "os.", "socket.", "subprocess.", "shutil.", "glob.", "pathlib.", "sqlite3.",
    "urllib.", "http.", "ftplib.", "signal.", "time.sleep",
)  # fmt: skip
_watching = threading.local()
_hooked = threading.Event()


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    seen: list[str] | None = getattr(_watching, "seen", None)
    if seen is not None and event.startswith(_DEEDS):
        seen.append(f"{event}{arguments[:1]}")


@contextmanager
def _watched() -> Iterator[list[str]]:
    """Yield a list of everything this thread does to the world, as the interpreter reports it."""
    if not _hooked.is_set():
        sys.addaudithook(_listen)  # for good: a hook cannot be taken off
        _hooked.set()
    seen: list[str] = []
    _watching.seen = seen
    try:
        yield seen
    finally:
        _watching.seen = None


# ---- Logs that nobody thought of ---------------------------------------------------------------


def _lines() -> Any:
    from hypothesis import strategies as st

    words = st.sampled_from(
        (
            "CUDA out of memory", "error: unrecognized arguments: --x", "Traceback", "READY",
            "[Errno 98] Address already in use", "No such file or directory", "Killed", "loading",
            "100%|####| 5/5", "Tried to allocate . GiB", "kv cache", "listening on http://",
            "-1", "nan", "1e999", "\x1b[0m", "%", "{", "\\", "(", "::", "=", "MiB", "é", "0" * 400,
        )
    )  # fmt: skip
    return st.one_of(st.text(max_size=80), st.lists(words, max_size=6).map(" ".join))


def _logs() -> Any:
    from hypothesis import strategies as st

    return st.lists(_lines(), max_size=8)


def _cuts(length: int) -> Any:
    from hypothesis import strategies as st

    return st.integers(0, length)


def _for_any(holds: Callable[..., None], *strategies: Any) -> None:
    """Run a check for many examples, the same ones every time."""
    from hypothesis import HealthCheck, given, settings

    limits = settings(
        max_examples=LOG_EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    decorated: Any = given(*strategies)
    every: Any = limits(decorated(holds))
    every()


__all__ = ["FOREIGN_LOGS", "MODEL", "EngineContract"]
