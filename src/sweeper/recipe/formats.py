"""The formats of recipes: which command each starts, and in what that is not as measured.

A format is an entry here and a template (or a folder of templates) in `templates/`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sweeper.core.pairs import Pairs
from sweeper.engines import CommandParts
from sweeper.recipe.quoting import RecipeError, comment, preset, utf8
from sweeper.recipe.source import (
    DEFAULT_PORT,
    Export,
    Source,
    container_words,
    hub_model,
    limit_difference,
    model_mount,
    needs_parts,
    needs_port,
    port_difference,
    with_port,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A kind of recipe: its template, the end of its files' names, and whether they are run.

    A format with no `suffix` is a folder, made of the templates in the folder `template`. `only`
    says, for a format that is not for every engine, for which it is; the adapters say which.
    """

    template: str
    suffix: str
    executable: bool = False
    export: Callable[[Source], Export]
    only: str = ""


def direct(source: Source) -> Export:
    """Return the measured command on another port: exactly what ran."""
    return Export(
        argv=with_port(source),
        port_argument=source.attempt.port_argument,
        env=source.env,
        memory_limit_bytes=source.attempt.memory_limit_bytes,
        differs=port_difference(source),
    )


def systemd(source: Source) -> Export:
    """Return the measured command as a unit of systemd starts it."""
    program = source.attempt.argv[0]
    if not re.match(r"/|[A-Za-z0-9]", program) or ("/" in program and program[0] != "/"):
        raise RecipeError(f"systemd starts a program by its full path or name, not {program}")
    if any(each in "\"'\\" or ord(each) < 0x20 or ord(each) == 0x7F for each in program):
        raise RecipeError(
            f"systemd takes no program whose path has quotes, backslashes or control characters: "
            f"{comment(program)}; use format shell"
        )
    for name, value in source.env.items():
        if any(_no_text(ord(each)) for each in str(value)):
            raise RecipeError(
                f"{name} has a character that systemd takes in no variable (no UTF-8, or none that "
                "Unicode assigns); use format shell"
            )
    return direct(source)


def _no_text(code: int) -> bool:
    """Tell whether systemd's check of UTF-8 refuses a character: surrogates, noncharacters."""
    return 0xD800 <= code <= 0xDFFF or 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE


def llama_swap(source: Source) -> Export:
    """Return the measured command on the port that llama-swap chooses."""
    needs_port(source, "llama-swap chooses the port")
    for name, value in source.env.items():
        if re.search(r"\$\{env\.\w+\}", str(value)):
            raise RecipeError(
                f"{name} has ${{env.…}} in its value, which llama-swap would replace; use shell"
            )
    for each in (*source.attempt.argv, *(str(value) for value in source.env.values())):
        utf8(each)
    plain = direct(source)
    at = source.attempt.argv[source.attempt.port_argument or 0]
    return Export(
        argv=plain.argv,
        port_argument=plain.port_argument,
        env=plain.env,
        memory_limit_bytes=None,
        differs=(
            f"the port: the one that llama-swap gives it, measured on {at}",
            "it is started by the first request for it",
            *limit_difference(source),
        ),
    )


def llama_preset(source: Source) -> Export:
    """Return the flags as a preset; the router sets address, port and alias itself."""
    parts = needs_parts(source, "a preset is a list of flags")
    pairs: list[tuple[str, str]] = []
    seen: set[str] = set()
    kept: list[str] = []
    switches = []
    for flag in parts.flags:
        if flag[0] in ("--host", "--port", "--alias"):
            continue
        if len(flag) > 2 or "=" in flag[0]:
            raise RecipeError(
                f"{comment(' '.join(flag))} has more than one value, and a preset gives one"
            )
        key = flag[0].lstrip("-")
        if key in seen:
            raise RecipeError(f"{flag[0]} is given twice, and a preset can hold it once")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", key) or key == "version":
            raise RecipeError(f"{comment(flag[0])} is no flag that a preset can name")
        seen.add(key)
        if len(flag) == 1:
            switches.append(flag[0])
        pairs.append((key, preset(flag[0], flag[1]) if len(flag) == 2 else "true"))
        kept += flag
    program = source.attempt.argv[: parts.flags_at]
    section = _section(source.served_name or source.name)
    # The router adds these to the flags of a preset (update_args in server-models.cpp).
    added = ("--alias", section, "--host", "127.0.0.1", "--port", str(DEFAULT_PORT))
    return Export(
        argv=(*program, *kept, *added),
        port_argument=len(program) + len(kept) + len(added) - 1,
        env=source.env,
        memory_limit_bytes=None,
        switches=tuple(switches),
        differs=(
            f"the port: {DEFAULT_PORT} of the router, which forwards to a port of its choice",
            "llama-server is the router's own program; the measured one was "
            f"{comment(' '.join(program))}",
            *(
                (f"the name: {section}, measured as {comment(parts.served_name)}",)
                * (section != parts.served_name)
            ),
            *(("the environment: set it where the router is started",) * bool(source.env)),
            *limit_difference(source),
        ),
        values={"pairs": pairs, "section": section},
    )  # fmt: skip


def _section(name: str) -> str:
    """Return the name of a preset's section; the router answers to it."""
    safe = re.sub(r"[^\w./:@+-]+", "-", name).strip("-") or "model"
    return safe if safe not in ("default", "*") else f"{safe}-model"


def vllm_yaml(source: Source) -> Export:
    """Return the flags as a file for `vllm serve --config`."""
    parts = needs_parts(source, "a config is a list of flags")
    flags = _with_port(source, parts)
    keys: list[tuple[str, list[str] | None]] = []
    if not any(flag[0] == "--model" for flag in flags):
        keys.append(("model", [parts.model]))
    for flag in flags:
        name, equals, value = flag[0].partition("=")
        if not name.startswith("--"):
            raise RecipeError(f"{comment(name)} is a short flag, which a config cannot name")
        values = [value] if equals else list(flag[1:])
        keys.append((name[2:], values or None))
    names = [name for name, _ in keys]
    if twice := sorted({each for each in names if names.count(each) > 1}):
        raise RecipeError(f"--{twice[0]} is given twice, and a config can hold it once")
    words = [word for name, values in keys for word in (f"--{name}", *(values or ()))]
    before = source.attempt.argv[: parts.start]
    return Export(
        argv=("vllm", "serve", *words),
        port_argument=words.index("--port") + 3 if "--port" in words else None,
        env=source.env,
        memory_limit_bytes=None,
        switches=tuple(f"--{name}" for name, values in keys if values is None),
        differs=(
            *port_difference(source),
            "vllm serve reads it; the measured command was "
            f"{comment(' '.join(source.attempt.argv[parts.start : parts.flags_at]))}",
            *((f"without the wrapper {comment(' '.join(before))}",) * bool(before)),
            *(("the environment: set it where vllm is started",) * bool(source.env)),
            *limit_difference(source),
        ),
        values={"keys": keys},
    )


def _with_port(source: Source, parts: CommandParts) -> list[tuple[str, ...]]:
    """Return the flags with the default port."""
    known = source.attempt.port_argument is not None
    return [
        (flag[0], str(DEFAULT_PORT)) if known and flag[0] == "--port" else flag
        for flag in parts.flags
    ]


# --- containers -------------------------------------------------------------------------------


def contained(source: Source) -> Export:
    """Return the command in a container: the measured one, or the engine's public image."""
    needs_port(source, "a container publishes it")
    for each in (*source.attempt.argv, *(str(value) for value in source.env.values())):
        utf8(each)
    if container_words(source.attempt.argv):
        return _measured_container(source)
    parts, deployable = source.parts, source.deployable
    allowance_s = _allowance_s(source)
    common: dict[str, Any] = {
        "service": _label(source.name),
        "gpus": _gpus(source),
        "start_s": allowance_s,
        "volumes": [(each, each) for each in sorted({model_mount(path) for path in source.paths})],
        "options": {},
        "measured_image": False,
    }
    if parts is None or deployable is None:
        plain = direct(source)
        return Export(
            argv=plain.argv, port_argument=plain.port_argument, env=plain.env,
            memory_limit_bytes=None,
            differs=(
                *plain.differs,
                "a container: it was measured without one, so name an image that holds "
                f"{comment(source.attempt.argv[0])}",
                "the container shares the network of the host, since how this engine is told to "
                "listen is not known here",
                *limit_difference(source),
            ),
            values={**common, "image": None, "entrypoint": [plain.argv[0]],
                    "command_at": 1, "host_network": True, "probe": True},
        )  # fmt: skip
    image = deployable.container(parts, source.attempt.argv, source.facts)
    words: list[str] = list(image.entrypoint)
    port = None
    for flag in parts.flags:
        if flag[0] == "--host" and len(flag) == 2:
            words += ["--host", "0.0.0.0"]  # noqa: S104 - in the container; published on loopback
        elif flag[0] == "--port" and len(flag) == 2:
            port = len(words) + 1
            words += ["--port", str(DEFAULT_PORT)]
        else:
            words += flag
    before = source.attempt.argv[: parts.start]
    return Export(
        argv=tuple(words), port_argument=port, env=source.env, memory_limit_bytes=None,
        differs=(
            *port_difference(source),
            f"a container: the engine of the image {image.image or '(name one)'} instead of "
            f"{comment(' '.join(source.attempt.argv[parts.start : parts.flags_at]))}",
            *((f"without the wrapper {comment(' '.join(before))}",) * bool(before)),
            "--host 0.0.0.0 inside the container, which is published on 127.0.0.1 only; measured "
            "with --host 127.0.0.1",
            *limit_difference(source),
        ),
        values={**common, "image": image.image, "entrypoint": list(image.entrypoint),
                "command_at": len(image.entrypoint), "host_network": False, "probe": True},
    )  # fmt: skip


_SIMPLE = {
    "--ipc": "ipc", "--shm-size": "shm_size", "--user": "user", "-u": "user",
    "--runtime": "runtime", "--workdir": "working_dir", "-w": "working_dir",
}  # fmt: skip
_LISTS = {
    "-v": "volumes", "--volume": "volumes", "--device": "devices", "--cap-add": "cap_add",
    "--security-opt": "security_opt", "-e": "environment", "--env": "environment",
}  # fmt: skip
_OURS = ("-p", "--publish", "--name", "--gpus", "--network", "--net", "--entrypoint")
_SWITCHES = ("--rm", "-d", "-i", "-t", "-it", "-ti", "--init", "--detach", "--interactive")


def _measured_container(source: Source) -> Export:
    """Return the container that was measured, its options translated."""
    argv = source.attempt.argv
    parts = needs_parts(source, "so where the image stands is not known")
    image, run = argv[parts.start - 1], argv.index("run")
    options: dict[str, Any] = {}
    untranslated: list[str] = []
    given: dict[str, str] = {}
    words = list(argv[run + 1 : parts.start - 1])
    while words:
        name, equals, value = words.pop(0).partition("=")
        if name in _SWITCHES:
            continue
        if not equals and words and not words[0].startswith("-"):
            value = words.pop(0)
        if name in _LISTS:
            options.setdefault(_LISTS[name], []).append(value)
        elif name in _SIMPLE:
            options[_SIMPLE[name]] = value
        elif name in _OURS:
            given[name] = value
        else:
            untranslated.append(f"{name} {value}".strip())
    host_network = (given.get("--network") or given.get("--net")) == "host"
    entrypoint = [given["--entrypoint"]] if "--entrypoint" in given else []
    command = with_port(source)[parts.start :]
    env = {**dict(source.env)}
    for each in options.pop("environment", []):
        name, equals, value = each.partition("=")
        if equals:
            env[name] = value
    return Export(
        argv=(*entrypoint, *command),
        port_argument=(source.attempt.port_argument or 0) - parts.start + len(entrypoint),
        env=Pairs(env),
        memory_limit_bytes=None,
        differs=(
            *port_difference(source),
            f"compose starts the container instead of {comment(argv[0])}",
            *(f"not translated: {comment(each)}" for each in untranslated),
            *limit_difference(source),
        ),
        values={
            "service": _label(source.name), "gpus": "all" if "--gpus" in given else None,
            "start_s": _allowance_s(source), "volumes": [], "options": options, "image": image,
            "measured_image": True, "entrypoint": entrypoint, "command_at": len(entrypoint),
            "host_network": host_network, "probe": True,
        },
    )  # fmt: skip


def _gpus(source: Source) -> str | int | None:
    return "all" if source.has_gpu else None


def _allowance_s(source: Source) -> int:
    """Return how long a start may take: three times what it took, a minute at least."""
    return max(60, math.ceil(3 * (source.attempt.timings.boot_s or 0.0)))


def _label(name: str) -> str:
    """Return a name that Docker and Kubernetes take (RFC 1123)."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60].strip("-") or "engine"


_HELM_REFUSES = re.compile("[\\x7f-\\x9f\\ufeff\\ufffe\\uffff]")
"""What Go's JSON writes as it is, and YAML does not read as such (5.1 and 5.4 of YAML 1.1)."""


def helm(source: Source) -> Export:
    """Return the command in a pod."""
    parts = needs_parts(source, "so how it is told to listen for a cluster is not known")
    for each in (*source.attempt.argv, *(str(value) for value in source.env.values())):
        if _HELM_REFUSES.search(each):
            raise RecipeError(
                f"{comment(each)} has a control character that helm cannot pass on; use format "
                "shell or systemd"
            )
    if container_words(source.attempt.argv):
        measured = _measured_container(source)
        words = list(measured.argv)
        if "--host" in words:
            words[words.index("--host") + 1] = "0.0.0.0"  # noqa: S104 - in its pod
        values = dict(measured.values)
        found: list[str] = values["options"].get("volumes", [])
        values["volumes"] = [
            (each.split(":")[0], each.split(":")[1]) for each in found if each.count(":") > 0
        ]
        dropped = [name for name in values["options"] if name != "volumes"]
        differs = (
            *port_difference(source),
            "a pod of Kubernetes instead of the container that was measured",
            "--host 0.0.0.0 inside the pod; measured with --host 127.0.0.1",
            *(f"not translated: {name}" for name in dropped),
            *limit_difference(source),
        )
        export = Export(
            argv=tuple(words), port_argument=measured.port_argument, env=measured.env,
            memory_limit_bytes=None, differs=differs, values=values,
        )  # fmt: skip
    else:
        export = contained(source)
    name = chart_name(source)
    image = str(export.values["image"] or "")
    cards = next((flag[1] for flag in parts.flags if flag[0] == "--tensor-parallel-size"), None)
    count = int(cards) if cards is not None and cards.isdigit() else 1
    repository, tag = _image(image)
    return Export(
        argv=export.argv, port_argument=export.port_argument, env=export.env,
        memory_limit_bytes=None,
        differs=(
            *(each.replace("published on 127.0.0.1 only", "a service of the cluster")
              for each in export.differs),
            "the model's folder of the node is mounted, so the pod must run on that node",
        ),
        values={
            **export.values,
            "chart": name,
            "repository": repository or "SET-AN-IMAGE",
            "tag": tag or "latest",
            "cards": count if export.values["gpus"] else 0,
            "needs": _needs(source),
            "title": comment(source.name)[:30],
        },
    )  # fmt: skip


def _image(image: str) -> tuple[str, str]:
    """Return the name of an image, and its tag or digest; a name may hold the port of a host."""
    name, _, digest = image.partition("@")
    folder, slash, last = name.rpartition("/")
    last, _, tag = last.partition(":")
    return f"{folder}{slash}{last}", digest or tag


def _needs(source: Source) -> dict[str, str]:
    """Return the memory of a pod as Olares asks for it, from what was seen or the model's size."""
    telemetry = source.measured.telemetry
    size = source.attempt.model.get("size_bytes")
    known = size if isinstance(size, int) else 2**30
    host = (telemetry and telemetry.engine_rss_peak_bytes) or source.measured.peak_bytes or known
    card = (telemetry and telemetry.gpu_engine_bytes) or known

    def gib(number: int) -> str:
        return f"{max(1, math.ceil(number / 2**30))}Gi"

    return {"memory": gib(host), "gpu_memory": gib(card), "disk": gib(known)}


def chart_name(source: Source) -> str:
    """Return a chart's name, which Olares wants in at most 30 lower-case letters and digits."""
    letters = re.sub(r"[^a-z0-9]", "", source.attempt.study.lower())
    number = f"{source.attempt.number:04d}"
    begins = letters if letters[:1].isalpha() else f"s{letters}"
    return begins[: 30 - len(number)] + number


# --- catalogues -------------------------------------------------------------------------------


def vllm_recipe(source: Source) -> Export:
    """Return the flags in the shape of the public vLLM recipes."""
    parts = needs_parts(source, "a recipe is a list of flags")
    for each in source.attempt.argv:
        utf8(each)
    own = ("--model", "--host", "--port", "--tensor-parallel-size", "--pipeline-parallel-size")
    args = [word for flag in parts.flags if flag[0].partition("=")[0] not in own for word in flag]
    sizes = {flag[0]: flag[1] for flag in parts.flags if len(flag) == 2}
    hub = hub_model(parts.model)
    peak = source.measured.telemetry and source.measured.telemetry.gpu_engine_bytes
    total = peak or source.measured.peak_bytes or source.attempt.model.get("size_bytes")
    paths = ("model_id is a path of the machine of the measurement",) * (hub is None)
    revision = (
        ()
        if hub is None
        else (f"the revision, which these recipes do not pin; measured was {hub[1]}",)
    )
    return Export(
        argv=tuple(args), port_argument=None, env=source.env, memory_limit_bytes=None,
        differs=(
            "address and port, which whoever starts it chooses",
            *paths, *revision,
            "parallelism, which the strategy sets: measured with tensor parallel size "
            f"{sizes.get('--tensor-parallel-size', '1')}",
            *limit_difference(source),
        ),
        values={
            "args": args,
            "model_id": parts.model if hub is None else hub[0],
            "precision": sizes.get("--quantization") or sizes.get("--dtype") or "auto",
            "vram_gb": math.ceil(total / 2**30) if isinstance(total, int) else None,
            "tensor_parallel": sizes.get("--tensor-parallel-size", "1"),
            "date": _date(source.attempt.started_at),
        },
    )  # fmt: skip


def _date(moment: str) -> str:
    found = re.match(r"\d{4}-\d{2}-\d{2}", moment)
    return '""' if found is None else found[0]


_SPARKRUN_KEYS = ("model", "port", "host")


def sparkrun(source: Source) -> Export:
    """Return the command as sparkrun starts it on a DGX Spark, in a container."""
    parts = needs_parts(source, "sparkrun starts an engine by its flags")
    needs_port(source, "sparkrun chooses the port")
    export = contained(source)
    for word in export.argv:
        if "{{" in word or re.search(r"\{(?:" + "|".join(_SPARKRUN_KEYS) + r")\}", word):
            raise RecipeError(
                f"{comment(word)} has braces that sparkrun would replace; use format shell"
            )
    for name, value in export.env.items():
        if re.search(r"\{(?:config|launch)\.", str(value)):
            raise RecipeError(f"{name} has braces that sparkrun would replace; use format shell")
    deployable = source.deployable
    assert deployable is not None
    return Export(
        argv=export.argv, port_argument=export.port_argument, env=export.env,
        memory_limit_bytes=None,
        differs=tuple(
            each.replace("published on 127.0.0.1 only", "reached through its host")
            for each in export.differs
        ),
        values={
            **export.values,
            "runtime": deployable.runtime,
            "model": parts.model,
        },
    )  # fmt: skip


def page(source: Source) -> Export:
    """Return what a page tells of: the measured command."""
    for each in source.attempt.argv:
        utf8(each)
    return direct(source)


FORMATS: dict[str, Format] = {
    "shell": Format(template="shell.sh.j2", suffix=".sh", executable=True, export=direct),
    "systemd": Format(template="systemd.service.j2", suffix=".service", export=systemd),
    "compose": Format(template="compose.yaml.j2", suffix=".compose.yaml", export=contained),
    "helm": Format(template="helm", suffix="", export=helm),
    "llama-swap": Format(
        template="llama-swap.yaml.j2", suffix=".llama-swap.yaml", export=llama_swap
    ),
    "llama-preset": Format(
        template="llama-preset.ini.j2", suffix=".ini", export=llama_preset,
        only="presets are read by llama-server",
    ),
    "vllm-yaml": Format(
        template="vllm-config.yaml.j2", suffix=".vllm.yaml", export=vllm_yaml,
        only="it is read by vllm serve --config",
    ),
    "vllm-recipe": Format(
        template="vllm-recipe.yaml.j2", suffix=".recipe.yaml", export=vllm_recipe,
        only="it is the shape of vLLM's own recipes",
    ),
    "sparkrun": Format(
        template="sparkrun.yaml.j2", suffix=".sparkrun.yaml", export=sparkrun,
        only="sparkrun has runtimes of its own",
    ),
    "page": Format(template="page.md.j2", suffix=".md", export=page),
}  # fmt: skip
"""The formats by the names that a user gives."""


def available(source: Source) -> tuple[str, ...]:
    """Return the formats that are made for the engine of this attempt."""
    forms = frozenset() if source.deployable is None else source.deployable.recipe_forms
    return tuple(name for name, each in FORMATS.items() if not each.only or name in forms)
