"""One configuration: a frozen Config of wishes, resolved once into a frozen Plan of facts.

Command-line flags, BLOOMERY_* variables and the keyword arguments of the offline API are all derived from the
fields below. This is the only file that reads the environment.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from bloomery.errors import ConfigError

DTYPES = ("auto", "float32", "float16", "bfloat16")
QUANTIZE = ("auto", "int8", "int4", "int4-64", "int3", "int2", "nf4", "fp4", "fp8", "w8a8")
LOAD_FORMATS = ("auto", "dummy")
EXECUTORS = ("auto", "ray")
KV_CACHE_DTYPES = ("auto", "model", "fp8", "int8")
POLICIES = ("auto", "fair", "fcfs")
LOG_FORMATS = ("auto", "human", "json")
PREFIX = "BLOOMERY_"
TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")
# Set by Nsight Systems and Compute, by torch's profiler when driven from outside, and by samplers of Python.
PROFILERS = (
    "NSYS_PROFILING_SESSION_ID",
    "CUDA_INJECTION64_PATH",
    "KINETO_USE_DAEMON",
    "VIZTRACER_ENABLED",
)


def option(
    default: Any, help: str, group: str, choices: tuple[str, ...] | None = None, kind: Any = None
) -> Any:
    """A field that is also a flag and a variable."""
    kind = kind or (type(default) if default is not None else str)
    return dataclasses.field(
        default=default, metadata={"help": help, "group": group, "choices": choices, "kind": kind}
    )


def check(config: Any) -> None:
    for field in dataclasses.fields(config):
        if not field.metadata:
            continue
        value = getattr(config, field.name)
        choices = field.metadata["choices"]
        if choices and value not in choices:
            raise ConfigError(f"{field.name} {value!r} is not one of {', '.join(choices)}")
        if field.metadata["kind"] in (int, float) and value is not None and not value > 0:
            raise ConfigError(f"{field.name} must be positive, not {value!r}")


@dataclass(frozen=True)
class Config:
    model: str | None = None  # the positional argument of every command
    revision: str | None = option(None, "branch, tag or commit of a Hub model", "Model")
    dtype: str = option(
        "auto",
        "precision of weights and activations; auto: the checkpoint's own, float32 on a CPU",
        "Model",
        DTYPES,
    )
    quantize: str = option(
        "auto",
        "round the products of any checkpoint to fewer bits while loading; auto: as stored",
        "Model",
        QUANTIZE,
    )
    load_format: str = option(
        "auto", "dummy: random weights of the right shapes, no file read", "Model", LOAD_FORMATS
    )
    max_model_len: int | None = option(
        None,
        "longest prompt plus answer, in tokens; default: what the model and memory allow",
        "Model",
        kind=int,
    )
    device: str = option("auto", "cpu, cuda, cuda:1; auto: a GPU if there is one", "Hardware")
    threads: int | None = option(
        None, "CPU threads of the model, or of each rank; default: one a core", "Hardware", kind=int
    )
    native: bool = option(
        True,
        "CPU kernels compiled on this machine; without: torch alone, and GGUF's blocks expanded",
        "Hardware",
    )
    memory: float = option(0.9, "share of the GPU's memory to use", "Hardware")
    cuda_graphs: bool = option(True, "capture decode steps as CUDA graphs", "Hardware")
    tp: int = option(
        1, "ranks that share every layer (tensor parallel): shorter steps, much traffic", "Hardware"
    )
    pp: int = option(
        1, "stages of layers (pipeline parallel): more steps at once, little traffic", "Hardware"
    )
    executor: str = option(
        "auto",
        "where ranks live: processes of this machine, or actors of a Ray cluster; auto: here",
        "Hardware",
        EXECUTORS,
    )
    interface: str | None = option(
        None,
        "network interface by which ranks of several machines talk; default: that of Ray's address",
        "Hardware",
    )
    kv_cache_gib: float | None = option(
        None,
        "memory for keys and values, in GiB; default: the rest (GPU), 8,192 positions or one longest sequence (CPU)",
        "Hardware",
        kind=float,
    )
    kv_cache_dtype: str = option(
        "auto",
        "keys and values in 8 bits, a scale a head; model: as dtype; auto: that, float16 beside GGUF weights on a CPU",
        "Hardware",
        KV_CACHE_DTYPES,
    )
    max_num_seqs: int | None = option(
        None, "sequences in one step; default: 272 on a GPU, 64 on a CPU", "Batching", kind=int
    )
    max_num_batched_tokens: int | None = option(
        None,
        "positions computed in one step, longer prompts go in chunks; default: 8192 on a GPU, 512 on a CPU",
        "Batching",
        kind=int,
    )
    prefix_cache: bool = option(
        True, "reuse the keys and values of prompts that begin alike", "Batching"
    )
    deterministic: bool = option(
        False,
        "the same tokens alone and in any batch, chunked, cached or replayed; costs speed",
        "Batching",
    )
    steps_in_flight: int | None = option(
        None,
        "steps queued on the device; default: 2 on a GPU, and up to 8 short ones while no row can change; 1 on a CPU; "
        "at least one a stage",
        "Batching",
        kind=int,
    )
    policy: str = option(
        "auto",
        "fair: short requests never wait for long ones; auto: fair, but fcfs for offline batches",
        "Batching",
        POLICIES,
    )
    target_inter_token_ms: float | None = option(
        None,
        "time between two tokens of a stream, aimed at while prompts are computed; default: by the measured step",
        "Batching",
        kind=float,
    )
    short_request_ms: float | None = option(
        None,
        "a request that takes no longer alone is short; default: 64 measured steps",
        "Batching",
        kind=float,
    )
    block_size: int | None = option(
        None,
        "positions a block of the cache holds; default: 64 on a GPU, 16 on a CPU",
        "Batching",
        kind=int,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.memory > 1:
            raise ConfigError(f"memory is a share of the device, at most 1, not {self.memory!r}")


@dataclass(frozen=True)
class ServerConfig:
    """What `bloomery serve` needs beside the model. Lists are separated by commas."""

    host: str = option("127.0.0.1", "address to listen on; a public one needs an API key", "Server")
    port: int = option(8000, "port to listen on", "Server")
    api_key: str | None = option(None, "keys that let clients in, or @FILE that has them", "Server")
    served_model_name: str | None = option(
        None, "names the model answers to; the first is the one it is listed under", "Server"
    )
    allowed_hosts: str | None = option(
        None, "names clients may call the server by, beside the local ones", "Server"
    )
    cors_origins: str | None = option(None, "pages of other origins that may use the API", "Server")
    open_metrics: bool = option(False, "/metrics without a key", "Server")
    log_format: str = option(
        "auto",
        "one line a request: for people, or as JSON; auto: JSON unless on a terminal",
        "Server",
        LOG_FORMATS,
    )
    limits: str | None = option(
        None, "what clients may ask for, as name=value; GET /info lists all names", "Server"
    )
    otlp_endpoint: str | None = option(
        None,
        "where traces go, by OpenTelemetry's HTTP protocol; needs pip install 'bloomery[otel]'",
        "Server",
    )
    otlp_service_name: str = option("bloomery", "what traces call this server", "Server")
    replicas: int = option(1, "engines behind this one door, each with the whole model", "Server")
    drain_seconds: float = option(
        30.0, "how long running answers may go on after a signal to stop", "Server"
    )

    def __post_init__(self) -> None:
        check(self)
        if not is_local(self.host) and not self.api_key:
            raise ConfigError(
                f"host {self.host} can be reached from other machines, and there is no API key: anybody could use this "
                "server. Set --api-key (or BLOOMERY_API_KEY), or listen on 127.0.0.1"
            )

    @property
    def keys(self) -> tuple[str, ...]:
        """The API keys; from a file, one a line, where its name stands behind an @: nobody can read that in a process
        list."""
        found: list[str] = []
        for item in self.items(self.api_key):
            try:
                found += Path(item[1:]).read_text().split() if item.startswith("@") else [item]
            except OSError as error:
                raise ConfigError(f"api_key: {item[1:]} cannot be read: {error.strerror}") from None
        return tuple(found)

    @staticmethod
    def items(text: str | None) -> tuple[str, ...]:
        return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def is_local(host: str) -> bool:
    return host in ("127.0.0.1", "localhost", "::1") or host.startswith("127.")


Options = type[Config] | type[ServerConfig]


def options(*of: Options) -> Iterator[dataclasses.Field[Any]]:
    return (
        field for kind in of or (Config,) for field in dataclasses.fields(kind) if field.metadata
    )


def from_environment(
    environ: Mapping[str, str] | None = None, of: Options = Config
) -> tuple[dict[str, Any], list[str]]:
    """Values of BLOOMERY_* variables by field, and warnings about variables nobody reads."""
    environ = os.environ if environ is None else environ
    every = {PREFIX + field.name.upper(): field for field in options(Config, ServerConfig)}
    known = {PREFIX + field.name.upper(): field for field in options(of)}
    values: dict[str, Any] = {}
    warnings = []
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        if variable not in every:
            near = difflib.get_close_matches(variable, every, 1)
            warnings.append(
                f"{variable} has no meaning" + (f"; did you mean {near[0]}?" if near else "")
            )
        elif variable in known:
            field = known[variable]
            values[field.name] = parse(field, environ[variable], variable)
    return values, warnings


def variables() -> Mapping[str, str]:
    """All there are: for the launcher, whose names are another project's."""
    return os.environ


def use_interface(name: str) -> None:
    """What this process's communication libraries bind to and listen on; before they are first used."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name


def child_environment() -> dict[str, str]:
    """What a process that we start inherits: everything but secrets, which it has no use for."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in (f"{PREFIX}API_KEY", "API_KEY")
    }


def parse(field: dataclasses.Field[Any], text: str, name: str) -> Any:
    kind = field.metadata["kind"]
    if kind is bool:
        if text.lower() not in (*TRUE, *FALSE):
            raise ConfigError(f"{name} must be true or false, not {text!r}")
        return text.lower() in TRUE
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(
            f"{name} must be {'a whole number' if kind is int else 'a number'}, not {text!r}"
        ) from None


def at_least(least: int | float) -> Callable[[str], Any]:
    """Of a flag that is no option: a number of that kind, no smaller and not without end."""
    kind = type(least)

    def number(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = -inf
        if not least <= value < inf:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} from {least:g} upwards")
        return value

    return number


def destination(text: str) -> Path:
    """Of a flag: where a file will be written; refused before the work whose result it is to hold."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} may not be written")
    return path


def profiler(environ: Mapping[str, str] | None = None) -> str | None:
    """What slows this process down by watching it, if anything does: in Python, or by a variable that it set."""
    if sys.getprofile() is not None or sys.gettrace() is not None:
        return "sys.setprofile or sys.settrace"
    if watching := getattr(sys, "monitoring", None):  # from Python 3.12 on, and cProfile by it
        for tool in range(6):
            if name := watching.get_tool(tool):
                return str(name)
    environ = os.environ if environ is None else environ
    return next((name for name in PROFILERS if environ.get(name)), None)


def device(wish: str) -> str:
    """`auto` is a GPU if the driver has one and torch was built for it."""
    if wish != "auto":
        return wish
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    except (OSError, AttributeError):
        return "cpu"
    return "cuda" if found and count.value > 0 and "+cpu" not in torch_version() else "cpu"


def torch_version() -> str:
    from importlib import metadata  # which takes a while, and is seldom asked

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "+cpu"


def cores() -> int:
    """Physical cores this process may use: threads that share one share its arithmetic."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len({siblings(cpu) for cpu in os.sched_getaffinity(0)})


def siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


@dataclass(frozen=True)
class Plan:
    """What will run where: every default resolved. Printed at start, handed to the workers, never changed."""

    name: str  # what the model is called
    path: str  # folder or .gguf file
    kind: str  # "folder" | "gguf"
    load_format: str
    dtype: str  # never "auto"
    device: str  # never "auto"
    threads: int
    max_length: int
    length_is_wish: bool  # the user named the length, so it may not be lowered to fit
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    memory: float
    kv_bytes: int | None
    prefix_cache: bool
    depth: int  # steps in flight
    graphs: bool = False  # decode steps captured
    native: bool = False  # CPU kernels of our own
    policy: str = "fcfs"
    target_inter_token: float | None = None  # seconds; None: by the measured step
    short_request: float | None = None
    deterministic: bool = False
    quantize: str = "auto"
    kv_cache_dtype: str = "auto"
    tp: int = 1
    pp: int = 1
    executor: str = "auto"
    interface: str | None = None
    first_device: int = 0  # where `device` names no single one: the first GPU of this engine
    shared: bool = False  # its Ray cluster is that of other engines too


def sizes(cpu: bool) -> tuple[int, int]:
    """Positions and sequences of a step unless told otherwise; on a GPU 256 and some for short ones."""
    return (512, 64) if cpu else (8192, 272)


def resolve(
    config: Config, *, name: str, path: str, kind: str, dtype: str, device: str, context: int
) -> Plan:
    """`dtype` is the checkpoint's own, `device` the one found, `context` the model's limit."""
    cpu = device == "cpu"
    ranks = config.tp * config.pp
    if config.max_model_len is not None and config.max_model_len > context:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is beyond the {context} positions {name} was made for; "
            f"ask for at most {context}"
        )
    if config.dtype != "auto":
        dtype = config.dtype
    elif cpu:
        dtype = "float32"  # without bf16 arithmetic a CPU only loses by narrow types
    return Plan(
        name=name,
        path=path,
        kind=kind,
        load_format=config.load_format,
        dtype=dtype,
        device=device,
        threads=config.threads or max(cores() // ranks, 1),
        max_length=config.max_model_len or context,
        length_is_wish=config.max_model_len is not None,
        block_size=config.block_size or (16 if cpu else 64),
        max_num_seqs=config.max_num_seqs or sizes(cpu)[1],
        max_num_batched_tokens=config.max_num_batched_tokens or sizes(cpu)[0],
        memory=config.memory,
        kv_bytes=None if config.kv_cache_gib is None else int(config.kv_cache_gib * 2**30),
        prefix_cache=config.prefix_cache,
        graphs=config.cuda_graphs and not cpu,
        native=config.native and cpu,
        policy="fair" if config.policy == "auto" else config.policy,
        target_inter_token=None
        if config.target_inter_token_ms is None
        else config.target_inter_token_ms / 1000,
        short_request=None if config.short_request_ms is None else config.short_request_ms / 1000,
        deterministic=config.deterministic,
        quantize=config.quantize,
        kv_cache_dtype=config.kv_cache_dtype,
        depth=config.steps_in_flight or max(config.pp, 1 if cpu else 2),
        tp=config.tp,
        pp=config.pp,
        executor=config.executor,
        interface=config.interface,
    )
