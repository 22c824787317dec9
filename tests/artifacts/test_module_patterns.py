"""Patterns of adapters mean what they mean in PEFT, and cannot take an engine's time."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from bloomery.artifacts.module_patterns import MAX_PATTERNS, NAME, PatternMatcher
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


def test_flags_are_possible_where_peft_takes_them() -> None:
    with PatternMatcher(ORIGIN) as matcher:
        matcher.check("target_modules", "(?i)Q_PROJ", is_end=False)
        assert matcher.is_path("(?i)Q_PROJ", "q_proj")
        with pytest.raises(re.error) as error:
            re.match(r"(.*\.)?((?i)Q_PROJ)$", "q_proj")  # as in PEFT
        with pytest.raises(InvalidRequest, match=str(error.value)):
            matcher.check("rank_pattern", "(?i)Q_PROJ", is_end=True)
        matcher.check("rank_pattern", "(?i:Q_PROJ)", is_end=True)
        assert matcher.is_end("(?i:Q_PROJ)", "layers.q_proj")


def test_names_need_no_other_process() -> None:
    with PatternMatcher(ORIGIN) as matcher:
        for number in range(MAX_PATTERNS):
            matcher.check("rank_pattern", f"layers.{number}.q_proj", is_end=True)
        assert matcher.process is None
        with pytest.raises(InvalidRequest, match=f"more than {MAX_PATTERNS} patterns"):
            matcher.check("alpha_pattern", "q_proj", is_end=True)


def test_expressions_are_not_compiled_in_this_process() -> None:
    begin = time.thread_time()
    with PatternMatcher(ORIGIN) as matcher:
        with pytest.raises(InvalidRequest, match="takes too long"):
            for number in range(20):  # half a second each
                slow = f"(?i:{number}" + "[a-\U0010fffe]" * 130 + ")"
                matcher.check("rank_pattern", slow, is_end=True)
        assert matcher.num_patterns < 20
    assert time.thread_time() - begin < 1


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
