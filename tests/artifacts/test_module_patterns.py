"""Patterns of adapters mean what they mean in PEFT, and cannot take an engine's time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bloomery.artifacts.module_patterns import NAME, PatternMatcher
from bloomery.errors import InvalidRequest

ORIGIN = Path("adapter_config.json")
PATHS = (
    "q_proj",
    "model.layers.0.self_attn.q_proj",
    "model.layers.10.self_attn.q_proj",
    "model.layers.0.mlp.experts.3.down_proj",
    "xq_proj",
)
PATTERNS = (
    "q_proj",
    "self_attn.q_proj",
    r"layers\.0\.self_attn\.q_proj",
    "0.self_attn.q_proj",
    r".*\.(q|k)_proj",
    r"^model\.layers\.\d\..*",
    r"(?!.*experts).*_proj",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_means_what_it_means_in_peft(pattern: str) -> None:
    with PatternMatcher(ORIGIN) as matcher:
        for path in PATHS:
            assert matcher.is_path(pattern, path) == bool(re.fullmatch(pattern, path))
            expected = re.fullmatch(rf"(.*\.)?({pattern})", path)
            assert matcher.is_end(pattern, path) == bool(expected)
        assert (matcher.process is None) == bool(NAME.fullmatch(pattern))


def test_an_expression_that_never_ends_is_refused() -> None:
    with PatternMatcher(ORIGIN) as matcher:
        assert matcher.is_path(".*", "x")
        process = matcher.process
        assert process is not None
        with pytest.raises(InvalidRequest, match="adapter_config.json: .* takes too long"):
            matcher.is_path("(.*)*" * 9 + "x", PATHS[1])
        with pytest.raises(InvalidRequest):  # there is no second chance
            matcher.is_path(".*", "x")
    assert process.poll() is not None
