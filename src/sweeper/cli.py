"""The verbs: parse, load, wire the parts together, print. No decisions of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeper import __version__
from sweeper.places import GROUPS, ConfDirs, ConfError, conf_dirs

if TYPE_CHECKING:
    from rich.console import Console

    from sweeper.conf import Loaded
    from sweeper.core.outcome import Attempt

OK, FAILED, WRONG_INPUT, HOST_CANNOT, INTERRUPTED = 0, 1, 2, 3, 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A command line, taken apart."""

    verb: str
    overrides: tuple[str, ...]
    dirs: ConfDirs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0 done, 2 wrong input, 3 host cannot, 130 stopped."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if any(each in ("-h", "--help") for each in argv):
            print(_help(conf_dirs()), flush=True)
            return OK
        if "--version" in argv:
            print(f"sweeper {__version__}", flush=True)
            return OK
        call = _parse(argv)
        code = VERBS[call.verb][0](call)
        sys.stdout.flush()  # here, where a reader that has gone is provided for
    except ConfError as error:
        _complain(str(error))
        return WRONG_INPUT
    except KeyboardInterrupt:
        _complain("stopped")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (as in `sweeper show | head`): nothing to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    else:
        return code


def _parse(argv: list[str]) -> Call:
    verb = "run"
    overrides: list[str] = []
    folders: list[str] = []
    rest = list(argv)
    if rest and rest[0][:1] not in ("-", "+", "~") and "=" not in rest[0]:
        verb = rest.pop(0)
    if verb not in VERBS:
        from sweeper.core.space import suggestion

        raise ConfError(f"{verb}: there is no such verb{suggestion(verb, tuple(VERBS))}")
    while rest:
        each = rest.pop(0)
        if each in ("--config-dir", "-cd"):
            if not rest:
                raise ConfError("--config-dir needs a folder after it")
            folders.append(rest.pop(0))
        elif each.startswith("--config-dir="):
            folders.append(each.partition("=")[2])
        elif each.startswith("-") and each != "-":
            raise ConfError(
                f"{each}: there is no such option; there are --config-dir DIR, --help and "
                "--version, and settings are written KEY=VALUE"
            )
        else:
            overrides.append(each)
    return Call(verb=verb, overrides=tuple(overrides), dirs=conf_dirs(folders))


def _help(dirs: ConfDirs) -> str:
    lines = [
        "usage: python -m sweeper [VERB] +study=NAME [KEY=VALUE ...] [--config-dir DIR]",
        "",
        "Finds the fastest inference engine configuration that keeps the context you need.",
        "",
        "verbs (none: run)",
        *(f"  {verb:<8} {words}" for verb, (_, words) in VERBS.items()),
        "",
        "studies (+study=NAME)",
        *(f"  {name}" for name in dirs.options("study")),
        "",
        "config groups (GROUP=NAME)",
        *(
            f"  {group:<9} {', '.join(dirs.options(group)) or '-'}"
            for group in GROUPS
            if group != "study"
        ),
        "",
        "examples",
        "  python -m sweeper plan +study=quickstart",
        "  python -m sweeper +study=quickstart budget.boots=20 hardware.memory_limit=600MiB",
        "  python -m sweeper show +study=quickstart output=json",
        "",
        f"configs are read from: {', '.join(str(each) for each in dirs.dirs)}",
    ]
    return "\n".join(lines)


def _complain(words: str) -> None:
    print(f"sweeper: {words}", file=sys.stderr)


def _load(call: Call) -> Loaded:
    from sweeper.conf import load

    return load(call.overrides, call.dirs)


def _consoles() -> tuple[Console, Console]:
    """Return the consoles for results (stdout) and for progress (stderr)."""
    from rich.console import Console

    return Console(), Console(stderr=True)


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


def _recorded(loaded: Loaded) -> list[Attempt]:
    from sweeper.record.attempts import Attempts, RecordError

    folder = loaded.studies_dir / loaded.study.name / "attempts"
    try:
        return Attempts(folder).all()
    except RecordError as error:
        raise ConfError(str(error)) from None


# --- run --------------------------------------------------------------------------------------


def _run(call: Call) -> int:
    from sweeper.orchestrate import HostCannotError, StudyError, run_study

    loaded = _load(call)
    out, err = _consoles()
    try:
        summary = run_study(loaded, err)
    except StudyError as error:
        raise ConfError(str(error)) from None
    except HostCannotError as error:
        _complain(str(error))
        return HOST_CANNOT
    if loaded.output == "json":
        _print_json(summary.as_json())
    else:
        from sweeper.report import front_table

        out.print(front_table(summary.attempts, width=out.width))
        for line in summary.next_steps:
            out.print(line, soft_wrap=True, highlight=False, markup=False)
    if summary.interrupted:
        return INTERRUPTED
    return HOST_CANNOT if summary.fault is not None else OK


# --- plan -------------------------------------------------------------------------------------


def _plan(call: Call) -> int:
    from sweeper.conf import LeaderboardError
    from sweeper.plan import leaderboard_plan, leaderboard_text, make_plan, plan_text

    try:
        loaded = _load(call)
    except LeaderboardError as named:
        document = leaderboard_plan(named.board, call.dirs)
        if named.board.output == "json":
            _print_json(document)
        else:
            print(leaderboard_text(document))
        return OK
    plan = make_plan(loaded, _recorded(loaded))
    if loaded.output == "json":
        _print_json(plan)
    else:
        print(plan_text(plan))
    return OK


# --- show -------------------------------------------------------------------------------------


def _show(call: Call) -> int:
    from sweeper.report import front_rows, front_table, trial_rows, trials_table

    loaded = _load(call)
    attempts = _recorded(loaded)
    if loaded.output == "json":
        _print_json(
            {
                "study": loaded.study.name,
                "front": front_rows(attempts),
                "trials": trial_rows(attempts),
            }
        )
        return OK
    if not attempts:
        print(f"study {loaded.study.name} has no attempts yet; start it: {_command(call, 'run')}")
        return OK
    out, _ = _consoles()
    out.print(trials_table(attempts, width=out.width))
    out.print(front_table(attempts, width=out.width))
    return OK


def _command(call: Call, verb: str) -> str:
    return " ".join(["python -m sweeper", *([] if verb == "run" else [verb]), *call.overrides])


# --- export -----------------------------------------------------------------------------------


def _export(call: Call) -> int:
    from sweeper.core.standing import front_among
    from sweeper.recipe import PICKS, RecipeError, write_recipes

    loaded = _load(call)
    attempts = _recorded(loaded)
    front = front_among(attempts)
    if loaded.export_trial is not None:
        chosen = [each for each in attempts if each.number == loaded.export_trial]
        if not chosen:
            raise ConfError(
                f"export.trial: study {loaded.study.name} has no attempt {loaded.export_trial}; "
                f"there are 1 to {len(attempts)}"
            )
    elif front:
        chosen = PICKS[loaded.export_pick](front)
    else:
        raise ConfError(
            f"study {loaded.study.name} has no measured attempt to export; run it first: "
            f"{_command(call, 'run')}"
        )
    folder = loaded.studies_dir / loaded.study.name
    try:
        written = write_recipes(
            chosen, form=loaded.export_format, folder=folder / "recipes", study_folder=folder
        )
    except RecipeError as error:
        raise ConfError(f"export: {error}") from None
    if loaded.output == "json":
        _print_json({"study": loaded.study.name, "recipes": [str(path) for path in written]})
    else:
        for path in written:
            print(path)
    return OK


# --- ui ---------------------------------------------------------------------------------------


def _ui(call: Call) -> int:  # noqa: RET503 - the last line never returns
    """Replace this process by the MLflow UI on the study's store."""
    from sweeper.record.tracking import ui_command

    loaded = _load(call)
    if loaded.tracking_uri is None:
        raise ConfError("tracking is off for this study, so there is nothing to show in MLflow")
    if not loaded.tracking_uri.startswith("sqlite:"):
        print(f"this study is tracked by a server; open {loaded.tracking_uri}")
        return OK
    store = Path(loaded.tracking_uri.removeprefix("sqlite:///"))
    if not store.exists():
        raise ConfError(
            f"there is no store {store} yet; run a study first: {_command(call, 'run')}"
        )
    argv, env = ui_command(loaded.tracking_uri, loaded.ui_port)
    address = f"http://127.0.0.1:{loaded.ui_port}"
    if loaded.output == "json":
        _print_json({"url": address, "command": list(argv)})
    else:
        print(f"MLflow opens on {address} in some ten seconds; Ctrl-C ends it", flush=True)
    sys.stdout.flush()
    os.execve(argv[0], argv, {**os.environ, **env})  # noqa: S606 - our own interpreter


# --- diagnose ---------------------------------------------------------------------------------


def _diagnose(call: Call) -> int:
    """Name what happened to an engine, from a log that need not be of our making."""
    from sweeper.diagnose import as_text, diagnose
    from sweeper.engines import engine_names

    stated: dict[str, str] = {}
    paths = []
    for each in call.overrides:
        key, equals, value = each.partition("=")
        if equals and key in ("engine", "exit_code", "output"):
            stated[key] = value
        else:
            paths.append(each)
    if len(paths) != 1:
        raise ConfError(
            "diagnose takes one log (- for standard input) and engine=NAME, exit_code=N, "
            f"output=json; got {len(paths)} logs: {' '.join(paths) or 'none'}"
        )
    try:
        exit_code = int(stated["exit_code"]) if "exit_code" in stated else None
    except ValueError:
        raise ConfError(f"exit_code: {stated['exit_code']} is not a whole number") from None
    if stated.get("output", "text") not in ("text", "json"):
        raise ConfError(f"output: {stated['output']} is not one of text, json")
    engine = stated.get("engine")
    if engine is not None and engine not in engine_names():
        raise ConfError(f"engine: {engine} is not one of {', '.join(engine_names())}")
    found = diagnose(paths[0], engine_name=engine, exit_code=exit_code)
    if stated.get("output") == "json":
        _print_json(found)
    else:
        print(as_text(found))
    return OK


# --- replay -----------------------------------------------------------------------------------


def _replay(call: Call) -> int:
    """Play searches against a table of boots, and say how many each needed."""
    from sweeper.replay import ReplayError, replay

    stated = {"sampler": "frontier", "seeds": "20", "budget": "150", "output": "text"}
    paths = []
    for each in call.overrides:
        key, equals, value = each.partition("=")
        if equals and key in stated:
            stated[key] = value
        elif equals and not Path(each).exists():
            from sweeper.core.space import suggestion

            raise ConfError(f"replay: {key} is not known{suggestion(key, tuple(stated))}")
        else:
            paths.append(each)
    if len(paths) != 1:
        raise ConfError(
            "replay takes one table (TABLE.csv.gz, with TABLE.space.yaml beside it) and "
            f"sampler=NAME[,NAME] seeds=N budget=N output=json; got {len(paths)} tables"
        )
    if stated["output"] not in ("text", "json"):
        raise ConfError(f"output: {stated['output']} is not one of text, json")
    counts = {}
    for key in ("seeds", "budget"):
        if not stated[key].isdecimal() or int(stated[key]) < 1:
            raise ConfError(f"{key}: {stated[key]} is not a whole number above 0")
        counts[key] = int(stated[key])
    out, err = _consoles()
    with err.status("reading") as status:
        try:
            results = replay(
                Path(paths[0]),
                stated["sampler"].split(","),
                seeds=counts["seeds"],
                budget=counts["budget"],
                told=status.update,
            )
        except ReplayError as error:
            raise ConfError(str(error)) from None
    if stated["output"] == "json":
        # One line for each sampler, so that a reader need not know how many there are.
        for result in results:
            print(json.dumps(result, ensure_ascii=False))
        return OK
    from rich.table import Table

    titles = {
        "sampler": "sampler",
        "boots_90": "90 %",
        "boots_95": "95 %",
        "boots_99": "99 %",
        "score": "score",
        "infeasible_first_30": "failed of 30",
        "infeasible": "failed",
        "wrong_skips": "wrong skips",
        "sampler_s": "s",
    }
    shown = Table(
        title=f"{results[0]['table']}: medians of {counts['seeds']} seeds, "
        f"{counts['budget']} boots; boots to a share of the hypervolume"
    )
    for key, title in titles.items():
        shown.add_column(title, justify="left" if key == "sampler" else "right")
    for result in results:
        shown.add_row(*(str(result[key]) for key in titles))
    out.print(shown)
    return OK


VERBS: dict[str, tuple[Callable[[Call], int], str]] = {
    "run": (_run, "boot, prove and measure until the budget is spent; resumes where it stopped"),
    "plan": (
        _plan,
        "what would be booted, with which memory, and why points are out; boots nothing",
    ),
    "show": (_show, "the front and all trials of a study, from disk"),
    "export": (_export, "recipes of the winners (export.format=shell export.pick=all)"),
    "diagnose": (_diagnose, "what happened to an engine, from its log: diagnose LOG engine=NAME"),
    "replay": (
        _replay,
        "searches against a table of boots: replay TABLE.csv.gz sampler=NAME[,NAME]",
    ),
    "ui": (_ui, "the MLflow UI on the study's store"),
}
