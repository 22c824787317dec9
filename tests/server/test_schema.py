"""Strict reading: laws over values, and bodies nobody would write."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bloomery.errors import InvalidRequest
from bloomery.server.errors import Malformed
from bloomery.server.routes import table
from bloomery.server.schema import Body, decode, read
from bloomery.server.service import Settings
from tests.server.conftest import Running


class Inner(msgspec.Struct, kw_only=True):
    a: int | None = None


class Sample(Body, kw_only=True):
    REFUSED = {"tools": "not yet"}
    n: int | None = None
    x: float | None = None
    s: str | None = None
    b: bool | None = None
    inner: Inner | None = None
    many: list[Inner] | None = None


@pytest.mark.parametrize(
    "text",
    [
        '{"n": true}',
        '{"n": "3"}',
        '{"n": 1.0}',
        '{"x": "1"}',
        '{"x": false}',
        '{"s": 1}',
        '{"b": 1}',
        '{"b": "yes"}',
        '{"inner": []}',
        '{"inner": {"a": "1"}}',
        '{"many": [{}, {"a": true}]}',
    ],
)
def test_nothing_that_merely_looks_like_it(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(decode(text.encode()), Sample)
    assert caught.value.field and caught.value.field.replace("[1]", "").split(".")[0] in text


def test_nulls_are_absent_and_the_unknown_is_counted() -> None:
    body = {
        "n": None,
        "x": 1,
        "tools": None,
        "who": 1,
        "inner": {"a": None, "what": 2},
        "many": [{"z": 1}, {"a": 1}],
    }
    made, unknown = read(decode(json.dumps(body).encode()), Sample)
    assert (made.n, made.x, made.s, unknown) == (None, 1.0, None, 3)


@pytest.mark.parametrize("value", ["1", "[1]", '{"a": 1}', '"x"', "true"])
def test_refused_fields_are_named(value: str) -> None:
    with pytest.raises(InvalidRequest, match="tools is not supported: not yet") as caught:
        read(decode(f'{{"tools": {value}}}'.encode()), Sample)
    assert caught.value.field == "tools"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON)
@settings(max_examples=300, deadline=None)
def test_whatever_is_sent_is_read_or_refused(value: Any) -> None:
    text = json.dumps(value)  # with NaN and Infinity, as careless clients write them
    try:
        read(decode(text.encode()), Sample)
    except (InvalidRequest, Malformed) as error:
        assert str(error)


@given(st.binary(max_size=64))
@settings(max_examples=300, deadline=None)
def test_any_bytes(data: bytes) -> None:
    try:
        decode(data)
    except (InvalidRequest, Malformed) as error:
        assert str(error)


POSTS = [route for route in table(Settings(model="m")) if route.method == "POST"]
NAMES = sorted({name for route in POSTS if route.body for name in route.body.__struct_fields__})


@given(
    st.sampled_from(POSTS),
    st.dictionaries(st.sampled_from([*NAMES, "unheard_of"]), JSON, max_size=5),
    st.data(),
)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_body_is_the_servers_fault(
    server: Running, route: Any, body: dict[str, Any], data: st.DataObject
) -> None:
    """Real routes, fields by their real names, values of any kind: never a 5xx, never a hang."""
    body = {
        "max_tokens": 2,
        "inputs": "a",
        "prompt": "a",
        "input": "a",
        "messages": [{"role": "user", "content": "a"}],
        "parameters": {"max_new_tokens": 2},
        **body,
    }
    text = json.dumps(body).encode("utf-8", "surrogatepass")
    answer = server.client.post(
        route.path, content=text, headers={"content-type": "application/json"}
    )
    assert answer.status_code in (200, 400, 404, 422), (route.path, text, answer.text)
