"""The verbs: parse, load, wire the parts together, print. No decisions of its own."""

from __future__ import annotations

import errno
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeper import __version__
from sweeper.places import GROUPS, ConfDirs, ConfError, conf_dirs

if TYPE_CHECKING:
    from rich.console import Console

    from sweeper.conf import Leaderboard, Loaded
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
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return INTERRUPTED  # the terminal was closed: what was to be kept was kept before
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


@contextmanager
def _no_collection() -> Iterator[None]:
    """Look for no garbage: in what is imported and composed it costs a tenth of a second."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # nor later, at the latest when Python ends
        gc.enable()


def _load(call: Call, outputs: Sequence[str] = ("text", "json")) -> Loaded:
    with _no_collection():
        from sweeper.conf import load

        loaded = load(call.overrides, call.dirs)
    if loaded.output not in outputs:
        raise ConfError(f"output: {loaded.output} is not one of {', '.join(outputs)}")
    return loaded


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


@_no_collection()
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
    attempts = _recorded(loaded)
    plan = make_plan(loaded, attempts)
    if loaded.plan_png is not None:
        plan["png"] = str(_plan_png(loaded, plan, attempts))
    if loaded.output == "json":
        _print_json(plan)
    else:
        print(plan_text(plan))
        if "png" in plan:
            print(f"\npicture: {plan['png']}")
    return OK


def _plan_png(loaded: Loaded, plan: dict[str, Any], attempts: list[Attempt]) -> Path:
    """Draw what of the space fits, and return the file."""
    from sweeper.plan_picture import picture_words, region_of, write_plan_png

    assert loaded.plan_png is not None
    path = Path(loaded.plan_png).expanduser()
    if loaded.plan_png == "auto":
        path = loaded.studies_dir / loaded.study.name / "plan.png"
    region = region_of(loaded, plan, attempts)
    title = f"{plan['study']}: {plan['engine']} serving {plan['model']}"
    try:
        write_plan_png(region, path, title=title, subtitle=picture_words(region))
    except OSError as error:
        raise ConfError(f"plan.png: {path}: {error.strerror or error}") from None
    return path


# --- show -------------------------------------------------------------------------------------


def _show(call: Call) -> int:
    """Print trials and front of a study, of several side by side, or a leaderboard, from disk."""
    from sweeper import show
    from sweeper.conf import LeaderboardError
    from sweeper.report import front_rows, front_table, trial_rows, trials_table

    try:
        loaded = _load(call, show.OUTPUTS)
    except LeaderboardError as named:
        return _show_several(named.board, show.board_studies(named.board, call.dirs))
    study, choice, attempts = loaded.study.name, loaded.show, _recorded(loaded)
    if loaded.output == "report":
        return _report(loaded, attempts)
    if choice.studies or choice.rows == "board":
        beside = show.named_studies(loaded.studies_dir, choice.studies)
        return _show_several(loaded, {study: attempts, **beside})
    rows = show.chosen(show.rows_of({study: attempts}), choice.where)
    only = {row["attempt"] for row in rows}
    if loaded.output == "json":
        found = {
            "study": study,
            "front": [row for row in front_rows(attempts) if row["attempt"] in only],
            "trials": [row for row in trial_rows(attempts) if row["attempt"] in only],
        }
        _print_json({key: each for key, each in found.items() if _wanted(key, choice.rows)})
        return OK
    if loaded.output != "text":
        rows = [row for row in rows if row["on_front"] or choice.rows != "front"]
        print(show.written(rows, loaded.output, choice.to), end="")
        return OK
    if not attempts:
        print(f"study {study} has no attempts yet; start it: {_command(call, 'run')}")
        return OK
    out, _ = _consoles()
    if _wanted("trials", choice.rows):
        out.print(trials_table(attempts, width=out.width, only=only))
    if _wanted("front", choice.rows):
        out.print(front_table(attempts, width=out.width, only=only))
    return OK


def _wanted(key: str, rows: str | None) -> bool:
    return key == "study" or rows in (None, key)


def _show_several(named: Leaderboard | Loaded, studies: dict[str, list[Attempt]]) -> int:
    """Print the ranking of several studies, or all of their trials."""
    from sweeper import show

    choice, output = named.show, named.output
    if output == "report":
        raise ConfError("output=report is of one study: name it with +study=NAME")
    board = None
    if choice.rows in ("trials", "front"):
        rows = show.rows_of(studies)
        rows = [row for row in rows if row["on_front"] or choice.rows == "trials"]
    else:
        board = show.board_of_named(named, studies)
        rows = show.board_rows(board)
    rows = show.chosen(rows, choice.where)
    if output in ("csv", "parquet"):
        print(show.written(rows, output, choice.to), end="")
    elif output == "json":
        _print_json({str(choice.rows): rows} if board is None else show.board_json(board, rows))
    else:
        out, _ = _consoles()
        tables = (
            show.several_tables(studies, rows, out.width)
            if board is None
            else show.board_tables(board, rows, out.width)
        )
        for table in tables:
            out.print(table)
        for line in () if board is None else show.board_notes(board):
            out.print(line, soft_wrap=True, highlight=False, markup=False)
    return OK


def _report(loaded: Loaded, attempts: list[Attempt]) -> int:
    """Write the report of a study again, from its records."""
    from sweeper.joining import job_of
    from sweeper.models import described_models
    from sweeper.report import write_report

    if not attempts:
        raise ConfError(f"study {loaded.study.name} has no attempts yet, so there is no report")
    job = job_of(loaded, described_models(loaded.model)[0], loaded.options)
    for path in write_report(attempts, loaded.studies_dir / loaded.study.name, job=job):
        print(path)
    return OK


def _command(call: Call, verb: str) -> str:
    return " ".join(["python -m sweeper", *([] if verb == "run" else [verb]), *call.overrides])


# --- export -----------------------------------------------------------------------------------


def _export(call: Call) -> int:
    """Write recipes of chosen attempts; with format=all in every form that they can have."""
    from sweeper.core.outcome import Measured
    from sweeper.core.standing import front_among
    from sweeper.recipe import FORMATS, PICKS, RecipeError, write_recipes

    short = ("format=", "pick=", "trial=")
    overrides = tuple(
        f"export.{each}" if each.startswith(short) else each for each in call.overrides
    )
    loaded = _load(replace(call, overrides=overrides))
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
    every = loaded.export_format == "all"
    written, refused = [], {}
    for form in FORMATS if every else (loaded.export_format,):
        try:
            written += write_recipes(
                chosen,
                form=form,
                folder=folder / "recipes",
                study_folder=folder,
                failed=[each for each in attempts if not isinstance(each.outcome, Measured)],
                front=front,
                everyone=attempts,
                health_path=loaded.engine.wire.health_path,
            )
        except RecipeError as error:
            if not every:
                raise ConfError(f"export: {error}") from None
            refused[form] = str(error)
    behind = _boots_behind(chosen, attempts)
    if loaded.output == "json":
        _print_json(
            {
                "study": loaded.study.name,
                "recipes": [str(path) for path in written],
                "refused": refused,
                "boots": {str(number): boots for number, boots in behind.items()},
            }
        )
    else:
        for path in written:
            print(path)
        for number, boots in behind.items():
            _complain(f"attempt {number}: {boots['words']}")
        for form, why in refused.items():
            _complain(f"not as {form}: {why}")
    return OK


def _boots_behind(
    chosen: Sequence[Attempt], attempts: Sequence[Attempt]
) -> dict[int, dict[str, Any]]:
    """Return which boots stand behind each recipe, and what they left of memory."""
    from sweeper.core.reliability import margin_words
    from sweeper.core.standing import reliability_of

    holds = reliability_of(attempts)
    found = {}
    for each in chosen:
        hold = holds[each.point]
        numbers = [other.number for other in attempts if other.point == each.point]
        listed = ", ".join(map(str, numbers))
        found[each.number] = {
            "attempts": numbers,
            "holds": hold.hold.value,
            "words": f"{margin_words(hold)} (attempts {listed}), {hold.hold.value}",
        }
    return found


# --- verify -----------------------------------------------------------------------------------


def _verify(call: Call) -> int:
    """Boot a recipe, measure it again, and say whether it holds: exit code 0, 1 or 2."""
    from rich.console import Console

    from sweeper.verify import VerifyError, verify

    output, paths = "text", []
    for each in call.overrides:
        if each.startswith("output="):
            output = each.partition("=")[2]
        else:
            paths.append(each)
    if output not in ("text", "json"):
        raise ConfError(f"output: {output} is not one of text, json")
    if len(paths) != 1:
        raise ConfError(
            f"verify takes one recipe, and output=json: got {len(paths)}: "
            f"{' '.join(paths) or 'none'}"
        )
    console = Console(stderr=True)
    with console.status("reading the recipe") as status:
        try:
            found = verify(
                Path(paths[0]),
                watch=lambda each: status.update(f"{each.stage} {each.detail}".strip()),
            )
        except VerifyError as error:
            _complain(str(error))
            return HOST_CANNOT
    if output == "json":
        _print_json(found.as_json())
    else:
        print("\n".join(found.lines))
    return found.verdict.exit_code


# --- ui ---------------------------------------------------------------------------------------


def _ui(call: Call) -> int:  # noqa: RET503 - the last line never returns
    """Say where the study is to be seen in MLflow; of a local store, become the UI on it."""
    from sweeper.orchestrate import StudyError
    from sweeper.record import mlflow_ui as ui
    from sweeper.record.sync import sweep_of

    loaded = _load(call)
    uri, study = loaded.tracking_uri, loaded.study.name
    if uri is None:
        raise ConfError(
            "tracking is off for this study, so there is nothing to show in MLflow; "
            f"{_command(call, 'sync')} tracking=local puts it there"
        )
    folder = loaded.studies_dir / study
    if not uri.startswith("sqlite:"):
        sweep = sweep_of(folder)["sweep"] if folder.is_dir() else ""
        url = ui.remote_link(uri, study, sweep)
        if loaded.output == "json":
            _print_json({"url": url, "command": None})
        else:
            print(url)
        if loaded.ui_open:
            ui.open_browser(url)
        return OK
    attempts = _recorded(loaded)
    if not attempts and not ui.store_path(uri).exists():
        raise ConfError(
            f"there is no store {ui.store_path(uri)} yet; run a study first: "
            f"{_command(call, 'run')}"
        )
    if not ui.is_free(loaded.ui_port):
        raise ConfError(
            f"ui.port: something listens on port {loaded.ui_port} already; if it is this UI, it "
            f"shows the study as well; else choose another: ui.port={loaded.ui_port + 1}"
        )
    sweep = ""
    if attempts:
        sweep = sweep_of(folder)["sweep"]
        if ui.is_behind(uri, study, sweep, len(attempts)):
            try:
                added = _synced(loaded)["added"]
            except StudyError as error:  # The run that holds it tracks it.
                _complain(str(error))
            else:
                _complain(f"brought MLflow up to date with {study}: {added} attempts added")
    url = ui.local_link(uri, loaded.ui_port, study, sweep)
    argv, env = ui.ui_command(uri, loaded.ui_port)
    if loaded.output == "json":
        _print_json({"url": url, "command": list(argv)})
    else:
        print(f"{url}\nopens in some ten seconds; Ctrl-C ends it", flush=True)
    ui.announce_when_ready(loaded.ui_port, url, open_it=loaded.ui_open)
    os.execve(argv[0], argv, {**os.environ, **env})  # noqa: S606 - our own interpreter


# --- sync -------------------------------------------------------------------------------------


def _sync(call: Call) -> int:
    """Rebuild what MLflow shows of the study from its folder."""
    from sweeper.orchestrate import StudyError
    from sweeper.record.tracking import without_password

    loaded = _load(call)
    if loaded.tracking_uri is None:
        raise ConfError("tracking is off for this study; say where to: tracking=local")
    attempts = _recorded(loaded)
    if not attempts:
        raise ConfError(
            f"study {loaded.study.name} has no attempts yet; start it: {_command(call, 'run')}"
        )
    try:
        done = _synced(loaded)
    except StudyError as error:
        raise ConfError(str(error)) from None
    except ValueError as error:
        raise ConfError(f"tracking.uri: {error}") from None
    where = without_password(loaded.tracking_uri)
    if loaded.output == "json":
        _print_json({"study": loaded.study.name, "tracking_uri": where, **done})
    else:
        print(
            f"{done['attempts']} attempts of {loaded.study.name}, {done['added']} new, in {where}"
        )
        if done["failures"]:
            print(f"{done['failures']} operations failed; once MLflow is well, sync again")
    return FAILED if done["failures"] else OK


def _synced(loaded: Loaded) -> dict[str, Any]:
    """Bring MLflow up to date with a study and return what was done; StudyError while it runs."""
    from dataclasses import asdict

    from sweeper.orchestrate import only_one
    from sweeper.record.sync import sync

    assert loaded.tracking_uri is not None
    folder = loaded.studies_dir / loaded.study.name
    with only_one(folder, loaded.study.name):
        return asdict(sync(loaded.tracking_uri, loaded.study, folder))


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
    "export": (_export, "recipes of the winners: format=shell|compose|...|all pick=fastest"),
    "verify": (_verify, "does a recipe still hold: verify RECIPE says PASS, FAIL or INCONCLUSIVE"),
    "diagnose": (_diagnose, "what happened to an engine, from its log: diagnose LOG engine=NAME"),
    "replay": (
        _replay,
        "searches against a table of boots: replay TABLE.csv.gz sampler=NAME[,NAME]",
    ),
    "ui": (_ui, "the MLflow UI on the study (ui.open=true opens the browser)"),
    "sync": (_sync, "MLflow rebuilt from the study's attempts, into any tracking.uri"),
}
