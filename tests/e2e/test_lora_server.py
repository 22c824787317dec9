"""LoRA adapters in a real server: whatever clients load, running answers keep their tokens."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
import torch
from safetensors.torch import save_file

from bloomery.artifacts.locate import locate_model
from bloomery.describe import describe_model
from tests.chaos.http import free_port
from tests.e2e.test_serve import is_ready
from tests.waiting import wait_until

OPTIONS = ("--threads", "1", "--kv-cache-gib", "0.2")
LORA_OPTIONS = ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3")
RANK = 4
NUM_TOKENS = 40


class LoraServer(NamedTuple):
    client: httpx2.Client
    folder: Path  # for adapters

    def write(self, name: str, seed: int = 0, **values: Any) -> Path:
        """Write a random adapter for the embedded model."""
        model = describe_model(locate_model(None)).model
        attention = model.layers[0].attention
        assert attention is not None
        outputs = attention.num_heads * attention.head_dim
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for layer in range(len(model.layers)):
            module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
            a = torch.randn(RANK, model.hidden, generator=generator)
            b = torch.randn(outputs, RANK, generator=generator)
            tensors |= {f"{module}.lora_A.weight": 0.3 * a, f"{module}.lora_B.weight": 0.3 * b}
        config = {"r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"]} | values
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, str(folder / "adapter_model.safetensors"))
        return folder

    def load(self, name: str, path: Path, in_place: bool = False) -> httpx2.Response:
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": in_place}
        return self.client.post("/v1/load_lora_adapter", json=body)

    def unload(self, name: str) -> httpx2.Response:
        return self.client.post("/v1/unload_lora_adapter", json={"lora_name": name})

    def complete(self, model: str, num_tokens: int = NUM_TOKENS) -> httpx2.Response:
        body = {"model": model, "prompt": "The iron", "max_tokens": num_tokens}
        greedy = {"temperature": 0, "ignore_eos": True}
        return self.client.post("/v1/completions", json=body | greedy)

    def text(self, model: str) -> str:
        response = self.complete(model)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoraServer]:
    base = tmp_path_factory.mktemp("lora")
    folder = base / "allowed" / "team"
    folder.mkdir(parents=True)
    port = free_port()
    command = [sys.executable, "-m", "bloomery", "serve", "--port", str(port), "--api-key", "key"]
    command += [*OPTIONS, *LORA_OPTIONS, "--lora-allow", str(folder.parent)]
    log_file = base / "log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        headers = {"authorization": "Bearer key"}
        url = f"http://127.0.0.1:{port}"
        with httpx2.Client(base_url=url, timeout=120, headers=headers) as client:
            assert wait_until(lambda: process.poll() is not None or is_ready(client), 240)
            assert process.poll() is None, "the server has exited"
            yield LoraServer(client, folder)
        assert "Traceback" not in log_file.read_text()
    finally:
        process.kill()
        process.wait(30)


def test_harmful_adapters_are_refused_while_answers_go_on(server: LoraServer) -> None:
    assert server.load("smith", server.write("smith")).status_code == 200
    expected = server.text("smith")
    truncated = server.write("truncated")
    weights = truncated / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    endless = server.write("endless", target_modules="(.*)*" * 9 + "x")
    large = server.write("large", padding="x" * (17 << 20))
    deep = server.write("deep")
    (deep / "adapter_config.json").write_text('{"r":' + "[" * 100_000 + "]" * 100_000 + "}")
    with ThreadPoolExecutor(2) as threads:
        answers: list[Future[str]] = []
        for path, reason in (
            (truncated, "download it again"),
            (endless, "takes too long to match"),
            (large, "larger than 16 MiB"),
            (deep, "not valid JSON"),
        ):
            answers += [threads.submit(server.text, "smith") for _ in range(2)]
            response = server.load("bad", path)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "lora_path"
            assert error["message"].startswith(f"cannot use the LoRA adapter 'bad': {path}")
            assert reason in error["message"]
            assert server.complete("bad", 1).status_code == 404
        assert [answer.result() for answer in answers] == [expected] * len(answers)


def test_files_may_change_and_vanish_under_running_answers(server: LoraServer) -> None:
    path = server.write("miner", seed=1)
    assert server.load("miner", path).status_code == 200
    first = server.text("miner")
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(server.text, "miner") for _ in range(2)]
        server.write("miner", seed=2)  # other files at the same place
        assert server.load("miner", path).status_code == 400
        assert server.load("miner", path, in_place=True).status_code == 200
        assert {answer.result() for answer in answers} <= {first, server.text("miner")}
        second = server.text("miner")
        assert second != first
        answers = [threads.submit(server.text, "miner") for _ in range(2)]
        shutil.rmtree(path)
        assert [answer.result() for answer in answers] == [second] * 2
    others = [f"other{number}" for number in range(3)]
    for number, name in enumerate(others):  # they take all places in host memory
        assert server.load(name, server.write(name, seed=3 + number)).status_code == 200
        assert server.complete(name, 1).status_code == 200
    refusal = server.complete("miner", 1)
    assert refusal.status_code == 400
    assert "there is no such adapter; check the path" in refusal.text
    for name in ("miner", *others):
        assert server.unload(name).status_code == 200
    assert server.unload("miner").status_code == 404


def test_a_link_that_came_later_does_not_lead_out_of_the_allowed_folder(
    server: LoraServer,
) -> None:
    path = server.write("weaver", seed=7)
    assert server.complete("team/weaver", 1).status_code == 200
    secret = server.folder.parent.parent / "secret"
    weights = path / "adapter_model.safetensors"
    weights.rename(secret)
    weights.symlink_to(secret)
    others = [f"other{number}" for number in range(3)]
    for number, name in enumerate(others):  # they take all places in host memory
        assert server.load(name, server.write(name, seed=3 + number)).status_code == 200
        assert server.complete(name, 1).status_code == 200
    refusal = server.complete("team/weaver", 1)
    assert refusal.status_code == 400
    assert "a link there leads out of the folders of --lora-allow" in refusal.text
    for name in others:
        assert server.unload(name).status_code == 200


def test_an_unloaded_adapter_serves_its_answers_to_their_end(server: LoraServer) -> None:
    assert server.load("monk", server.write("monk", seed=6)).status_code == 200
    expected = server.text("monk")
    body = {"model": "monk", "prompt": "The iron", "max_tokens": NUM_TOKENS, "stream": True}
    greedy = {"temperature": 0, "ignore_eos": True}
    text = ""
    unloaded = False
    with server.client.stream("POST", "/v1/completions", json=body | greedy) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
            if text and not unloaded:
                assert server.unload("monk").status_code == 200
                assert server.complete("monk", 1).status_code == 404
                unloaded = True
    assert text == expected


def test_a_hundred_loads_leave_nothing_behind(server: LoraServer) -> None:
    path = server.write("poet", seed=5)
    for number in range(100):
        name = f"poet{number}"
        assert server.load(name, path).status_code == 200
        if number % 10 == 0:
            assert server.complete(name, 1).status_code == 200
        assert server.unload(name).status_code == 200
    assert server.complete("poet99", 1).status_code == 404
    names = [entry["name"] for entry in server.client.get("/lora-adapters").json()]
    assert not [name for name in names if name.startswith("poet")]
    assert 'adapter="poet' not in server.client.get("/metrics").text
