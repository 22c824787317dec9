"""Names of adapters: every version of the weights has its own, and options name them clearly."""

from __future__ import annotations

import pytest

from bloomery.engine.adapter_catalog import (
    AdapterCatalog,
    adapter_name_of,
    parse_lora_modules,
)
from bloomery.errors import ConfigError


def test_a_name_never_stands_for_other_weights_again() -> None:
    catalog = AdapterCatalog()
    first = catalog.create("sql", "/v1", "/v1")
    assert catalog.put(first) is None
    second = catalog.create("sql", "/v2", "/v2")
    assert catalog.put(second) is first
    names = [first.engine_name, second.engine_name]
    assert names == ["sql", "sql#2"]
    assert [adapter_name_of(name) for name in names] == ["sql", "sql"]
    assert catalog.adapters == {"sql": second}


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("", []),
        ("a=/a", [("a", "/a")]),
        ("a=/a, b = /b with spaces\nc=/c=d", [("a", "/a"), ("b", "/b with spaces"), ("c", "/c=d")]),
        ("org/poet", [("org/poet", "org/poet")]),
        ('{"name": "a", "path": "/a,b"},b=/b', [("a", "/a,b"), ("b", "/b")]),
        ('[{"name": "a", "path": "/a"}, {"name": "b", "path": "/b"}]', [("a", "/a"), ("b", "/b")]),
    ],
)
def test_modules_are_read_in_the_forms_of_vllm_and_tgi(
    text: str, modules: list[tuple[str, str]]
) -> None:
    assert parse_lora_modules(text) == modules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=", "must be name=path"),
        ("=/a", "must be name=path"),
        ('{"name": "a"}', "must be name=path"),
        ("[1]", "must be name=path"),
        ('{"name": ', "not valid JSON"),
        ("a=/a,a=/b", "'a' is there twice"),
        ("a#2=/a", "without '#'"),
    ],
)
def test_wrong_modules_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="lora_modules") as refusal:
        parse_lora_modules(text)
    assert message in str(refusal.value)
