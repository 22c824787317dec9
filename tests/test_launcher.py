"""TGI's flags and variables become Bloomery's options, and a server starts by them alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from bloomery.config import EngineConfig, ServerConfig, option_fields
from bloomery.engine.adapter_catalog import parse_lora_modules
from bloomery.errors import ConfigError
from bloomery.launcher import (
    CHECKPOINT_FORMATS,
    LIMIT_PREFIX,
    TGI_FLAGS,
    TGI_QUANTIZATIONS,
    build_fields,
    build_parser,
    build_server_config,
    read_flags,
    translate_flags,
)
from bloomery.server.limits import ServerLimits
from tests.chaos.http import free_port
from tests.waiting import WAIT_SECONDS, wait_until

KNOWN_OPTIONS = {field.name for field in option_fields(EngineConfig, ServerConfig)}


def translate(*arguments: str, **environ: str) -> tuple[dict[str, str], list[str]]:
    return translate_flags(read_flags(arguments, environ), KNOWN_OPTIONS)


def test_every_flag_of_tgi_is_accepted() -> None:
    """As a flag and as a variable. Bloomery has fewer options than TGI has flags."""
    assert len(TGI_FLAGS) == 54 > len(KNOWN_OPTIONS)
    for flag in TGI_FLAGS:
        arguments = [f"--{flag.name}"] if flag.switch else [f"--{flag.name}", "1"]
        assert list(read_flags(arguments, {})) == [flag]
        if flag.variable:
            assert list(read_flags([], {flag.field.upper(): "1"})) == [flag]
        assert flag.option or flag.why, f"--{flag.name}: neither a meaning nor a reason"
        assert flag.name in build_parser().format_help()


def test_every_flag_leads_to_an_option_that_exists() -> None:
    limits = set(ServerLimits.__dataclass_fields__)
    for flag in TGI_FLAGS:
        if flag.option.startswith(LIMIT_PREFIX):
            assert flag.option.removeprefix(LIMIT_PREFIX) in limits
        elif flag.option:
            assert flag.option in KNOWN_OPTIONS | {"model"}, flag.name


@pytest.mark.parametrize("name", ["fp8_e4m3fn", "fp8_e5m2"])
def test_the_precision_of_the_kv_cache_is_translated(name: str) -> None:
    values, warnings = translate("--kv-cache-dtype", name)
    assert not warnings
    assert EngineConfig(**build_fields(values, EngineConfig)).kv_cache_dtype == "fp8"


def test_a_deployment_by_variables() -> None:
    values, warnings = translate(
        MODEL_ID="org/name",
        NUM_SHARD="2",
        QUANTIZE="bitsandbytes-nf4",
        DTYPE="bfloat16",
        MAX_TOTAL_TOKENS="4096",
        MAX_INPUT_LENGTH="4000",
        MAX_BATCH_PREFILL_TOKENS="2048",
        MAX_CONCURRENT_REQUESTS="64",
        PORT="80",
        HOSTNAME="3f2a9c0d11aa",
        JSON_OUTPUT="true",
        CUDA_MEMORY_FRACTION="0.8",
        API_KEY="secret",
        MAX_BEST_OF="4",
        CUDA_GRAPHS="0",
        LORA_ADAPTERS="org/poet,smith=/adapters/smith",
        UNRELATED="x",
    )
    assert warnings == [
        "--max-input-length has no meaning here: "
        "a prompt may have one token less than --max-total-tokens"
    ]
    config = EngineConfig(**build_fields(values, EngineConfig))
    assert (config.model, config.tensor_parallel_size, config.quantization, config.dtype) == (
        "org/name",
        2,
        "nf4",
        "bfloat16",
    )
    assert (config.max_model_len, config.max_num_batched_tokens) == (4096, 2048)
    assert config.gpu_memory_utilization == 0.8
    assert not config.cuda_graphs
    server_config = build_server_config(values)
    assert (
        server_config.host,
        server_config.port,
        server_config.api_key,
        server_config.log_format,
    ) == (
        "0.0.0.0",
        80,
        "secret",
        "json",
    )
    limits = ServerLimits.parse(server_config.limits)
    assert (limits.requests, limits.best_of) == (64, 4)
    assert server_config.implies_lora
    modules = parse_lora_modules(server_config.lora_modules or "")
    assert modules == [("org/poet", "org/poet"), ("smith", "/adapters/smith")]


def test_flags_take_precedence_over_variables_and_lists_are_joined() -> None:
    values, _ = translate(
        "-p", "8080", "--cors-allow-origin", "a", "--cors-allow-origin", "b", PORT="80"
    )
    assert (values["port"], values["cors_origins"]) == ("8080", "a,b")


@pytest.mark.parametrize("name", [*TGI_QUANTIZATIONS, *CHECKPOINT_FORMATS])
def test_every_quantization_is_translated(name: str) -> None:
    values, _ = translate("--quantize", name)
    config = EngineConfig(**build_fields(values, EngineConfig))
    assert config.quantization == TGI_QUANTIZATIONS.get(name, "auto")


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="quantize 'ternary' is not one of bitsandbytes"):
        translate("--quantize", "ternary")
    with pytest.raises(ConfigError, match=r"listen on 0\.0\.0\.0.*API_KEY.*HOSTNAME=127\.0\.0\.1"):
        build_server_config({})
    with pytest.raises(ConfigError, match="port must be a whole number"):
        build_server_config({"port": "http", "api_key": "x"})


def is_healthy(client: httpx2.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx2.HTTPError:
        return False


def test_a_server_starts_by_variables_alone(tmp_path: Path) -> None:
    """As a TGI container is started: with nothing but the environment."""
    port = free_port()
    environ = {
        "PORT": str(port),
        "HOSTNAME": "127.0.0.1",
        "MAX_TOTAL_TOKENS": "256",
        "NGROK": "true",
        "JSON_OUTPUT": "true",
        "BLOOMERY_THREADS": "1",
        "BLOOMERY_KV_CACHE_GIB": "0.1",
        "MAX_CONCURRENT_REQUESTS": "7",
    }
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "bloomery.launcher"], stderr=file, env=os.environ | environ
        )
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            assert wait_until(lambda: process.poll() is not None or is_healthy(client), 240), (
                "the server does not get ready"
            )
            info = client.get("/info").json()
            body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 3}}
            assert client.post("/generate", json=body).json()["generated_text"].startswith(" Paris")
        assert (info["max_total_tokens"], info["max_concurrent_requests"]) == (256, 7)
    finally:
        process.terminate()
        assert process.wait(WAIT_SECONDS) == 0, log.read_text()
    assert "--ngrok has no meaning here" in log.read_text()
