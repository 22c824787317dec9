"""`text-generation-launcher`: starts Bloomery with text-generation-inference's (TGI's) flags.

A table maps TGI's flags, each of which is also an environment variable in capitals, to Bloomery's
options. A flag that has no meaning here is accepted with a warning. This module only translates;
`bloomery serve` does the rest.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from bloomery import __version__
from bloomery.config import (
    ConfigClass,
    EngineConfig,
    ServerConfig,
    is_local_host,
    option_fields,
    parse_option,
    process_environment,
    read_environment,
)
from bloomery.errors import BloomeryError, ConfigError

log = logging.getLogger("bloomery")

# TGI's --quantize values, and ours.
TGI_QUANTIZATIONS = {
    "bitsandbytes": "int8",
    "bitsandbytes-nf4": "nf4",
    "bitsandbytes-fp4": "fp4",
    "eetq": "int8",
    "fp8": "fp8",
}
# TGI's --quantize values for quantized checkpoints. Bloomery recognizes these when it reads them.
CHECKPOINT_FORMATS = ("awq", "compressed-tensors", "exl2", "gptq", "marlin")
LIMIT_PREFIX = "limits."


@dataclass(frozen=True)
class TgiFlag:
    """One flag of TGI's launcher."""

    name: str
    option: str = ""  # Bloomery's option, or limits.NAME; empty: no meaning here
    why: str = ""  # the reason why the flag, or a part of its values, has no meaning
    switch: bool = False  # takes no value
    short: str = ""
    variable: bool = True  # also read from the environment

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")


RANKS_CONNECT = "ranks find each other without it"
CHUNKED_PREFILL = "prompts are prefilled in chunks while other requests decode"
USE_HUB_CACHE = "set HF_HUB_CACHE"
NO_TUNNELS = "this server opens no tunnels"
TGI_FLAGS = (
    TgiFlag("model-id", "model"),
    TgiFlag("revision", "revision"),
    TgiFlag("validation-workers", why="text is tokenized by the server itself"),
    TgiFlag("sharded", why="give --num-shard"),
    TgiFlag("num-shard", "tensor_parallel_size"),
    TgiFlag("quantize", "quantization"),
    TgiFlag("speculate", why="there is no speculative decoding yet"),
    TgiFlag("dtype", "dtype"),
    TgiFlag("kv-cache-dtype", "kv_cache_dtype", "fp8 is 8 bits with a scale per head here"),
    TgiFlag("trust-remote-code", why="no code of a checkpoint is ever run", switch=True),
    TgiFlag("max-concurrent-requests", LIMIT_PREFIX + "requests"),
    TgiFlag("max-best-of", LIMIT_PREFIX + "best_of"),
    TgiFlag("max-stop-sequences", LIMIT_PREFIX + "stop_strings"),
    TgiFlag("max-top-n-tokens", LIMIT_PREFIX + "top_n_tokens"),
    TgiFlag("max-input-tokens", why="a prompt may have one token less than --max-total-tokens"),
    TgiFlag("max-input-length", why="a prompt may have one token less than --max-total-tokens"),
    TgiFlag("max-total-tokens", "max_model_len"),
    TgiFlag("waiting-served-ratio", why=CHUNKED_PREFILL),
    TgiFlag("max-batch-prefill-tokens", "max_num_batched_tokens"),
    TgiFlag(
        "max-batch-total-tokens",
        why="the KV cache takes all free memory, see --cuda-memory-fraction",
    ),
    TgiFlag("max-waiting-tokens", why=CHUNKED_PREFILL),
    TgiFlag("max-batch-size", "max_num_seqs"),
    TgiFlag(
        "cuda-graphs",
        "cuda_graphs",
        "0 turns them off; otherwise the sizes are chosen automatically",
    ),
    TgiFlag("hostname", "host"),
    TgiFlag("port", "port", short="-p"),
    TgiFlag("prometheus-port", why="metrics are at /metrics of the server's own port"),
    TgiFlag("shard-uds-path", why=RANKS_CONNECT),
    TgiFlag("master-addr", why=RANKS_CONNECT),
    TgiFlag("master-port", why=RANKS_CONNECT),
    TgiFlag("huggingface-hub-cache", why=USE_HUB_CACHE),
    TgiFlag("weights-cache-override", why=USE_HUB_CACHE),
    TgiFlag("disable-custom-kernels", why="the GPU has no other kernels", switch=True),
    TgiFlag("cuda-memory-fraction", "gpu_memory_utilization"),
    TgiFlag("rope-scaling", why="the checkpoint says how RoPE is scaled"),
    TgiFlag("rope-factor", why="the checkpoint says how RoPE is scaled"),
    TgiFlag("json-output", "log_format", switch=True),
    TgiFlag("otlp-endpoint", "otlp_endpoint", "by HTTP, whose port is 4318, not by gRPC"),
    TgiFlag("otlp-service-name", "otlp_service_name"),
    TgiFlag("cors-allow-origin", "cors_origins"),
    TgiFlag("api-key", "api_key"),
    TgiFlag("watermark-gamma", why="watermarks have TGI's defaults"),
    TgiFlag("watermark-delta", why="watermarks have TGI's defaults"),
    TgiFlag("ngrok", why=NO_TUNNELS, switch=True),
    TgiFlag("ngrok-authtoken", why=NO_TUNNELS),
    TgiFlag("ngrok-edge", why=NO_TUNNELS),
    TgiFlag("tokenizer-config-path", why="the tokenizer's own files are used"),
    TgiFlag(
        "disable-grammar-support", why="grammars cost nothing unless a request has one", switch=True
    ),
    TgiFlag(
        "env", why="the plan is always printed at start", switch=True, short="-e", variable=False
    ),
    TgiFlag("max-client-batch-size", LIMIT_PREFIX + "fan_out"),
    TgiFlag("lora-adapters", "lora_modules"),
    TgiFlag("usage-stats", why="nothing is ever sent anywhere"),
    TgiFlag("payload-limit", LIMIT_PREFIX + "tgi_body_bytes"),
    TgiFlag(
        "enable-prefill-logprobs", why="a request gets them when it asks for them", switch=True
    ),
    TgiFlag("graceful-termination-timeout", "drain_seconds"),
)
# TGI's defaults, on which deployments rely.
DEFAULTS = {"host": "0.0.0.0", "port": "3000"}


# ---- values --------------------------------------------------------------------------------------


def translate_quantization(text: str) -> str:
    if text not in TGI_QUANTIZATIONS and text not in CHECKPOINT_FORMATS:
        known = ", ".join((*TGI_QUANTIZATIONS, *CHECKPOINT_FORMATS))
        raise ConfigError(f"quantize {text!r} is not one of {known}")
    return TGI_QUANTIZATIONS.get(text, "auto")


def translate_hostname(text: str) -> str:
    """Return the address, or all interfaces when `text` is not an address.

    Docker sets HOSTNAME to the container's name. TGI listens on all interfaces then.
    """
    try:
        return str(ip_address(text))
    except ValueError:
        return text if text == "localhost" else DEFAULTS["host"]


def translate_cuda_graphs(text: str) -> str:
    return "false" if text.strip() == "0" else "true"


def translate_json_output(text: str) -> str:
    return "auto" if text.lower() in ("false", "0") else "json"


def translate_kv_cache_dtype(text: str) -> str:
    """TGI's fp8_e4m3fn and fp8_e5m2 become fp8; everything else is checked as our own value."""
    return "fp8" if text.startswith("fp8") else text


VALUE_TRANSLATORS: Mapping[str, Callable[[str], str]] = {
    "quantize": translate_quantization,
    "kv-cache-dtype": translate_kv_cache_dtype,
    "hostname": translate_hostname,
    "cuda-graphs": translate_cuda_graphs,
    "json-output": translate_json_output,
}


# ---- translation ---------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="text-generation-launcher",
        description="Start Bloomery with text-generation-inference's flags and variables. Without "
        "--model-id: the embedded SmolLM2-135M-Instruct. `bloomery serve --help` has Bloomery's "
        "own flags.",
        epilog="Each flag is also a variable: --max-total-tokens is MAX_TOTAL_TOKENS.",
    )
    parser.add_argument("--version", "-V", action="version", version=f"bloomery {__version__}")
    for flag in TGI_FLAGS:
        settings: dict[str, Any] = {"dest": flag.field, "help": flag_help(flag)}
        if flag.switch:
            settings |= {"action": "store_const", "const": "true"}
        elif flag.name == "cors-allow-origin":
            settings["action"] = "append"
        names = [f"--{flag.name}"]
        if flag.short:
            names.insert(0, flag.short)
        parser.add_argument(*names, **settings)
    return parser


def flag_help(flag: TgiFlag) -> str:
    """Bloomery's option for the flag, or the reason why it has no meaning here."""
    target = "no meaning here"
    if flag.option:
        option = flag.option.replace(LIMIT_PREFIX, "limits ").replace("_", "-")
        target = f"--{option}"
    return f"{target}; {flag.why}" if flag.why else target


def read_flags(arguments: Sequence[str] | None, environ: Mapping[str, str]) -> dict[TgiFlag, str]:
    """The texts of all flags that are set. Flags take precedence over variables."""
    args = build_parser().parse_args(arguments)
    flag_values = {}
    for flag in TGI_FLAGS:
        value = getattr(args, flag.field)
        if value is None and flag.variable:
            value = environ.get(flag.field.upper())
        if isinstance(value, list):
            value = ",".join(value)
        if value is not None and value != "":
            flag_values[flag] = value
    return flag_values


def translate_flags(
    flag_values: Mapping[TgiFlag, str], known_options: Iterable[str]
) -> tuple[dict[str, str], list[str]]:
    """Translate to values of Bloomery's options, as text, and warnings about the rest."""
    values = dict[str, str]()
    limits = list[str]()
    warnings = list[str]()
    known_options = {*known_options, "model"}
    for flag, text in flag_values.items():
        if flag.option.startswith(LIMIT_PREFIX):
            limits.append(f"{flag.option.removeprefix(LIMIT_PREFIX)}={text}")
        elif flag.option in known_options:
            translate_value = VALUE_TRANSLATORS.get(flag.name, str)
            values[flag.option] = translate_value(text)
        else:
            warnings.append(f"--{flag.name} has no meaning here: {flag.why}")
    if limits:
        values["limits"] = ",".join(limits)
    return values, warnings


def build_fields(values: dict[str, str], config_class: ConfigClass) -> dict[str, Any]:
    """The values of a configuration class's fields.

    TGI's flags take precedence over BLOOMERY_* variables, and these over TGI's defaults.
    """
    fields, _ = read_environment(of=config_class)
    if config_class is EngineConfig and "model" in values:
        fields["model"] = values["model"]
    for field in option_fields(config_class):
        if field.name in values:
            fields[field.name] = parse_option(field, values[field.name], field.name)
        elif field.name in DEFAULTS and field.name not in fields:
            fields[field.name] = parse_option(field, DEFAULTS[field.name], field.name)
    return fields


def build_server_config(values: dict[str, str]) -> ServerConfig:
    fields = build_fields(values, ServerConfig)
    if not is_local_host(fields["host"]) and not fields.get("api_key"):
        raise ConfigError(
            f"the server would listen on {fields['host']}, as text-generation-inference does, "
            "where other machines can reach it, and there is no API key. Set API_KEY (or "
            "--api-key) and let clients send it as Authorization: Bearer KEY; or set "
            "HOSTNAME=127.0.0.1 (--hostname) to serve this machine only, for instance behind a "
            "proxy"
        )
    return ServerConfig(**fields)


def main(arguments: Sequence[str] | None = None) -> int:
    """Translate the flags, warn about those without meaning, and run the server."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        flag_values = read_flags(arguments, process_environment())
        known_options = [field.name for field in option_fields(EngineConfig, ServerConfig)]
        values, warnings = translate_flags(flag_values, known_options)
        _, environment_warnings = read_environment()
        for warning in (*warnings, *environment_warnings):
            log.warning(warning)
        config = EngineConfig(**build_fields(values, EngineConfig))
        server_config = build_server_config(values)

        from bloomery.serve_main import prestart_engine_and_serve

        return prestart_engine_and_serve(config, server_config)
    except BloomeryError as error:
        print(f"text-generation-launcher: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
