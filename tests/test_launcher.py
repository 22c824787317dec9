"""TGI's flags and variables as ours, and a server started by them alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from bloomery.config import Config, ServerConfig, options
from bloomery.errors import ConfigError
from bloomery.launcher import (
    FLAGS,
    LIMIT,
    QUANTIZE,
    STORED,
    configured,
    given,
    parser,
    server,
    translate,
)
from bloomery.server.limits import Limits
from tests.chaos.http import free_port
from tests.waiting import LONG, until

KNOWN = {field.name for field in options(Config, ServerConfig)}


def said(*arguments: str, **environ: str) -> tuple[dict[str, str], list[str]]:
    return translate(given(arguments, environ), KNOWN)


def test_every_flag_of_tgi_is_taken() -> None:
    """With its value or without, in both forms; ours are fewer."""
    assert len(FLAGS) == 54 > len(KNOWN)
    for flag in FLAGS:
        found = given([f"--{flag.name}"] if flag.switch else [f"--{flag.name}", "1"], {})
        assert list(found) == [flag]
        if flag.variable:
            assert list(given([], {flag.field.upper(): "1"})) == [flag]
        assert flag.ours or flag.why, f"--{flag.name}: neither a meaning nor a reason"
        assert flag.name in parser().format_help()


def test_where_they_lead_exists() -> None:
    limits = set(Limits.__dataclass_fields__)
    later = {
        "speculate",
        "kv_cache_dtype",
        "lora_adapters",
    }  # warned about while there is no such option
    for flag in FLAGS:
        if flag.ours.startswith(LIMIT):
            assert flag.ours.removeprefix(LIMIT) in limits
        elif flag.ours:
            assert flag.ours in KNOWN | {"model"} | later, flag.name


def test_a_deployment_in_variables() -> None:
    values, warnings = said(
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
        UNRELATED="x",
    )
    assert warnings == [
        "--max-input-length has no meaning here: a prompt may fill --max-total-tokens but for one"
    ]
    config = Config(values["model"], **configured(values, Config))
    assert (config.model, config.tp, config.quantize, config.dtype) == (
        "org/name",
        2,
        "nf4",
        "bfloat16",
    )
    assert (config.max_model_len, config.max_num_batched_tokens, config.memory) == (4096, 2048, 0.8)
    assert not config.cuda_graphs
    wishes = server(values)
    assert (wishes.host, wishes.port, wishes.api_key, wishes.log_format) == (
        "0.0.0.0",
        80,
        "secret",
        "json",
    )
    limits = Limits.of(wishes.limits)
    assert (limits.requests, limits.best_of) == (64, 4)


def test_flags_come_before_variables_and_lists_are_joined() -> None:
    values, _ = said(
        "-p", "8080", "--cors-allow-origin", "a", "--cors-allow-origin", "b", PORT="80"
    )
    assert (values["port"], values["cors_origins"]) == ("8080", "a,b")


@pytest.mark.parametrize("name", [*QUANTIZE, *STORED])
def test_every_quantization(name: str) -> None:
    values, _ = said("--quantize", name)
    assert Config(**configured(values, Config)).quantize == QUANTIZE.get(name, "auto")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantize 'ternary' is not one of bitsandbytes"):
        said("--quantize", "ternary")
    with pytest.raises(ConfigError, match=r"listen on 0\.0\.0\.0.*API_KEY.*HOSTNAME=127\.0\.0\.1"):
        server({})
    with pytest.raises(ConfigError, match="port must be a whole number"):
        server({"port": "http", "api_key": "x"})


def healthy(client: httpx2.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx2.HTTPError:
        return False


def test_a_server_by_variables_alone(tmp_path: Path) -> None:
    """As a TGI container is started: nothing but the environment."""
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
            assert until(lambda: process.poll() is not None or healthy(client), 240), (
                "the server does not get ready"
            )
            info = client.get("/info").json()
            body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 3}}
            assert client.post("/generate", json=body).json()["generated_text"].startswith(" Paris")
        assert (info["max_total_tokens"], info["max_concurrent_requests"]) == (256, 7)
    finally:
        process.terminate()
        assert process.wait(LONG) == 0, log.read_text()
    assert "--ngrok has no meaning here" in log.read_text()
