"""/v1/embeddings: the forms of an input, batches, and invalid inputs."""

from __future__ import annotations

import struct
from base64 import b64decode
from collections.abc import Callable
from typing import Any

import pytest

from bloomery.server.limits import ServerLimits
from bloomery.server.service import ServerSettings
from tests.server.conftest import HttpTestServer

IRON = [295, 359]  # "The iron"


def embed(server: HttpTestServer, input: Any, **more: Any) -> list[list[float]]:
    response = server.post("/v1/embeddings", {"input": input, **more})
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return [entry["embedding"] for entry in data]


def test_the_forms_of_an_input_have_the_same_embedding(server: HttpTestServer) -> None:
    (vector,) = embed(server, "The iron", add_special_tokens=False)
    assert embed(server, IRON) == [vector]
    assert embed(server, [IRON, IRON]) == [vector, vector]
    assert embed(server, ["The iron"] * 2, add_special_tokens=False) == [vector, vector]
    (encoded,) = embed(server, IRON, encoding_format="base64")
    decoded = list(struct.unpack("<4f", b64decode(encoded)))  # type: ignore[arg-type]
    assert decoded == pytest.approx(vector, abs=1e-6)
    assert embed(server, IRON, pooling="mean") == [vector]
    assert embed(server, IRON, pooling="last") != [vector]


def test_more_inputs_than_one_batch_holds(serve: Callable[..., HttpTestServer]) -> None:
    """Batches run one after the other and keep the order of the inputs."""
    server = serve(ServerSettings(model="m", limits=ServerLimits(fan_out=3)))
    inputs = [[id] for id in range(300, 320)]
    assert embed(server, inputs) == [embed(server, entry)[0] for entry in inputs]
    response = server.post("/v1/embeddings", {"input": inputs, "encoding_format": None})
    assert response.json()["usage"] == {"prompt_tokens": 20, "total_tokens": 20}


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": 7}, "input"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "user": "u" * 600}, "user"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [300] * 513}, "input"),
    ],
)
def test_invalid_inputs_are_refused(
    server: HttpTestServer, body: dict[str, Any], param: str
) -> None:
    response = server.post("/v1/embeddings", {"add_special_tokens": False, **body})
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_an_input_may_fill_the_context(server: HttpTestServer) -> None:
    assert len(embed(server, [300] * 512)) == 1
    response = server.post("/v1/embeddings", {"input": [300] * 513}).json()
    assert response["error"]["code"] == "context_length_exceeded"


def test_an_unknown_model_is_refused(server: HttpTestServer) -> None:
    assert server.post("/v1/embeddings", {"input": "a", "model": "ada"}).status_code == 404


def test_dimensions_shorten_and_scale_a_vector(server: HttpTestServer) -> None:
    (full,) = embed(server, "The iron")
    response = server.post("/v1/embeddings", {"input": "The iron", "dimensions": 2}).json()
    short = response["data"][0]["embedding"]
    length = (full[0] ** 2 + full[1] ** 2) ** 0.5
    assert short == pytest.approx([full[0] / length, full[1] / length])
