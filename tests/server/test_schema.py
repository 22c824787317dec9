"""Request bodies are read strictly: properties over arbitrary values, and malformed bodies."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bloomery.errors import InvalidRequest
from bloomery.server.errors import MalformedBodyError
from bloomery.server.routes import build_routes
from bloomery.server.schema import RequestBody, UnknownField, decode_json, parse_body
from bloomery.server.service import ServerSettings
from tests.server.conftest import HttpTestServer


class InnerStruct(msgspec.Struct, kw_only=True):
    a: int | None = None


class SampleBody(RequestBody, kw_only=True):
    UNSUPPORTED_FIELDS = {"tools": "not yet"}
    n: int | None = None
    x: float | None = None
    s: str | None = None
    b: bool | None = None
    inner: InnerStruct | None = None
    many: list[InnerStruct] | None = None


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
def test_values_are_not_coerced(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(decode_json(text.encode()), SampleBody)
    assert caught.value.field and caught.value.field.replace("[1]", "").split(".")[0] in text


def test_nulls_are_absent_and_unknown_fields_are_counted() -> None:
    body = {
        "n": None,
        "x": 1,
        "tools": None,
        "who": 1,
        "inner": {"a": None, "what": 2},
        "many": [{"z": 1}, {"a": 1}],
    }
    parsed, unknown = parse_body(decode_json(json.dumps(body).encode()), SampleBody)
    assert (parsed.n, parsed.x, parsed.s) == (None, 1.0, None)
    assert [field.name for field in unknown] == ["who", "what", "z"]


def test_a_misspelt_field_has_a_nearest_name() -> None:
    known = ("temperature", "max_tokens", "n")
    cases = {"temprature": "temperature", "maxtokens": "max_tokens", "m": None, "speed": None}
    for name, nearest in cases.items():
        assert UnknownField(name, known).nearest_name() == nearest


@pytest.mark.parametrize("value", ["1", "[1]", '{"a": 1}', '"x"', "true"])
def test_unsupported_fields_are_named(value: str) -> None:
    with pytest.raises(InvalidRequest, match="tools is not supported: not yet") as caught:
        parse_body(decode_json(f'{{"tools": {value}}}'.encode()), SampleBody)
    assert caught.value.field == "tools"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON_VALUES)
@settings(max_examples=300, deadline=None)
def test_any_json_value_is_parsed_or_refused(value: Any) -> None:
    text = json.dumps(value)  # with NaN and Infinity, as careless clients write them
    try:
        parse_body(decode_json(text.encode()), SampleBody)
    except (InvalidRequest, MalformedBodyError) as error:
        assert str(error)


@given(st.binary(max_size=64))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        decode_json(data)
    except (InvalidRequest, MalformedBodyError) as error:
        assert str(error)


POST_ROUTES = [route for route in build_routes(ServerSettings(model="m")) if route.method == "POST"]
FIELD_NAMES = sorted(
    {name for route in POST_ROUTES if route.body_type for name in route.body_type.__struct_fields__}
)


@given(
    st.sampled_from(POST_ROUTES),
    st.dictionaries(st.sampled_from([*FIELD_NAMES, "unheard_of"]), JSON_VALUES, max_size=5),
    st.data(),
)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_body_causes_a_server_error(
    server: HttpTestServer, route: Any, body: dict[str, Any], data: st.DataObject
) -> None:
    """Real routes and field names with values of any kind give no 5xx and no hang."""
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
    response = server.client.post(
        route.path, content=text, headers={"content-type": "application/json"}
    )
    assert response.status_code in (200, 400, 404, 422), (route.path, text, response.text)
