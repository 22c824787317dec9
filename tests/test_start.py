"""What starts with what: the server's process without torch, the engine's on a CPU with no more of it than it uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from bloomery.artifacts import gguf
from bloomery.artifacts.locate import locate
from bloomery.config import Config
from bloomery.describe import plan_for
from bloomery.engine.birth import bear, command
from bloomery.native.team import team
from bloomery.runtime.worker import Worker
from tests.waiting import LONG

SERVER = """
import sys, bloomery.cli
bloomery.cli.parser("serve")
import bloomery.start, bloomery.serve
heavy = {"torch", "numpy", "transformers", "huggingface_hub", "bloomery.tools.bench", "bloomery.tools.quantize", "bloomery.tools.profile"}
print(sorted(heavy & set(sys.modules)))
"""
ENGINE = """
import gc, sys
from bloomery.engine_main import prepare
prepare()
import torch
heavy = {"torch._dynamo", "torch._inductor", "torch._decomp", "sympy", "triton.language", "transformers"}
print(sorted(heavy & set(sys.modules)), torch.ones(3, 3).matmul(torch.ones(3, 3)).sum().item(), gc.isenabled())
"""


def said(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_server_imports_nothing_of_the_engine() -> None:
    assert said(SERVER) == "[]"


def test_an_engine_on_a_cpu_leaves_the_compiler_out() -> None:
    assert said(ENGINE) == "[] 27.0 True"


def test_an_engine_nobody_takes_over_ends() -> None:
    engine = bear(command("json", on_cpu=True))
    engine.end()
    with pytest.raises(ProcessLookupError):
        os.kill(engine.process.pid, 0)


@pytest.mark.parametrize("style", ["json", "human"])
def test_an_engine_writes_its_log_as_the_server_does(
    style: str, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = bear(command(style))
    engine.line.sendall(b"this is no frame" * 8)
    assert engine.process.wait(LONG) == 1
    engine.end()
    (line,) = capfd.readouterr().err.splitlines()
    assert "engine: the engine ends on a malformed frame" in (
        json.loads(line)["message"] if style == "json" else line
    )


def test_a_vocabulary_can_be_passed_over() -> None:
    path = locate(None).path
    whole = gguf.read(path)
    rest = gguf.read(path, words=False)
    assert rest.tensors == whole.tensors and whole.metadata["tokenizer.ggml.tokens"]
    differing = {key for key, value in whole.metadata.items() if rest.metadata[key] != value}
    assert (
        differing == {key for key in differing if rest.metadata[key] == []}
        and "tokenizer.ggml.tokens" in differing
    )


def test_a_worker_without_native_kernels_has_none() -> None:
    """Though one before it in the same process had them."""
    if team().start(1) is not None:
        pytest.skip("no native kernels here")
    plan, _ = plan_for(
        Config(native=False, kv_cache_gib=0.02, max_model_len=64, max_num_seqs=1, threads=1)
    )
    Worker(plan)
    assert not team().active
