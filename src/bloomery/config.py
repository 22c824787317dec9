"""One configuration: a frozen Config of wishes, resolved once into a frozen Plan of facts.

Command-line flags, BLOOMERY_* variables and the keyword arguments of the offline API are all derived from the
fields below. This is the only file that reads the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bloomery.errors import ConfigError

DTYPES = ("auto", "float32", "float16", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")
LOG_FORMATS = ("auto", "human", "json")
PREFIX = "BLOOMERY_"


def option(default: Any, help: str, group: str, choices: tuple[str, ...] | None = None, kind: Any = None) -> Any:
    """A field that is also a flag and a variable."""
    kind = kind or (type(default) if default is not None else str)
    return dataclasses.field(default=default, metadata={"help": help, "group": group, "choices": choices, "kind": kind})


def check(config: Any) -> None:
    for field in dataclasses.fields(config):
        if not field.metadata:
            continue
        value, choices = getattr(config, field.name), field.metadata["choices"]
        if choices and value not in choices:
            raise ConfigError(f"{field.name} {value!r} is not one of {', '.join(choices)}")
        if field.metadata["kind"] in (int, float) and value is not None and not value > 0:
            raise ConfigError(f"{field.name} must be positive, not {value!r}")


@dataclass(frozen=True)
class Config:
    model: str | None = None  # the positional argument of every command
    revision: str | None = option(None, "branch, tag or commit of a Hub model", "Model")
    dtype: str = option(
        "auto", "precision of weights and activations; auto: the checkpoint's own, float32 on a CPU", "Model", DTYPES
    )
    load_format: str = option("auto", "dummy: random weights of the right shapes, no file read", "Model", LOAD_FORMATS)
    max_model_len: int | None = option(
        None, "longest prompt plus answer, in tokens; default: what the model and memory allow", "Model", kind=int
    )
    device: str = option("auto", "cpu, cuda, cuda:1; auto: a GPU if there is one", "Hardware")
    threads: int | None = option(None, "CPU threads of the model; default: one a core", "Hardware", kind=int)
    memory: float = option(0.9, "share of the GPU's memory to use", "Hardware")
    cuda_graphs: bool = option(True, "capture decode steps as CUDA graphs", "Hardware")
    kv_cache_gib: float | None = option(
        None,
        "memory for keys and values, in GiB; default: what is left (GPU), a quarter of what is free up to 4 (CPU)",
        "Hardware",
        kind=float,
    )
    max_sequences: int | None = option(
        None, "sequences in one step; default: 256 on a GPU, 64 on a CPU", "Batching", kind=int
    )
    max_batch_tokens: int | None = option(
        None,
        "positions computed in one step, longer prompts go in chunks; default: 8192 on a GPU, 512 on a CPU",
        "Batching",
        kind=int,
    )
    prefix_cache: bool = option(True, "reuse the keys and values of prompts that begin alike", "Batching")
    steps_in_flight: int | None = option(
        None, "steps queued on the device; default: 2 on a GPU, 1 on a CPU", "Batching", kind=int
    )
    block_size: int | None = option(
        None, "positions a block of the cache holds; default: 64 on a GPU, 16 on a CPU", "Batching", kind=int
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
    api_key: str | None = option(None, "keys that let clients in", "Server")
    served_model_name: str | None = option(
        None, "names the model answers to; the first is the one it is listed under", "Server"
    )
    allowed_hosts: str | None = option(None, "names clients may call the server by, beside the local ones", "Server")
    cors_origins: str | None = option(None, "pages of other origins that may use the API", "Server")
    open_metrics: bool = option(False, "/metrics without a key", "Server")
    log_format: str = option(
        "auto", "one line a request: for people, or as JSON; auto: JSON unless on a terminal", "Server", LOG_FORMATS
    )
    drain_seconds: float = option(30.0, "how long running answers may go on after a signal to stop", "Server")

    def __post_init__(self) -> None:
        check(self)
        if not is_local(self.host) and not self.api_key:
            raise ConfigError(
                f"host {self.host} can be reached from other machines, and there is no API key: anybody could use this "
                "server. Set --api-key (or BLOOMERY_API_KEY), or listen on 127.0.0.1"
            )

    @staticmethod
    def items(text: str | None) -> tuple[str, ...]:
        return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def is_local(host: str) -> bool:
    return host in ("127.0.0.1", "localhost", "::1") or host.startswith("127.")


Options = type[Config] | type[ServerConfig]


def options(*of: Options) -> Iterator[dataclasses.Field[Any]]:
    return (field for kind in of or (Config,) for field in dataclasses.fields(kind) if field.metadata)


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
            warnings.append(f"{variable} has no meaning" + (f"; did you mean {near[0]}?" if near else ""))
        elif variable in known:
            field = known[variable]
            values[field.name] = parse(field, environ[variable], variable)
    return values, warnings


def parse(field: dataclasses.Field[Any], text: str, name: str) -> Any:
    kind = field.metadata["kind"]
    if kind is bool:
        words = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if text.lower() not in words:
            raise ConfigError(f"{name} must be true or false, not {text!r}")
        return words[text.lower()]
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name} must be {'a whole number' if kind is int else 'a number'}, not {text!r}") from None


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    max_sequences: int
    max_batch_tokens: int
    memory: float
    kv_bytes: int | None
    prefix_cache: bool
    depth: int  # steps in flight
    graphs: bool = False  # decode steps captured


def resolve(config: Config, *, name: str, path: str, kind: str, dtype: str, device: str, context: int) -> Plan:
    """`dtype` is the checkpoint's own, `device` the one found, `context` the model's limit."""
    cpu = device == "cpu"
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
        threads=config.threads or cores(),
        max_length=config.max_model_len or context,
        length_is_wish=config.max_model_len is not None,
        block_size=config.block_size or (16 if cpu else 64),
        max_sequences=config.max_sequences or (64 if cpu else 256),
        max_batch_tokens=config.max_batch_tokens or (512 if cpu else 8192),
        memory=config.memory,
        kv_bytes=None if config.kv_cache_gib is None else int(config.kv_cache_gib * 2**30),
        prefix_cache=config.prefix_cache,
        graphs=config.cuda_graphs and not cpu,
        depth=config.steps_in_flight or (1 if cpu else 2),
    )
