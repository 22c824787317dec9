"""Hub access, over HTTP to a small server of our own; each look-up in a process with its own environment."""

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

from tests.artifacts.hub import Hub, serving

OLD = "a" * 40
NEW = "b" * 40
SCRIPT = """
import json, sys
from bloomery.artifacts.locate import locate
from bloomery.errors import BloomeryError
try:
    a = locate(**json.loads(sys.argv[1]))
    print(json.dumps({"name": a.name, "kind": a.kind, "path": str(a.path), "revision": a.revision, "found": a.found}))
except BloomeryError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
"""


def files(mark: str) -> dict[str, bytes]:
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


WANTED = {name for name in files("") if not name.endswith((".bin", ".py", ".pt", ".md"))} - {
    "consolidated.safetensors",
    "onnx/model.onnx",
    "onnx/config.json",
}


@pytest.fixture
def hub():
    with serving(Hub({OLD: files("old"), NEW: files("new")}, {"main": NEW, "v1": OLD})) as running:
        yield running


@pytest.fixture
def look(tmp_path):
    """Look a model up in a fresh process; what it printed, as a dict."""

    def run(hub: Hub | None, env: dict[str, str] | None = None, **arguments) -> dict:
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
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(arguments)],
            env={**inherited, **settings, **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def content(folder: str) -> dict[str, str]:
    root = Path(folder)
    found = [path for path in root.rglob("*") if path.is_file()]
    return {
        path.relative_to(root).as_posix(): hashlib.sha1(path.read_bytes()).hexdigest()
        for path in found
    }


def digests(commit: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha1(commit[name]).hexdigest() for name in WANTED}


def test_only_the_model_is_fetched_and_the_token_is_sent(hub, look):
    found = look(hub, {"HF_TOKEN": "hf_secret"})
    assert (found["name"], found["kind"], found["revision"]) == ("org/model", "folder", NEW)
    assert content(found["path"]) == digests(hub.commits[NEW])
    assert hub.fetched() == WANTED
    tokens = {headers.get("authorization") for _, path, headers in hub.log if "org/model" in path}
    assert tokens == {"Bearer hf_secret"}


def test_every_file_is_of_the_pinned_revision_though_the_branch_moves(hub, look):
    hub.refs["main"] = OLD
    hub.on_info = lambda: hub.refs.update(main=NEW)
    found = look(hub)
    assert found["revision"] == OLD and content(found["path"]) == digests(hub.commits[OLD])
    assert not [
        path for path in hub.asked("GET") if f"/resolve/{NEW}" in path or "/resolve/main" in path
    ]
    tagged = look(hub, revision="v1")
    assert tagged["path"] == found["path"]
    assert "no revision 'v9'" in look(hub, revision="v9")["message"]


def test_description_alone_when_no_weights_are_wanted(hub, look):
    found = look(hub, weights=False)
    assert (
        hub.fetched() == {name for name in WANTED if not name.endswith(".safetensors")}
        and found["kind"] == "folder"
    )


def test_broken_connection_is_resumed_where_it_broke(hub, look):
    cut = 11 << 20  # more than the library holds back before it writes
    hub.commits[NEW]["model-00002-of-00002.safetensors"] = bytes(range(256)) * (12 << 12)
    hub.cut = {"model-00002-of-00002.safetensors": cut}
    found = look(hub)
    assert content(found["path"]) == digests(hub.commits[NEW])
    ranges = [headers["range"] for _, _, headers in hub.log if "range" in headers]
    assert len(ranges) == 1 and 0 < int(ranges[0].removeprefix("bytes=").rstrip("-")) <= cut


def test_download_that_failed_goes_on_in_the_next_run(hub, look):
    hub.broken = {"model-00002-of-00002.safetensors"}
    stopped = look(hub)
    assert (
        stopped["error"] == "ModelNotFound" and "run the same command again" in stopped["message"]
    )
    fetched = hub.fetched()
    hub.broken = set()
    hub.log = []
    assert content(look(hub)["path"]) == digests(hub.commits[NEW])
    assert "model-00002-of-00002.safetensors" in hub.fetched() and len(hub.fetched()) < len(fetched)


def test_offline_uses_the_cache_and_says_so(hub, look):
    missing = look(hub, {"HF_HUB_OFFLINE": "1"})
    assert missing["error"] == "ModelNotFound" and "HF_HUB_OFFLINE" in missing["message"]
    assert not hub.log
    first = look(hub)
    hub.log = []
    cached = look(hub, {"HF_HUB_OFFLINE": "1"})
    assert (
        cached["path"] == first["path"] and cached["revision"] == NEW and "cache" in cached["found"]
    )
    assert not hub.log
    assert look(None)["path"] == first["path"], "an unreachable Hub is no worse than being offline"


def test_hub_that_cannot_be_reached(look):
    found = look(None)
    assert found["error"] == "ModelNotFound" and "cannot be reached" in found["message"]


@pytest.mark.parametrize(
    ("denied", "message"),
    [
        ((403, "GatedRepo"), "gated; ask for access"),
        ((401, "RepoNotFound"), "no such Hub repository.*HF_TOKEN"),
    ],
)
def test_refusals_name_the_remedy(hub, look, denied, message):
    hub.denied = denied
    found = look(hub)
    assert found["error"] == "ModelNotFound"
    assert re.search(message, found["message"]), found["message"]


def test_pickled_repository_is_refused_before_a_download(hub, look):
    hub.commits[NEW] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    found = look(hub)
    assert found["error"] == "CheckpointError" and "pytorch_model.bin" in found["message"]
    assert hub.fetched() == {"config.json"}


def test_gguf_repository(hub, look):
    hub.commits[NEW] = {
        "config.json": b"{}",
        "m-Q4_K_M.gguf": b"four",
        "m-Q8_0.gguf": b"eight",
        "README.md": b"",
    }
    ambiguous = look(hub)
    assert "name one: org/model:m-Q4_K_M.gguf, org/model:m-Q8_0.gguf" in ambiguous["message"]
    for given in ("org/model:m-Q8_0.gguf", "org/model:q8_0"):
        found = look(hub, model=given)
        assert found["kind"] == "gguf" and Path(found["path"]).read_bytes() == b"eight"
    assert hub.fetched() == {"config.json", "m-Q8_0.gguf"}
    assert look(hub, {"HF_HUB_OFFLINE": "1"}, model="org/model:q8_0")["path"] == found["path"]
    assert "no GGUF file matches 'q2_k'" in look(hub, model="org/model:q2_k")["message"]


def test_of_a_gguf_the_header_alone_when_no_weights_are_wanted(hub, look, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array(
        "tokenizer.ggml.tokens", ["x" * 1000] * 5000
    )  # a header of more than one piece
    writer.add_tensor("token_embd.weight", np.ones((4096, 1024), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    hub.commits[NEW] = {"m.gguf": (tmp_path / "m.gguf").read_bytes()}
    assert look(hub, weights=False)["kind"] == "gguf"
    asked = [
        headers.get("range")
        for verb, path, headers in hub.log
        if verb == "GET" and path.endswith("m.gguf")
    ]
    assert asked == ["bytes=0-4194303", "bytes=4194304-8388607"]


def test_name_the_hub_could_not_have(hub, look):
    assert "not a name" in look(hub, model="org/a--b")["message"]
