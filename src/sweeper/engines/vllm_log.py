"""What vLLM's server prints, read once from top to bottom into facts, phases and a first cause.

Lines are read by meaning, since their wording, their process prefix and their file names move
between versions.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from sweeper.core.launch import Phase
from sweeper.core.outcome import (
    BrokenName,
    Finding,
    HostFaultName,
    InfeasibleName,
    UnfitName,
)
from sweeper.core.pairs import Pairs, Scalar
from sweeper.engines.lines import plain

# --- lines ------------------------------------------------------------------------------------

_LONGEST_LINE = 20_000
_LEVEL = re.compile(r"(?:^|[\s)|\]])(DEBUG|INFO|WARNING|ERROR|CRITICAL)(?=:?\s)")
_LOGGER = re.compile(r"\[[\w./-]+:\d+\] ?|\[[\w-]+\.py\] ?")
_PROCESS = re.compile(r"^(?:\([\w :=.-]*(?:pid|rank)[=:]? ?\d+[\w :=.-]*\)\s?)+")
_MARK = re.compile(
    r"\bv?LLM\b|vllm[:./ ]|VLLM_|EngineCore|APIServer|AsyncLLM|Worker_(?:TP|PP|DP|EP)\d|VllmWorker|"
    r"api_server|KV cache|kv_cache|[Cc][Uu][Dd][Aa] ?[Gg]raph|max_num_(?:seqs|batched|scheduled)|"
    r"max_model_len|num_speculative|SpecDecoding|Avg (?:prompt|generation) throughput|"
    r"shared memory broadcast|(?:Loading|Capturing|Starting to load) .*(?:shard|graph|model)|"
    r"attention backend|torch\.(?:cuda\.)?OutOfMemoryError|Application startup|"
    r"maximum context length|chat template|core engine proc|module or parameter named|"
    r"cache blocks|Free memory on device|memory profiling|\[\w+\.py(?::\d+)?\]"
)
_KIN = re.compile(
    r"torch|[Nn][Cc][Cc][Ll]|CUDA|cuda|[Zz][Mm][Qq]|[Tt]riton|nvcc|ninja|\[Errno \d+\]|EADDRINUSE|"
    r"transformers|safetensors|pydantic|flashinfer|/dev/shm|[Bb]us error|uvicorn|uvloop"
)
"""What this engine is built on: enough to believe a failure, not enough to believe a success."""
_FOREIGN = re.compile(
    r"\bggml_|llama_(?:model|context|kv|init)|\bllama-server|\bslot +\w+_|sglang|\bollama\b|"
    r"\[TensorRT|text-generation-launcher"
)


def _lines(log: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a log without colours; a progress bar's states are lines of their own."""
    for raw in log:
        line = plain(raw, _LONGEST_LINE)
        if "\r" in line or "\n" in line:
            yield from (part for part in re.split(r"[\r\n]+", line) if part)
        else:
            yield line


def _level(line: str) -> str:
    found = _LEVEL.search(line, 0, 160)
    return found[1] if found else ""


def _body(line: str) -> str:
    """Return what a line says, without the process and the logger that said it."""
    found = _LOGGER.search(line, 0, 200)
    if found is not None and _level(line[: found.start() + 1]):
        return line[found.end() :].strip()
    return _PROCESS.sub("", line).strip()


def number_of(text: str) -> float | None:
    """Return the number that a word is, with or without commas."""
    try:
        return float(text.replace(",", ""))
    except ValueError:  # such as a lone dot in a torn line
        return None


_SCALE = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
AMOUNT = r"(-?[\d.,]*\d)\s*([KMGT]?)(?:\[?i?B\]?|b)?"


def size_of(number: str, unit: str) -> int | None:
    """Return the bytes of the two groups of an `AMOUNT`."""
    value = number_of(number)
    return None if value is None else round(value * _SCALE[unit.upper()])


# --- phases -----------------------------------------------------------------------------------

_MILESTONES: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    (Phase.READY, re.compile(r"Application startup complete|Uvicorn running on")),
    (Phase.SERVING, re.compile(r"Avg (?:prompt|generation) throughput|SpecDecoding metrics|"
                               r'"(?:GET|POST) /\S* HTTP/')),
    (Phase.WARMUP, re.compile(r"init engine \(|warming up sampler|Starting vLLM (?:API )?server")),
    # The estimate of the graphs' memory is made while profiling, before there is a KV cache.
    (Phase.PROFILING, re.compile(r"Profiling CUDA ?graph|Estimated CUDA ?graph memory|"
                                 r"Model loading took|Loading model weights took|"
                                 r"Memory profiling|torch\.compile took|Dynamo bytecode transform|"
                                 r"Initial profiling|profiling/warmup run")),
    (Phase.CAPTURE, re.compile(r"Capturing CUDA ?graph|Capturing cudagraphs|"
                               r"Graph capturing finished|CUDA ?graph pool memory")),
    (Phase.KV, re.compile(r"Available KV cache memory|KV cache size:|Maximum concurrency for|"
                          r"memory for KV Cache as specified|Auto-fit max_model_len|"
                          r"Explicitly set \(.*for KV cache|"
                          r"Overriding num_gpu_blocks|# (?:GPU|CPU|cuda) blocks:")),
    (Phase.DRAFT, re.compile(r"Loading (?:the )?(?:drafter|draft model|speculator)")),
    (Phase.WEIGHTS, re.compile(r"Starting to load model|Loading (?:safetensors|pt|model) (?:"
                               r"checkpoint )?(?:shards|weights|from)|Loading weights took|"
                               r"Failed to load model|[Uu]sing \w+ (?:attention )?backend out of|"
                               r"checkpoint shards:")),
    (Phase.DEVICE, re.compile(r"Initializing a V\d LLM engine|Initializing an LLM engine|"
                              r"world_size=\d+ rank=\d+|rank \d+ in world size|"
                              r"Using V2 Model Runner")),
    (Phase.CONFIG, re.compile(r"non-default args|vLLM API server version|Resolved architecture|"
                              r"[█▄▀] +version \d")),
)  # fmt: skip

_BAR = re.compile(r"\d%(?:\|[^|]*| Completed ?)\| *(\d{1,9})/(\d{1,9}) \[")
"""`Capturing CUDA graphs (decode, FULL):  51%|█████▏    | 18/35 [` and
`Loading safetensors checkpoint shards:  25% Completed | 1/4 [`."""


def milestone(line: str) -> Phase | None:
    """Return the phase that this line opens; lines are matched by meaning, at any level."""
    return next((phase for phase, sign in _MILESTONES if sign.search(line)), None)


def told(line: str) -> tuple[int, int] | None:
    """Return how many shards are loaded or graphs captured, by the bar that shows it."""
    found = _BAR.search(line)
    return None if found is None else (int(found[1]), int(found[2]))


_BOOT = (
    Phase.SPAWN, Phase.ARGS, Phase.CONFIG, Phase.DEVICE, Phase.WEIGHTS, Phase.DRAFT,
    Phase.PROFILING, Phase.KV, Phase.CAPTURE, Phase.WARMUP, Phase.READY, Phase.SERVING,
)  # fmt: skip
"""The phases in this engine's order: it loads the drafter with the weights, before profiling."""

_PLACES: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    (Phase.PROFILING, re.compile(r"profile_run|determine_available_memory|profile_cudagraph|"
                                 r"memory_profiling")),
    (Phase.CAPTURE, re.compile(r"capture_model|capture_cudagraphs?|_warmup_and_capture|"
                               r"capture_graphs?\b|[Gg]raph (?:\w+ )?capture|cudagraph capture")),
    (Phase.WARMUP, re.compile(r"_dummy_sampler_run|warming up sampler|compile_or_warm_up_model|"
                              r"kernel_warmup|warmup_kernels")),
    (Phase.DRAFT, re.compile(r"(?:drafter|speculator|proposer|draft_model|draft_worker)\.load|"
                             r"load_(?:draft|drafter|speculator|eagle|mtp)\w*|MultiTokenPredictor|"
                             r"\w+MTP\b")),
    (Phase.WEIGHTS, re.compile(r"load_model|initialize_model|create_weights|load_weights|"
                               r"process_weights_after_loading|model_loader")),
    (Phase.KV, re.compile(r"get_kv_cache_config|initialize_kv_cache|allocate_kv_cache|"
                          r"unify_kv_cache|initialize_from_config|_check_enough_kv|kv_cache_spec")),
    (Phase.DEVICE, re.compile(r"init_device|MemorySnapshot|request_memory")),
    (Phase.SERVING, re.compile(r"execute_model|_process_engine_step|sample_tokens|run_busy_loop")),
    (Phase.CONFIG, re.compile(r"create_engine_config|create_model_config|create_speculative_config|"
                              r"(?:Vllm|Model|Speculative|Cache|Scheduler|Parallel)Config\b")),
)  # fmt: skip
"""Where a traceback was, by the functions in it; the first that is found is the innermost."""


def place(text: str) -> Phase | None:
    """Return the phase in which a traceback was."""
    return next((phase for phase, sign in _PLACES if sign.search(text)), None)


# --- signs of failure -------------------------------------------------------------------------

Name: TypeAlias = InfeasibleName | UnfitName | BrokenName | HostFaultName
_Open: TypeAlias = Literal["memory", "fault", "hang", "exception"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sign:
    """What a line means; `name` may be left open to the phase.

    `boot_only` signs mean nothing once it serves, `raised_only` ones only in an exception.
    """

    name: Name | _Open
    pattern: re.Pattern[str]
    why: str
    phase: Phase | None = None
    boot_only: bool = False
    raised_only: bool = False


def _sign(
    name: Name | _Open, pattern: str, why: str, *,
    phase: Phase | None = None, boot: bool = False, raised: bool = False,
) -> _Sign:  # fmt: skip
    return _Sign(
        name=name, pattern=re.compile(pattern), why=why, phase=phase, boot_only=boot,
        raised_only=raised,
    )  # fmt: skip


_SIGNS: tuple[_Sign, ...] = (
    _sign(HostFaultName.ENGINE_NOT_FOUND,
          r"No module named '?vllm\b|[Nn]o package metadata was found for vllm|"
          r"PackageNotFoundError: vllm|vllm: (?:command )?not found|\.so\S*: undefined symbol",
          "the engine is not installed, or not whole, where it was looked for", phase=Phase.SPAWN),
    _sign(HostFaultName.DRIVER_MISMATCH,
          r"compiled with an unsupported toolchain|device kernel image is invalid|"
          r"no kernel image is available|driver version is insufficient|"
          r"driver on your system is too old|cudaErrorInsufficientDriver|"
          r"forward compatibility was attempted|CUDA driver initialization failed|"
          r"Driver/library version mismatch|system not yet initialized|"
          r"lib(?:cuda|cudart|cublas\w*|nv\w+)\.so\S* cannot open|Failed to infer device type|"
          r"No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device|"
          r"CUDA unknown error|unsupported display driver|Failed to initialize NVML|"
          r"NVMLError_(?:LibRmVersionMismatch|DriverNotLoaded|LibraryNotFound)",
          "the GPU driver does not fit this build of the engine"),
    _sign(BrokenName.SHM_EXHAUSTED,
          r"insufficient shared memory|/dev/shm.*(?:No space|full|too small)|"
          r"(?:No space left|Errno 28).*(?:/dev/shm|psm_|shared memory|shm)|"
          r"(?:unable|failed|[Ee]rror|could not)\b.*(?:open|allocat|resiz|writ|creat|truncat|map)"
          r"\w*.*\bshared memory|shared memory.*(?:exhausted|No space left)|\bBus error|SIGBUS",
          "the shared memory between the engine's processes is used up"),
    _sign(HostFaultName.DISK_FULL,
          r"No space left on device|\[Errno 28\]|os error 28|"
          r"[Nn]ot enough (?:free )?(?:disk )?space|"
          r"Disk quota exceeded",
          "the disk is full"),
    _sign(HostFaultName.TOOLCHAIN_JIT_FAILURE,
          r"(?:[Cc]ould not find|[Cc]annot find|needs?|requires?|no|missing|without) `?'?\"?nvcc|"
          r"nvcc['\"`]?:? (?:is )?(?:not found|fatal|error|command not found|No such)|"
          r"Command .*(?:gcc|g\+\+|nvcc|cicc).* returned non-zero|GLIBC\w*_[\d.]+.? not found|"
          r"No such file or directory: '[^']*nvcc|ninja: (?:build stopped|error|fatal)|"
          r"[Nn]inja build failed|[Nn]inja is required|Command .*ninja.* (?:returned|died)|"
          r"Error building extension|CUDA_HOME (?:environment variable )?is not set|"
          r"Failed to find (?:a )?C compiler|fatal error: \S+\.h(?:pp)?\b|"
          r"\.(?:cu|cuh|cc|cpp|c|h)[:(]\d+\S* (?:fatal )?error|"
          r"ptxas (?:fatal|error)|PTXASError|ptxas.*(?:failed|not defined)|"
          r"NVRTC_ERROR|nvrtc: error|"
          r"JIT (?:build|compil\w+) (?:needs|fail\w*|error)",
          "a kernel could not be compiled on this host: its compiler is missing or too old"),
    _sign(BrokenName.COMPILE_CACHE_CORRUPT,
          r"vLLM failed to compile the model|corrupted compilation artifact|"
          r"(?:compile|compilation|torch_compile|inductor|aot)\w*[ _](?:cache|artifact).*"
          r"(?:corrupt|truncated|EOFError|Unpickling|invalid load key)",
          "the cache of compiled graphs is damaged: remove the torch_compile_cache folder",
          phase=Phase.PROFILING),
    _sign(HostFaultName.MODEL_NOT_FOUND_OR_GATED,
          r"SafetensorError|[Ee]rror while deserializing header|HeaderTooLarge|"
          r"MetadataIncompleteBuffer",
          "a file of the model's weights is damaged", phase=Phase.WEIGHTS, boot=True),
    _sign(HostFaultName.MODEL_NOT_FOUND_OR_GATED,
          r"gated repo|GatedRepoError|[Aa]ccess to model .* is restricted|"
          r"\b40[13] Client Error|RepositoryNotFoundError|"
          r"Repository Not Found|not a valid model identifier|is not a local folder|"
          r"LocalEntryNotFoundError|EntryNotFoundError|[Cc]ouldn't connect to|OfflineModeIsEnabled|"
          r"[Cc]annot find any model weights|does not appear to have a file named|"
          r"no file named .*(?:safetensors|bin|json)|Incorrect path_or_model_id|"
          r"HFValidationError|Invalid repository ID or local directory|"
          r"Can't load (?:the )?(?:configuration|tokenizer|config)|"
          r"No such file or directory: .*(?:config\.json|safetensors|tokenizer|\.gguf)",
          "the model is missing, damaged, or not open to this user", phase=Phase.CONFIG, boot=True),
    _sign(BrokenName.PORT_IN_USE,
          r"[Aa]ddress already in use|EADDRINUSE|\[Errno 98\]|[Pp]ort \d+ is (?:already )?in use",
          "another process holds the port"),
    _sign(BrokenName.GPU_MEMORY_CONTENDED,
          r"Free memory on device.*(?:is less than|less than desired|below)",
          "other processes hold the card's memory", phase=Phase.DEVICE, boot=True),
    _sign(BrokenName.GPU_MEMORY_CONTENDED,
          r"Error in memory profiling|[Ii]nitial free memory .*current free memory",
          "other processes freed the card's memory while the engine measured it",
          phase=Phase.PROFILING, boot=True),
    _sign(InfeasibleName.CAPACITY_MAX_NUM_SEQS,
          r"max_num_seqs.*(?:exceeds?|larger than|more than|greater than).*"
          r"(?:[Mm]amba|state|cache) (?:cache )?blocks",
          "more sequences were asked for than there are state blocks", phase=Phase.CAPTURE,
          boot=True),
    _sign(InfeasibleName.OOM_KV_CACHE,
          r"No available memory for the cache blocks|KV cache is needed|"
          r"To serve at least one request with|larger than the available KV cache memory|"
          r"maximum number of tokens that can be stored in (?:the )?KV cache|"
          r"is less than requested memory for kv|[Cc]annot auto-fit max_model_len|"
          r"not enough (?:GPU )?memory .*even a single token",
          "the KV cache that is left room for does not hold the window", phase=Phase.KV,
          boot=True),
    _sign(InfeasibleName.HOST_RAM_OOM,
          r"DefaultCPUAllocator|[Cc]annot allocate memory|(?<!OutOf)\bMemoryError\b|"
          r"std::bad_alloc|oom-?kill|OOMKilled|Out of memory: Killed|node running low on memory|"
          r"ray\.exceptions\.OutOfMemoryError|Memory cgroup out of memory",
          "the host's memory ran out"),
    _sign("memory",
          r"CUDA out of (?:memory|\W)|HIP out of memory|XPU out of memory|Tried to allocate|"
          r"OutOfMemoryError|CUDA error: out of memory|cudaErrorMemoryAllocation|"
          r"not enough GPU memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|"
          r"CUDA driver error: out of memory|Triton Error \[CUDA\]: out of memory|"
          r"UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
          "memory ran out"),
    _sign(InfeasibleName.MODEL_UNSUPPORTED_ARCH,
          r"[Mm]odel architectures? .*(?:not supported|failed to be inspected)|"
          r"does not recognize this architecture|has no vLLM implementation|"
          r"[Uu]nsupported model (?:type|architecture)|[Uu]nrecognized model in|"
          r"[Uu]nknown model architecture",
          "this build does not know the model's architecture", phase=Phase.CONFIG, boot=True),
    _sign(InfeasibleName.BAD_ARGUMENT,
          r"(?:^|[\s/])(?:vllm|api_server|serve|python\d?|__main__|main)\b[\w. -]*: error: |"
          r"^error: (?:unrecognized arguments|argument )|\binvalid choice: ",
          "this build does not know one of the flags or values", phase=Phase.ARGS, boot=True),
    _sign(InfeasibleName.BAD_ARGUMENT,
          r"Input should be|Extra inputs are not permitted|Unexpected keyword argument \[|"
          r"Config\.__init__\(\) got an unexpected keyword|"
          r"Field required|unable to parse string|Invalid JSON|"
          r"Unknown (?:quantization|attention|speculative|load|kv|KV|backend)|"
          r"Invalid (?:attention |moe )?backend|is not a valid \w*(?:Backend|Enum|Mode)\b|"
          r"(?:dtype|quantization|load_format) must be one of",
          "the engine does not take one of the values", phase=Phase.CONFIG, boot=True,
          raised=True),
    _sign(InfeasibleName.UNSUPPORTED_COMBINATION,
          r"max_num_scheduled_tokens is set to -?\d+.*not allow|"
          r"does not have enough slots to schedule|must be divisible by|"
          r"should be consistent with the max value of|num_speculative_tokens must be provided|"
          r"User-specified max_model_len|is greater than the derived max_model_len|"
          r"larger than the (?:number of )?available GPUs|invalid device ordinal|"
          r"[Cc]annot find the config file for|max_num_batched_tokens .*is smaller than|"
          r"must be greater than or equal to max_num_seqs",
          "the engine refuses this combination of settings", phase=Phase.CONFIG, boot=True),
    _sign(InfeasibleName.UNSUPPORTED_COMBINATION,
          r"No valid attention backend|no module or parameter named|"
          r"both a multiple of|[Oo]ut ?[Oo]f ?[Rr]esources?: |out of resource: shared memory|"
          r"is not supported (?:with|for|on|by|in|when)|(?:does|do|are|is) not (?:yet )?support|"
          r"not (?:yet )?(?:supported|implemented)|only supports?\b|[Uu]nsupported|"
          r"[Ii]ncompatible|not compatible|mutually exclusive|"
          r"cannot be used (?:with|together|when)|"
          r"not divisible by|[Rr]equires? (?:compute capability|CUDA capability)|"
          r"[Mm]inimum capability|conflicts? with|Please (?:pip )?install |"
          r"should have the same vocabulary size",
          "the engine, the model or the card does not support this combination", boot=True,
          raised=True),
    _sign(InfeasibleName.UNSUPPORTED_COMBINATION,
          r"(?:ImportError|ModuleNotFoundError): .* is required (?:for|to|by)\b",
          "the engine lacks a package that these settings need", boot=True, raised=True),
    _sign(BrokenName.BOOT_TIMEOUT,
          r"Timed out waiting for engine (?:core )?processes|Engine (?:core )?process\w* did not "
          r"(?:start|become ready)",
          "the engine's own deadline for its boot passed", boot=True),
    _sign("hang",
          r"RPC call to \S+ timed out|execute_model timed out|Watchdog caught collective operation",
          "the engine's processes stopped answering each other"),
    _sign("fault",
          r"illegal (?:memory access|instruction|address)|cudaErrorIllegal|misaligned address|"
          r"device-side assert|unspecified launch failure|cudaErrorLaunch|CUBLAS_STATUS_|"
          r"CUDNN_STATUS_|NCCL error|ncclUnhandled|ncclSystemError|ncclInternalError|CUDA error|"
          r"HIP error|Segmentation fault|SIGSEGV|SIGABRT|Fatal Python error|uncorrectable ECC|"
          r"fallen off the bus|[Cc]ore dumped",
          "the card or the process failed"),
)  # fmt: skip
"""Signs of failure by meaning; the first that a line carries is the one it means."""

_SURVIVED = re.compile(
    r"If (?:an )?out-of-memory error occurs|[Tt]rying (?:port|another)|using port|[Ff]alling back|"
    r"\bretrying\b|will be ignored"
)
"""What the engine says of a trouble that it gets around."""

_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?(?P<type>[A-Z]\w*(?:Error|Exception))\b(?::\s*(?P<text>.*)|.*)$"
)
_WRAPPER = re.compile(
    r"EngineCore failed to start|See root cause above|See stack trace|EngineDeadError|"
    r"WorkerProc (?:initialization failed|hit an exception|failed)|check the stack trace above|"
    r"Frontend process failed|[Ee]xecutor failed|died unexpectedly|died with exit code|"
    r"EngineCore encountered a|EngineGenerateError|CancelledError|cancelled|BrokenPipeError|"
    r"ConnectionResetError|KeyboardInterrupt|SystemExit|engine dead|engine is (?:dead|not running)|"
    r"Background loop has errored|ProcessRaisedException|ProcessExitedException"
)
_INNER = re.compile(r"Worker failed with error ['\"](?P<inner>.+?)['\"]?(?:, please check|$)")
_DIED = re.compile(
    r"EngineCore encountered a|EngineDeadError|EngineGenerateError|engine dead|"
    r"Background loop has errored|Dumping (?:scheduler stats|input data)|AsyncEngineDeadError"
)
_BOOT_FAILED = re.compile(
    r"EngineCore failed to start|initialization failed|Frontend process failed during|"
    r"during engine core initialization"
)
_RESTART = re.compile(r"non-default args|vLLM API server version|[█▄▀] +version \d|^\$ \S*vllm")
_TRACEBACK = "Traceback (most recent call last)"
_COMPILING = re.compile(r"^(?:\[\d+/\d+\])? ?:?\S*\b(?:nvcc|c\+\+|g\+\+|cicc|ptxas)\b.* -")
_WAITING = re.compile(r"Waiting for \d+ local, \d+ remote core engine proc")
_SHM_WAIT = re.compile(r"[Nn]o available shared memory broadcast block")
_HTTP_500 = re.compile(r'HTTP/\d(?:\.\d)?" 50\d')
_SHUTDOWN = re.compile(r"shutdown triggered|[Rr]eceived signal|[Tt]rigger received|got SIGTERM")

_CONTEXT_400 = re.compile(
    r"maximum context length (?:is|of) ([\d,]+)|"
    r"longer than the maximum model length of ([\d,]+)|"
    r"exceeds? (?:the )?(?:model's )?max(?:imum)?[_ ]model[_ ]len(?:gth)?"
)
_CHAT_TEMPLATE = re.compile(
    r"chat template is no longer allowed|must provide a chat template|ChatTemplateResolutionError|"
    r"jinja2?\.exceptions\.\w+|TemplateSyntaxError|[Cc]hat template .*(?:error|fail|invalid|not)"
    r"(?!.*content format)"
)
_STATS = re.compile(
    r"Avg prompt throughput: ([\d.]+) tokens/s, Avg generation throughput: ([\d.]+) tokens/s, "
    r"Running: (\d+) reqs?,(?: Swapped: \d+ reqs?,)? (?:Waiting|Pending): (\d+) reqs?"
)
_MEAN_LENGTH = re.compile(r"[Mm]ean acceptance length: ([\d.]+)")
_DRAFT_RATE = re.compile(r"[Dd]raft acceptance rate: ([\d.]+)%")
_DRAFTED = re.compile(r"Drafted: ([\d,]+) tokens")
TRUNCATED = re.compile(r"Truncating max_cudagraph_capture_size to ([\d,]+)")
CAPPED = re.compile(r"[Cc]apping cudagraph capture sizes from max ([\d,]+) to ([\d,]+)")
_UNSPECULATIVE = re.compile(
    r"[Ss]peculative decoding (?:is|was|will be) (?:disabled|ignored|turned off)|"
    r"[Dd]isabling speculative decoding|without speculative decoding"
)
_WORKER_GONE = re.compile(
    # Without an exit code it is what a worker that refused its settings leaves behind.
    r"(?:Worker proc|[Ee]ngine core proc(?:ess)?) \S+ died unexpectedly(?! \(exit code: None)"
)


# --- facts ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Facts:
    """What a log tells of the engine, gathered line by line; a new boot begins anew."""

    found: dict[str, Scalar] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    backends: list[str] = field(default_factory=list)

    def read(self, line: str) -> None:
        for word, pattern, names in _FACTS:
            if word in line and (match := pattern.search(line)) is not None:
                self._take(names, match)
        if "non-default args" in line or "_config=" in line:
            self._configuration(line)
        if " backend" in line and (match := _BACKEND.search(line)) is not None:
            self._backend(match)

    def _take(self, names: tuple[str, ...], match: re.Match[str]) -> None:
        """Keep the groups of a match by name: sizes are two groups, numbers and words one."""
        groups = list(match.groups())
        for name in names:
            value: Scalar
            if name.endswith("_bytes"):
                number, unit = groups.pop(0), groups.pop(0)
                value = None if number is None else size_of(number, unit or "")
            else:
                word = groups.pop(0)
                value = word if word is None or name in _WORDS else number_of(word)
            if value is None:
                continue
            if isinstance(value, float) and value.is_integer() and name not in _FRACTIONS:
                value = int(value)
            before = self.found.get(name)
            if name in _LEAST_OF and isinstance(before, int | float):
                value = min(before, float(value)) if isinstance(value, int | float) else value
            elif name in _MOST_OF and isinstance(before, int | float):
                value = max(before, float(value)) if isinstance(value, int | float) else value
            elif name in _FIRST_OF and before is not None:
                continue
            if isinstance(value, float) and name.endswith("_bytes"):
                value = round(value)
            self.found[name] = value

    def _configuration(self, line: str) -> None:
        for name, pattern in _ASKED:
            if (match := pattern.search(line)) is not None:
                number = number_of(match[1])
                if number is not None:
                    self.asked[name] = number
        if "speculative_config=None" in line:
            self.found["spec_method"] = "none"
        for name, pattern in _RUNNING:
            if (match := pattern.search(line)) is not None:
                word = match[1].strip("'\"")
                if word != "None":
                    self.found[name] = int(word) if word.isdigit() else word

    def _backend(self, match: re.Match[str]) -> None:
        name, kind = match["name"].upper(), match["kind"] or ""
        if "MoE" in kind:
            self.found.setdefault("moe_backend", name)
        elif "attention" in kind.lower() and name not in self.backends:
            self.backends.append(name)

    def pairs(self) -> Pairs:
        """Return the facts, with the window that is in effect."""
        facts = dict(self.found)
        window = next(
            (
                facts[name]
                for name in ("_concurrency_tokens", "autofit_max_model_len", "_sequence_tokens",
                             "_first_window_tokens")
                if name in facts
            ),
            None,
        )  # fmt: skip
        if window is not None:
            facts["effective_context_tokens"] = window
        if self.backends:
            facts["attention_backend"] = self.backends[0]
            if len(self.backends) > 1:
                facts["attention_backends"] = " ".join(self.backends)
        return Pairs({name: value for name, value in facts.items() if not name.startswith("_")})

    def number(self, name: str) -> float | None:
        """Return what was asked for, or what runs, as a number."""
        if name in self.asked:
            return self.asked[name]
        value = self.found.get(name)
        return float(value) if isinstance(value, int | float) else None


_WORDS = ("engine_version", "linear_kernel", "cudagraph_mode", "model_runner")
_FRACTIONS = ("max_concurrency",)
_LEAST_OF = ("kv_cache_bytes", "kv_pool_tokens", "max_concurrency", "num_gpu_blocks")
"""Of several workers, the one with least room decides."""
_MOST_OF = ("weights_bytes", "graph_pool_bytes", "graph_estimate_bytes", "activation_peak_bytes")
_FIRST_OF = ("engine_version", "_first_window_tokens", "linear_kernel")

_FACTS: tuple[tuple[str, re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (word, re.compile(pattern), names)
    for word, pattern, names in (
        ("ersion", r"(?:[█▄▀] +version|API server version:?) v?(\d[\w.+-]*)", ("engine_version",)),
        ("LLM engine (v", r"LLM engine \(v(\d[\w.+-]*)\)", ("engine_version",)),
        ("odel loading took", r"Model loading took " + AMOUNT, ("weights_bytes",)),
        ("weights took", r"Loading model weights took " + AMOUNT, ("weights_bytes",)),
        ("Available KV cache", r"Available KV cache memory: " + AMOUNT, ("kv_cache_bytes",)),
        ("Explicitly set", r"Explicitly set \(([\d.]*\d) ?/ ?[\d.]+\) ([KMGT]?)i?B for KV cache",
         ("kv_cache_bytes",)),
        ("reserved", r"reserved " + AMOUNT + r" memory for KV Cache", ("kv_cache_bytes",)),
        ("KV cache size:", r"KV cache size: ([\d,]+) tokens", ("kv_pool_tokens",)),
        ("aximum concurrency for",
         r"[Mm]aximum concurrency for ([\d,]+) tokens per request: ([\d.,]+) ?x",
         ("_concurrency_tokens", "max_concurrency")),
        ("graph memory", r"Estimated CUDA ?graph memory: " + AMOUNT, ("graph_estimate_bytes",)),
        ("graph memory: ", r"\(largest=(\d+)\)", ("largest_captured",)),
        ("graph pool", r"CUDA ?graph pool memory: " + AMOUNT + r" \(actual\), " + AMOUNT,
         ("graph_pool_bytes", "graph_estimate_bytes")),
        ("raph capturing finished", r"Graph capturing finished in [\d.]+ secs?, took " + AMOUNT,
         ("graph_pool_bytes",)),
        ("peak memory increase", r"torch peak memory increase: " + AMOUNT,
         ("activation_peak_bytes",)),
        ("peak activation", AMOUNT + r" for peak activation", ("activation_peak_bytes",)),
        ("for CUDAGraph memory", AMOUNT + r" for CUDAGraph memory", ("graph_pool_bytes",)),
        ("--kv-cache-memory=", r"--kv-cache-memory(?:-bytes)?=(-?\d+)",
         ("suggested_kv_cache_memory",)),
        ("non KV cache memory", r"[Tt]otal non KV cache memory: " + AMOUNT, ("non_kv_bytes",)),
        ("maximum model length", r"estimated maximum model length is ([\d,]*\d)",
         ("estimated_max_model_len",)),
        ("uto-fit max_model_len", r"Auto-fit max_model_len: reduced from [\d,]+ to ([\d,]+)",
         ("autofit_max_model_len",)),
        ("uto-fit max_model_len", r"full model context length ([\d,]+) fits",
         ("autofit_max_model_len",)),
        ("blocks", r"# (?:GPU|CPU|cuda) blocks: ([\d,]+)", ("num_gpu_blocks",)),
        ("num_gpu_blocks", r"num_gpu_blocks(?:=| is:? )\d+ with num_gpu_blocks_override=(\d+)",
         ("num_gpu_blocks",)),
        ("Using max model len", r"Using max model len ([\d,]+)", ("_first_window_tokens",)),
        ("Selected", r"Selected (\w*Kernel) for", ("linear_kernel",)),
        ("FlashAttention version", r"Using FlashAttention version (\d+)",
         ("flash_attention_version",)),
        ("cudagraph_mode", r"setting cudagraph_mode(?:=| to )(?:CUDAGraphMode\.)?(\w+)",
         ("cudagraph_mode",)),
        ("Model Runner", r"Using (V2) Model Runner", ("model_runner",)),
        ("max_cudagraph_capture_size", r"Truncating max_cudagraph_capture_size to ([\d,]+)",
         ("capture_truncated_to",)),
        ("cudagraph capture sizes",
         r"[Cc]apping cudagraph capture sizes from max [\d,]+ to ([\d,]+)", ("capture_capped_to",)),
        ("init engine", r"init engine \(.*\) took ([\d.]+) s", ("engine_init_s",)),
        ("batched_tokens", r"enabled with max_num_batched_tokens=([\d,]+)",
         ("max_num_batched_tokens",)),
        ("gpu-memory-utilization", r"current --gpu-memory-utilization=([\d.]*\d)",
         ("gpu_memory_utilization",)),
    )
)  # fmt: skip

_BACKEND = re.compile(
    r"Using (?:AttentionBackendEnum\.)?(?P<name>\w+) "
    r"(?P<kind>attention|Attention|(?:\w+ )*MoE)? ?backend\b"
)
_ASKED = tuple(
    (name, re.compile(rf"'{name}': ([\d.]+)"))
    for name in (
        "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
        "num_speculative_tokens",
    )
)  # fmt: skip
_RUNNING = (
    ("_sequence_tokens", re.compile(r"[ (]max_seq_len=(\d+)")),
    ("kv_cache_dtype", re.compile(r"[ (]kv_cache_dtype=([\w'\".]+)")),
    ("quantization", re.compile(r"[ (]quantization=([\w'\"-]+)")),
    ("spec_method", re.compile(r"speculative_config=SpeculativeConfig\(method='(\w+)'")),
    ("spec_tokens", re.compile(r"num_spec(?:ulative)?_tokens=(\d+)")),
    ("cudagraph_mode", re.compile(r"'cudagraph_mode': <CUDAGraphMode\.(\w+)")),
    ("max_capture_size", re.compile(r"'max_cudagraph_capture_size': (\d+)")),
)


def evidence(log: Iterable[str]) -> Pairs:
    """Return sizes, the window, the version and what really runs, of the last boot."""
    facts = _Facts()
    for line in _lines(log):
        facts.read(line)
    return facts.pairs()


# --- reading the log --------------------------------------------------------------------------


@dataclass(slots=True)
class Cause:
    """The first line that says why, and what stood around it."""

    sign: _Sign
    line: str
    then: Phase
    up: bool
    trace: str
    after: list[str] = field(default_factory=list)
    exception: str = ""

    def text(self) -> str:
        """Return the line and what stood around it."""
        return "\n".join((self.trace, self.line, *self.after))


@dataclass(slots=True)
class _Memory:
    """What the allocator said of one allocation, in bytes."""

    requested: int | None = None
    free: int | None = None
    total: int | None = None

    def read(self, line: str) -> None:
        if self.requested is None and (found := TRIED.search(line)) is not None:
            self.requested = size_of(found[1], found[2])
        if self.total is None and (found := _CAPACITY.search(line)) is not None:
            # Older wording has the same numbers in other groups.
            number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
            self.total = size_of(number, unit)
            number, unit = (found[5], found[6]) if found[5] else (found[7], found[8])
            self.free = size_of(number, unit)


TRIED = re.compile(r"[Tt]ried to allocate " + AMOUNT)
_CAPACITY = re.compile(
    rf"(?:total capacity of {AMOUNT}|{AMOUNT} total capacity;).*?"
    rf"(?:of which {AMOUNT} is free|; {AMOUNT} free)"
)


@dataclass(slots=True)
class Reading:
    """A log, read once from top to bottom, keeping what decides."""

    facts: _Facts = field(default_factory=_Facts)
    phase: Phase = Phase.SPAWN
    up: bool = False
    marked: bool = False
    kin: bool = False
    foreign: bool = False
    stopped: bool = False
    boot_failed: str = ""
    died: str = ""
    cause: Cause | None = None
    survived: Cause | None = None
    earlier: tuple[Cause | None, Phase, bool, str] | None = None
    memory: _Memory = field(default_factory=_Memory)
    last: str = ""
    last_error: str = ""
    compiling: str = ""
    waits_at_the_end: bool = False
    shm_waits: int = 0
    idle_waits: int = 0
    stats_line: str = ""
    stats: tuple[float, ...] = ()
    http_500: str = ""
    context_400: str = ""
    chat_template: str = ""
    observed: str = ""
    unspeculative: str = ""
    worker_gone: str = ""
    on_cpu: bool = False
    booted: bool = False
    drafts: list[tuple[float, str]] = field(default_factory=list)
    drafted: int | None = None
    in_trace: bool = False
    trace: deque[str] = field(default_factory=lambda: deque(maxlen=150))
    validation_lines: int = 0
    after_fatal: bool = False

    def feed(self, line: str) -> None:
        """Take one line."""
        if not line.strip():
            return
        level = _level(line)
        if not self.marked:
            self.marked = _MARK.search(line) is not None
            self.kin = self.kin or _KIN.search(line) is not None
            self.foreign = self.foreign or _FOREIGN.search(line) is not None
        quiet = level in ("DEBUG", "INFO", "WARNING")
        if self.up and quiet and not any(word in line for word in _TELLING):
            # A served log may be long, and nearly all of it is this.
            self._moved_on(line)
            return
        if _RESTART.search(line) and (self.cause is not None or self.died or self.stopped):
            self._begin_again()
        self.facts.read(line)
        low = line.lower()
        if any(word in low for word in _STEPS):
            self._milestone(line)
        self._observe(line)
        self._moved_on(line)
        if self.stopped:
            # Told to stop, its processes complain of each other's end.
            return
        if not quiet and "Warning:" not in line and "[W" not in line[:40]:
            self._complaint(line, level, low)
        elif self.cause is not None and len(self.cause.after) < 4:
            self.cause.after.append("")

    def _begin_again(self) -> None:
        if self.cause is not None or self.died:
            self.earlier = (self.cause, self.phase, self.up, self.died)
        self.phase, self.up, self.stopped = Phase.SPAWN, False, False
        self.cause = self.survived = None
        self.died = self.boot_failed = ""
        self.facts = _Facts()
        self.memory = _Memory()
        self.trace.clear()

    def _milestone(self, line: str) -> None:
        opened = milestone(line)
        if opened is None or _BOOT.index(opened) <= _BOOT.index(self.phase):
            return
        # In an excerpt the text of a failure may come before the line that places it.
        unplaced = self.phase is Phase.SPAWN
        self.phase = opened
        serves = opened in (Phase.READY, Phase.SERVING)
        if self.cause is not None:
            if unplaced and not serves:
                self.cause.then = opened
            elif not self.boot_failed and not self.cause.up and not self.died:
                self.survived, self.cause = (None if serves else self.cause), None
        if serves:
            self.up = True
            self.booted = self.booted or opened is Phase.READY
            self.survived = None

    def _moved_on(self, line: str) -> None:
        """Keep whether the log ends in waiting: for a process, for a block, for a request."""
        self.last = line
        self.waits_at_the_end = _WAITING.search(line) is not None
        if _SHM_WAIT.search(line):
            self.shm_waits += 1
        elif not self.waits_at_the_end and '"GET ' not in line:
            self.shm_waits = 0

    def _observe(self, line: str) -> None:
        if "Avg prompt" in line and (found := _STATS.search(line)) is not None:
            self.stats = tuple(float(each) for each in found.groups())
            prompt, generated, running, waiting = self.stats
            stuck = prompt == 0 and generated == 0 and running + waiting > 0
            # With sequences running, one such interval may be a long prefill; an excerpt that
            # shows nothing else was cut out because of it.
            sure = running == 0 or not self.booted
            self.idle_waits = self.idle_waits + (2 if sure else 1) if stuck else 0
            self.stats_line = line
        if "cceptance" in line:
            self._drafting(line)
        if not self.http_500 and _HTTP_500.search(line):
            self.http_500 = line
        if not self.context_400 and "model" in line and "User-specified" not in line:
            self.context_400 = line if _CONTEXT_400.search(line) else ""
        if not self.chat_template and "emplate" in line and _CHAT_TEMPLATE.search(line):
            self.chat_template = line
        if (
            not self.observed
            and "capture" in line
            and (TRUNCATED.search(line) or CAPPED.search(line))
        ):
            self.observed = line
        if not self.on_cpu and "device_config=cpu" in line:
            self.on_cpu = True
        if not self.unspeculative and "peculative" in line and _UNSPECULATIVE.search(line):
            self.unspeculative = line
        if not self.worker_gone and "died" in line and _WORKER_GONE.search(line):
            self.worker_gone = line
        if not self.stopped and self.up and _SHUTDOWN.search(line):
            self.stopped = True
        if any(word in line for word in _COMPILERS) and _COMPILING.search(_body(line)):
            self.compiling = line

    def _drafting(self, line: str) -> None:
        rate, length = _DRAFT_RATE.search(line), _MEAN_LENGTH.search(line)
        if rate is not None:
            share = (number_of(rate[1]) or 0.0) / 100
        elif length is not None:
            share = max(0.0, (number_of(length[1]) or 1.0) - 1)
        else:
            return
        if (counted := _DRAFTED.search(line)) is not None:
            self.drafted = (self.drafted or 0) + int(number_of(counted[1]) or 0)
        # The best and the last interval tell all that is judged.
        best = max(self.drafts, key=lambda each: each[0], default=(share, line))
        best = max(best, (share, line), key=lambda each: each[0])
        self.drafts = [best, (share, line)]

    def _complaint(self, line: str, level: str, low: str) -> None:
        """Take a line that may say why, at no level or at that of an error."""
        match = _LOGGER.search(line, 0, 200) if level else None
        raw = line[match.end() :] if match is not None else _PROCESS.sub("", line)
        body = raw.strip()
        if self.cause is not None:
            if len(self.cause.after) < 4:
                self.cause.after.append(body[:300])
            if self.cause.sign.name == "memory":
                self.memory.read(line)
        expected = self.in_trace or self.validation_lines > 0
        if not expected and not any(word in low for word in _TROUBLES):
            return
        if _TRACEBACK in line:
            self.in_trace = True
            self.trace.clear()
            return
        if _DIED.search(body):
            self._death(body)
        if _BOOT_FAILED.search(body) and not self.boot_failed:
            self.boot_failed = body
        if self.validation_lines > 0 and raw.startswith(" "):
            self.validation_lines -= 1
            self._try(body.removeprefix("Value error, "), body, raised="ValidationError")
            return
        if self.in_trace and raw.startswith(" "):
            self.trace.append(body[:200])
            return
        found = _EXCEPTION.match(body)
        if found is not None:
            self.in_trace = False
            if "validation error" in body:
                self.validation_lines = 8
        raised = found["type"] if found is not None else ""
        if raised or level in ("ERROR", "CRITICAL"):
            self.last_error = body
        inner = _INNER.search(body)
        self._try(inner["inner"] if inner else body, body, raised=raised or level)
        if found is not None:
            self.trace.clear()

    def _death(self, body: str) -> None:
        during_boot = self.boot_failed or (
            self.phase is not Phase.SPAWN and not self.up and "Dead" in body
        )
        if during_boot or self.died:
            return
        self.died = body
        self.up = True
        if _BOOT.index(self.phase) < _BOOT.index(Phase.SERVING):
            self.phase = Phase.SERVING
        # What a single request complained of before is not why the engine died.
        if self.cause is not None and self.cause.sign.name == "exception":
            self.cause = None

    def _try(self, text: str, body: str, *, raised: str) -> None:
        """Take this as the cause if it is one and none came before it."""
        again = (
            self.cause is not None
            # A KV cache that is too small ends a boot: what follows is another attempt's.
            and self.cause.sign.name is InfeasibleName.OOM_KV_CACHE
            and _MEMORY_SIGN.pattern.search(text) is not None
        )
        open_cause = self.cause is None or again or self.cause.sign.name == "exception"
        if not open_cause or _SURVIVED.search(text):
            return
        sign = next(
            (
                each
                for each in _SIGNS
                if not (each.boot_only and self.up)
                and not (each.raised_only and not raised)
                and each.pattern.search(text)
            ),
            None,
        )
        if sign is not None and sign.name is HostFaultName.DISK_FULL and self._shares_memory():
            sign = _SHM_SIGN
        if self.on_cpu and sign is not None and "DefaultCPUAllocator" in text:
            # The host's memory is the device's own here, so the phase tells what it was for.
            sign = _MEMORY_SIGN
        if sign is None:
            if self.cause is not None or raised in ("", "ERROR", "CRITICAL"):
                return
            if _WRAPPER.search(body) or (raised == "ValidationError" and text.startswith("For ")):
                return
            sign = _EXCEPTION_SIGN
        elif self.cause is not None and not again and not self.after_exception(sign):
            return
        self.cause = Cause(
            sign=sign,
            line=body[:600],
            then=self.phase,
            up=self.up,
            trace="\n".join(self.trace),
            exception=raised,
        )
        if sign.name == "memory":
            self.memory = _Memory()
            self.memory.read(text)

    def after_exception(self, sign: _Sign) -> bool:
        """Tell whether a sign says more than the nameless exception before it."""
        assert self.cause is not None
        generic = self.cause.sign.name == "exception"
        return generic and sign.name not in (BrokenName.PORT_IN_USE, "fault", "hang")

    def _shares_memory(self) -> bool:
        return any("shared_memory" in each or "shm" in each for each in self.trace)

    def recall(self) -> None:
        """Go back to the failure of an earlier boot in the same log, if this one shows none."""
        if self.cause is None and not self.died and self.earlier is not None:
            self.cause, self.phase, self.up, self.died = self.earlier

    def finding(
        self, explanation: str, cause: str = "", *, phase: Phase | None = None,
        facts: Mapping[str, Scalar] | None = None, try_next: Mapping[str, Scalar] | None = None,
    ) -> Finding:  # fmt: skip
        """Return a finding of the phase that was reached, where no other is given."""
        return Finding(
            phase=phase if phase is not None else self._phase(),
            cause=_body(cause)[:600] if cause else "",
            explanation=explanation,
            facts=Pairs(facts or {}),
            try_next=Pairs(try_next or {}),
        )

    def _phase(self) -> Phase:
        return Phase.SERVING if self.up else self.phase

    def settled(self) -> Finding:
        """Return the finding of a log without trouble."""
        if self.up:
            return Finding(phase=Phase.READY, cause="", explanation="It came up and served.")
        return Finding(
            phase=self.phase, cause="", explanation="As far as the log goes, nothing went wrong."
        )


_COMPILERS = ("nvcc", "c++", "g++", "cicc", "ptxas")
_STEPS = (
    "application startup", "uvicorn running", "throughput", "specdecoding", "http/", "init engine",
    "warming up", "starting", "graph", "model loading", "weights", "profiling", "torch.compile",
    "dynamo", "kv cache", "concurrency", "auto-fit", "overriding", "blocks:", "drafter", "draft",
    "speculator", "loading", "load model", "backend", "initializing", "world_size", "world size",
    "model runner", "non-default", "server version", "resolved arch", "version",
)  # fmt: skip
"""Words, one of which is in every line that opens a phase: finding words is what is fast."""
_TROUBLES = (
    "error", "fail", "exception", "memory", "not", "n't", "unable", "support", "invalid",
    "incompatib", "incomplete", "no ", "cuda", "driver", "bus", "space", "nvcc", "ninja", "ptx",
    "nvrtc", "compil", "gated", "address", "in use", "less", "exceed", "cache", "alloc",
    "architecture", "choice", "must", "should", "require", "conflict", "exclusive", "divisible",
    "resource", "time", "watchdog", "seg", "sig", "nccl", "ecc", "fallen", "dump", "unknown",
    "unexpected", "extra inputs", "than", "missing", "corrupt", "oom", "kill", "restricted",
    "recogniz", "glibc", "multiple of", "capability", "install", "quota", "illegal", "align",
    "assert", "launch", "input", "undefined", "shm", "errno", "offline", "header", "inuse",
    "user-specified", "vocabulary", "encountered", "dead", "died", "traceback", "need", "without",
    "maximum", "result_",
)  # fmt: skip
"""Likewise for every line that may say why an engine failed."""
_TELLING = (
    "throughput", "cceptance", "shared memory", "non-default args", "server version", "emplate",
    "context length", "model length", "max_model_len", '" 50', "hutdown", "hutting", "signal",
    "capture", "core engine proc", "version ", "died unexpectedly", "peculative decoding",
)  # fmt: skip
"""Words of the lines that still matter once it serves."""
_MEMORY_SIGN = next(each for each in _SIGNS if each.name == "memory")
_SHM_SIGN = next(each for each in _SIGNS if each.name is BrokenName.SHM_EXHAUSTED)
_EXCEPTION_SIGN = _sign("exception", r"", "the engine refused to start")


def read(last: Iterable[str], log: Iterable[str]) -> Reading:
    """Return what decides of a log, and of the lines that come after it."""
    reading = Reading()
    for line in _lines(log):
        reading.feed(line)
    for line in _lines(last):
        reading.feed(line)
    reading.recall()
    return reading
