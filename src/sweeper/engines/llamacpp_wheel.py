"""Upstream's `llama-server`, as far as sweeper uses it, served by the `xllamacpp` wheel.

    python -m sweeper.engines.llamacpp_wheel -m model.gguf -c 4096 --port 8080

Flags have upstream's names, defaults and error messages, with three differences: nothing is read
from LLAMA_ARG_* variables, nothing is ever downloaded, and a number must be all number ("12x" is
refused). What it prints is llama.cpp's own log, on stderr.

Under a limit on the address space (`ulimit -v`, `LimitAS=`) its threads have stacks of 1 MiB: glibc
would reserve as much for each as the shell's `ulimit -s`, mostly 8 MiB, of which next to nothing is
touched, and the server starts threads while it serves.

Exit codes as upstream: 1 for a wrong flag, a model that does not load or a port that is taken, 0
after SIGTERM or SIGINT once it serves. Before that these signals end it as they end any process.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

SERVER = "sweeper.engines.llamacpp_wheel"
NO_WHEEL = (
    "error: the xllamacpp wheel is not installed in this interpreter; install sweeper[quickstart]"
)
LIMITED_STACK_BYTES = 2**20
"""Stack of a thread under a limit on the address space: what Windows gives a thread, and twice what
macOS gives, where the same server runs."""
INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
SPECULATION = (
    "none",
    "draft-simple",
    "draft-eagle3",
    "draft-mtp",
    "draft-dflash",
    "draft-dspark",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-cache",
)
LOAD_MODES = {
    "auto": "AUTO",
    "none": "NONE",
    "mmap": "MMAP",
    "mlock": "MLOCK",
    "mmap+mlock": "MMAP_MLOCK",
    "dio": "DIRECT_IO",
}


_PTHREAD_ATTR_BYTES = 256
"""More than a pthread_attr_t has anywhere: 56 on x86-64, 64 on AArch64."""


class UsageError(Exception):
    """A command line that llama-server would refuse, in its words."""


@dataclass(frozen=True, slots=True)
class Member:
    """A value of one of the wheel's enumerations, by name: the wheel is not imported to parse."""

    enumeration: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag: its names, how its value reads, and the parameter that takes it.

    `target` is a dotted path in xllamacpp.CommonParams. A flag without `read` has no value on the
    command line and sets `constant`. `read` raises ValueError saying what is wrong. A flag that
    `gathers` adds to its earlier values, all others replace them.
    """

    names: tuple[str, ...]
    target: str
    help: str
    placeholder: str = ""
    read: Callable[[str], object] | None = None
    constant: object = None
    gathers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value for one parameter, and the flag that asked for it."""

    value: object
    flag: str


def whole(word: str, *, low: int = -INT32_MAX - 1, high: int = INT32_MAX) -> int:
    """Return the whole number that a word is, if it lies within the bounds."""
    try:
        number = int(word)
    except ValueError:
        raise ValueError(f"not a whole number: '{word}'") from None
    if not low <= number <= high:
        raise ValueError(f"must be between {low} and {high} inclusive, got {number}")
    return number


def fraction(word: str) -> float:
    """Return the number that a word is."""
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"not a number: '{word}'") from None


def threads(word: str) -> int:
    """Return a number of threads; zero and below mean one for every core."""
    number = whole(word)
    return number if number > 0 else os.cpu_count() or 1


def slots(word: str) -> int:
    """Return a number of slots; below zero means that the server chooses."""
    number = whole(word)
    if number == 0:
        raise ValueError("error: invalid value for n_parallel")
    return number


def layers(word: str) -> int:
    """Return a number of layers as the wheel counts them: -1 is auto, -2 is all."""
    return {"auto": -1, "all": -2}[word] if word in ("auto", "all") else whole(word)


def cache_type(word: str) -> Member:
    """Return the data type of a KV cache."""
    if word not in CACHE_TYPES:
        raise ValueError(f"Unsupported cache type: {word}")
    return Member("ggml_type", f"GGML_TYPE_{word.upper()}")


def truth(word: str, *, flag: str) -> bool:
    """Return what on or off, in any of upstream's spellings, means."""
    if word in ("on", "enabled", "true", "1"):
        return True
    if word in ("off", "disabled", "false", "0"):
        return False
    raise ValueError(f"error: unknown value for {flag}: '{word}'")


def flash_attention(word: str) -> Member:
    """Return the use of flash attention: on, off or auto."""
    if word in ("auto", "-1"):
        name = "AUTO"
    else:
        name = "ENABLED" if truth(word, flag="--flash-attn") else "DISABLED"
    return Member("llama_flash_attn_type", f"LLAMA_FLASH_ATTN_TYPE_{name}")


def load_mode(word: str) -> Member:
    """Return how the weights are read."""
    if word not in LOAD_MODES:
        raise ValueError("invalid value")
    return Member("llama_load_mode", f"LLAMA_LOAD_MODE_{LOAD_MODES[word]}")


def speculation(word: str) -> list[Member]:
    """Return the kinds of speculation in a comma-separated list; none in it means none at all."""
    kinds = word.split(",")
    for kind in kinds:
        if kind not in SPECULATION:
            raise ValueError(f"unknown speculative type: {kind}")
    if "none" in kinds:
        kinds = ["none"]
    return [
        Member(
            "common_speculative_type",
            f"COMMON_SPECULATIVE_TYPE_{kind.upper().replace('-', '_')}",
        )
        for kind in kinds
    ]


def names(word: str) -> list[str]:
    """Return the parts of a comma-separated list."""
    return [part.strip() for part in word.split(",") if part.strip()]


def hosts(word: str) -> list[str]:
    """Return the addresses to listen on."""
    addresses = names(word)
    if not addresses:
        raise ValueError("--host requires at least one address")
    return addresses


def template_arguments(word: str) -> dict[str, str]:
    """Return the arguments of the chat template, each one as JSON."""
    try:
        arguments = json.loads(word)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a JSON object: {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"not a JSON object: '{word}'")
    return {name: json.dumps(value) for name, value in arguments.items()}


def taking(
    flags: str, placeholder: str, read: Callable[[str], object], target: str, help: str
) -> Flag:
    """Return a flag that takes a value."""
    return Flag(
        names=tuple(flags.split()), placeholder=placeholder, read=read, target=target, help=help
    )


def setting(flags: str, constant: object, target: str, help: str) -> Flag:
    """Return a flag that takes no value."""
    return Flag(names=tuple(flags.split()), constant=constant, target=target, help=help)


def switch(
    on: str, off: str, target: str, help: str, *, inverted: bool = False
) -> tuple[Flag, ...]:
    """Return a flag and its opposite."""
    return (
        setting(on, not inverted, target, help),
        setting(off, inverted, target, f"the opposite of {on.rsplit(maxsplit=1)[-1]}"),
    )


def ngram_map(kind: str) -> tuple[Flag, ...]:
    """Return the flags of one of the n-gram speculations that look up a map."""
    place = f"speculative.{kind.replace('-', '_')}"
    size = functools.partial(whole, low=1, high=1024)
    hits = functools.partial(whole, low=1)
    return (
        taking(
            f"--spec-{kind}-size-n", "N", size, f"{place}.size_n", "length of the lookup n-gram"
        ),
        taking(f"--spec-{kind}-size-m", "N", size, f"{place}.size_m", "length of the draft"),
        taking(f"--spec-{kind}-min-hits", "N", hits, f"{place}.min_hits", "hits before it drafts"),
    )


def mmap(name: str) -> Member:
    """Return the load mode of that name in the wheel's enumeration."""
    return Member("llama_load_mode", f"LLAMA_LOAD_MODE_{name}")


MOD_SIZE = functools.partial(whole, low=0, high=1024)
MOD_MATCH = functools.partial(whole, low=1, high=1024)
DRAFT = "speculative.draft"

FLAGS: tuple[Flag, ...] = (
    taking("-m --model", "FNAME", str, "model.path", "model path to load"),
    taking(
        "-a --alias", "STRING", names, "model_alias", "model names for the API, comma-separated"
    ),
    taking("-c --ctx-size", "N", whole, "n_ctx", "size of the context (0 = from the model)"),
    taking("-b --batch-size", "N", whole, "n_batch", "logical maximum batch size"),
    taking("-ub --ubatch-size", "N", whole, "n_ubatch", "physical maximum batch size"),
    taking("-ctk --cache-type-k", "TYPE", cache_type, "cache_type_k", "KV cache data type for K"),
    taking("-ctv --cache-type-v", "TYPE", cache_type, "cache_type_v", "KV cache data type for V"),
    taking(
        "-fa --flash-attn", "on|off|auto", flash_attention, "flash_attn_type", "flash attention"
    ),
    taking("-np --parallel", "N", slots, "n_parallel", "number of server slots (-1 = auto)"),
    taking(
        "-ngl --gpu-layers --n-gpu-layers",
        "N|auto|all",
        layers,
        "n_gpu_layers",
        "number of layers to keep in GPU memory",
    ),
    taking("-t --threads", "N", threads, "cpuparams.n_threads", "CPU threads to generate with"),
    taking(
        "-tb --threads-batch",
        "N",
        threads,
        "cpuparams_batch.n_threads",
        "CPU threads to process prompts with (default: as --threads)",
    ),
    taking("--threads-http", "N", whole, "n_threads_http", "threads that process HTTP requests"),
    taking("--host", "HOST", hosts, "hostnames", "addresses to listen on, comma-separated"),
    taking(
        "--port", "PORT", functools.partial(whole, low=0, high=65535), "port", "port to listen on"
    ),
    setting("--metrics", True, "endpoint_metrics", "serve /metrics"),
    setting("--props", True, "endpoint_props", "allow POST /props"),
    *switch("--slots", "--no-slots", "endpoint_slots", "serve /slots"),
    taking(
        "-lm --load-mode",
        "|".join(LOAD_MODES),
        load_mode,
        "load_mode",
        "how the weights are read",
    ),
    # Newer versions of upstream know --load-mode only; adapters of older ones pass these.
    setting("--mmap", mmap("MMAP"), "load_mode", "as --load-mode mmap"),
    setting("--no-mmap", mmap("NONE"), "load_mode", "as --load-mode none"),
    *switch("--warmup", "--no-warmup", "warmup", "an empty run before it serves"),
    *switch("--repack", "-nr --no-repack", "no_extra_bufts", "repack weights", inverted=True),
    taking(
        "-cram --cache-ram", "N", whole, "cache_ram_mib", "prompt cache in MiB (-1 = any, 0 = none)"
    ),
    taking(
        "-fit --fit",
        "on|off",
        functools.partial(truth, flag="--fit"),
        "fit_params",
        "fit what is not set to the memory of the devices",
    ),
    taking("-lv --verbosity --log-verbosity", "N", whole, "verbosity", "0 (little) to 5 (debug)"),
    taking(
        "-s --seed",
        "SEED",
        functools.partial(whole, low=-1, high=UINT32_MAX),
        "sampling.seed",
        "seed of sampling (-1 = random)",
    ),
    setting("--swa-full", True, "swa_full", "keep a full-size cache for sliding windows"),
    *switch(
        "-kvu --kv-unified", "-no-kvu --no-kv-unified", "kv_unified", "one KV buffer for all slots"
    ),
    taking("--chat-template", "TEMPLATE", str, "chat_template", "name or text of a chat template"),
    *switch("--jinja", "--no-jinja", "use_jinja", "the chat template in full"),
    taking(
        "--chat-template-kwargs",
        "JSON",
        template_arguments,
        "default_template_kwargs",
        "arguments of the chat template",
    ),
    *switch("--ui --webui", "--no-ui --no-webui", "ui", "the web page"),
    setting("--offline", True, "offline", "never reach for the network; always so here"),
    Flag(
        names=("--spec-type",),
        placeholder=",".join(SPECULATION),
        read=speculation,
        target="speculative.types",
        help="kinds of speculation, comma-separated",
        gathers=True,
    ),
    taking(
        "--spec-draft-model -md --model-draft",
        "FNAME",
        str,
        f"{DRAFT}.mparams.path",
        "draft model for speculation",
    ),
    taking(
        "--spec-draft-n-max",
        "N",
        functools.partial(whole, low=0),
        f"{DRAFT}.n_max",
        "most tokens to draft",
    ),
    taking("--spec-draft-n-min", "N", whole, f"{DRAFT}.n_min", "fewest tokens to draft"),
    taking(
        "--spec-draft-p-min --draft-p-min",
        "P",
        fraction,
        f"{DRAFT}.p_min",
        "least probability of a drafted token",
    ),
    taking(
        "--spec-draft-type-k -ctkd --cache-type-k-draft",
        "TYPE",
        cache_type,
        f"{DRAFT}.cache_type_k",
        "KV cache data type for K of the draft model",
    ),
    taking(
        "--spec-draft-type-v -ctvd --cache-type-v-draft",
        "TYPE",
        cache_type,
        f"{DRAFT}.cache_type_v",
        "KV cache data type for V of the draft model",
    ),
    taking(
        "--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft",
        "N|auto|all",
        layers,
        f"{DRAFT}.n_gpu_layers",
        "number of the draft model's layers to keep in GPU memory",
    ),
    *ngram_map("ngram-simple"),
    *ngram_map("ngram-map-k"),
    *ngram_map("ngram-map-k4v"),
    taking(
        "--spec-ngram-mod-n-match",
        "N",
        MOD_MATCH,
        "speculative.ngram_mod.n_match",
        "length of the lookup",
    ),
    taking(
        "--spec-ngram-mod-n-min", "N", MOD_SIZE, "speculative.ngram_mod.n_min", "fewest to draft"
    ),
    taking("--spec-ngram-mod-n-max", "N", MOD_SIZE, "speculative.ngram_mod.n_max", "most to draft"),
)

DEFAULTS: Mapping[str, object] = {
    # Where llama-server's own defaults differ from those of a bare CommonParams.
    "n_parallel": -1,
    "port": 8080,
    "hostnames": ["127.0.0.1"],
    "default_template_kwargs": {"preserve_reasoning": "true"},
    # An engine under measurement has no business on the network.
    "offline": True,
}
HELP_FLAGS = ("-h", "--help", "--usage")
VERSION_FLAG = "--version"


def parse(argv: Sequence[str]) -> dict[str, Setting] | str:
    """Return the parameters that a command line sets, or the --help or --version that it asks for.

    Raises UsageError with the message that llama-server prints.
    """
    known = {name: flag for flag in FLAGS for name in flag.names}
    asked: dict[str, Setting] = {}
    wants_help = False
    words = iter(argv)
    for word in words:
        name = word.replace("_", "-") if word.startswith("--") else word
        if name == VERSION_FLAG:
            return VERSION_FLAG
        if name in HELP_FLAGS:
            wants_help = True
            continue
        if name not in known:
            raise UsageError(f"error: invalid argument: {name}")
        flag = known[name]
        if flag.read is None:
            asked[flag.target] = Setting(value=flag.constant, flag=name)
            continue
        argument = next(words, None)
        try:
            if argument is None:
                raise ValueError("expected value for argument")
            value = flag.read(argument)
        except ValueError as error:
            raise UsageError(f'error while handling argument "{name}": {error}') from None
        if flag.gathers and flag.target in asked:
            earlier = asked[flag.target].value
            assert isinstance(earlier, list)
            assert isinstance(value, list)
            value = earlier + value
        asked[flag.target] = Setting(value=value, flag=name)
    if wants_help:
        return "--help"
    if "model.path" not in asked:
        # Without a model llama-server is a router of many, which the wheel cannot be.
        raise UsageError("error: --model is required")
    return asked


def usage() -> str:
    """Return what --help prints."""
    lines = [f"usage: python -m {SERVER} [options]", ""]
    for flag in FLAGS:
        lines.append(", ".join(flag.names) + (f" {flag.placeholder}" if flag.placeholder else ""))
        lines.append(f"        {flag.help}")
    lines += [", ".join(HELP_FLAGS), "        print this and exit"]
    lines += [VERSION_FLAG, "        print the version and exit"]
    return "\n".join(lines)


def parameters(wheel: Any, asked: Mapping[str, Setting]) -> Any:
    """Return the wheel's CommonParams with llama-server's defaults and what was asked for.

    Raises UsageError for what this version of the wheel does not have.
    """
    params = wheel.CommonParams()
    for target, default in DEFAULTS.items():
        _assign(params, target, default)
    for target, each in asked.items():
        try:
            _assign(params, target, _resolved(wheel, _merged(target, each.value)))
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise UsageError(
                f'error while handling argument "{each.flag}": '
                f"xllamacpp {wheel.__version__} cannot do this: {error}"
            ) from None
    if "n_ctx" in asked and asked["n_ctx"].value == 0:
        # A context asked for in full must not be reduced to fit the devices' memory: upstream says
        # so with the largest unsigned number, which is -1 in the wheel's signed field.
        params.fit_params_min_ctx = -1
    return params


def _merged(target: str, value: object) -> object:
    default = DEFAULTS.get(target)
    if isinstance(default, dict) and isinstance(value, dict):
        return {**default, **value}
    if target == "sampling.seed":
        assert isinstance(value, int)
        return value % (UINT32_MAX + 1)
    if target == "model_alias":
        assert isinstance(value, list)
        return set(value)
    return value


def _resolved(wheel: Any, value: object) -> object:
    """Return the value with every name of the wheel's enumerations replaced by its member."""
    if isinstance(value, Member):
        return getattr(getattr(wheel, value.enumeration), value.name)
    if isinstance(value, list):
        return [_resolved(wheel, each) for each in value]
    return value


def _assign(params: Any, target: str, value: object) -> None:
    *path, name = target.split(".")
    setattr(functools.reduce(getattr, path, params), name, value)


def address_space() -> str | None:
    """Return a line with the largest address space so far and its limit; None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmPeak:"):
            peak = int(line.split()[1]) * 1024
            return (
                f"sweeper: address space in use at the failure: {peak} bytes, limit {limit} bytes"
            )
    return None


def limit_stacks() -> str | None:
    """Make the stacks of threads small under a limit on the address space.

    Returns a line with the limit and the size, None without a limit or on another C library than
    glibc. It has taken its default from RLIMIT_STACK before Python ran: to lower that here would
    come too late.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    library = ctypes.CDLL(None)
    try:
        change = library.pthread_setattr_default_np
    except AttributeError:
        return None
    attributes = ctypes.create_string_buffer(_PTHREAD_ATTR_BYTES)
    stack = ctypes.c_size_t(LIMITED_STACK_BYTES)
    done = (
        library.pthread_attr_init(attributes) == 0
        and library.pthread_attr_setstacksize(attributes, stack) == 0
        and change(attributes) == 0
    )
    if not done:
        return None
    return (
        f"sweeper: limit on the address space {limit} bytes, stack of a thread {stack.value} bytes"
    )


def wheel_or_exit() -> Any:
    """Return the xllamacpp module; without one, exits as an engine that cannot start."""
    # If llama.cpp aborts, it would let a debugger attach and print a backtrace: that takes seconds,
    # holds the memory until then, and asks the network for symbols.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        return importlib.import_module("xllamacpp")
    except ModuleNotFoundError as error:
        if error.name != "xllamacpp":
            raise
        print(NO_WHEEL, file=sys.stderr)
        sys.exit(1)


def version(wheel: Any) -> str:
    """Return the one line that says which wheel, and which llama.cpp in it, is here."""
    build = wheel.BUILD_INFO
    return (
        f"version: xllamacpp {wheel.__version__} (llama.cpp build {build['build_number']}, "
        f"commit {build['commit']}, {build['compiler']} for {build['build_target']})"
    )


def serve(wheel: Any, params: Any) -> NoReturn:
    """Serve until SIGTERM or SIGINT and exit with 0; exit with 1 if the server does not come up."""
    # The constructor is C++ and returns when the model is loaded; until then a handler written in
    # Python would not run, so both signals keep their deadly default.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        _server = wheel.Server(params)
    except Exception as error:
        # llama.cpp prints from a thread of its own, which nothing here can wait for.
        time.sleep(0.1)
        print(f"error: {error}", file=sys.stderr)
        used = address_space()
        if used is not None:
            print(used, file=sys.stderr)
        _leave(1)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()
    # The server is kept until here and not destroyed: its destructor waits for every open
    # request, whose answer will never come, until the client hangs up. The kernel takes back
    # memory and port either way.
    _leave(0)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(argv: Sequence[str]) -> NoReturn:
    """Run the command line; never returns."""
    try:
        asked = parse(argv)
        if asked == "--help":
            print(usage())
            sys.exit(0)
        # Before the wheel, which starts threads as soon as it is imported.
        limits = limit_stacks()
        wheel = wheel_or_exit()
        if isinstance(asked, str):
            print(version(wheel))
            sys.exit(0)
        params = parameters(wheel, asked)
    except UsageError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    # llama.cpp inside a wheel does not know its own build; who reads the log needs a version.
    print(version(wheel), file=sys.stderr, flush=True)
    if limits is not None:
        print(limits, file=sys.stderr, flush=True)
    serve(wheel, params)


if __name__ == "__main__":
    main(sys.argv[1:])
