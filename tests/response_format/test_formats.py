"""Formats of public chat templates: found, faithful to what the template writes, and split-proof.

The numbers are what the templates in data/ reach today. benchmarks/response_formats.py prints them
for each template.
"""

from __future__ import annotations

from collections import Counter

import pytest

from bloomery.response_format.check import is_faithful, merge_events
from tests.response_format.conversations import (
    PublicTemplate,
    find_bad_split,
    golden_tools,
    judge_golden,
    look_up,
    open_template,
    parse_parts,
    read_golden,
    read_templates,
    render_messages,
)

KNOWN = [entry for entry in read_templates() if "llama.cpp" in entry.origin]
HELD_OUT = [entry for entry in read_templates() if "llama.cpp" not in entry.origin]
# Templates that show no tool calls at all.
WITHOUT_CALLS = {
    "google-gemma-2-2b-it",
    "microsoft-Phi-3.5-mini-instruct",
    "llama-cpp-rwkv-world",
    "HuggingFaceTB-SmolLM3-3B",
}


def template_name(template: PublicTemplate) -> str:
    return template.name


def count_faithful(templates: list[PublicTemplate]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for template in templates:
        format = look_up(template.source).format
        if format.calls is None:
            continue
        for _, sample in render_messages(template.source).items():
            answer = merge_events(parse_parts(format, sample.prompt, [sample.text]))
            counts["texts"] += 1
            counts["faithful"] += is_faithful(answer, sample.message)
    return counts


def test_every_known_template_with_calls_has_a_format() -> None:
    sources: Counter[str] = Counter()
    for template in KNOWN:
        lookup = look_up(template.source)
        render_messages(template.source)  # while the template is compiled
        if template.name in WITHOUT_CALLS:
            assert lookup.tool_problem
            continue
        assert lookup.format.calls is not None, template.name
        assert not lookup.tool_problem, (template.name, lookup.warnings)
        sources[lookup.source] += 1
    assert sources["derived"] >= 57
    assert sources.total() == 64


def test_known_templates_are_read_as_they_write() -> None:
    counts = count_faithful(KNOWN)
    assert counts["texts"] >= 640
    assert counts["faithful"] >= 0.98 * counts["texts"]


def test_held_out_templates_are_read_as_they_write() -> None:
    counts = count_faithful(HELD_OUT)
    assert counts["texts"] >= 420
    assert counts["faithful"] >= 0.92 * counts["texts"]


def test_golden_conversations() -> None:
    sources = {entry.name: entry.source for entry in KNOWN}
    verdicts: Counter[str] = Counter()
    for case in read_golden()["cases"]:
        source = sources[case["template"].removesuffix(".jinja")]
        verdict = judge_golden(open_template(source), look_up(source).format, case)
        verdicts[verdict.verdict] += 1
    assert verdicts["exact"] + verdicts["trimmed"] >= 345


def check_splits(template: PublicTemplate, stride: int) -> None:
    format = look_up(template.source).format
    for name, sample in render_messages(template.source).items():
        bad_split = find_bad_split(format, sample.prompt, sample.text, stride)
        assert bad_split is None, (template.name, name, bad_split)


@pytest.mark.parametrize("template", KNOWN[::3], ids=template_name)
def test_some_splits_of_some_templates(template: PublicTemplate) -> None:
    check_splits(template, stride=19)


@pytest.mark.slow
@pytest.mark.parametrize("template", [*KNOWN, *HELD_OUT], ids=template_name)
def test_all_splits_of_all_templates(template: PublicTemplate) -> None:
    check_splits(template, stride=1)


def check_golden_splits(stride: int, every: int) -> None:
    sources = {entry.name: entry.source for entry in KNOWN}
    for case in read_golden()["cases"][::every]:
        source = sources[case["template"].removesuffix(".jinja")]
        format = look_up(source).format
        tools = golden_tools(case["tools"])
        assert find_bad_split(format, "", case["text"], stride, tools) is None, case


def test_some_splits_of_golden_texts() -> None:
    check_golden_splits(stride=11, every=5)


@pytest.mark.slow
def test_all_splits_of_golden_texts() -> None:
    check_golden_splits(stride=1, every=1)
