"""Hydra configs to frozen values: the schemas, and the one gate through which all input passes.

Every mistake is refused here, before anything is booted, with the file and the key it stands in.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sweeper.core.architecture import ELSEWHERE, FACTS, TEXT_FACTS, TRUTH_FACTS
from sweeper.core.objectives import OBJECTIVES
from sweeper.core.pairs import Pairs, Point, Scalar, text
from sweeper.core.quality import Guard
from sweeper.core.space import (
    OPS,
    Axis,
    AxisRef,
    Condition,
    Rule,
    Space,
    SpaceError,
    suggestion,
)
from sweeper.core.study import Budget, Confirm, SamplerChoice, Study
from sweeper.core.typed import FieldError
from sweeper.core.workload import Repeats, Workload
from sweeper.engines import Engine, EngineOptions, ModelFacts, load_engine
from sweeper.job import MODEL_VARIANT
from sweeper.models import ModelChoice
from sweeper.places import GROUPS, ConfDirs, ConfError
from sweeper.recipe import FORMATS, PICKS

_OPEN_MAPPINGS = (
    "space", "engine.params", "engine.env", "model.variants", "model.facts",
    "model.variant_facts", "workload.request",
    "workload.chat_template", "guard.reference", "sampler.arguments",
)  # fmt: skip
_REPLACED = {
    "workload.runs": "repeats follow the samples: set workload.repeats.least and "
    "workload.repeats.most",
    "workload.warmup_runs": "warm-up ends by a test: set workload.repeats.warmup_min and "
    "workload.repeats.warmup_max",
}
"""Keys of earlier versions, and what to write instead."""
OUTPUTS = ("text", "json", "csv", "parquet", "report")
"""How results are printed; only `show` knows more than the first two."""
_SEVERAL = "several studies"
"""The name where folders of studies are named to be shown, and no study."""
SHOWN_ROWS = ("trials", "front", "board")
SAMPLERS = ("frontier", "tpe", "nsga2", "random", "qmc", "grid", "gp", "target")


# --- schemas: mutable, because hydra-core 1.3 demands it; nothing past `load` sees them ---------


MEMORY_LEFT = "memory_left"
AUTO = "auto"


@dataclass
class EngineSchema:
    name: str = MISSING
    binary: str | None = None
    python: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    prefix: list[str] = field(default_factory=list)
    detached: bool = False
    stop_command: list[str] = field(default_factory=list)
    extra_args: list[str] = field(default_factory=list)
    boot_timeout_s: float = 600.0
    first_request_timeout_s: float = 600.0
    stop_timeout_s: float = 10.0


@dataclass
class ModelSchema:
    name: str = MISSING
    path: str | None = None
    package: str | None = None
    package_module: str | None = None
    sha256: str | None = None
    variants: dict[str, str] = field(default_factory=dict)
    draft_path: str | None = None
    facts_yield: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    variant_facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class HardwareSchema:
    name: str = MISSING
    memory_limit: Any = None
    device_memory: Any = None
    unified: bool = False


_REPEATS = Repeats()


@dataclass
class RepeatsSchema:
    least: int = _REPEATS.least
    most: int = _REPEATS.most
    interval: float | None = _REPEATS.interval
    confidence: float = _REPEATS.confidence
    racing: bool = _REPEATS.racing
    warmup_min: int = _REPEATS.warmup_min
    warmup_max: int = _REPEATS.warmup_max
    warmup_tokens: int = _REPEATS.warmup_tokens


@dataclass
class WorkloadSchema:
    name: str = MISSING
    api: str = "completion"
    prompt: str = ""
    prompts: list[str] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    to_window: bool = False
    streams: list[int] = field(default_factory=lambda: [1])
    max_tokens: int = MISSING
    minutes: float | None = None
    repeats: RepeatsSchema = field(default_factory=RepeatsSchema)
    fresh_prefix: bool = True
    cached_runs: int = 0
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int | None = 0
    chat_template: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    proof_answer_tokens: int = 32
    proof_turns: int = 0
    request_timeout_s: float = 600.0
    silence_timeout_s: float = 300.0


@dataclass
class TrackingSchema:
    enabled: bool = True
    uri: str | None = None


@dataclass
class BudgetSchema:
    boots: int = 20
    minutes: float | None = None
    gpu_hours: float | None = None


@dataclass
class SamplerSchema:
    name: str = "frontier"
    startup: int = 8
    target: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    check_share: float = 0.05
    stop_share: float | None = None
    stop_asks: int = 3


@dataclass
class GuardSchema:
    prefix_min_tokens: int | None = 4
    end_prefix_min_share: float | None = 0.1
    logprob_drop_max: float | None = 0.5
    mean_logprob_min: float | None = None
    prefix_warn_share: float | None = 0.5
    logprob_drop_warn: float | None = 0.1
    reference: dict[str, Any] = field(default_factory=dict)


@dataclass
class ConfirmSchema:
    rounds: int = 1
    boots: int = 8
    checks: int = 6


@dataclass
class ProofSchema:
    boots: int = 1


@dataclass
class ExportSchema:
    format: str = "shell"
    pick: str = "all"
    trial: int | None = None


@dataclass
class AssumedSchema:
    boot_s: float = 60.0
    decode_tok_s: float = 40.0
    prefill_tok_s: float = 1500.0


@dataclass
class PlanSchema:
    points: int = 10
    png: str | None = None
    assumed: AssumedSchema = field(default_factory=AssumedSchema)


@dataclass
class ShowSchema:
    studies: list[str] = field(default_factory=list)
    where: str = ""
    rows: str | None = None
    to: str | None = None
    mix: bool = False


@dataclass
class LeaderboardSchema:
    studies: list[str] = field(default_factory=list)
    workload: str | None = None


@dataclass
class UiSchema:
    port: int = 5000
    open: bool = False


@dataclass
class Schema:
    engine: EngineSchema = field(default_factory=EngineSchema)
    model: ModelSchema = field(default_factory=ModelSchema)
    hardware: HardwareSchema = field(default_factory=HardwareSchema)
    workload: WorkloadSchema = field(default_factory=WorkloadSchema)
    also: list[str] = field(default_factory=list)
    tracking: TrackingSchema = field(default_factory=TrackingSchema)
    name: str | None = None
    description: str = ""
    seed: int = 0
    space: dict[str, Any] = field(default_factory=dict)
    rules: list[Any] = field(default_factory=list)
    enqueue: list[Any] = field(default_factory=list)
    budget: BudgetSchema = field(default_factory=BudgetSchema)
    sampler: SamplerSchema = field(default_factory=SamplerSchema)
    retries: int = 1
    guard: GuardSchema = field(default_factory=GuardSchema)
    proof: ProofSchema = field(default_factory=ProofSchema)
    confirm: ConfirmSchema = field(default_factory=ConfirmSchema)
    limits: list[Any] = field(default_factory=lambda: [{"of": MEMORY_LEFT, "ge": AUTO}])
    mix_conditions: bool = False
    objectives: list[str] = field(default_factory=lambda: list(OBJECTIVES[:2]))
    warm_start: Any = True
    studies_dir: str | None = None
    output: str = "text"
    export: ExportSchema = field(default_factory=ExportSchema)
    plan: PlanSchema = field(default_factory=PlanSchema)
    show: ShowSchema = field(default_factory=ShowSchema)
    ui: UiSchema = field(default_factory=UiSchema)
    leaderboard: LeaderboardSchema = field(default_factory=LeaderboardSchema)


# --- the gate ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowChoice:
    """What of which studies is shown: conditions on rows, which rows, and a file for them.

    `studies` are shown beside the one that was named. With `mix` measurements are ranked that
    cannot be compared.
    """

    studies: tuple[str, ...] = ()
    where: str = ""
    rows: str | None = None
    to: str | None = None
    mix: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What the time of a study is reckoned from before its first attempt."""

    boot_s: float = 60.0
    decode_tok_s: float = 40.0
    prefill_tok_s: float = 1500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Everything a verb needs, checked."""

    study: Study
    engine: Engine
    options: EngineOptions
    model: ModelChoice
    dirs: ConfDirs
    studies_dir: Path
    tracking_uri: str | None
    output: str
    export_format: str
    export_pick: str
    export_trial: int | None
    plan_points: int
    plan_png: str | None
    assumed: Assumed
    show: ShowChoice
    ui_port: int
    ui_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaderboard:
    """Studies to be shown in one table, by what each of them reached on one workload."""

    name: str
    description: str
    studies: tuple[str, ...]
    workload: str | None
    studies_dir: Path
    output: str
    show: ShowChoice = ShowChoice()


class LeaderboardError(ConfError):
    """A leaderboard was named where a study is asked for; `board` is what was named."""

    def __init__(self, board: Leaderboard) -> None:
        super().__init__(
            f"{board.name} is a leaderboard, which is shown, not run: `python -m sweeper show "
            f"+study={board.name}`. Run its studies one by one: {', '.join(board.studies)}"
        )
        self.board = board


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sources:
    """Where each part of a composed config came from, for messages."""

    overrides: tuple[str, ...]
    files: tuple[tuple[str, Path], ...]
    """The package ('' for the root) and the file, first the one that wins."""

    def where(self, key: str) -> str:
        """Return the place that states the key, or the nearest part of it that is stated."""
        parts = [part for part in re.split(r"\.|\[\d+\]", key) if part]
        for depth in range(len(parts), 0, -1):
            dotted = ".".join(parts[:depth])
            for override in self.overrides:
                name = override.lstrip("+~").split("=", 1)[0]
                if name == dotted or name.startswith(dotted + "."):
                    return f"on the command line, {override}"
            for package, file in self.files:
                inner = parts[:depth]
                if package:
                    if inner[:1] != [package]:
                        continue
                    inner = inner[1:]
                    if not inner:
                        continue
                if _has(file, inner):
                    return f"in {_shown(file)}"
        return f"in {_shown(self.files[-1][1])}" if self.files else "in the configuration"


def _has(file: Path, parts: Sequence[str]) -> bool:
    try:
        node = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError):
        return False
    for part in parts:
        if not isinstance(node, dict):
            return False
        # YAML reads the key `on` as True and `1` as a number; compare as text.
        match = next((key for key in node if str(key) == part), None)
        if match is None:
            return False
        node = node[match]
    return True


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def load(overrides: Sequence[str], dirs: ConfDirs) -> Loaded:
    """Return the checked study that the configs and overrides describe.

    Raises ConfError for every mistake that can be seen without the model and the engine, and
    LeaderboardError where they name no study but a table of several.
    """
    schema, sources = _read(overrides, dirs)
    if (board := _leaderboard(schema, dirs, sources)) is not None:
        raise LeaderboardError(board)
    assert schema.name is not None
    _one_of("export.format", schema.export.format, (*FORMATS, "all"), sources)
    _one_of("export.pick", schema.export.pick, tuple(PICKS), sources)
    _one_of("sampler.name", schema.sampler.name, SAMPLERS, sources)
    for name, value in dataclasses.asdict(schema.plan.assumed).items():
        if not 0 < value < math.inf:
            key = f"plan.assumed.{name}"
            raise ConfError(f"{key}: must be more than 0, got {value} ({sources.where(key)})")
    for key, value, least in (
        ("budget.boots", schema.budget.boots, 1),
        ("retries", schema.retries, 0),
        ("sampler.startup", schema.sampler.startup, 1),
        ("sampler.stop_asks", schema.sampler.stop_asks, 1),
        ("confirm.rounds", schema.confirm.rounds, 0),
        ("confirm.boots", schema.confirm.boots, 0),
        ("confirm.checks", schema.confirm.checks, 0),
        ("proof.boots", schema.proof.boots, 0),
        ("plan.points", schema.plan.points, 0),
        ("ui.port", schema.ui.port, 1),
    ):
        if value < least:
            raise ConfError(f"{key}: must be at least {least}, got {value} ({sources.where(key)})")
    # `not x > 0` and not `x <= 0`: NaN is neither, and would never end.
    for key, amount in (
        ("budget.minutes", schema.budget.minutes),
        ("budget.gpu_hours", schema.budget.gpu_hours),
    ):
        if amount is not None and not amount > 0:
            raise ConfError(f"{key}: must be more than 0, got {amount} ({sources.where(key)})")
    for key, share in (
        ("sampler.check_share", schema.sampler.check_share),
        ("sampler.stop_share", schema.sampler.stop_share),
    ):
        if share is not None and not 0 <= share < 1:
            raise ConfError(
                f"{key}: must be a share from 0 to below 1, got {share} ({sources.where(key)})"
            )
    if (schema.sampler.name == "target") != (schema.sampler.target is not None):
        raise ConfError(
            "sampler.target: names the class of a sampler, and sampler.name must then be target "
            f"({sources.where('sampler.target')})"
        )
    try:
        engine = load_engine(schema.engine.name, schema.engine.params)
    except LookupError as error:
        raise ConfError(f"engine.name: {error} ({sources.where('engine.name')})") from None
    except FieldError as error:
        key = f"engine.params.{error.key}"
        raise ConfError(f"{key}: {error.message} ({sources.where(key)})") from None
    try:
        space = _space(schema, engine)
        enqueue = _enqueued(schema, space)
    except SpaceError as error:
        raise ConfError(f"{error} ({sources.where(error.key)})") from None
    if schema.engine.detached and not schema.engine.stop_command:
        raise ConfError(
            "engine.detached: a server outside our process tree must be stopped by a command: "
            f"set engine.stop_command too ({sources.where('engine.detached')})"
        )
    for name in schema.engine.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            key = f"engine.env.{name}"
            raise ConfError(
                f"{key}: is not a name an environment variable can have ({sources.where(key)})"
            )
    if tuple(schema.objectives) not in (OBJECTIVES[:2], OBJECTIVES):
        raise ConfError(
            f"objectives: must be [{', '.join(OBJECTIVES[:2])}] or [{', '.join(OBJECTIVES)}], got "
            f"[{', '.join(schema.objectives)}] ({sources.where('objectives')})"
        )
    if len(schema.objectives) > 2 and engine.wire.scoring is None:
        raise ConfError(
            f"objectives: engine {schema.engine.name} cannot tell the log-probability of a text, "
            f"which is what quality is measured by ({sources.where('objectives')})"
        )
    study = _study(schema, space, enqueue, _also(schema, dirs, sources), sources)
    options = EngineOptions(
        binary=schema.engine.binary,
        python=schema.engine.python,
        env=study.engine_env,
        prefix=study.engine_prefix,
        detached=schema.engine.detached,
        stop_command=tuple(schema.engine.stop_command),
        extra_args=study.engine_extra_args,
        boot_timeout_s=schema.engine.boot_timeout_s,
        first_request_timeout_s=schema.engine.first_request_timeout_s,
        stop_timeout_s=schema.engine.stop_timeout_s,
        memory_limit_bytes=study.memory_limit_bytes,
    )
    _check_settings(study, engine, options, schema, sources)
    return Loaded(
        study=study,
        engine=engine,
        options=options,
        model=_model(schema, sources),
        dirs=dirs,
        studies_dir=_studies_dir(schema, dirs),
        tracking_uri=_tracking_uri(schema, dirs, sources),
        output=schema.output,
        export_format=schema.export.format,
        export_pick=schema.export.pick,
        export_trial=schema.export.trial,
        plan_points=schema.plan.points,
        plan_png=schema.plan.png,
        assumed=Assumed(**dataclasses.asdict(schema.plan.assumed)),
        show=_show(schema),
        ui_port=schema.ui.port,
        ui_open=schema.ui.open,
    )


def _read(overrides: Sequence[str], dirs: ConfDirs) -> tuple[Schema, _Sources]:
    """Return what the configs and overrides say, of a name that can name a folder."""
    # `study=x` is what one types; Hydra wants a + since no study is in the defaults list.
    stated = [_quoted(f"+{each}" if each.startswith("study=") else each) for each in overrides]
    config, sources = _composed(stated, dirs)
    schema = _typed(config, sources, Schema)
    _one_of("output", schema.output, OUTPUTS, sources)
    if schema.show.rows is not None:
        _one_of("show.rows", schema.show.rows, SHOWN_ROWS, sources)
    if schema.name is None and schema.show.studies:
        schema.name = _SEVERAL
        return schema, sources
    if schema.name is None:
        names = ", ".join(dirs.options("study"))
        raise ConfError(f"no study was chosen: add +study=NAME (there are: {names})")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", schema.name):
        raise ConfError(
            f"name: {schema.name!r} ({sources.where('name')}) names a folder: use letters, digits, "
            "dots, dashes and underscores only"
        )
    if schema.model.path is not None and any(
        each.lstrip("+").startswith("model.path=") for each in stated
    ):
        # A file that is asked for is the only one, whatever variants the model has.
        schema.model.variants, schema.model.variant_facts = {}, {}
    return schema, sources


def _show(schema: Schema) -> ShowChoice:
    stated = dataclasses.asdict(schema.show)
    return ShowChoice(**{**stated, "studies": tuple(schema.show.studies)})


def _quoted(override: str) -> str:
    """Return an override such that Hydra takes conditions for text: `=` and `<` are its own."""
    key, _, value = override.partition("=")
    if key.lstrip("+") != "show.where" or value[:1] in ("'", '"'):
        return override
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{key}="{escaped}"'


def _leaderboard(schema: Schema, dirs: ConfDirs, sources: _Sources) -> Leaderboard | None:
    stated = schema.leaderboard
    assert schema.name is not None
    if schema.name != _SEVERAL and not stated.studies:
        return None
    if schema.name == _SEVERAL:
        return Leaderboard(
            name=schema.name, description="side by side", studies=(), workload=stated.workload,
            studies_dir=_studies_dir(schema, dirs), output=schema.output, show=_show(schema),
        )  # fmt: skip
    for key, names, group in (
        ("leaderboard.studies", stated.studies, "study"),
        ("leaderboard.workload", [stated.workload] if stated.workload else [], "workload"),
    ):
        for each in names:
            if each not in dirs.options(group):
                raise ConfError(
                    f"{key}: there is no {group} called {each}"
                    f"{suggestion(each, dirs.options(group))} ({sources.where(key)})"
                )
    return Leaderboard(
        name=schema.name,
        description=schema.description,
        studies=tuple(stated.studies),
        workload=stated.workload,
        studies_dir=_studies_dir(schema, dirs),
        output=schema.output,
        show=_show(schema),
    )


def outline(study: str, dirs: ConfDirs) -> dict[str, Any]:
    """Return what a study is, by the names in its own file; nothing is composed or checked."""
    file = next(each / "study" / f"{study}.yaml" for each in dirs.dirs
                if (each / "study" / f"{study}.yaml").is_file())  # fmt: skip
    root = next(each / "config.yaml" for each in dirs.dirs if (each / "config.yaml").is_file())
    chosen: dict[str, str] = {}
    stated: dict[str, Any] = {}
    for path in (root, file):
        try:
            stated = yaml.safe_load(path.read_text()) or {}
        except yaml.YAMLError as error:
            raise ConfError(_yaml_words(error)) from None
        for entry in stated.get("defaults", ()) if isinstance(stated, dict) else ():
            if isinstance(entry, dict):
                chosen |= {str(key).rpartition(" ")[2].strip("/"): v for key, v in entry.items()}
    if not isinstance(stated, dict):
        stated = {}
    return {
        "study": stated.get("name", study),
        "description": stated.get("description", ""),
        **{group: chosen.get(group, "none") for group in ("engine", "model", "hardware")},
        "workloads": [chosen.get("workload", "none"), *stated.get("also", ())],
    }


def _composed(overrides: list[str], dirs: ConfDirs) -> tuple[DictConfig, _Sources]:
    with _hydra(dirs) as hydra, _libyaml():
        try:
            config = hydra.compose_config(
                config_name="config", overrides=[_settable(each) for each in overrides],
                run_mode=RunMode.RUN, from_shell=True, with_log_configuration=False,
            )  # fmt: skip
        # Hydra lets plain Python errors through where an override does not fit what it overrides.
        except (HydraException, OmegaConfBaseException, ValueError, TypeError) as error:
            raise ConfError(_hydra_words(hydra, error, overrides, dirs)) from None
        except yaml.YAMLError as error:
            raise ConfError(_yaml_words(error)) from None
        chosen = OmegaConf.to_container(config.hydra.runtime.choices)
        assert isinstance(chosen, dict)
    files = []
    for group in GROUPS:
        name = chosen.get(group)
        for each in dirs.dirs:
            if isinstance(name, str) and (each / group / f"{name}.yaml").is_file():
                files.append(("" if group == "study" else group, each / group / f"{name}.yaml"))
                break
    root = next(each / "config.yaml" for each in dirs.dirs if (each / "config.yaml").is_file())
    OmegaConf.set_struct(config, False)
    config.pop("hydra")
    return config, _Sources(overrides=tuple(overrides), files=(*files, ("", root)))


@contextmanager
def _libyaml() -> Iterator[None]:
    """Let OmegaConf parse by libyaml, where it is there: a tenth of the time a plan takes."""
    usual = yaml.SafeLoader
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", usual)  # type: ignore[misc]
    try:
        yield
    finally:
        yaml.SafeLoader = usual  # type: ignore[misc]


def _settable(override: str) -> str:
    """Return an override such that a key that sweeper knows can be set where no file names it."""
    key, equals, _ = override.partition("=")
    node: Any = Schema
    for part in key.split("."):
        if not dataclasses.is_dataclass(node):
            return override
        found = {each.name: each for each in dataclasses.fields(node)}.get(part)
        if found is None:
            return override
        node = found.default_factory
    # A group is chosen by its name: it cannot be added to.
    return f"++{override}" if equals and not dataclasses.is_dataclass(node) else override


@contextmanager
def _hydra(dirs: ConfDirs) -> Iterator[Hydra]:
    """Yield Hydra over our folders, in our order.

    The public compose API knows one primary folder whose files cannot be overridden by others
    (hydra #2125); the search path itself has no such limit.
    """
    search_path = ConfigSearchPathImpl()
    search_path.append("hydra", "pkg://hydra.conf")
    for index, each in enumerate(dirs.dirs):
        search_path.append(f"sweeper-{index}", f"file://{each}")
    search_path.append("schema", "structured://")
    Plugins.instance()  # registers the kinds of sources that a search path may hold
    GlobalHydra.instance().clear()
    try:
        yield Hydra.create_main_hydra2(task_name="sweeper", config_search_path=search_path)
    finally:
        GlobalHydra.instance().clear()


def _yaml_words(error: yaml.YAMLError) -> str:
    """Return what is wrong with a file that is not YAML, with the file and the line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"a config file is not YAML: {' '.join(str(error).split())}"
    problem = getattr(error, "problem", None) or "cannot be read"
    return f"{_shown(Path(mark.name))}, line {mark.line + 1}: not valid YAML: {problem}"


def _hydra_words(hydra: Hydra, error: Exception, overrides: Sequence[str], dirs: ConfDirs) -> str:
    """Return Hydra's complaint, with the nearest right name where a name is wrong."""
    words = str(error).strip()
    if found := re.search(r"Could not find '(\w+)/([^']*)'", words):
        group, name = found[1], found[2]
        place = next(
            (
                f"on the command line, {each}"
                for each in overrides
                if each.lstrip("+") == f"{group}={name}"
            ),
            f"asked for by {_asking(group, name, overrides, dirs)}",
        )
        return (
            f"{group}: there is no {group} called {name}{suggestion(name, dirs.options(group))} "
            f"({place})"
        )
    known = [*GROUPS, *(each.name for each in dataclasses.fields(Schema))]
    groups_chosen = []
    for override in overrides:
        try:
            parsed = OverridesParser.create().parse_override(override)
        except HydraException:
            return f"on the command line, {override}: cannot be read as KEY=VALUE"
        key = parsed.key_or_group.lstrip("/")
        first = key.split(".", 1)[0].split("@", 1)[0]
        if first not in known:
            return f"on the command line, {override}: unknown name{suggestion(first, known)}"
        if "." not in key and first in GROUPS:
            groups_chosen.append(override)
    if found := re.search(r"Could not override '([^']+)'", words):
        key = found[1]
        if key in _REPLACED:
            place = next((each for each in overrides if each.startswith(f"{key}=")), key)
            return f"{key}: no longer exists; {_REPLACED[key]} (on the command line, {place})"
        parent, _, last = key.rpartition(".")
        place = next((each for each in overrides if each.startswith(f"{key}=")), key)
        try:
            config = hydra.compose_config(
                config_name="config", overrides=groups_chosen, run_mode=RunMode.RUN,
                from_shell=True, with_log_configuration=False,
            )  # fmt: skip
            beside = OmegaConf.select(config, parent) if parent else config
            names = [str(each) for each in beside] if isinstance(beside, DictConfig) else []
        except (HydraException, OmegaConfBaseException):
            names = []
        # Only some mappings are the user's to extend; elsewhere a + would not help.
        hint = f"; to add a new entry, write +{place}" if parent in _OPEN_MAPPINGS else ""
        return f"on the command line, {place}: there is no {key}{suggestion(last, names)}{hint}"
    # Where a list stands for a mapping or the other way round, Hydra's second line says so.
    said = " ".join(words.splitlines()[: 2 if "raised while composing" in words else 1])
    return f"{said} (overrides: {' '.join(overrides) or 'none'})"


def _asking(group: str, name: str, overrides: Sequence[str], dirs: ConfDirs) -> str:
    """Return the file whose defaults list names the missing config of a group."""
    for override in reversed(overrides):
        chosen, _, option = override.lstrip("+").partition("=")
        for each in dirs.dirs:
            file = each / chosen / f"{option}.yaml"
            if chosen in GROUPS and file.is_file():
                if re.search(rf"\b{group}: *[\"']?{re.escape(name)}\b", file.read_text()):
                    return _shown(file)
                break
    return "the defaults of config.yaml"


_AnySchema = TypeVar("_AnySchema")


def _typed(
    config: DictConfig, sources: _Sources, schema: type[_AnySchema], within: str = ""
) -> _AnySchema:
    """Return a composed config as its schema; `within` is where that stands in the whole."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), config)
        typed = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        key = within + str(error.full_key or error.key or "")
        words = str(error.msg or error).splitlines()[0]
        if key == "study":
            words = "its first line must be `# @package _global_`, and it must be a mapping"
        elif not key and (group := _group_given(config)) is not None:
            key, first = group
            words = f"is a group of settings: write {key}.{first}=..."
        elif key in _REPLACED:
            words = f"no longer exists; {_REPLACED[key]}"
        elif "missing mandatory value" in words:
            words = "must be given"
        elif words.startswith("Key ") and " not in " in words:
            words = f"unknown key{suggestion(key.rsplit('.', 1)[-1], _keys_beside(key))}"
        raise ConfError(f"{key}: {words} ({sources.where(key)})") from None
    assert isinstance(typed, schema)
    return typed


def _group_given(config: DictConfig) -> tuple[str, str] | None:
    """Return the group of settings that is given a single value, and its first key."""
    for each in dataclasses.fields(Schema):
        group = each.default_factory
        if not dataclasses.is_dataclass(group) or each.name not in config:
            continue
        if not isinstance(OmegaConf.select(config, each.name), DictConfig):
            return each.name, dataclasses.fields(group)[0].name
    return None


def _keys_beside(key: str) -> list[str]:
    node: Any = Schema
    for part in key.split(".")[:-1]:
        found = {each.name: each for each in dataclasses.fields(node)}.get(part)
        factory = found.default_factory if found is not None else None
        if not dataclasses.is_dataclass(factory):
            return []
        node = factory
    return [each.name for each in dataclasses.fields(node)]


def _one_of(key: str, value: str, allowed: Sequence[str], sources: _Sources) -> None:
    if value not in allowed:
        raise ConfError(f"{key}: {value} is not one of {', '.join(allowed)} ({sources.where(key)})")


def _study(
    schema: Schema,
    space: Space,
    enqueue: tuple[Point, ...],
    also: tuple[Workload, ...],
    sources: _Sources,
) -> Study:
    assert schema.name is not None
    for key, seconds in (
        ("engine.boot_timeout_s", schema.engine.boot_timeout_s),
        ("engine.first_request_timeout_s", schema.engine.first_request_timeout_s),
        ("engine.stop_timeout_s", schema.engine.stop_timeout_s),
    ):
        if not 0 < seconds < math.inf:
            raise ConfError(
                f"{key}: must be a number of seconds above 0, got {seconds} ({sources.where(key)})"
            )
    sizes = {}
    for name in ("memory_limit", "device_memory"):
        try:
            sizes[name] = parse_bytes(getattr(schema.hardware, name))
        except ValueError as error:
            key = f"hardware.{name}"
            raise ConfError(f"{key}: {error} ({sources.where(key)})") from None
    return Study(
        name=schema.name,
        description=schema.description,
        seed=schema.seed,
        space=space,
        enqueue=enqueue,
        budget=Budget(
            boots=schema.budget.boots,
            minutes=schema.budget.minutes,
            gpu_hours=schema.budget.gpu_hours,
        ),
        sampler=_sampler(schema, sources),
        warm_start=_warm_start(schema, sources),
        retries=schema.retries,
        engine_name=schema.engine.name,
        engine_params=schema.engine.params,
        engine_env=Pairs(schema.engine.env),
        engine_prefix=tuple(schema.engine.prefix),
        engine_extra_args=tuple(schema.engine.extra_args),
        model_name=schema.model.name,
        hardware_name=schema.hardware.name,
        memory_limit_bytes=sizes["memory_limit"],
        workload=_workload(schema.workload, sources),
        also=also,
        guard=_guard(schema, sources),
        reference=_reference(schema, space, sources),
        confirm=Confirm(
            rounds=schema.confirm.rounds,
            boots=schema.confirm.boots,
            checks=schema.confirm.checks,
        ),
        memory_left_bytes=_memory_left(schema, sources),
        proof_boots=schema.proof.boots,
        mix_conditions=schema.mix_conditions,
        device_memory_bytes=sizes["device_memory"],
        unified_memory=schema.hardware.unified,
        objectives=tuple(schema.objectives),
    )


def _workload(schema: WorkloadSchema, sources: _Sources) -> Workload:
    """Return the checked workload; raises ConfError with the key and where it stands."""
    mappings = {}
    for name in ("request", "chat_template"):
        try:
            mappings[name] = Pairs(getattr(schema, name))
        except TypeError as error:
            key = f"workload.{name}"
            raise ConfError(f"{key}: {error} ({sources.where(key)})") from None
    plain = {each.name: getattr(schema, each.name) for each in dataclasses.fields(schema)}
    try:
        return Workload(
            **{
                **plain,
                **mappings,
                "repeats": Repeats(**dataclasses.asdict(schema.repeats)),
                "prompts": tuple(schema.prompts),
                "prompt_tokens": tuple(schema.prompt_tokens),
                "streams": tuple(schema.streams),
            }
        )
    except ValueError as error:
        key = f"workload.{str(error).split(':', 1)[0]}"
        raise ConfError(f"workload.{error} ({sources.where(key)})") from None


def _also(schema: Schema, dirs: ConfDirs, sources: _Sources) -> tuple[Workload, ...]:
    """Return the further workloads that the study names, each as its own file says it."""
    where = sources.where("also")
    workloads: list[Workload] = []
    taken = {schema.workload.name: "the study's own workload"}
    for option in schema.also:
        file = next(
            (
                each / "workload" / f"{option}.yaml"
                for each in dirs.dirs
                if (each / "workload" / f"{option}.yaml").is_file()
            ),
            None,
        )
        if file is None:
            raise ConfError(
                f"also: there is no workload called {option}"
                f"{suggestion(option, dirs.options('workload'))} ({where})"
            )
        with _hydra(dirs) as hydra:
            try:
                config = hydra.compose_config(
                    config_name=f"workload/{option}", overrides=[], run_mode=RunMode.RUN,
                    from_shell=False, with_log_configuration=False,
                )  # fmt: skip
            except (HydraException, OmegaConfBaseException) as error:
                words = " ".join(str(error).split())
                raise ConfError(f"also: {option}: {words} (in {_shown(file)})") from None
            except yaml.YAMLError as error:
                raise ConfError(_yaml_words(error)) from None
        raw = config.get("workload")
        if not isinstance(raw, DictConfig):
            raise ConfError(f"also: {option} says nothing (in {_shown(file)})")
        of_file = _Sources(overrides=(), files=(("workload", file),))
        workload = _workload(_typed(raw, of_file, WorkloadSchema, "workload."), of_file)
        if workload.name in taken:
            raise ConfError(
                f"also: {option} is called {workload.name}, and so is {taken[workload.name]}: "
                f"every workload of a study needs a name of its own ({where})"
            )
        taken[workload.name] = "one before it"
        workloads.append(workload)
    return tuple(workloads)


def _sampler(schema: Schema, sources: _Sources) -> SamplerChoice:
    try:
        arguments = Pairs(schema.sampler.arguments)
    except TypeError as error:
        key = "sampler.arguments"
        raise ConfError(f"{key}: {error} ({sources.where(key)})") from None
    return SamplerChoice(
        name=schema.sampler.name,
        startup=schema.sampler.startup,
        target=schema.sampler.target,
        arguments=arguments,
        check_share=schema.sampler.check_share,
        stop_share=schema.sampler.stop_share,
        stop_asks=schema.sampler.stop_asks,
    )


def _warm_start(schema: Schema, sources: _Sources) -> bool | tuple[str, ...]:
    stated = schema.warm_start
    if isinstance(stated, bool):
        return stated
    if isinstance(stated, list) and all(isinstance(each, str) for each in stated):
        return tuple(stated)
    raise ConfError(
        f"warm_start: must be true, false or a list of studies, got {stated} "
        f"({sources.where('warm_start')})"
    )


def _memory_left(schema: Schema, sources: _Sources) -> int | None:
    """Return what a configuration must leave of memory, None for as much as follows from boots."""
    found: int | None = None
    seen = False
    for index, raw in enumerate(schema.limits):
        key = f"limits[{index}]"
        if not isinstance(raw, dict) or set(raw) != {"of", "ge"} or raw["of"] != MEMORY_LEFT:
            raise ConfError(
                f"{key}: must be {{of: {MEMORY_LEFT}, ge: {AUTO} or a size such as 64MiB}}, got "
                f"{raw!r} ({sources.where('limits')})"
            )
        if seen:
            raise ConfError(f"{key}: {MEMORY_LEFT} is limited twice ({sources.where('limits')})")
        seen = True
        try:
            found = None if raw["ge"] == AUTO else parse_bytes(raw["ge"])
        except ValueError as error:
            raise ConfError(f"{key}.ge: {error} ({sources.where('limits')})") from None
    return found if seen else 0


def _guard(schema: Schema, sources: _Sources) -> Guard:
    limits = {
        each.name: getattr(schema.guard, each.name)
        for each in dataclasses.fields(schema.guard)
        if each.name != "reference"
    }
    try:
        return Guard(**limits)
    except ValueError as error:
        key = "guard." + str(error).split(":", 1)[0]
        raise ConfError(f"guard.{error} ({sources.where(key)})") from None


def _reference(schema: Schema, space: Space, sources: _Sources) -> Pairs:
    axes = {axis.name: axis for axis in space.axes}
    for name, value in schema.guard.reference.items():
        key = f"guard.reference.{name}"
        if name not in axes:
            raise ConfError(
                f"{key}: is no axis of the space{suggestion(name, tuple(axes))} "
                f"({sources.where(key)})"
            )
        if value not in axes[name].values:
            known = ", ".join(text(each) for each in axes[name].values)
            raise ConfError(
                f"{key}: {value} is not one of the axis's values: {known} ({sources.where(key)})"
            )
    return Pairs(schema.guard.reference)


def _model(schema: Schema, sources: _Sources) -> ModelChoice:
    variants = schema.model.variants
    variant_facts = []
    for name, stated in schema.model.variant_facts.items():
        key = f"model.variant_facts.{name}"
        if name not in variants:
            raise ConfError(
                f"{key}: is not one of model.variants{suggestion(name, tuple(variants))} "
                f"({sources.where(key)})"
            )
        if not isinstance(stated, Mapping):
            raise ConfError(f"{key}: must be a mapping, got {stated!r} ({sources.where(key)})")
        variant_facts.append((name, _model_facts(key, stated, sources)))
    return ModelChoice(
        name=schema.model.name,
        path=schema.model.path,
        package=schema.model.package,
        package_module=schema.model.package_module,
        sha256=schema.model.sha256,
        variants=Pairs(variants),
        draft_path=schema.model.draft_path,
        facts_yield=schema.model.facts_yield,
        facts=_model_facts("model.facts", schema.model.facts, sources),
        variant_facts=tuple(variant_facts),
    )


def _model_facts(key: str, stated: Mapping[str, Any], sources: _Sources) -> Pairs:
    """Return what a study states of a model; raises ConfError for what no model has."""
    for name, value in stated.items():
        place = f"{key}.{name}"
        if name not in FACTS:
            raise ConfError(
                f"{place}: is not a fact of a model"
                f"{suggestion(ELSEWHERE.get(name, name), tuple(FACTS))} ({sources.where(place)})"
            )
        number = isinstance(value, int | float) and not isinstance(value, bool)
        right, wanted = number and value >= 0, "a number, 0 or more"
        if name in TEXT_FACTS:
            right, wanted = isinstance(value, str), "text"
        elif name in TRUTH_FACTS:
            right, wanted = isinstance(value, bool), "true or false"
        if value is not None and not right and not isinstance(value, list | dict):
            raise ConfError(
                f"{place}: {FACTS[name]}; must be {wanted}, got {value!r} ({sources.where(place)})"
            )
    try:
        return Pairs({name: value for name, value in stated.items() if value is not None})
    except TypeError as error:
        raise ConfError(f"{key}: {error} ({sources.where(key)})") from None


def _studies_dir(schema: Schema, dirs: ConfDirs) -> Path:
    if schema.studies_dir is None:
        return dirs.root / "studies"
    return Path(schema.studies_dir).expanduser().resolve()


def _tracking_uri(schema: Schema, dirs: ConfDirs, sources: _Sources) -> str | None:
    if not schema.tracking.enabled:
        return None
    uri = schema.tracking.uri
    default = f"sqlite:///{dirs.root / 'mlruns' / 'mlflow.db'}"
    if uri is None:
        return default
    if not uri.strip():
        raise ConfError(
            "tracking.uri: there is no MLFLOW_TRACKING_URI in the environment; set it to the "
            f"address of the tracking server, or write tracking=local ({default})"
        )
    if uri.startswith("file:") or "://" not in uri:
        raise ConfError(
            f"tracking.uri: {uri} is a folder store, which MLflow no longer keeps up "
            f"({sources.where('tracking.uri')}); write {default}, or the address of a server"
        )
    if uri.startswith("sqlite:") and not uri.startswith("sqlite:////"):
        raise ConfError(
            f"tracking.uri: {uri} is relative, so it would be another file in every folder "
            f"({sources.where('tracking.uri')}); write {default}"
        )
    return uri


_ANY_MODEL = ModelFacts(name="any", path="any", served_name="any", size_bytes=0, sha256="")


def _check_settings(
    study: Study, engine: Engine, options: EngineOptions, schema: Schema, sources: _Sources
) -> None:
    """Build the engine's settings once for every value of every axis, to find wrong ones."""
    params = dict(study.engine_params)
    for name in params:
        if name not in engine.setting_names():
            key = f"engine.params.{name}"
            raise ConfError(
                f"{key}: is not a setting of {engine.name}"
                f"{suggestion(name, engine.setting_names())} ({sources.where(key)})"
            )
    swept = {name: axis for axis in study.space.axes for name in axis.sets}
    for axis in study.space.axes:
        for value in axis.values:
            narrowed = Space(
                axes=tuple(
                    dataclasses.replace(each, values=(value,)) if each.name == axis.name else each
                    for each in study.space.axes
                ),
                rules=study.space.rules,
            )
            point = next((each for each in narrowed.points() if axis.name in each), None)
            if point is None:
                continue
            here = dict(params)
            for each in study.space.axes:
                if each.name in point:
                    here.update(dict.fromkeys(each.sets, point[each.name]))
            here.pop(MODEL_VARIANT, None)
            try:
                # Rendering finds what only the whole command line shows, such as a flag in
                # extra_args that belongs to sweeper. The model and the port do not matter for it.
                engine.launch(engine.settings(here), _ANY_MODEL, options, 1)
            except FieldError as error:
                culprit = swept.get(error.key)
                key = f"space.{culprit.name}" if culprit else f"engine.params.{error.key}"
                if error.key in ("extra_args", "env"):
                    key = f"engine.{error.key}"
                raise ConfError(f"{key}: {error.message} ({sources.where(key)})") from None
            if MODEL_VARIANT in axis.sets and str(value) not in _axis_variants(schema, axis.sets):
                known = ", ".join(schema.model.variants) or "none"
                raise ConfError(
                    f"space.{axis.name}: {text(value)} is not one of model.variants ({known}) "
                    f"({sources.where(f'space.{axis.name}')})"
                )


# --- space, rules, enqueue --------------------------------------------------------------------


def _space(schema: Schema, engine: Engine) -> Space:
    axes = tuple(_axis(str(name), raw, engine, schema) for name, raw in schema.space.items())
    rules = tuple(_rule(index, raw) for index, raw in enumerate(schema.rules))
    space = Space(axes=axes, rules=rules)
    if next(space.points(), None) is None:
        raise SpaceError("rules", "forbid every point of the space")
    taken: dict[str, str] = {}
    for axis in axes:
        for name in axis.sets:
            if name in taken:
                raise SpaceError(
                    f"space.{axis.name}", f"sets {name}, which {taken[name]} sets already"
                )
            taken[name] = axis.name
    return space


_AXIS_KEYS = ("choices", "range", "step", "ordered", "sets", "when")


def _axis_variants(schema: Schema, sets: Sequence[str]) -> tuple[str, ...]:
    """Return the values of an axis of variants: those of the model, or its one file by its name."""
    alone = (schema.model.name,) if tuple(sets) == (MODEL_VARIANT,) else ()
    return tuple(schema.model.variants) or alone


def _axis(name: str, raw: Any, engine: Engine, schema: Schema) -> Axis:
    key = f"space.{name}"
    if isinstance(raw, list):
        raw = {"choices": raw}
    if not isinstance(raw, dict):
        raise SpaceError(
            key,
            f"must be a list of values or a mapping, got {raw!r}; a value that is not swept "
            f"belongs in engine.params.{name}",
        )
    for each in raw:
        if each not in _AXIS_KEYS:
            raise SpaceError(f"{key}.{each}", f"unknown key{suggestion(str(each), _AXIS_KEYS)}")
    values: tuple[Scalar, ...]
    if raw.get("sets") in (MODEL_VARIANT, [MODEL_VARIANT]) and not {"choices", "range"} & {*raw}:
        values = _axis_variants(schema, (MODEL_VARIANT,))
    elif ("choices" in raw) == ("range" in raw):
        raise SpaceError(key, "needs either choices or range")
    else:
        values = _choices(key, raw["choices"]) if "choices" in raw else _range(key, raw)
    ordered = raw.get("ordered")
    if ordered is None:
        ordered = all(
            isinstance(each, int | float) and not isinstance(each, bool) for each in values
        )
    if not isinstance(ordered, bool):
        raise SpaceError(f"{key}.ordered", f"must be true or false, got {ordered!r}")
    sets = raw.get("sets", name)
    sets = [sets] if isinstance(sets, str) else sets
    if not isinstance(sets, list) or not sets or not all(isinstance(each, str) for each in sets):
        raise SpaceError(f"{key}.sets", f"must be a setting or a list of settings, got {sets!r}")
    known = (*engine.setting_names(), MODEL_VARIANT)
    for each in sets:
        if each not in known:
            where = f"{key}.sets" if "sets" in raw else key
            hint = "" if "sets" in raw else "; name what it sets with `sets:`"
            raise SpaceError(
                where, f"{each} is not a setting of {engine.name}{suggestion(each, known)}{hint}"
            )
    return Axis(
        name=name,
        values=values,
        ordered=ordered,
        sets=tuple(sets),
        when=_conditions(raw.get("when", {}), f"{key}.when"),
    )


def _choices(key: str, raw: Any) -> tuple[Scalar, ...]:
    if not isinstance(raw, list) or not raw:
        raise SpaceError(f"{key}.choices", f"must be a list with at least one value, got {raw!r}")
    for each in raw:
        if each is not None and not isinstance(each, bool | int | float | str):
            raise SpaceError(f"{key}.choices", f"values must be scalars, got {each!r}")
    return tuple(raw)


def _range(key: str, raw: Mapping[str, Any]) -> tuple[Scalar, ...]:
    bounds = raw["range"]
    if (
        not isinstance(bounds, list)
        or len(bounds) != 2  # low and high
        or not all(_is_finite(b) for b in bounds)
    ):
        raise SpaceError(f"{key}.range", f"must be [low, high], got {bounds!r}")
    low, high = bounds
    step = raw.get("step", 1 if all(isinstance(b, int) for b in bounds) else None)
    if step is None:
        raise SpaceError(f"{key}.step", "is needed for a range of fractions")
    if not _is_finite(step) or step <= 0:
        raise SpaceError(f"{key}.step", f"must be a number above 0, got {step!r}")
    if low > high:
        raise SpaceError(f"{key}.range", f"is empty: {low} is above {high}")
    count = int((high - low) / step + 1e-9) + 1
    if count > 100_000:
        raise SpaceError(f"{key}.range", f"has {count:,} values; give a larger step")
    values = [low + index * step for index in range(count)]
    return tuple(round(v, 10) if isinstance(v, float) else v for v in values)


def _is_finite(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and -math.inf < value < math.inf


def _rule(index: int, raw: Any) -> Rule:
    key = f"rules[{index}]"
    if not isinstance(raw, dict) or set(raw) != {"reason", "forbid"}:
        raise SpaceError(key, f"must have exactly `reason` and `forbid`, got {raw!r}")
    reason, forbid = raw["reason"], raw["forbid"]
    if not isinstance(reason, str) or not reason.strip():
        raise SpaceError(f"{key}.reason", "must say in words why the combination cannot work")
    return Rule(reason=reason, forbid=_conditions(forbid, f"{key}.forbid"))


def _conditions(raw: Any, key: str) -> tuple[Condition, ...]:
    if not isinstance(raw, dict):
        raise SpaceError(key, f"must map axes to conditions, got {raw!r}")
    return tuple(
        condition
        for axis, stated in raw.items()
        for condition in _condition(str(axis), stated, f"{key}.{axis}")
    )


def _condition(axis: str, raw: Any, key: str) -> Iterator[Condition]:
    if not isinstance(raw, dict):
        several = raw if isinstance(raw, list) else [raw]
        yield Condition(axis=axis, op="in", operand=_operands(several, key))
        return
    if not raw:
        raise SpaceError(key, "states no condition")
    for op, operand in raw.items():
        if op == "not":
            several = operand if isinstance(operand, list) else [operand]
            yield Condition(axis=axis, op="not_in", operand=_operands(several, key))
        elif op in OPS and op not in ("in", "not_in"):
            if isinstance(operand, dict) and set(operand) == {"axis"}:
                yield Condition(axis=axis, op=op, operand=AxisRef(axis=str(operand["axis"])))
            elif isinstance(operand, int | float) and not isinstance(operand, bool):
                yield Condition(axis=axis, op=op, operand=operand)
            else:
                raise SpaceError(
                    f"{key}.{op}", f"must be a number or {{axis: NAME}}, got {operand!r}"
                )
        else:
            raise SpaceError(
                f"{key}.{op}",
                f"unknown condition{suggestion(str(op), ('not', 'lt', 'le', 'gt', 'ge'))}",
            )


def _operands(values: Sequence[Any], key: str) -> tuple[Scalar, ...]:
    for each in values:
        if each is not None and not isinstance(each, bool | int | float | str):
            raise SpaceError(key, f"must compare with scalars, got {each!r}")
    return tuple(values)


def _enqueued(schema: Schema, space: Space) -> tuple[Point, ...]:
    points: list[Point] = []
    ours = _for_this_model(schema, space)
    for index, raw in enumerate(ours):
        key = f"enqueue[{index}]"
        if not isinstance(raw, dict):
            raise SpaceError(key, f"must map axes to values, got {raw!r}")
        try:
            point = space.checked({str(name): value for name, value in raw.items()}, key)
        except SpaceError as error:
            raise SpaceError(
                error.key, f"{error.message}; correct the entry, or start without: enqueue=[]"
            ) from None
        rule = space.refused_by(point)
        if rule is not None:
            raise SpaceError(key, f"is forbidden by a rule: {rule.reason}")
        points.append(point)
    return tuple(dict.fromkeys(points))


def _for_this_model(schema: Schema, space: Space) -> list[Any]:
    """Return the guesses; those made for another model's variants, for the first of this one's.

    Only where not one of the variants that they name exists: the study was given another model,
    and what was guessed of all else may still be good.
    """
    axis = next((each for each in space.axes if each.sets == (MODEL_VARIANT,)), None)
    if axis is None or "choices" in schema.space[axis.name]:
        return schema.enqueue
    named = [raw[axis.name] for raw in schema.enqueue if isinstance(raw, dict) and axis.name in raw]
    if not named or any(str(each) in axis.values for each in named):
        return schema.enqueue
    return [
        {**raw, axis.name: axis.values[0]} if isinstance(raw, dict) and axis.name in raw else raw
        for raw in schema.enqueue
    ]


_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
          "KB": 10**3, "MB": 10**6, "GB": 10**9}  # fmt: skip


def parse_bytes(raw: Any) -> int | None:
    """Return a size as bytes: a whole number, or text such as 600MiB or 23.42 GiB; None stays."""
    if raw is None:
        return None
    if isinstance(raw, int) and not isinstance(raw, bool):
        size = raw
    else:
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(raw))
        if found is None or found[2].upper() not in _UNITS:
            raise ValueError(f"{raw!r} is not a size; write it as 600MiB or 23.4GiB")
        size = round(float(found[1]) * _UNITS[found[2].upper()])
    if size <= 0:
        raise ValueError(f"must be more than 0, got {raw!r}")
    return size
