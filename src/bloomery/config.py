"""Configuration: the user's options (EngineConfig) and the resolved plan (EnginePlan).

Command-line flags, BLOOMERY_* environment variables, the keys of a configuration file and keyword
arguments of the offline `LLM` are all derived from the dataclass fields below, so an option is
declared once. `resolve_plan` replaces every default by a value and returns an immutable EnginePlan.

This is the only module that reads the process environment. It must not import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import difflib
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from bloomery.errors import ConfigError

log = logging.getLogger("bloomery")

DTYPES = ("auto", "float32", "float16", "bfloat16")
QUANTIZATIONS = ("auto", "int8", "int4", "int4-64", "int3", "int2", "nf4", "fp4", "fp8", "w8a8")
LOAD_FORMATS = ("auto", "dummy")
EXECUTORS = ("auto", "ray")
KV_CACHE_DTYPES = ("auto", "model", "fp8", "int8")
POLICIES = ("auto", "fair", "fcfs")
LOG_FORMATS = ("auto", "human", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULT_MAX_CPU_LORAS = 64  # adapters of an 8B model at rank 16 have 5 GiB then
MAX_PORT = 65535

ENVIRONMENT_PREFIX = "BLOOMERY_"
TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")
SECRET_VARIABLES = (f"{ENVIRONMENT_PREFIX}API_KEY", "API_KEY")
MODEL_VARIABLE = f"{ENVIRONMENT_PREFIX}MODEL"
CONFIG_VARIABLE = f"{ENVIRONMENT_PREFIX}CONFIG"
CACHE_VARIABLE = f"{ENVIRONMENT_PREFIX}CACHE_DIR"

# Environment variables set by Nsight Systems, Nsight Compute, torch's Kineto daemon and VizTracer.
PROFILER_VARIABLES = (
    "NSYS_PROFILING_SESSION_ID",
    "CUDA_INJECTION64_PATH",
    "KINETO_USE_DAEMON",
    "VIZTRACER_ENABLED",
)
# How often a thread of torch polls for work before it sleeps (libgomp). By default it polls for
# milliseconds, which takes cores from the native CPU kernels and the server.
TORCH_POLLS = ("GOMP_SPINCOUNT", "10000")
TORCH_WAIT_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # with which a user decides
NUM_MONITORING_TOOLS = 6  # tool ids that sys.monitoring has


# ---- options -------------------------------------------------------------------------------------


def option(
    default: Any,
    help: str,
    group: str,
    choices: tuple[str, ...] | None = None,
    kind: Any = None,
    alias: str | None = None,
    is_list: bool = False,
) -> Any:
    """Declare a dataclass field that is also a command-line flag and an environment variable.

    `group` is its heading in the help text, `kind` the type of its value, `alias` a second flag.
    A flag with `is_list` takes several values and may be repeated; in a text they are separated by
    commas.
    """
    if kind is None:
        kind = str if default is None else type(default)
    metadata = {
        "help": help,
        "group": group,
        "choices": choices,
        "kind": kind,
        "alias": alias,
        "is_list": is_list,
    }
    return dataclasses.field(default=default, metadata=metadata)


def check_values(config: Any) -> None:
    """Raise ConfigError for a value that is not among the choices, or a number that is not > 0."""
    for field in dataclasses.fields(config):
        if not field.metadata:
            continue
        value = getattr(config, field.name)
        choices = field.metadata["choices"]
        if choices and value not in choices:
            raise ConfigError(f"{field.name} {value!r} is not one of {', '.join(choices)}")
        is_number = field.metadata["kind"] in (int, float)
        if is_number and value is not None and not value > 0:
            raise ConfigError(f"{field.name} must be positive, not {value!r}")


@dataclass(frozen=True)
class EngineConfig:
    """Options of the model and the engine, as the user gave them."""

    model: str | None = None  # the positional argument of every command
    revision: str | None = option(None, "branch, tag or commit of a Hub model", "Model")
    dtype: str = option(
        "auto",
        "precision of weights and activations; auto: the checkpoint's own, float32 on a CPU",
        "Model",
        DTYPES,
    )
    quantization: str = option(
        "auto",
        "quantize the linear layers of any checkpoint while loading; auto: as stored",
        "Model",
        QUANTIZATIONS,
    )
    load_format: str = option(
        "auto",
        "dummy: random weights of the right shapes, no weight file is read",
        "Model",
        LOAD_FORMATS,
    )
    max_model_len: int | None = option(
        None,
        "longest prompt plus output, in tokens; default: what the model and memory allow",
        "Model",
        kind=int,
    )
    chat_template: str | None = option(
        None, "file with a Jinja chat template; default: the model's own", "Model"
    )
    response_format: str | None = option(
        None,
        "file that says how the model writes reasoning and tool calls; "
        "default: derived from its chat template",
        "Model",
    )
    device: str = option("auto", "cpu, cuda, cuda:1; auto: a GPU if there is one", "Hardware")
    threads: int | None = option(
        None,
        "CPU threads of the model, or of each rank; default: one per physical core",
        "Hardware",
        kind=int,
    )
    cpu_kernels: bool = option(
        True,
        "use CPU kernels compiled on this machine; without them torch alone computes, "
        "and GGUF weights are dequantized",
        "Hardware",
    )
    gpu_memory_utilization: float = option(0.9, "share of the GPU's memory to use", "Hardware")
    cuda_graphs: bool = option(True, "capture decode steps as CUDA graphs", "Hardware")
    tensor_parallel_size: int = option(
        1,
        "tensor parallel ranks, which share every layer: shorter steps, much communication",
        "Hardware",
        alias="--tp",
    )
    pipeline_parallel_size: int = option(
        1,
        "pipeline stages, which share the list of layers: more steps at once, little communication",
        "Hardware",
        alias="--pp",
    )
    executor: str = option(
        "auto",
        "where ranks run: processes of this machine (auto), or actors of a Ray cluster (ray)",
        "Hardware",
        EXECUTORS,
    )
    interface: str | None = option(
        None,
        "network interface for communication between machines; default: that of Ray's address",
        "Hardware",
    )
    cache_dir: str | None = option(
        None,
        "folder for compiled kernels, measurements and the GPU's caches; "
        "default: ~/.cache/bloomery",
        "Hardware",
    )
    kv_cache_gib: float | None = option(
        None,
        "size of the KV cache in GiB; default: the rest of the memory (GPU), "
        "8,192 positions or one sequence of max_model_len (CPU)",
        "Hardware",
        kind=float,
    )
    kv_cache_dtype: str = option(
        "auto",
        "fp8 and int8: 8 bits and one scale per head; model: same as dtype; "
        "auto: same as dtype, but on a CPU float16 for GGUF and with --quantization",
        "Hardware",
        KV_CACHE_DTYPES,
    )
    max_num_seqs: int | None = option(
        None, "most sequences in one step; default: 272 on a GPU, 64 on a CPU", "Batching", kind=int
    )
    max_num_batched_tokens: int | None = option(
        None,
        "most tokens computed in one step; longer prompts are prefilled in chunks; "
        "default: 8192 on a GPU, 512 on a CPU",
        "Batching",
        kind=int,
    )
    prefix_cache: bool = option(
        True, "reuse the KV cache of prompts that begin with the same tokens", "Batching"
    )
    deterministic: bool = option(
        False,
        "batch-invariant: the same tokens alone and in any batch, chunked or cached; slower",
        "Batching",
    )
    steps_in_flight: int | None = option(
        None,
        "steps queued on the device; default: 1 on a CPU, 2 on a GPU (up to 8 short ones while "
        "the batch cannot change), at least one per pipeline stage",
        "Batching",
        kind=int,
    )
    policy: str = option(
        "auto",
        "scheduling policy; fair: short requests do not wait for long ones; fcfs: first come, "
        "first served; auto: fair, but fcfs for offline batches",
        "Batching",
        POLICIES,
    )
    target_inter_token_ms: float | None = option(
        None,
        "inter-token latency (ITL) to aim at while prompts are prefilled; "
        "default: derived from the measured step time",
        "Batching",
        kind=float,
    )
    short_request_ms: float | None = option(
        None,
        "a request that takes no longer than this alone counts as short; "
        "default: 64 measured steps",
        "Batching",
        kind=float,
    )
    block_size: int | None = option(
        None,
        "tokens in one block of the KV cache; default: 64 on a GPU, 16 on a CPU",
        "Batching",
        kind=int,
    )

    enable_lora: bool = option(
        False, "serve LoRA adapters; --lora-modules and --lora-allow imply it", "LoRA"
    )
    max_loras: int = option(
        8, "adapters on the device at once: a step may mix requests of this many", "LoRA"
    )
    max_lora_rank: int = option(16, "largest rank of an adapter", "LoRA")
    max_cpu_loras: int | None = option(
        None,
        "adapters in host memory; others are read from disk when a request needs them; "
        "default: 64, at least max_loras",
        "LoRA",
        kind=int,
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.gpu_memory_utilization > 1:
            raise ConfigError(
                f"gpu_memory_utilization is a share of the device, at most 1, "
                f"not {self.gpu_memory_utilization!r}"
            )


@dataclass(frozen=True)
class ServerConfig:
    """Options of the HTTP server that `bloomery serve` starts. Lists are separated by commas."""

    host: str = option("127.0.0.1", "address to listen on; a public one needs an API key", "Server")
    port: int = option(8000, "port to listen on", "Server")
    api_key: str | None = option(None, "accepted API keys, or @FILE that lists them", "Server")
    served_model_name: str | None = option(
        None, "names of the model in requests; the first is the one /v1/models lists", "Server"
    )
    allowed_hosts: str | None = option(
        None, "accepted Host headers, besides the local names", "Server"
    )
    ssl_certfile: str | None = option(
        None, "PEM file with the certificate chain, to serve HTTPS", "Server"
    )
    ssl_keyfile: str | None = option(None, "PEM file with the certificate's private key", "Server")
    cors_origins: str | None = option(None, "other origins whose pages may use the API", "Server")
    open_metrics: bool = option(False, "serve /metrics without a key", "Server")
    log_format: str = option(
        "auto",
        "one log line per request, for people or as JSON; auto: JSON unless on a terminal",
        "Server",
        LOG_FORMATS,
    )
    log_level: str = option(
        "info", "least severe messages to log; debug includes probes", "Server", LOG_LEVELS
    )
    limits: str | None = option(
        None, "limits on requests, as name=value; GET /info lists all names", "Server"
    )
    otlp_endpoint: str | None = option(
        None,
        "where traces go, by OpenTelemetry's HTTP protocol; needs pip install 'bloomery[otel]'",
        "Server",
    )
    otlp_service_name: str = option("bloomery", "name of this server in traces", "Server")
    replicas: int = option(1, "engines behind this server, each with the whole model", "Server")
    drain_seconds: float = option(
        30.0, "how long running requests may continue after a signal to stop", "Server"
    )
    lora_modules: str | None = option(
        None,
        'LoRA adapters, as NAME=PATH or {"name": ..., "path": ...}; a path is a PEFT folder, a '
        ".gguf file or a Hub id",
        "Server",
        is_list=True,
    )
    lora_allow: str | None = option(
        None,
        "folders, and patterns of Hub ids such as org/*, whose LoRA adapters requests may name; "
        "the only ones that clients may load",
        "Server",
        is_list=True,
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.port > MAX_PORT:
            raise ConfigError(f"port must be at most {MAX_PORT}, not {self.port}")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ConfigError("HTTPS needs both ssl_certfile and ssl_keyfile: give both or neither")
        if not is_local_host(self.host) and not self.api_key:
            raise ConfigError(
                f"host {self.host} can be reached from other machines, and there is no API key: "
                "anybody could use this server. Set --api-key (or BLOOMERY_API_KEY), or listen "
                "on 127.0.0.1"
            )

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The accepted API keys.

        An entry @FILE stands for the keys in that file, separated by white space. This keeps keys
        out of process lists.
        """
        keys: list[str] = []
        for entry in self.split_list(self.api_key):
            if not entry.startswith("@"):
                keys.append(entry)
                continue
            path = entry[1:]
            try:
                keys += Path(path).read_text().split()
            except OSError as error:
                raise ConfigError(f"api_key: {path} cannot be read: {error.strerror}") from None
        return tuple(keys)

    @property
    def implies_lora(self) -> bool:
        """Whether LoRA is on although enable_lora was not given."""
        return bool(self.lora_modules or self.lora_allow)

    @staticmethod
    def split_list(text: str | None) -> tuple[str, ...]:
        """Split a comma-separated option into its non-empty entries."""
        entries = (text or "").replace("\n", ",").split(",")
        return tuple(entry.strip() for entry in entries if entry.strip())


def is_local_host(host: str) -> bool:
    return host in ("127.0.0.1", "localhost", "::1") or host.startswith("127.")


ConfigClass = type[EngineConfig] | type[ServerConfig]


def option_fields(*config_classes: ConfigClass) -> Iterator[dataclasses.Field[Any]]:
    """Yield the fields of these classes (default: EngineConfig) that are options."""
    for config_class in config_classes or (EngineConfig,):
        for field in dataclasses.fields(config_class):
            if field.metadata:
                yield field


def flag_name(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def parse_option(field: dataclasses.Field[Any], text: str, name: str) -> Any:
    """Convert the text of a flag or variable to the field's type; `name` is for the error."""
    kind = field.metadata["kind"]
    if kind is bool:
        if text.lower() not in (*TRUE_WORDS, *FALSE_WORDS):
            raise ConfigError(f"{name} must be true or false, not {text!r}")
        return text.lower() in TRUE_WORDS
    try:
        return kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{name} must be {expected}, not {text!r}") from None


# ---- environment and configuration file ----------------------------------------------------------


def variable_name(field: dataclasses.Field[Any]) -> str:
    return ENVIRONMENT_PREFIX + field.name.upper()


def read_environment(
    environ: Mapping[str, str] | None = None, of: ConfigClass = EngineConfig
) -> tuple[dict[str, Any], list[str]]:
    """Read BLOOMERY_* variables.

    Returns the values of the fields of class `of`, and warnings about variables that match no
    option at all.
    """
    environ = os.environ if environ is None else environ
    all_fields = {
        variable_name(field): field for field in option_fields(EngineConfig, ServerConfig)
    }
    requested_names = {field.name for field in option_fields(of)}
    values: dict[str, Any] = {}
    warnings = []
    for variable in sorted(name for name in environ if name.startswith(ENVIRONMENT_PREFIX)):
        text = environ[variable]
        field = all_fields.get(variable)
        if variable == MODEL_VARIABLE and of is EngineConfig:
            values["model"] = text
        elif field is not None and field.name in requested_names:
            values[field.name] = parse_option(field, text, variable)
        elif field is None and variable not in (MODEL_VARIABLE, CONFIG_VARIABLE):
            suggestion = _suggest(variable, [*all_fields, MODEL_VARIABLE, CONFIG_VARIABLE])
            warnings.append(f"{variable} has no meaning{suggestion}")
    return values, warnings


def read_config_file(path: str, of: ConfigClass = EngineConfig) -> dict[str, Any]:
    """Read the fields of class `of` from a TOML file whose keys are the names of flags.

    One file may hold the options of the engine and of the server. An unknown key is refused.
    """
    import tomllib  # only this function needs it

    try:
        keys = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"config: {path} is not valid TOML: {error}") from None
    all_fields = {field.name: field for field in option_fields(EngineConfig, ServerConfig)}
    requested_names = {field.name for field in option_fields(of)}
    values: dict[str, Any] = {}
    for key, value in keys.items():
        name = key.replace("-", "_")
        if name != "model" and name not in all_fields:
            flags = [flag.replace("_", "-") for flag in ("model", *all_fields)]
            suggestion = _suggest(key.replace("_", "-"), flags)
            raise ConfigError(f"config: {path}: there is no option {key!r}{suggestion}")
        text = _text_of_toml(value, f"config: {path}: {key}")
        if name == "model" and of is EngineConfig:
            values[name] = text
        elif name in requested_names:
            values[name] = parse_option(all_fields[name], text, f"config: {path}: {key}")
    return values


def _text_of_toml(value: Any, name: str) -> str:
    """Return a TOML value as its flag would be written: lists and tables separated by commas."""
    match value:
        case bool():
            return "true" if value else "false"
        case str() | int() | float():
            return str(value)
        case list() if all(isinstance(entry, str) for entry in value):
            return ",".join(value)
        case dict() if all(isinstance(entry, int | float | str) for entry in value.values()):
            return ",".join(f"{entry_name}={entry}" for entry_name, entry in value.items())
    raise ConfigError(f"{name} must be a text, a number, true or false, or a list of texts")


def _suggest(name: str, known_names: Iterable[str]) -> str:
    closest = difflib.get_close_matches(name, list(known_names), 1)
    return f"; did you mean {closest[0]}?" if closest else ""


def config_file_variable() -> str | None:
    """The configuration file that BLOOMERY_CONFIG names."""
    return os.environ.get(CONFIG_VARIABLE) or None


def process_environment() -> Mapping[str, str]:
    """All environment variables, for the launcher, which reads TGI's names."""
    return os.environ


def child_environment() -> dict[str, str]:
    """The environment for child processes: everything except API keys, which they do not need.

    Threads of torch sleep soon in it, unless the user has decided how they wait.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    if not any(name in inherited for name in TORCH_WAIT_VARIABLES):
        name, polls = TORCH_POLLS
        inherited[name] = polls
    return inherited


def bind_network_interface(name: str) -> None:
    """Make Gloo and NCCL use this network interface. Must run before either is initialized."""
    os.environ["GLOO_SOCKET_IFNAME"] = name
    os.environ["NCCL_SOCKET_IFNAME"] = name


def active_profiler(environ: Mapping[str, str] | None = None) -> str | None:
    """The name of the profiler or tracer that slows this process down, or None."""
    if sys.getprofile() is not None or sys.gettrace() is not None:
        return "sys.setprofile or sys.settrace"
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12 and later; cProfile uses it
    if monitoring is not None:
        for tool_id in range(NUM_MONITORING_TOOLS):
            if name := monitoring.get_tool(tool_id):
                return str(name)
    environ = os.environ if environ is None else environ
    return next((name for name in PROFILER_VARIABLES if environ.get(name)), None)


# ---- the cache folder ----------------------------------------------------------------------------


def use_cache_directory(cache_dir: str | None) -> Path:
    """Choose the folder of all caches for this process and its children, and return it.

    It is `cache_dir`, else BLOOMERY_CACHE_DIR, else ~/.cache/bloomery. A folder that was asked for
    must be writable. Where the default is not, a folder for temporary files takes its place, which
    the next start may not find again. Must run before Triton or CUDA is initialized.
    """
    requested = cache_dir or os.environ.get(CACHE_VARIABLE)
    folder = Path(requested).expanduser() if requested else _home_cache_directory()
    is_writable = folder is not None and _is_writable(folder)
    if requested and not is_writable:
        raise ConfigError(f"cache_dir: {folder} cannot be written; name a folder that can")
    if folder is None or not is_writable:
        folder = _temporary_cache_directory()
        log.warning(
            "the home directory cannot be written, so compiled kernels and measurements are kept "
            "in %s; --cache-dir FOLDER keeps them elsewhere",
            folder,
        )
    if requested or not is_writable:
        # Child processes follow. Triton and CUDA would use the home directory otherwise.
        os.environ[CACHE_VARIABLE] = str(folder)
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
        os.environ.setdefault("CUDA_CACHE_PATH", str(folder / "cuda"))
    return folder


def cache_directory() -> Path:
    """The folder of all caches: compiled kernels, measurements. It may not exist yet."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else use_cache_directory(None)


def _home_cache_directory() -> Path | None:
    """The default folder; None where the user has no home directory."""
    try:
        return Path.home() / ".cache" / "bloomery"
    except RuntimeError:
        return None


def _temporary_cache_directory() -> Path:
    """A folder that only this user can write, so that no other user can plant a library in it."""
    folder = Path(tempfile.gettempdir()) / f"bloomery-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        if is_private and status.st_uid == os.getuid() and _is_writable(folder):
            return folder
    return Path(tempfile.mkdtemp(prefix="bloomery-"))


def _is_writable(folder: Path) -> bool:
    """Whether files can be created in the folder, which is created if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


# ---- argument types for flags that are not options -----------------------------------------------


def at_least(minimum: int | float) -> Callable[[str], Any]:
    """An argparse type: a finite number of the type of `minimum`, and no smaller."""
    number_type = type(minimum)

    def parse_number(text: str) -> int | float:
        try:
            value = number_type(text)
        except ValueError:
            value = -inf
        if not minimum <= value < inf:
            expected = "a whole number" if number_type is int else "a number"
            message = f"{text!r} is not {expected} of at least {minimum:g}"
            raise argparse.ArgumentTypeError(message)
        return value

    return parse_number


def output_file(text: str) -> Path:
    """An argparse type: a path that can be written. It is checked before the work starts."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} may not be written")
    return path


# ---- hardware defaults ---------------------------------------------------------------------------


def resolve_device(device: str) -> str:
    """Replace `auto` by cuda if the driver reports a GPU and torch has CUDA support, else cpu."""
    if device != "auto":
        return device
    if count_gpus() > 0 and "+cpu" not in installed_torch_version():
        return "cuda"
    return "cpu"


def count_gpus() -> int:
    """Ask the CUDA driver for the number of GPUs, without importing torch."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else count.value


def installed_torch_version() -> str:
    """The version of the installed torch package; "+cpu" when there is none."""
    from importlib import metadata  # slow to import and seldom needed

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "+cpu"


def count_physical_cores() -> int:
    """Count the physical cores this process may use. Hyper-threads share their core's units."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len({_thread_siblings(cpu) for cpu in os.sched_getaffinity(0)})


def _thread_siblings(cpu: int) -> str:
    """The logical CPUs of one physical core, as Linux lists them."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text()
    except OSError:
        return str(cpu)


def default_batch_limits(cpu: bool) -> tuple[int, int]:
    """Defaults of max_num_batched_tokens and max_num_seqs.

    On a GPU, 272 sequences are 256 and a reserve of 16 that the fair policy keeps for short
    requests.
    """
    if cpu:
        return 512, 64
    return 8192, 272


def default_block_size(cpu: bool) -> int:
    """The default of block_size."""
    return 16 if cpu else 64


# ---- the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnginePlan:
    """The resolved configuration of one engine. Printed at start and sent to the workers."""

    name: str  # of the model
    path: str  # checkpoint folder or .gguf file
    kind: str  # "folder" or "gguf"
    load_format: str
    dtype: str  # never "auto"
    device: str  # never "auto"
    threads: int
    max_model_len: int
    max_model_len_is_fixed: bool  # the user set it, so it must not be lowered to fit the memory
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_bytes: int | None
    prefix_cache: bool
    steps_in_flight: int
    cuda_graphs: bool = False
    cpu_kernels: bool = False
    policy: str = "fcfs"
    target_inter_token_seconds: float | None = None  # None: derived from the measured step time
    short_request_seconds: float | None = None  # None: derived from the measured step time
    deterministic: bool = False
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    executor: str = "auto"
    interface: str | None = None
    first_device: int = 0  # index of this engine's first GPU, when `device` has no index
    text_part_only: bool = False  # a vision model, of which only the text part is served
    shares_ray_cluster: bool = False  # other engines use the same Ray cluster
    enable_lora: bool = False
    max_loras: int = 8  # device slots
    max_lora_rank: int = 16
    max_cpu_loras: int = DEFAULT_MAX_CPU_LORAS
    lora_folders: tuple[str, ...] = ()  # adapters below them have no links out of them


def resolve_plan(
    config: EngineConfig,
    *,
    name: str,
    path: str,
    kind: str,
    dtype: str,
    device: str,
    context: int,
) -> EnginePlan:
    """Resolve every default of `config`.

    `dtype` is the checkpoint's own, `device` the resolved device, and `context` the longest
    sequence the model supports.
    """
    cpu = device == "cpu"
    if config.max_model_len is not None and config.max_model_len > context:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the {context} positions that "
            f"{name} supports; ask for at most {context}"
        )
    if config.dtype != "auto":
        dtype = config.dtype
    elif cpu:
        dtype = "float32"  # CPUs without bf16 arithmetic are slower with narrower types
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    default_num_tokens, default_num_seqs = default_batch_limits(cpu)
    default_steps_in_flight = max(config.pipeline_parallel_size, 1 if cpu else 2)
    kv_cache_bytes = None
    if config.kv_cache_gib is not None:
        kv_cache_bytes = int(config.kv_cache_gib * 2**30)
    return EnginePlan(
        name=name,
        path=path,
        kind=kind,
        load_format=config.load_format,
        dtype=dtype,
        device=device,
        threads=config.threads or max(count_physical_cores() // num_ranks, 1),
        max_model_len=config.max_model_len or context,
        max_model_len_is_fixed=config.max_model_len is not None,
        block_size=config.block_size or default_block_size(cpu),
        max_num_seqs=config.max_num_seqs or default_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or default_num_tokens,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_bytes=kv_cache_bytes,
        prefix_cache=config.prefix_cache,
        steps_in_flight=config.steps_in_flight or default_steps_in_flight,
        cuda_graphs=config.cuda_graphs and not cpu,
        cpu_kernels=config.cpu_kernels and cpu,
        policy="fair" if config.policy == "auto" else config.policy,
        target_inter_token_seconds=_to_seconds(config.target_inter_token_ms),
        short_request_seconds=_to_seconds(config.short_request_ms),
        deterministic=config.deterministic,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        executor=config.executor,
        interface=config.interface,
        enable_lora=config.enable_lora,
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        max_cpu_loras=resolve_max_cpu_loras(config.max_loras, config.max_cpu_loras),
    )


def resolve_max_cpu_loras(max_loras: int, max_cpu_loras: int | None) -> int:
    """Return how many adapters host memory holds, which are at least those on the device."""
    max_cpu_loras = max_cpu_loras or max(DEFAULT_MAX_CPU_LORAS, max_loras)
    if max_cpu_loras < max_loras:
        raise ConfigError(
            f"max_cpu_loras {max_cpu_loras} is less than max_loras {max_loras}, but an adapter on "
            "the device is in host memory, too: raise max_cpu_loras or lower max_loras"
        )
    return max_cpu_loras


def _to_seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
