"""What llama.cpp's server prints, read once from top to bottom into a few facts and troubles.

A log may be a gigabyte: it is streamed, and what is kept does not grow with it. Lines are matched
by meaning, at any prefix: none (builds before 2026), `M.SS.mmm.uuu L`, or a wrapper's (ollama,
llama-swap, compose), in colour or not.
"""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from sweeper.core.launch import Phase
from sweeper.core.pairs import Pairs, Scalar
from sweeper.engines.lines import plain

MIB = 2**20

_LONGEST_LINE = 2048
_OURS_NEEDLES = (
    "ggml", "llama", "gguf", "llm_load", "load_tensors", "print_info", "common_", "sched_reserve",
    "srv ", "slot ", "cmn ", "spec ", "main: ", "current device", "server_error", "speculative",
)  # fmt: skip
_OURS = re.compile(
    r"ggml[-_]|\bllama[_.-](?:\w|cpp)|\bgguf_|\bllm_load|\bload_tensors\b|\bprint_info\b|"
    r"\bcommon_(?:init|params|fit|specu|chat|download)|\bsched_reserve\b|\b(?:srv|cmn) +\w|"
    r"\bslot +(?:update|launch|print|release|get_av|load_model|init|prompt)|\bspec +common|"
    r"\bollama\b|\bxllamacpp\b|\bmain: (?:server|model|HTTP|loading|exiting)|"
    r"\bcurrent device: -?\d+, in function|\"type\": ?\"server_error\"|speculative batch"
)

MILESTONES: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    (Phase.READY, re.compile(
        r"(?:server is )?listening on (?:http|unix)|\bmodel loaded$|all slots are idle|"
        r"llama runner started|HTTP server is listening\b(?!, hostname)|server listening at unix")),
    (Phase.WARMUP, re.compile(r"warming up the model")),
    (Phase.DRAFT, re.compile(r"loading draft model|creating MTP draft context")),
    (Phase.COMPUTE, re.compile(
        r"reserving \.\.\.|reserve\w*: .*(?:compute|graph)|sched_reserve|graph_reserve|"
        r"compute buffer size")),
    (Phase.KV, re.compile(r"kv_cache|KV buffer size|KV self size|rs_cache|memory_recurrent")),
    (Phase.CONTEXT, re.compile(
        r"constructing llama_context|llama_context: n_ctx\b|new_context_with_model: n_ctx\b|"
        r"init_from_model:")),
    (Phase.WEIGHTS, re.compile(
        r"loading model tensors|load_tensors|load_model: loading model|llama_model_load|"
        r"llm_load_|print_info: file|\bmain: loading model|\bmodel buffer size")),
    (Phase.DEVICE, re.compile(
        r"ggml_\w+_init: found \d|ggml_vulkan: Found \d|ggml_metal_(?:device_)?init: (?:found|GPU)|"
        r"failed to initialize (?:CUDA|HIP|ROCm|Vulkan|Metal)")),
    (Phase.CONFIG, re.compile(
        r"common_params_print_info|(?:llama_server|srv +init): (?:initializing|build)|"
        r"build_info|build: \d|system_info|system info|\bbuild info\b")),
)  # fmt: skip
"""The first sign that a phase has begun, latest phase first: a line opens the latest it shows."""

_FAILS = (
    "fail", "error", "unable", "cannot", "couldn't", "insufficient", "exiting", "abort",
)  # fmt: skip
_NO_CHATTER = (
    "fail", "error", "exceed", "draft", "memory", "500", "limit", "context size", "n_ctx",
    "n_prompt_tokens", "too large", "couldn't", "abort", "assert",
)  # fmt: skip
_UP = re.compile(r"initializing(?: slots)?, n_slots|slot +\S+: .*new slot|new slot,? n_ctx")


_MILESTONE_NEEDLES = (
    "listening", "model loaded", "slots are idle", "runner started", "warming up", "draft",
    "reserv", "buffer size", "kv_cache", "kv self", "rs_cache", "recurrent", "llama_context",
    "context_with_model", "init_from_model", "load", "print_info: file", "found", "gpu",
    "failed to initialize", "common_params", "initializing", "build", "system_info", "system info",
)  # fmt: skip


def milestone(line: str) -> Phase | None:
    """Return the phase that this line opens, if it opens one."""
    low = line.lower()
    if not any(needle in low for needle in _MILESTONE_NEEDLES):
        return None
    return next((phase for phase, sign in MILESTONES if sign.search(line)), None)


class Trouble(enum.Enum):
    """Something that a line complains of; whether it mattered is judged with the whole log."""

    PORT = enum.auto()
    ARGUMENT = enum.auto()
    FLASH_FOR_V = enum.auto()
    COMBINATION = enum.auto()
    NO_MTP = enum.auto()
    DRAFT_REFUSED = enum.auto()
    NEEDS_TARGET = enum.auto()
    SPECULATION_OFF = enum.auto()
    NO_SPECULATION = enum.auto()
    ARCHITECTURE = enum.auto()
    TEMPLATE = enum.auto()
    NO_ENGINE = enum.auto()
    DRIVER = enum.auto()
    TOOLCHAIN = enum.auto()
    DISK = enum.auto()
    MODEL_FILE = enum.auto()
    DEVICE_FULL = enum.auto()
    DEVICE_INIT = enum.auto()
    DEVICE_ERROR = enum.auto()
    ABORT = enum.auto()
    EXITING = enum.auto()
    KILLED_FOR_RAM = enum.auto()
    CACHE_OVER_LIMIT = enum.auto()
    NO_THREAD = enum.auto()
    REFUSED_PROMPT = enum.auto()
    FAILED_REQUEST = enum.auto()
    CONTEXT_CAPPED = enum.auto()
    CONTEXT_REDUCED = enum.auto()
    GPU_IGNORED = enum.auto()
    FLASH_ELSEWHERE = enum.auto()
    MISSING_SUPPORT = enum.auto()
    STILL_LOADING = enum.auto()
    GAVE_UP = enum.auto()


@dataclass(frozen=True, slots=True)
class _Sign:
    """How a trouble reads. One of the needles, in lower case, is in every line that shows it."""

    trouble: Trouble
    needles: tuple[str, ...]
    pattern: re.Pattern[str]
    ours: bool = True
    """Whether only llama.cpp and its wrappers speak like this."""


def _sign(trouble: Trouble, needles: str, pattern: str, *, ours: bool = True) -> _Sign:
    return _Sign(trouble, tuple(needles.split("|")), re.compile(pattern, re.IGNORECASE), ours)


_SIGNS: tuple[_Sign, ...] = (
    _sign(Trouble.PORT, "bind|already in use|http listener|only one usage",
          r"couldn't (?:bind|start) HTTP (?:server socket|listener)|address already in use|"
          r"bind: only one usage of each socket|failed to bind\b.*port", ours=False),
    _sign(Trouble.ARGUMENT,
          "argument|cache type|speculative|unknown value for|--model is required|environment "
          "variable",
          r"invalid argument: -|error while handling (?:argument|environment variable)|"
          r"argument has been removed|unknown argument: ?-|unsupported cache type|"
          r"unknown speculative\b|unknown value for -|error: --model is required|"
          r"expected value for argument|invalid parameter for argument"),
    _sign(Trouble.FLASH_FOR_V, "v cache|v_cache|flash",
          r"quantized V cache (?:requires|was requested)|V cache quantization requires|"
          r"V cache.*requires flash|SPLIT_MODE_TENSOR requires flash_attn"),
    _sign(Trouble.COMBINATION,
          "divide|different k|requires flash|not implemented for|not support split|"
          "assert(|compiled without|split_mode|split mode|not allowed with|cannot be used with|"
          "needs >= 1|block size|n_seq",
          r"does not divide n_embd_head|does not support different K|requires flash_attn|"
          r"not implemented for architecture|does not support split buffers|"
          r"GGML_ASSERT\(.*(?:nextn|mtp|requires)|SPLIT_MODE_\w+ (?:needs|requires)|"
          r"split mode .* not supported|not allowed with|cannot be used (?:with|together)|"
          r"is not a multiple of the block size|n_seq_max must be"),
    _sign(Trouble.NO_MTP, "mtp|nextn|eagle|dflash|dspark",
          r"context type MTP requested|doesn't contain MTP layers|(?:model|MTP).*requires? the "
          r"NextN block|no MTP (?:layers|head)|does not (?:have|contain|support) (?:an? )?"
          r"(?:MTP|nextn|eagle3?)|draft model is not (?:eagle|dflash|dspark)|draft has no "
          r"confidence head"),
    _sign(Trouble.DRAFT_REFUSED, "target|speculati|draft",
          r"(?:draft|vocab)[^:]* must match (?:the )?target|draft model .* is not compatible|"
          r"target and draft vocabs are not compatible|not compatible with the target|"
          r"speculative decoding (?:is )?not supported by|incompatible with the speculative|"
          r"draft-?simple requires a draft|requires a draft (?:context|model)"),
    _sign(Trouble.NEEDS_TARGET, "ctx_other", r"requires ctx_other"),
    _sign(Trouble.SPECULATION_OFF, "speculati",
          r"failed to initiali[sz]e speculative|speculative decoding (?:is )?not supported by|"
          r"speculative decoding (?:will be |is )?disabled|disabling speculative"),
    _sign(Trouble.NO_SPECULATION, "implementations",
          r"no implementations specified for speculative"),
    _sign(Trouble.ARCHITECTURE,
          "architecture|pre-tokenizer|number of tensors|ggml type|not found in model|"
          "missing tensor|tensor '|gguf file|gguf version",
          r"(?:unknown|unsupported) model architecture|unknown pre-tokenizer|"
          r"wrong number of tensors|invalid ggml type|key not found in model|missing tensor|"
          r"tensor '[^']*' (?:not found|has wrong shape)|GGUF file is version \d+ but|"
          r"GGUFv1 is no longer supported|bad GGUF version", ours=False),
    _sign(Trouble.TEMPLATE, "template|jinja",
          r"chat template parsing error|chat template is not supported|jinja \w*(?:error|"
          r"exception)|(?:error|exception)\W.*jinja|failed to (?:parse|apply|render) \w* ?"
          r"(?:chat )?template|consider disabling jinja|\bin chat template\b|template\W.*is not "
        r"callable", ours=False),
    _sign(Trouble.NO_ENGINE, "not installed|command not found|shared librar|shared object",
          r"xllamacpp wheel is not installed|llama\S*: (?:command )?not found|"
          r"error while loading shared libraries"),
    _sign(Trouble.DRIVER, "driver|kernel image|ptx|libcuda.so",
          r"driver version is insufficient|no kernel image is available|unsupported toolchain|"
          r"forward compatibility was attempted|libcuda\.so\S*: cannot open|driver.*mismatch|"
          r"has no device code compatible", ours=False),
    _sign(Trouble.TOOLCHAIN, "ptx|nvrtc|shader|metal library|jit",
          r"PTX JIT compilation failed|nvrtc\b.*(?:fail|error)|failed to (?:compile|create) "
          r"(?:shader|the metal library)|error: .*metal library", ours=False),
    _sign(Trouble.DISK, "space left|disk quota", r"no space left on device|disk quota exceeded",
          ours=False),
    _sign(Trouble.MODEL_FILE,
          "gguf|no such file|magic|file bounds|corrupted|download|fetch|hugging|gated|split file",
          r"failed to open GGUF|gguf_init_from_file\w*: failed to (?:open|read)|no such file|"
          r"invalid magic|failed to read magic|not within the file bounds|model is corrupted|"
          r"failed to download|failed to fetch model|(?:401|403|404)\b.*hugging|hugging.*\b(?:401|"
          r"403|404)\b|gated repo|(?:missing|invalid) split file", ours=False),
    _sign(Trouble.DEVICE_FULL, "failed to initialize",
          r"failed to initialize (?:CUDA|HIP|ROCm|MUSA)\w*: .*out of memory"),
    _sign(Trouble.DEVICE_INIT, "failed to initialize|no cuda-capable|no devices found",
          r"failed to initialize (?:CUDA|HIP|ROCm|MUSA|Vulkan|Metal)|no CUDA-capable device|"
          r"ggml_vulkan: no devices found"),
    _sign(Trouble.DEVICE_ERROR,
          "error:|devicelost|illegal memory|command buffer|gpu hang|page fault",
          r"\b(?:CUDA|HIP|ROCm|MUSA|SYCL|CANN) error: (?!out of memory)|DeviceLost|"
          r"illegal memory access|unspecified launch failure|command buffer \d+ failed|"
          r"GPU hang|memory access fault by GPU", ours=False),
    _sign(Trouble.ABORT, "assert(|abort|segmentation|core dumped|terminate called|fatal error",
          r"GGML_ASSERT\(|ggml_abort|GGML_ABORT|segmentation fault|core dumped|terminate called "
          r"after|: fatal error$", ours=False),
    _sign(Trouble.EXITING, "exiting due|failed to init server|unable to load model",
          r"exiting due to|failed to init server|error: unable to load model|"
          r"panic: unable to load model"),
    _sign(Trouble.KILLED_FOR_RAM, "oom|killed process",
          r"out of memory: killed|oom-kill|killed process \d+|memory cgroup out of memory|"
          r"\boom_kill\b [1-9]|oom-?killed|oom_reaper", ours=False),
    _sign(Trouble.CACHE_OVER_LIMIT, "exceeds limit|size limit",
          r"cache state:.*exceeds limit|cache size limit reached"),
    _sign(Trouble.NO_THREAD, "temporarily unavailable|create thread",
          r"Resource temporarily unavailable|failed to create thread", ours=False),
    _sign(Trouble.REFUSED_PROMPT, "context size|context_size|context length|too long",
          r"exceeds? (?:the )?available context size|exceed_context_size|prompt is too long|"
          r"exceeds the (?:slot )?context"),
    _sign(Trouble.FAILED_REQUEST,
          "server_error|decode()|compute error|speculative batch|physical batch|"
          'context shift is disabled|"code":500|"code": 500| 500|failed to decode',
          r"\"type\": ?\"server_error\"|decode\(\) failed|\bcompute error\b|failed to process "
          r"speculative batch|too large to process|context shift is disabled|\"code\": ?500\b|"
          r"\b(?:POST|GET) /\S+ (?:\S+ )?500\b", ours=False),
    _sign(Trouble.CONTEXT_CAPPED, "training context",
          r"exceeds the training context of the model \(\d+\) - capping|n_ctx_slot.*capped"),
    _sign(Trouble.CONTEXT_REDUCED, "context size reduced", r"context size reduced from \d+ to \d+"),
    _sign(Trouble.GPU_IGNORED, "no usable gpu|without gpu|without support for gpu",
          r"no usable GPU found|compiled without (?:GPU support|support for GPU)"),
    _sign(Trouble.FLASH_ELSEWHERE, "flash attention|flash_attn",
          r"flash attention tensor is assigned to device CPU|flash.?att\w+ (?:tensor )?(?:is )?"
          r"assigned to device CPU|Flash Attention not supported, set to disabled|"
          r"Flash Attention was auto, set to disabled"),
    _sign(Trouble.MISSING_SUPPORT, "missing support", r"usually due to missing support"),
    _sign(Trouble.STILL_LOADING, '/health|loading model"',
          r"/health\b.*\b503\b|\"message\": ?\"Loading model\""),
    _sign(Trouble.GAVE_UP, "health check",
          r"health check (?:failed|timed out|timeout)\b.*?(?:after|in) ?[\d.]+"),
)  # fmt: skip

_NOT_FATAL = re.compile(
    r"will be disabled|will be ignored|ignoring|falling back|defaulting to|using CPU|"
    r"set to disabled|normal during memory fitting",
    re.IGNORECASE,
)
_MAY_BE_HARMLESS = frozenset(
    {Trouble.COMBINATION, Trouble.TEMPLATE, Trouble.NO_MTP, Trouble.DRAFT_REFUSED,
     Trouble.ARCHITECTURE, Trouble.FLASH_FOR_V}
)  # fmt: skip

_ALLOCATION: tuple[tuple[tuple[str, ...], re.Pattern[str]], ...] = (
    (("attempted to allocate",),
     re.compile(r"insufficient memory \(attempted to allocate +(?P<mb>[\d.,]+) MB\)")),
    (("mib on device",),
     re.compile(r"allocating (?P<mib>[\d.,]+) MiB on device (?P<device>\w+): \w+ failed"
                r"(?!: (?!.*(?i:out ?of ?memory|not enough)))")),
    (("allocation of size",),
     re.compile(r"[Dd]evice memory allocation of size (?P<bytes>\d+) failed")),
    (("buffer, size",),
     re.compile(r"failed to allocate buffer, size = +(?P<mib>[\d.,]+) MiB")),
    (("can't allocate",),
     re.compile(r"can't allocate (?P<bytes>\d+) [Bb]ytes of memory")),
    (("failed to allocate",),
     re.compile(r"failed to allocate (?:\S+ )?buffer of size (?P<mib>[\d.,]+) MiB")),
    (("failed to allocate",),
     re.compile(r"failed to allocate (?:(?P<buffer>\S+) )?buffer(?: type \S+)? of size "
                r"(?P<bytes>[\d,]+)")),
    (("failed to allocate",),
     re.compile(r"failed to allocate +(?P<mb>[\d.,]+) MB\b")),
    (("memory", "alloc", "mem_buffer", "buffer size"),
     re.compile(r"mmap failed: Cannot allocate memory|std::bad_alloc|bad allocation|"
                r"cannot allocate memory|[Oo]ut ?[Oo]f ?(?:Device|Host)? ?[Mm]emory|"
                r"unable to allocate \S+ buffer|failed to allocate buffer for|"
                r"failed to allocate (?:compute|graph|output)|failed to reserve initial output|"
                r"CUBLAS_STATUS_ALLOC_FAILED|ErrorOutOf\w*Memory|Insufficient Memory|"
                r"ctx->mem_buffer != NULL|exceeds device (?:memory allocation|buffer size) limit|"
                r"not enough (?:system |device |GPU )?memory|failed to create ggml context for "
                r"(?:kv|rs) cache")),
)  # fmt: skip
_RECOVERED_NEEDLES = ("retrying", "normal during", "free space", "reducing", "memory will", "retry")
_RECOVERED = re.compile(
    r"retrying without pipeline parallelism|retrying with smaller batch|normal during memory "
    r"fitting|find free space in the KV cache|retrying with (?:less|fewer|reduced)|"
    r"reducing (?:gpu layers|the number of layers)|new memory will be required|"
    r"offload to \w+.*(?:retry|layers)",
    re.IGNORECASE,
)
_HARMLESS_ALLOCATION = re.compile(r"pinned|mlock|MADV|madvise|hugepage", re.IGNORECASE)
_NO_ALLOCATION = re.compile(
    # The kernel's killer, and a GPU without room for a driver context, are other troubles.
    r"killed process|\boom\b|failed to initialize (?!the context)",
    re.IGNORECASE,
)
_POOL = re.compile(r"\bCUDA error|\bHIP error|\bROCm error|CUBLAS|cuMem|pool", re.IGNORECASE)

_KIND_OF_ALLOCATION: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    (Phase.KV, re.compile(r"(?:buffer|context) for (?:kv|rs) cache|kv_cache|KV cache")),
    (Phase.COMPUTE, re.compile(
        r"compute (?:pp |tg )?buffers?|graph_reserve|sched_reserve|gallocr|output buffer|"
        r"reserve graph|graph buffers")),
    (Phase.WEIGHTS, re.compile(r"error loading model|failed to load model|model buffer")),
)  # fmt: skip
_DRAFT_OWNS = re.compile(r"draft model|MTP context|draft context|MTP draft|speculative")
_NEAR = 8

_ADDRESS_SPACE = re.compile(
    r"sweeper: address space in use at the failure: (?P<used>\d+) bytes, limit (?P<limit>\d+) bytes"
)
_STACKS = re.compile(
    r"sweeper: limit on the address space (?P<limit>\d+) bytes, "
    r"stack of a thread (?P<stack>\d+) bytes"
)
_BUFFER = re.compile(
    r"(?:(?P<place>[A-Za-z]\w*) +)?(?P<kind>model|KV|RS|compute|output) +buffer size += +"
    r"(?P<mib>[\d.]+) MiB"
)
_SLOTS = re.compile(r"n_slots = (?P<slots>\d+)")
_SLOT_WINDOW = re.compile(r"n_ctx_slot = (?P<tokens>\d+)|new slot,? n_ctx(?:_slot)? = (?P<own>\d+)")
_CHATML = re.compile(r"fall(?:ing|s)? ?back (?:to|on) chatml")
_WHEEL_VERSION = re.compile(r"^version: (?P<version>xllamacpp \S+)")
_VERSION = re.compile(
    r"(?:\b(?:build_info|build)\s*[:=]\s*|\bversion\s*[:=]\s*(?=b?\d))(?P<version>b?\d[^,|]*)|"
    r"^(?:[\d.]+ )?(?:[IWED] )?version: (?P<own>\S.*)"
)
_BUILD = re.compile(r"\bb(\d{3,})\b|\bbuild[ :=]+(\d{3,})\b|\bversion: (\d{3,}) \(")
_FLASH = re.compile(
    r"Flash Attention (?:was )?(?:auto, )?(?:not supported, )?(?:set to )?"
    r"(?P<state>enabled|disabled)|flash_attn += (?P<flag>enabled|disabled|0|1)\b",
    re.IGNORECASE,
)
_KV_TYPES = re.compile(
    r"(?:size|KV self size) += +[\d.]+ MiB.*?\bK \((?P<k>[^)]+)\): +(?P<k_mib>[\d.]+) MiB, "
    r"V \((?P<v>[^)]+)\): +(?P<v_mib>[\d.]+) MiB"
)
_CELLS = re.compile(r"\( *(?P<cells>\d+) cells")
_OFFLOADED = re.compile(r"offloaded (?P<some>\d+)/(?P<all>\d+) layers")
_NUMBERS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("context_tokens", re.compile(r"\bn_ctx +(?:= +)(\d+)")),
    ("ubatch_tokens", re.compile(r"\bn_ubatch += +(\d+)")),
    ("trained_context_tokens", re.compile(r"\bn_ctx_train += +(\d+)")),
    ("layers", re.compile(r"\bn_layer += +(\d+)")),
)
_CAPPED = re.compile(r"slot context \((\d+)\) exceeds the training context of the model \((\d+)\)")
_REDUCED = re.compile(r"context size reduced from (\d+) to (\d+)")
_PROJECTED = re.compile(r"projected to use (\d+) MiB of \w+ memory vs\. (\d+) MiB of")
_FIT = re.compile(
    r"(fitting without it|successfully fit params|failed to fit params|no changes needed|"
    r"error while trying to fit params|will leave \d+ >= \d+ MiB)"
)
_DEVICE_LINE = re.compile(
    r"using device (?P<name>\w+) \((?P<title>.+?)\).* - (?P<free>\d+) MiB free|"
    r"- (?P<name2>[A-Za-z]+\d*) +: (?P<title2>.+) \((?P<total2>\d+) MiB, (?P<free2>\d+) MiB free\)"
)
_FOUND_GPU = re.compile(
    r"found [1-9]\d* (?:CUDA|ROCm|HIP|MUSA|Vulkan|SYCL)|Found [1-9]\d* Vulkan devices|"
    r"ggml_metal_(?:device_)?init: (?:found|GPU name)|Device \d+: "
)
_GPU_NAME = re.compile(r"\bDevice (?P<at>\d+): (?P<title>[^,]+),|GPU name: +(?P<metal>.+)")
_ACCEPTANCE = re.compile(
    r"draft acceptance(?: rate)? += +[\d.]+ +\( *(?P<accepted>\d+) accepted / +"
    r"(?P<drafted>\d+) generated\)(?:, mean len = +(?P<mean>[\d.]+))?"
)
_IMPLEMENTATION = re.compile(r"adding speculative implementation '([^']+)'")
_CLAMPED = re.compile(r"exceeds the trained block size (\d+)")
_BREAKDOWN = re.compile(
    r"\| +- (?P<place>[A-Za-z]\w*).*\| +\d+ = +-?\d+ \+ \( *(?P<own>\d+) = +\d+ \+ +\d+ \+ +\d+\)"
)
_PROMPT = re.compile(r"n_prompt_tokens\"? ?[=:] ?(\d+)|request \((\d+) tokens\)")
_WINDOW = re.compile(r"available context size \((\d+) tokens\)|\"n_ctx\": ?(\d+)")
_BATCH_TOO_SMALL = re.compile(r"input \((\d+) tokens\) is too large to process")
_COMMAND = re.compile(r"^(?:[$>+#] *)?\S*llama[-_]?\w*server(?:\.exe)? +-")
_NO_LAYERS = re.compile(r"(?:-ngl|--(?:n-)?gpu-layers)[ =]0\b")
_SPECULATION_ASKED = re.compile(r"--spec-type[ =](?!none)|(?<!\w)-md |--model-draft|spec-draft-mod")


@dataclass(frozen=True, slots=True)
class Seen:
    """The first line of a trouble, and how far the boot had come."""

    line: str
    phase: Phase


@dataclass(slots=True)
class Allocation:
    """Memory that was refused, as far as the lines around it tell."""

    line: str
    at: int
    phase: Phase
    after_ready: bool
    drafting: bool
    in_pool: bool
    size_bytes: float | None = None
    device: str | None = None
    on_host: bool = False
    by_limit: bool = False
    kind: Phase | None = None


@dataclass(slots=True)
class Reading:
    """A log, read once from top to bottom. Nothing in here grows with the log."""

    phase: Phase = Phase.SPAWN
    ours: bool = False
    ready: bool = False
    up: bool = False
    gpu_found: bool = False
    began: bool = False
    drafting: bool = False
    command: str = ""
    seen: dict[tuple[Trouble, bool], Seen] = field(default_factory=dict)
    counts: dict[Trouble, int] = field(default_factory=dict)
    allocation: Allocation | None = None
    survived: Allocation | None = None
    last_line: str = ""
    last_error: str = ""
    used_bytes: int | None = None
    limit_bytes: int | None = None
    served: int = 0
    facts: dict[str, Scalar] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    free_mib: dict[str, int] = field(default_factory=dict)
    used_mib: dict[str, float] = field(default_factory=dict)

    def before_ready(self, *troubles: Trouble) -> Seen | None:
        """Return the first line of these troubles from before it served."""
        return next((s for each in troubles if (s := self.seen.get((each, False)))), None)

    def at_all(self, *troubles: Trouble) -> Seen | None:
        """Return the first line of these troubles, whenever it came."""
        return self.before_ready(*troubles) or next(
            (s for each in troubles if (s := self.seen.get((each, True)))), None
        )

    @property
    def reached(self) -> Phase:
        """How far the boot came; a draft model is loaded after the target has warmed up."""
        return Phase.DRAFT if self.drafting and not self.up else self.phase

    @property
    def cause(self) -> str:
        """The last line that complains, or the last line."""
        return self.last_error or self.last_line

    def number(self, name: str) -> int | None:
        """Return a whole number that the log showed."""
        value = self.facts.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def free_bytes(self, device: str | None) -> int | None:
        """Return what a device had free at the start less the buffers it printed since."""
        if device is None:
            return None
        for name, free in self.free_mib.items():
            if name == device or re.fullmatch(rf"[A-Za-z]+{re.escape(device)}", name):
                return max(round((free - self.used_mib.get(name, 0)) * MIB), 0)
        return None

    def evidence(self) -> Pairs:
        """Return the facts by name, sizes in bytes summed over buffers and devices."""
        facts = dict(self.facts)
        facts.update({name: round(size) for name, size in self.sizes.items()})
        if self.devices:
            facts["devices"] = "; ".join(f"{at}: {what}" for at, what in self.devices.items())
        if self.free_mib:
            facts["device_free_bytes"] = sum(self.free_mib.values()) * MIB
        if self.at_all(Trouble.GPU_IGNORED) is not None and not self.gpu_found:
            facts["gpu_ignored"] = True
        off = self.at_all(Trouble.SPECULATION_OFF, Trouble.DRAFT_REFUSED)
        if off is not None:
            facts["speculation_off"] = off.line[:300]
        elif self.at_all(Trouble.NO_SPECULATION) is not None:
            facts["speculation"] = "none"
        drafted, accepted = self.number("drafted_tokens"), self.number("accepted_tokens")
        if drafted and accepted is not None:
            facts["acceptance"] = accepted / drafted
        if self.used_bytes is not None:
            facts["peak_bytes"] = self.used_bytes
        return Pairs(facts)

    # --- one line ----------------------------------------------------------------------------

    def take(self, line: str, at: int) -> None:
        """Take in one line, already cleaned."""
        low = line.lower()
        self.last_line = line
        if self.ready and self._is_chatter(line, low):
            return
        if not self.ours and any(needle in low for needle in _OURS_NEEDLES):
            self.ours = _OURS.search(line) is not None
        if not self.command and at < 3 and _COMMAND.search(line):
            self.command = line
            return
        self._step(line, low)
        self._complaints(line, low)
        self._memory(line, low, at)
        self._numbers(line, low)

    def _is_chatter(self, line: str, low: str) -> bool:
        """Tell whether this is one of the many lines that a server prints for every request."""
        if "slot " not in line and "update_slots" not in line:
            return False
        if "print_timing" in line or "release" in line:
            self.served += "release" in line
            return "draft" not in line
        return not any(word in low for word in _NO_CHATTER)

    def _step(self, line: str, low: str) -> None:
        fails = any(word in low for word in _FAILS)
        if fails:
            self.last_error = line
        if self.ready:
            return
        opened = milestone(line)
        if fails:
            if opened is Phase.READY:
                return
        elif not self.up and (opened is Phase.READY or _UP.search(line)):
            self.up = True
            self._survive()
        if opened is None:
            return
        self.began = self.began or opened is Phase.CONFIG or "loading model" in low
        if not fails and (
            opened is Phase.WARMUP or "loading model" in low or "loading draft" in low
        ):
            # It goes on, or begins again with less: what was refused before was survived.
            self._survive()
        if opened is Phase.DRAFT:
            self.drafting = True
        if "loading model tensors" in line and not self.drafting:
            self._forget("weights", "kv_cache", "compute", "output", "rs")
            self.used_mib.clear()
        elif "constructing llama_context" in line:
            self._forget("kv_cache", "kv_k", "kv_v", "compute", "output", "rs", draft=self.drafting)
        if opened.order > self.phase.order:
            self.phase = opened
        if opened is Phase.READY:
            self.ready = True

    def _forget(self, *names: str, draft: bool = False) -> None:
        """Drop sizes that an earlier context printed: fitting measures before it loads."""
        for name in names:
            for end in ("", "_gpu", "_host"):
                self.sizes.pop(f"{'draft_' if draft else ''}{name}{end}_bytes", None)

    def _survive(self) -> None:
        if self.allocation is not None:
            self.survived = self.survived or self.allocation
            self.allocation = None

    def _complaints(self, line: str, low: str) -> None:
        for sign in _SIGNS:
            if not any(needle in low for needle in sign.needles):
                continue
            if not sign.pattern.search(line):
                continue
            if sign.trouble in _MAY_BE_HARMLESS and _NOT_FATAL.search(line):
                continue
            if sign.trouble is Trouble.ARGUMENT and self.phase.order > Phase.DEVICE.order:
                continue
            self.ours = self.ours or sign.ours
            self.counts[sign.trouble] = self.counts.get(sign.trouble, 0) + 1
            self.seen.setdefault((sign.trouble, self.ready), Seen(line, self.reached))

    def _memory(self, line: str, low: str, at: int) -> None:
        if any(needle in low for needle in _RECOVERED_NEEDLES) and _RECOVERED.search(line):
            self._survive()
            return
        held = self.allocation
        for needles, pattern in _ALLOCATION:
            if not any(needle in low for needle in needles):
                continue
            found = pattern.search(line)
            if found is None or _HARMLESS_ALLOCATION.search(line):
                continue
            if _NO_ALLOCATION.search(line):
                continue
            groups = found.groupdict()
            if held is None:
                held = self.allocation = Allocation(
                    line=line,
                    at=at,
                    phase=self.phase,
                    after_ready=self.ready,
                    drafting=self.drafting,
                    in_pool=bool(_POOL.search(line)) and "on device" not in line,
                )
            size = _size(groups)
            if size is not None and (held.size_bytes is None or _is_exact(size, held.size_bytes)):
                held.size_bytes = size
            held.device = held.device or groups.get("device")
            held.on_host = held.on_host or "cpu" in low or "ggml_aligned_malloc" in low
            held.by_limit = held.by_limit or "attempted to allocate" in low
            break
        if held is None or at - held.at > _NEAR:
            return
        if held.kind is None:
            held.kind = next(
                (kind for kind, sign in _KIND_OF_ALLOCATION if sign.search(line)), None
            )
        if not held.after_ready and _DRAFT_OWNS.search(line):
            held.drafting = True

    def _numbers(self, line: str, low: str) -> None:
        facts = self.facts
        if "buffer size" in low and (found := _BUFFER.search(line)):
            self._buffer(found)
        if "mib" in low:
            if found := _KV_TYPES.search(line):
                prefix = "draft_" if self.drafting else ""
                facts[f"{prefix}kv_type_k"], facts[f"{prefix}kv_type_v"] = found["k"], found["v"]
                for side in ("k", "v"):
                    name = f"{prefix}kv_{side}_bytes"
                    size = _size({"mib": found[f"{side}_mib"]}) or 0.0
                    self.sizes[name] = self.sizes.get(name, 0) + size
                if cells := _CELLS.search(line):
                    # Of a model with sliding windows the global layers hold the most.
                    name = f"{prefix}kv_cells"
                    facts[name] = max(int(cells["cells"]), self.number(name) or 0)
            elif found := _PROJECTED.search(line):
                facts["fit_projected_bytes"] = int(found[1]) * MIB
                facts["fit_free_bytes"] = int(found[2]) * MIB
            elif found := _DEVICE_LINE.search(line):
                self._device(found)
        if "n_ctx" in line or "n_ubatch" in line or "n_layer" in line:
            if found := _SLOT_WINDOW.search(line):
                facts["effective_context_tokens"] = int(found["tokens"] or found["own"])
            else:
                for name, pattern in _NUMBERS:
                    if found := pattern.search(line):
                        facts[f"{'draft_' if self.drafting else ''}{name}"] = int(found[1])
        if "n_slots" in line and (found := _SLOTS.search(line)):
            facts["slots"] = int(found["slots"])
        if ("version" in low or "build" in low) and self.phase.order < Phase.CONTEXT.order:
            self._version(line)
        if "chatml" in low and _CHATML.search(low):
            facts["chat_template_fallback"] = line.strip()[:300]
        if "flash" in low and not self.drafting and (found := _FLASH.search(line)):
            state = (found["state"] or found["flag"]).lower()
            facts["flash_attention"] = {"0": "disabled", "1": "enabled"}.get(state, state)
        if "offloaded" in low and not self.drafting and (found := _OFFLOADED.search(line)):
            facts["offloaded_layers"] = int(found["some"])
            facts["all_layers"] = int(found["all"])
        if "context" in low:
            if found := _CAPPED.search(line):
                facts["capped_from_tokens"] = int(found[1])
                facts["trained_context_tokens"] = int(found[2])
            elif found := _REDUCED.search(line):
                facts["fit_from_tokens"] = int(found[1])
                facts["fit_context_tokens"] = int(found[2])
        if ("fit" in low or "will leave" in low) and (found := _FIT.search(line)):
            failed = "failed" in found[1] or "error" in found[1] or "without" in found[1]
            changed = "successfully" in found[1]
            facts["fit"] = "failed" if failed else "fitted" if changed else "unchanged"
        if "device" in low or "gpu name" in low:
            self.gpu_found = self.gpu_found or _FOUND_GPU.search(line) is not None
            if (named := _GPU_NAME.search(line)) and len(self.devices) < 16:
                at = named["at"]
                title = (named["title"] or named["metal"]).strip()
                if title not in self.devices.values():
                    self.devices.setdefault(f"GPU{at or 0}", title)
        if "draft" in low or "speculative" in low:
            self._drafts(line)
        if "breakdown" in low and (found := _BREAKDOWN.search(line)):
            facts[f"breakdown_{found['place'].lower()}_bytes"] = int(found["own"]) * MIB
        if "tokens" in low or "n_ctx" in low:
            if found := _PROMPT.search(line):
                facts["prompt_tokens"] = int(found[1] or found[2])
            if found := _WINDOW.search(line):
                facts["refused_window_tokens"] = int(found[1] or found[2])
            if found := _BATCH_TOO_SMALL.search(line):
                facts["needed_ubatch_tokens"] = int(found[1])
        if "address space" in low and (found := _ADDRESS_SPACE.search(line)):
            self.used_bytes, self.limit_bytes = int(found["used"]), int(found["limit"])
        if "address space" in low and (found := _STACKS.search(line)):
            self.limit_bytes, facts["thread_stack_bytes"] = int(found["limit"]), int(found["stack"])

    def _buffer(self, found: re.Match[str]) -> None:
        names = {"model": "weights", "KV": "kv_cache"}
        name = ("draft_" if self.drafting else "") + names.get(found["kind"], found["kind"].lower())
        size = _size(found.groupdict()) or 0.0
        place = found["place"] or ""
        host = place.startswith(("CPU", "AMX", "BLAS")) or place.endswith("_Host")
        self.sizes[f"{name}_bytes"] = self.sizes.get(f"{name}_bytes", 0) + size
        if place and size > 0:
            per_class = f"{name}_{'host' if host else 'gpu'}_bytes"
            self.sizes[per_class] = self.sizes.get(per_class, 0) + size
            if not host and len(self.used_mib) < 64:
                self.used_mib[place] = self.used_mib.get(place, 0) + size / MIB

    def _device(self, found: re.Match[str]) -> None:
        name = found["name"] or found["name2"]
        if name.startswith("CPU") or len(self.free_mib) >= 64:
            return
        self.gpu_found = True
        self.devices[name] = (found["title"] or found["title2"]).strip()
        self.devices.pop(f"GPU{re.sub('[A-Za-z]', '', name)}", None)
        self.free_mib[name] = int(found["free"] or found["free2"])

    def _version(self, line: str) -> None:
        # The first is the most telling: the wheel's own line comes before llama.cpp's.
        if found := _WHEEL_VERSION.search(line) or _VERSION.search(line):
            groups = found.groupdict()
            said = groups.get("version") or groups.get("own") or ""
            self.facts.setdefault("engine_version", said.strip()[:120])
        if found := _BUILD.search(line):
            build = next(part for part in found.groups() if part is not None)
            self.facts.setdefault("engine_build", int(build))

    def _drafts(self, line: str) -> None:
        facts = self.facts
        if found := _ACCEPTANCE.search(line):
            self.ours = True
            for name in ("accepted", "drafted"):
                key = f"{name}_tokens"
                facts[key] = (self.number(key) or 0) + int(found[name])
            if found["mean"] is not None:
                with contextlib.suppress(ValueError):
                    facts["mean_draft_tokens"] = float(found["mean"])
        elif found := _IMPLEMENTATION.search(line):
            kinds = str(facts.get("speculation", ""))
            if found[1] not in kinds.split(",") and len(kinds) < 200:
                facts["speculation"] = f"{kinds},{found[1]}".strip(",")
        elif found := _CLAMPED.search(line):
            facts["draft_clamped_tokens"] = int(found[1])


def read(log: Iterable[str]) -> Reading:
    """Return what a log says, after one pass over its lines."""
    reading = Reading()
    for at, line in enumerate(_clean(log)):
        reading.take(line, at)
    return reading


def speculation_was_wanted(reading: Reading) -> bool:
    """Tell whether a log shows that drafts were asked for.

    Newer builds say of every server without a draft that no implementation was specified; only an
    excerpt that says nothing else, a draft model or a command line make that a complaint.
    """
    excerpt = reading.phase is Phase.SPAWN
    return excerpt or reading.drafting or bool(_SPECULATION_ASKED.search(reading.command))


def asked_for_no_layers(reading: Reading) -> bool:
    """Tell whether the command line in the log keeps every layer off the GPU by itself."""
    return bool(_NO_LAYERS.search(reading.command))


def _clean(log: Iterable[str]) -> Iterator[str]:
    for raw in log:
        for part in raw.splitlines() or [""]:
            line = plain(part, _LONGEST_LINE).strip()
            if line:
                yield line


def _is_exact(size: float, rounded: float) -> bool:
    """Tell whether a size in bytes is the one that the line before gave in rounded MiB."""
    return size.is_integer() and abs(size - rounded) < 0.01 * MIB


def _size(groups: Mapping[str, str | None]) -> float | None:
    for unit, scale in (("mb", MIB), ("mib", MIB), ("bytes", 1)):
        said = groups.get(unit)
        if said is not None:
            with contextlib.suppress(ValueError):  # such as a lone dot in a torn line
                return float(said.replace(",", "")) * scale
    return None
