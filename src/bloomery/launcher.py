"""`text-generation-launcher`: starts Bloomery where text-generation-inference was started, by the same words.

A table of TGI's flags, each of them also a variable in capitals, and what they are called here. One that means nothing
here is accepted and named in a warning. A composition root: it translates, and `bloomery serve` does the rest.
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
    Config,
    ServerConfig,
    from_environment,
    is_local,
    options,
    parse,
    variables,
)
from bloomery.errors import BloomeryError, ConfigError

log = logging.getLogger("bloomery")

QUANTIZE = {
    "bitsandbytes": "int8",
    "bitsandbytes-nf4": "nf4",
    "bitsandbytes-fp4": "fp4",
    "eetq": "int8",
    "fp8": "fp8",
}
STORED = (
    "awq",
    "compressed-tensors",
    "exl2",
    "gptq",
    "marlin",
)  # formats of checkpoints, seen when one is read
LIMIT = "limits."


@dataclass(frozen=True)
class Flag:
    name: str
    ours: str = ""  # our option, or limits.NAME; empty: it means nothing here
    why: str = ""  # it means nothing, or not all it says
    switch: bool = False  # takes no value
    short: str = ""
    variable: bool = True  # read from the environment too

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")


NO_SHARDS = "ranks find each other by themselves"
CHUNKED = "prompts are computed in chunks beside running answers, so nobody waits for a turn"
HUB = "set HF_HUB_CACHE"
NGROK = "this server opens no tunnels"
FLAGS = (
    Flag("model-id", "model"),
    Flag("revision", "revision"),
    Flag("validation-workers", why="text is tokenized by the server itself"),
    Flag("sharded", why="give --num-shard"),
    Flag("num-shard", "tp"),
    Flag("quantize", "quantize"),
    Flag("speculate", "speculate"),
    Flag("dtype", "dtype"),
    Flag("kv-cache-dtype", "kv_cache_dtype"),
    Flag("trust-remote-code", why="no code of a checkpoint is ever run", switch=True),
    Flag("max-concurrent-requests", LIMIT + "requests"),
    Flag("max-best-of", LIMIT + "best_of"),
    Flag("max-stop-sequences", LIMIT + "stop_strings"),
    Flag("max-top-n-tokens", LIMIT + "top_n_tokens"),
    Flag("max-input-tokens", why="a prompt may fill --max-total-tokens but for one"),
    Flag("max-input-length", why="a prompt may fill --max-total-tokens but for one"),
    Flag("max-total-tokens", "max_model_len"),
    Flag("waiting-served-ratio", why=CHUNKED),
    Flag("max-batch-prefill-tokens", "max_num_batched_tokens"),
    Flag(
        "max-batch-total-tokens",
        why="the cache takes the memory there is, see --cuda-memory-fraction",
    ),
    Flag("max-waiting-tokens", why=CHUNKED),
    Flag("max-batch-size", "max_num_seqs"),
    Flag("cuda-graphs", "cuda_graphs", "0 turns them off; otherwise sizes are chosen here"),
    Flag("hostname", "host"),
    Flag("port", "port", short="-p"),
    Flag("prometheus-port", why="figures are at /metrics of the server's own port"),
    Flag("shard-uds-path", why=NO_SHARDS),
    Flag("master-addr", why=NO_SHARDS),
    Flag("master-port", why=NO_SHARDS),
    Flag("huggingface-hub-cache", why=HUB),
    Flag("weights-cache-override", why=HUB),
    Flag("disable-custom-kernels", why="there is no other way on a GPU", switch=True),
    Flag("cuda-memory-fraction", "memory"),
    Flag("rope-scaling", why="the checkpoint says how its positions are scaled"),
    Flag("rope-factor", why="the checkpoint says how its positions are scaled"),
    Flag("json-output", "log_format", switch=True),
    Flag("otlp-endpoint", "otlp_endpoint", "by HTTP, whose port is 4318, not by gRPC"),
    Flag("otlp-service-name", "otlp_service_name"),
    Flag("cors-allow-origin", "cors_origins"),
    Flag("api-key", "api_key"),
    Flag("watermark-gamma", why="a request's watermark has TGI's defaults"),
    Flag("watermark-delta", why="a request's watermark has TGI's defaults"),
    Flag("ngrok", why=NGROK, switch=True),
    Flag("ngrok-authtoken", why=NGROK),
    Flag("ngrok-edge", why=NGROK),
    Flag("tokenizer-config-path", why="the tokenizer's own files say all"),
    Flag("disable-grammar-support", why="a request that asks for none pays for none", switch=True),
    Flag("env", why="the plan is printed at start anyway", switch=True, short="-e", variable=False),
    Flag("max-client-batch-size", LIMIT + "fan_out"),
    Flag("lora-adapters", "lora_adapters"),
    Flag("usage-stats", why="nothing is ever sent anywhere"),
    Flag("payload-limit", LIMIT + "tgi_body_bytes"),
    Flag("enable-prefill-logprobs", why="a request that asks for them gets them", switch=True),
    Flag("graceful-termination-timeout", "drain_seconds"),
)
DEFAULTS = {"host": "0.0.0.0", "port": "3000"}  # TGI's, where a deployment relies on them


# ---- values in our words -----------------------------------------------------------------------------


def quantize(text: str) -> str:
    if text not in QUANTIZE and text not in STORED:
        raise ConfigError(f"quantize {text!r} is not one of {', '.join((*QUANTIZE, *STORED))}")
    return QUANTIZE.get(text, "auto")


def hostname(text: str) -> str:
    """Docker sets HOSTNAME to the container's name; what is no address means every interface, as it does to TGI."""
    try:
        return str(ip_address(text))
    except ValueError:
        return text if text == "localhost" else DEFAULTS["host"]


VALUES: Mapping[str, Callable[[str], str]] = {
    "quantize": quantize,
    "hostname": hostname,
    "cuda-graphs": lambda text: "false" if text.strip() == "0" else "true",
    "json-output": lambda text: "json" if text.lower() not in ("false", "0") else "auto",
}


# ---- translation -------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="text-generation-launcher",
        description="Start Bloomery by text-generation-inference's flags and variables. Without --model-id: the "
        "embedded SmolLM2-135M-Instruct. `bloomery serve --help` has Bloomery's own flags.",
        epilog="Each flag is also a variable: --max-total-tokens is MAX_TOTAL_TOKENS.",
    )
    made.add_argument("--version", "-V", action="version", version=f"bloomery {__version__}")
    for flag in FLAGS:
        ours = (
            f"--{flag.ours.replace(LIMIT, 'limits ').replace('_', '-')}"
            if flag.ours
            else "no meaning here"
        )
        about: dict[str, Any] = {
            "dest": flag.field,
            "help": "; ".join(filter(None, (ours, flag.why))),
        }
        if flag.switch:
            about |= {"action": "store_const", "const": "true"}
        elif flag.name == "cors-allow-origin":
            about["action"] = "append"
        made.add_argument(*filter(None, (flag.short, f"--{flag.name}")), **about)
    return made


def given(arguments: Sequence[str] | None, environ: Mapping[str, str]) -> dict[Flag, str]:
    """What was said, flags before variables."""
    args = parser().parse_args(arguments)
    said = {}
    for flag in FLAGS:
        value = getattr(args, flag.field)
        if value is None and flag.variable:
            value = environ.get(flag.field.upper())
        if value is not None and value != "":
            said[flag] = ",".join(value) if isinstance(value, list) else value
    return said


def translate(said: Mapping[Flag, str], known: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Our options as text, and warnings about what has no meaning; `known`: the options there are."""
    values = dict[str, str]()
    limits = list[str]()
    warnings = list[str]()
    known = set(known)
    for flag, text in said.items():
        if flag.ours.startswith(LIMIT):
            limits.append(f"{flag.ours.removeprefix(LIMIT)}={text}")
        elif flag.ours in known or flag.ours == "model":
            values[flag.ours] = VALUES.get(flag.name, str)(text)
        else:
            warnings.append(
                f"--{flag.name} has no meaning here: {flag.why or 'there is no such option yet'}"
            )
    if limits:
        values["limits"] = ",".join(limits)
    return values, warnings


def configured(values: dict[str, str], kind: Any) -> dict[str, Any]:
    """Fields of a configuration: TGI's words over BLOOMERY_* variables over TGI's defaults."""
    fields = {field.name: field for field in options(kind)}
    said = {**DEFAULTS, **values}
    (found, _) = from_environment(of=kind)
    for name in fields.keys() & said.keys():
        if name in values or name not in found:
            found[name] = parse(fields[name], said[name], name)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        said = given(arguments, variables())
        values, warnings = translate(said, (field.name for field in options(Config, ServerConfig)))
        for warning in (*warnings, *from_environment()[1]):
            log.warning(warning)
        config = Config(values.get("model"), **configured(values, Config))
        wishes = server(values)

        from bloomery.start import start

        return start(config, wishes)
    except BloomeryError as error:
        print(f"text-generation-launcher: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def server(values: dict[str, str]) -> ServerConfig:
    found = configured(values, ServerConfig)
    if not is_local(found["host"]) and not found.get("api_key"):
        raise ConfigError(
            f"it would listen on {found['host']}, as text-generation-inference does, where other machines can reach "
            "it, and there is no API key. Set API_KEY (or --api-key) and let clients send it as Authorization: Bearer "
            "KEY; or say HOSTNAME=127.0.0.1 (--hostname) to serve this machine only, for instance behind a proxy"
        )
    return ServerConfig(**found)


if __name__ == "__main__":
    sys.exit(main())
