"""LoRA adapters over HTTP: every dialect can name one; clients with a key load and unload them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bloomery.artifacts.locate_adapter import AdapterAllowList
from bloomery.engine.adapter_catalog import NamedAdapter
from bloomery.errors import CheckpointError
from bloomery.server.adapters import AdapterSettings
from bloomery.server.service import ServerSettings
from bloomery.text.tokenizer import Tokenizer
from tests.server.conftest import HttpTestServer, start_server
from tests.server.scripted_engine import InProcessEngine

KEY = {"authorization": "Bearer secret"}
QUESTION = [{"role": "user", "content": "What is slag?"}]
MESSAGES = {"messages": QUESTION, "max_tokens": 3}
# (path, body without the model, how the answer names the model)
DIALECTS: list[tuple[str, dict[str, Any], str | None]] = [
    ("/v1/chat/completions", MESSAGES, "model"),
    ("/v1/completions", {"prompt": "iron", "max_tokens": 3}, "model"),
    ("/v1/responses", {"input": "iron", "max_output_tokens": 3}, "model"),
    ("/v1/embeddings", {"input": "iron"}, "model"),
    ("/v1/messages", MESSAGES, "model"),
    ("/api/chat", {"messages": QUESTION, "options": {"num_predict": 3}, "stream": False}, "model"),
    ("/api/generate", {"prompt": "iron", "raw": True, "stream": False}, "model"),
    ("/api/embed", {"input": "iron"}, "model"),
]


def write_adapter(folder: Path, name: str) -> Path:
    """A folder that looks like an adapter; the engine of these tests does not read it."""
    path = folder / name
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    return path


def lora_settings(folder: Path | None = None, with_key: bool = True) -> ServerSettings:
    modules = tuple(
        NamedAdapter(name, name, f"/secret/{path}", f"/secret/{path}")
        for name, path in (("smith", "smith"), ("poet", "poet"), ("broken", "broken/bad"))
    )
    allow_list = AdapterAllowList([str(folder)] if folder else [])
    return ServerSettings(
        model="speaker",
        keys=("secret",) if with_key else (),
        lora=AdapterSettings(enabled=True, modules=modules, allow_list=allow_list, max_loras=2),
    )


@pytest.fixture(scope="module")
def lora_server(tokenizer: Tokenizer) -> Iterator[HttpTestServer]:
    with ExitStack() as exit_stack:
        engine = InProcessEngine(tokenizer)
        server = start_server(engine, tokenizer, lora_settings(), exit_stack)
        server.client.headers.update(KEY)
        yield server


@pytest.mark.parametrize(("path", "body", "field"), DIALECTS, ids=[case[0] for case in DIALECTS])
def test_the_model_name_selects_the_adapter(
    lora_server: HttpTestServer, path: str, body: dict[str, Any], field: str
) -> None:
    for name, adapter in (("smith", "smith"), ("speaker:poet", "poet"), ("speaker", "")):
        response = lora_server.post(path, {**body, "model": name})
        assert response.status_code == 200, response.text
        assert lora_server.backend.received[-1].lora == adapter
        assert response.json()[field] == adapter or name == "speaker"


def test_answers_depend_on_the_adapter(lora_server: HttpTestServer) -> None:
    texts = set()
    for name in ("speaker", "smith", "poet"):
        body = {"prompt": "The iron", "model": name, "max_tokens": 8, "temperature": 0}
        answers = {
            lora_server.post("/v1/completions", body).json()["choices"][0]["text"] for _ in range(2)
        }
        assert len(answers) == 1
        texts |= answers
    assert len(texts) == 3


def test_tgi_names_the_adapter_in_its_parameters(lora_server: HttpTestServer) -> None:
    parameters = {"adapter_id": "smith", "max_new_tokens": 2}
    for path in ("/generate", "/generate_stream", "/"):
        response = lora_server.post(path, {"inputs": "iron", "parameters": parameters})
        assert response.status_code == 200
        assert lora_server.backend.received[-1].lora == "smith"
    instances = [
        {"inputs": "iron", "parameters": parameters},
        {"inputs": "iron", "parameters": {"max_new_tokens": 2}},
        {**MESSAGES, "model": "poet"},
    ]
    assert lora_server.post("/vertex", {"instances": instances}).status_code == 200
    adapters = [request.lora for request in lora_server.backend.received[-3:]]
    assert adapters == ["smith", "", "poet"]
    parameters["adapter_id"] = "miner"
    response = lora_server.post("/generate", {"inputs": "iron", "parameters": parameters})
    assert response.status_code == 404 and "'smith'" in response.json()["error"]


def test_llama_cpp_names_adapters_by_id(lora_server: HttpTestServer) -> None:
    ids = {entry["name"]: entry["id"] for entry in lora_server.get("/lora-adapters").json()}
    body = {"prompt": "iron", "max_tokens": 2}
    lora = [{"id": ids["smith"], "scale": 0.0}, {"id": ids["poet"], "scale": 1.0}]
    assert lora_server.post("/v1/completions", {**body, "lora": lora}).status_code == 200
    assert lora_server.backend.received[-1].lora == "poet"
    for bad, param in (
        ([{"id": 99}], "lora[0].id"),
        ([{"id": 0, "scale": 0.5}], "lora[0].scale"),
        ([{"id": 0}, {"id": 1}], "lora"),
    ):
        response = lora_server.post("/v1/completions", {**body, "lora": bad})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("field", ["adapter_id", "lora"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/api/generate", {"model": "speaker", "prompt": "hi"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_base_model_does_not_answer_for_an_adapter_in_the_wrong_field(
    lora_server: HttpTestServer, path: str, body: dict[str, Any], field: str
) -> None:
    response = lora_server.client.post(path, json=body | {field: "smith"})
    assert response.status_code == (422 if path == "/generate" else 400)
    assert f"{field} is not supported: name the LoRA adapter" in response.text


def test_an_unknown_adapter_is_answered_with_the_names(lora_server: HttpTestServer) -> None:
    for name in ("miner", "speaker:miner"):
        response = lora_server.post("/v1/chat/completions", {**MESSAGES, "model": name})
        assert response.status_code == 404
        error = response.json()["error"]
        assert error["code"] == "model_not_found"
        assert "'speaker', 'smith', 'poet'" in error["message"]


def test_a_name_with_many_prefixes_is_answered_like_any_unknown_one(
    lora_server: HttpTestServer,
) -> None:
    for num_prefixes in (2, 30, 5000):
        response = complete(lora_server, "speaker:" * num_prefixes + "miner")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


def test_a_bad_adapter_fails_only_its_own_requests(lora_server: HttpTestServer) -> None:
    response = lora_server.post("/v1/completions", {"prompt": "iron", "model": "broken"})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message == "cannot use the LoRA adapter 'broken': broken: rank 99 is too large"
    response = lora_server.post("/v1/completions", {"prompt": "iron", "model": "smith"})
    assert response.status_code == 200


def test_models_name_their_parent(lora_server: HttpTestServer) -> None:
    cards = {card["id"]: card for card in lora_server.get("/v1/models").json()["data"]}
    assert "parent" not in cards["speaker"]
    assert cards["smith"]["parent"] == "speaker"
    assert cards["smith"]["root"] == "/secret/smith"
    assert lora_server.get("/v1/models/poet").json()["parent"] == "speaker"
    tags = [entry["name"] for entry in lora_server.get("/api/tags").json()["models"]]
    assert "smith:latest" in tags


def test_metrics_count_by_adapter(lora_server: HttpTestServer) -> None:
    def read(name: str) -> float:
        text = lora_server.get("/metrics").text
        match = re.search(rf'^{name}\{{adapter="poet".*\}} (\S+)$', text, re.MULTILINE)
        return float(match[1]) if match else 0.0

    names = ("bloomery_adapter_requests_total", "bloomery_adapter_generated_tokens_total")
    before = [read(name) for name in names]
    body = {"prompt": "iron", "model": "poet", "max_tokens": 3, "ignore_eos": True}
    assert lora_server.post("/v1/completions", body).status_code == 200
    assert [read(name) for name in names] == [before[0] + 1, before[1] + 3]
    assert read("bloomery_adapter_loads_total") >= 1
    text = lora_server.get("/metrics").text
    info = re.search(r"^vllm:lora_requests_info\{.*\}", text, re.MULTILINE)
    assert info is not None and 'max_lora="2"' in info[0]
    assert 'running_lora_adapters=""' in info[0], "no request is open"
    assert re.search(r'bloomery_adapter_in_slot\{adapter="poet".*slot="[12]"', text)


# ---- loading and unloading -----------------------------------------------------------------------


@pytest.fixture
def fresh_server(serve: Callable[..., HttpTestServer], tmp_path: Path) -> HttpTestServer:
    server = serve(lora_settings(tmp_path / "allowed"))
    server.client.headers.update(KEY)
    return server


@pytest.fixture(autouse=True)
def allowed_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "allowed"
    write_adapter(folder, "monk")
    return folder


def complete(server: HttpTestServer, model: str) -> Any:
    return server.post("/v1/completions", {"prompt": "iron", "model": model, "max_tokens": 2})


def test_clients_load_replace_and_unload_adapters(
    fresh_server: HttpTestServer, allowed_folder: Path
) -> None:
    path = str(write_adapter(allowed_folder, "miner-v1"))
    load = {"lora_name": "miner", "lora_path": path}
    assert complete(fresh_server, "miner").status_code == 404
    response = fresh_server.post("/v1/load_lora_adapter", load)
    assert response.status_code == 200
    assert response.json()["rank"] == 8
    assert complete(fresh_server, "miner").status_code == 200
    assert fresh_server.backend.received[-1].lora == "miner"
    # Twice under one name is an error, unless it should be replaced.
    response = fresh_server.post("/v1/load_lora_adapter", load)
    assert response.status_code == 400 and "load_inplace" in response.json()["error"]["message"]
    response = fresh_server.post("/v1/load_lora_adapter", {**load, "load_inplace": True})
    assert response.status_code == 200
    assert complete(fresh_server, "miner").status_code == 200
    assert fresh_server.backend.received[-1].lora == "miner#2"
    assert 'bloomery_adapter_requests_total{adapter="miner"' in fresh_server.get("/metrics").text
    assert fresh_server.post("/v1/unload_lora_adapter", {"lora_name": "miner"}).status_code == 200
    assert 'adapter="miner"' not in fresh_server.get("/metrics").text
    assert complete(fresh_server, "miner").status_code == 404
    response = fresh_server.post("/v1/unload_lora_adapter", {"lora_name": "miner"})
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "lora_name"
    # The name never stands for the old weights again.
    assert fresh_server.post("/v1/load_lora_adapter", load).status_code == 200
    assert complete(fresh_server, "miner").status_code == 200
    assert fresh_server.backend.received[-1].lora == "miner#3"


def test_adapters_that_cannot_be_used_are_refused(
    fresh_server: HttpTestServer, allowed_folder: Path, tmp_path: Path
) -> None:
    outside = write_adapter(tmp_path, "outside")
    bad = write_adapter(allowed_folder, "bad")
    (allowed_folder / "link").symlink_to(outside)
    (allowed_folder / "empty").mkdir()
    for path, status, reason in (
        (outside, 400, "--lora-allow"),
        (allowed_folder / ".." / "outside", 400, "--lora-allow"),
        (allowed_folder / "link", 400, "--lora-allow"),
        (allowed_folder / "empty", 404, "adapter_config.json"),
        (allowed_folder / "missing", 400, "--lora-allow"),
        (allowed_folder / ("x" * 5000), 400, "File name too long"),
        ("~no-such-user/x", 404, "no such user"),
        ("~\0/x", 404, "no such user"),
        ("  ", 400, "lora_path is empty"),
        (bad, 400, "rank 99 is too large"),
    ):
        body = {"lora_name": "x", "lora_path": str(path)}
        assert complete(fresh_server, str(path)).status_code == 404
        response = fresh_server.post("/v1/load_lora_adapter", body)
        assert response.status_code == status, path
        error = response.json()["error"]
        assert reason in error["message"] and error["param"] == "lora_path"
    for name in ("", "a#b", "speaker", "default", "x" * 300, " x", "a\nb"):
        body = {"lora_name": name, "lora_path": str(bad)}
        response = fresh_server.post("/v1/load_lora_adapter", body)
        assert response.json()["error"]["param"] == "lora_name"


def test_an_adapter_that_the_server_may_not_read_is_refused(
    fresh_server: HttpTestServer, monkeypatch: pytest.MonkeyPatch, allowed_folder: Path
) -> None:
    def refuse(path: Path) -> None:
        raise CheckpointError(f"{path}: cannot be read (Permission denied); check its permissions")

    monkeypatch.setattr("bloomery.artifacts.locate_adapter.check_readable", refuse)
    path = str(allowed_folder / "monk")
    response = fresh_server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "lora_path" and "check its permissions" in error["message"]
    response = complete(fresh_server, "monk")
    assert response.status_code == 404 and path not in response.text


def test_adapters_in_an_allowed_folder_need_no_loading(
    fresh_server: HttpTestServer, tmp_path: Path
) -> None:
    write_adapter(tmp_path, "outside")
    ids = [card["id"] for card in fresh_server.get("/v1/models").json()["data"]]
    assert "monk" in ids
    assert complete(fresh_server, "monk").status_code == 200
    assert fresh_server.backend.received[-1].lora == "monk"
    for name in ("../outside", str(tmp_path / "outside"), ".", "monk/../../outside"):
        assert complete(fresh_server, name).status_code == 404, name


def test_only_adapters_that_requests_can_name_are_listed(
    fresh_server: HttpTestServer, allowed_folder: Path
) -> None:
    """Some names stand for the base model, with or without its own name before them."""
    for name in ("default", "tgi", "speaker", "a#b", "new\nline"):
        write_adapter(allowed_folder, name)
    ids = [card["id"] for card in fresh_server.get("/v1/models").json()["data"]]
    assert ids == ["speaker", "smith", "poet", "broken", "monk"]
    assert complete(fresh_server, "default").status_code == 200
    assert fresh_server.backend.received[-1].lora == ""
    assert complete(fresh_server, "speaker:default").status_code == 404
    assert complete(fresh_server, "default:monk").status_code == 200
    assert fresh_server.backend.received[-1].lora == "monk"


def test_unknown_names_do_not_read_the_allowed_folders_every_time(
    fresh_server: HttpTestServer, monkeypatch: pytest.MonkeyPatch, allowed_folder: Path
) -> None:
    list_names = AdapterAllowList.list_names
    num_listings = 0

    def count_listings(allow_list: AdapterAllowList) -> list[str]:
        nonlocal num_listings
        num_listings += 1
        return list_names(allow_list)

    monkeypatch.setattr(AdapterAllowList, "list_names", count_listings)
    monkeypatch.setattr("bloomery.server.adapters.LISTING_SECONDS", 0.0)
    assert "'monk'" in complete(fresh_server, "miner").text
    write_adapter(allowed_folder, "nun")
    assert "'nun'" in complete(fresh_server, "miner").text
    monkeypatch.setattr("bloomery.server.adapters.LISTING_SECONDS", 3600.0)
    for _ in range(10):
        assert "'nun'" in complete(fresh_server, "miner").text
    assert num_listings == 3


def test_loading_needs_an_api_key_and_lora(
    serve: Callable[..., HttpTestServer], allowed_folder: Path
) -> None:
    body = {"lora_name": "x", "lora_path": str(allowed_folder / "monk")}
    for settings, remedy in (
        (lora_settings(with_key=False), "--api-key"),
        (ServerSettings(model="speaker"), "--enable-lora"),
    ):
        server = serve(settings)
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            response = server.post(path, body)
            assert response.status_code == 403
            assert remedy in response.json()["error"]["message"]
    response = server.post("/v1/completions", {"prompt": "iron", "lora": [{"id": 0}]})
    assert response.status_code == 400 and "--enable-lora" in response.json()["error"]["message"]
    response = complete(server, "speaker:smith")
    assert response.status_code == 404 and "--lora-modules" in response.json()["error"]["message"]
    with_key = serve(lora_settings())
    assert with_key.post("/v1/load_lora_adapter", body).status_code == 401
