"""/v1/embeddings beyond its goldens: inputs of every kind, many at once, what is refused, what goes wrong."""

from __future__ import annotations

import struct
from base64 import b64decode
from collections.abc import Callable
from typing import Any

import pytest

from bloomery.server.limits import Limits
from bloomery.server.service import Settings
from tests.server.conftest import Running

IRON = [295, 359]  # "The iron"


def vectors(server: Running, input: Any, **more: Any) -> list[list[float]]:
    answer = server.post("/v1/embeddings", {"input": input, **more})
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return [entry["embedding"] for entry in data]


def test_one_text_said_in_four_ways(server: Running) -> None:
    (one,) = vectors(server, "The iron", add_special_tokens=False)
    assert vectors(server, IRON) == [one]
    assert (
        vectors(server, [IRON, IRON])
        == [one, one]
        == vectors(server, ["The iron"] * 2, add_special_tokens=False)
    )
    (packed,) = vectors(server, IRON, encoding_format="base64")
    assert list(struct.unpack("<4f", b64decode(packed))) == pytest.approx(one, abs=1e-6)  # type: ignore[arg-type]
    assert vectors(server, IRON, pooling="last") != [one] == vectors(server, IRON, pooling="mean")


def test_more_inputs_than_go_together(serve: Callable[..., Running]) -> None:
    """They go one batch after the other; nothing is mixed up, and the door is as it was."""
    server = serve(Settings(model="m", limits=Limits(fan_out=3)))
    several = [[id] for id in range(300, 320)]
    assert vectors(server, several) == [vectors(server, one)[0] for one in several]
    assert server.post("/v1/embeddings", {"input": several, "encoding_format": None}).json()[
        "usage"
    ] == {
        "prompt_tokens": 20,
        "total_tokens": 20,
    }


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
        ({"input": "a", "dimensions": 4}, "dimensions"),
        ({"input": "a", "user": "u" * 600}, "user"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [300] * 513}, "input"),
    ],
)
def test_what_is_refused(server: Running, body: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/embeddings", {"add_special_tokens": False, **body})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_an_input_may_fill_the_context(server: Running) -> None:
    assert len(vectors(server, [300] * 512)) == 1
    answer = server.post("/v1/embeddings", {"input": [300] * 513}).json()
    assert answer["error"]["code"] == "context_length_exceeded"


def test_another_model_is_not_found(server: Running) -> None:
    assert server.post("/v1/embeddings", {"input": "a", "model": "ada"}).status_code == 404
