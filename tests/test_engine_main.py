"""The engine process's start: what it imports, its log, and the server process without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from bloomery.artifacts import gguf
from bloomery.artifacts.locate import locate_model
from bloomery.config import EngineConfig
from bloomery.describe import build_engine_plan
from bloomery.ipc import build_engine_command, spawn_child
from bloomery.native.build import NativeBuildError
from bloomery.native.thread_pool import ThreadPool
from bloomery.runtime.worker import Worker
from tests.waiting import WAIT_SECONDS

SERVER_IMPORTS = """
import sys, bloomery.cli
bloomery.cli.build_parser("serve")
import bloomery.serve_main, bloomery.serve
heavy = {"torch", "numpy", "transformers", "huggingface_hub"}
tools = {"bloomery.tools.bench", "bloomery.tools.quantize", "bloomery.tools.profile"}
print(sorted((heavy | tools) & set(sys.modules)))
"""
ENGINE_IMPORTS = """
import gc, signal, sys
from bloomery.engine_main import preload_worker
preload_worker("cpu")
assert "bloomery.executors.local" in sys.modules
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
import torch
heavy = {"torch._dynamo", "torch._inductor", "sympy", "transformers"}
product = torch.ones(3, 3).matmul(torch.ones(3, 3)).sum().item()
seed = torch.Generator().manual_seed(3).initial_seed()
print(sorted(heavy & set(sys.modules)), product, seed, gc.isenabled())
"""


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_server_process_imports_neither_torch_nor_the_tools() -> None:
    assert run_python(SERVER_IMPORTS) == "[]"


def test_the_preload_imports_the_worker_and_a_complete_torch_without_its_compiler() -> None:
    assert run_python(ENGINE_IMPORTS) == "[] 27.0 3 True"


def test_a_prestarted_engine_that_is_not_taken_over_can_be_killed() -> None:
    engine = spawn_child(build_engine_command("json", "cpu"))
    engine.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(engine.process.pid, 0)


@pytest.mark.parametrize("log_format", ["json", "human"])
def test_an_engine_writes_its_log_in_the_format_of_the_server(
    log_format: str, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = spawn_child(build_engine_command(log_format))
    engine.connection.sendall(b"this is no frame" * 8)
    assert engine.process.wait(WAIT_SECONDS) == 1
    engine.kill()
    (line,) = capfd.readouterr().err.splitlines()
    message = json.loads(line)["message"] if log_format == "json" else line
    assert "engine: the engine ends on a malformed frame" in message


def test_the_engine_can_skip_the_vocabulary_of_a_gguf_file() -> None:
    path = locate_model(None).path
    complete = gguf.read_gguf(path)
    partial = gguf.read_gguf(path, read_string_arrays=False)
    assert partial.tensors == complete.tensors
    assert complete.metadata["tokenizer.ggml.tokens"]
    differing = {key for key, value in complete.metadata.items() if partial.metadata[key] != value}
    assert "tokenizer.ggml.tokens" in differing
    assert all(partial.metadata[key] == [] for key in differing)


def test_a_worker_without_cpu_kernels_has_no_thread_pool() -> None:
    """Even if another thread pool exists in the same process."""
    try:
        other_pool = ThreadPool(1)
    except NativeBuildError:
        pytest.skip("the CPU kernels cannot be built here")
    config = EngineConfig(
        cpu_kernels=False, kv_cache_gib=0.02, max_model_len=64, max_num_seqs=1, threads=1
    )
    plan, _ = build_engine_plan(config)
    assert Worker(plan).pool is None
    other_pool.close()
