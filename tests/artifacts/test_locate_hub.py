"""Locating models on the Hub, against a fake Hub; each lookup runs in its own process."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.artifacts.fake_hub import FakeHub, serve_hub

OLD = "a" * 40
NEW = "b" * 40
SCRIPT = """
import json, sys
from bloomery.artifacts.locate import locate_model
from bloomery.errors import BloomeryError
try:
    a = locate_model(**json.loads(sys.argv[1]))
    fields = {"name": a.name, "kind": a.kind, "path": str(a.path)}
    print(json.dumps({**fields, "revision": a.revision, "origin": a.origin}))
except BloomeryError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
"""


def repository_files(mark: str) -> dict[str, bytes]:
    names = [
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
    ]
    names += [
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    names += [
        "consolidated.safetensors",
        "pytorch_model.bin",
        "modeling_x.py",
        "onnx/model.onnx",
        "a.pt",
        "README.md",
    ]
    names += ["additional_chat_templates/tools.jinja", "onnx/config.json"]
    return {name: f"{mark} {name} ".encode() * 3000 for name in names}


NEEDED = {
    name for name in repository_files("") if not name.endswith((".bin", ".py", ".pt", ".md"))
} - {
    "consolidated.safetensors",
    "onnx/model.onnx",
    "onnx/config.json",
}


@pytest.fixture
def hub():
    with serve_hub(
        FakeHub(
            {OLD: repository_files("old"), NEW: repository_files("new")}, {"main": NEW, "v1": OLD}
        )
    ) as running:
        yield running


@pytest.fixture
def locate(tmp_path):
    """Locate a model in a new process, and return its fields or its error."""

    def run(hub: FakeHub | None, env: dict[str, str] | None = None, **arguments) -> dict:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("HF_")
        }
        settings = {
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
        }
        settings["HF_ENDPOINT"] = hub.url if hub else "http://127.0.0.1:9"
        arguments = {"model": "org/model", **arguments}
        process = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(arguments)],
            env={**inherited, **settings, **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout.splitlines()[-1])

    return run


def file_digests(folder: str) -> dict[str, str]:
    root = Path(folder)
    paths = [path for path in root.rglob("*") if path.is_file()]
    return {
        path.relative_to(root).as_posix(): hashlib.sha1(path.read_bytes()).hexdigest()
        for path in paths
    }


def expected_digests(commit: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha1(commit[name]).hexdigest() for name in NEEDED}


def test_only_needed_files_are_downloaded_and_the_token_is_sent(hub, locate):
    located = locate(hub, {"HF_TOKEN": "hf_secret"})
    assert (located["name"], located["kind"], located["revision"]) == ("org/model", "folder", NEW)
    assert file_digests(located["path"]) == expected_digests(hub.commits[NEW])
    assert hub.downloaded_files() == NEEDED
    tokens = {
        headers.get("authorization") for _, path, headers in hub.requests if "org/model" in path
    }
    assert tokens == {"Bearer hf_secret"}


def test_all_files_are_of_one_commit_even_if_the_branch_moves(hub, locate):
    hub.refs["main"] = OLD
    hub.on_info = lambda: hub.refs.update(main=NEW)
    located = locate(hub)
    assert located["revision"] == OLD and file_digests(located["path"]) == expected_digests(
        hub.commits[OLD]
    )
    assert not [
        path
        for path in hub.requested_paths("GET")
        if f"/resolve/{NEW}" in path or "/resolve/main" in path
    ]
    tagged = locate(hub, revision="v1")
    assert tagged["path"] == located["path"]
    assert "no revision 'v9'" in locate(hub, revision="v9")["message"]


def test_without_weights_only_the_description_is_downloaded(hub, locate):
    located = locate(hub, weights=False)
    assert (
        hub.downloaded_files() == {name for name in NEEDED if not name.endswith(".safetensors")}
        and located["kind"] == "folder"
    )


def test_broken_connection_is_resumed(hub, locate):
    cut = 11 << 20  # more than the library buffers before it writes
    hub.commits[NEW]["model-00002-of-00002.safetensors"] = bytes(range(256)) * (12 << 12)
    hub.interruptions = {"model-00002-of-00002.safetensors": cut}
    located = locate(hub)
    assert file_digests(located["path"]) == expected_digests(hub.commits[NEW])
    ranges = [headers["range"] for _, _, headers in hub.requests if "range" in headers]
    assert len(ranges) == 1 and 0 < int(ranges[0].removeprefix("bytes=").rstrip("-")) <= cut


def test_failed_download_continues_in_the_next_run(hub, locate):
    hub.missing_files = {"model-00002-of-00002.safetensors"}
    stopped = locate(hub)
    assert (
        stopped["error"] == "ModelNotFound" and "run the same command again" in stopped["message"]
    )
    fetched = hub.downloaded_files()
    hub.missing_files = set()
    hub.requests = []
    assert file_digests(locate(hub)["path"]) == expected_digests(hub.commits[NEW])
    assert "model-00002-of-00002.safetensors" in hub.downloaded_files() and len(
        hub.downloaded_files()
    ) < len(fetched)


def test_offline_uses_the_cache(hub, locate):
    missing = locate(hub, {"HF_HUB_OFFLINE": "1"})
    assert missing["error"] == "ModelNotFound" and "HF_HUB_OFFLINE" in missing["message"]
    assert not hub.requests
    first = locate(hub)
    hub.requests = []
    cached = locate(hub, {"HF_HUB_OFFLINE": "1"})
    assert (
        cached["path"] == first["path"]
        and cached["revision"] == NEW
        and "cache" in cached["origin"]
    )
    assert not hub.requests
    assert locate(None)["path"] == first["path"], "an unreachable Hub is treated like being offline"


def test_unreachable_hub_is_an_error(locate):
    located = locate(None)
    assert located["error"] == "ModelNotFound" and "cannot be reached" in located["message"]


@pytest.mark.parametrize(
    ("denied", "message"),
    [
        ((403, "GatedRepo"), "gated; ask for access"),
        ((401, "RepoNotFound"), "no such Hub repository.*HF_TOKEN"),
    ],
)
def test_errors_of_the_hub_name_the_remedy(hub, locate, denied, message):
    hub.error_response = denied
    located = locate(hub)
    assert located["error"] == "ModelNotFound"
    assert re.search(message, located["message"]), located["message"]


def test_repository_of_pickled_weights_is_refused_before_the_download(hub, locate):
    hub.commits[NEW] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    located = locate(hub)
    assert located["error"] == "CheckpointError" and "pytorch_model.bin" in located["message"]
    assert hub.downloaded_files() == {"config.json"}


def test_gguf_repository(hub, locate):
    hub.commits[NEW] = {
        "config.json": b"{}",
        "m-Q4_K_M.gguf": b"four",
        "m-Q8_0.gguf": b"eight",
        "README.md": b"",
    }
    ambiguous = locate(hub)
    assert "name one: org/model:m-Q4_K_M.gguf, org/model:m-Q8_0.gguf" in ambiguous["message"]
    for model in ("org/model:m-Q8_0.gguf", "org/model:q8_0"):
        located = locate(hub, model=model)
        assert located["kind"] == "gguf" and Path(located["path"]).read_bytes() == b"eight"
    assert hub.downloaded_files() == {"config.json", "m-Q8_0.gguf"}
    assert locate(hub, {"HF_HUB_OFFLINE": "1"}, model="org/model:q8_0")["path"] == located["path"]
    assert "no GGUF file matches 'q2_k'" in locate(hub, model="org/model:q2_k")["message"]


def test_without_weights_only_the_header_of_a_gguf_file_is_downloaded(hub, locate, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array(
        "tokenizer.ggml.tokens", ["x" * 1000] * 5000
    )  # a header of more than one chunk
    writer.add_tensor("token_embd.weight", np.ones((4096, 1024), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    hub.commits[NEW] = {"m.gguf": (tmp_path / "m.gguf").read_bytes()}
    assert locate(hub, weights=False)["kind"] == "gguf"
    ranges = [
        headers.get("range")
        for verb, path, headers in hub.requests
        if verb == "GET" and path.endswith("m.gguf")
    ]
    assert ranges == ["bytes=0-4194303", "bytes=4194304-8388607"]


def test_invalid_repository_name_is_refused(hub, locate):
    assert "not a name" in locate(hub, model="org/a--b")["message"]
