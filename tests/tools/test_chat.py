"""The chat in the terminal: loops, cut answers, commands, and base models."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import pytest

from bloomery import LLM, SamplingParams
from bloomery.tools.chat import LOOP_CHARACTERS, TerminalChat, find_loop

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("Paris, la femme, " + "la femme, " * 20, True),
        ("".join(f"{number}. The song of the sea.\n" for number in range(1, 20)), True),
        ("Boil the egg for ten minutes. " * 6, True),
        ("no no no no", False),  # too short to be certain
        ("| 0 | 0 |\n" * 40, False),  # a table
        ("-" * 400, False),
        ("".join(f"Fruit {chr(97 + number)} is a fruit.\n" for number in range(20)), False),
        ("", False),
    ],
)
def test_loops_are_parts_that_repeat_at_the_end(text: str, loops: bool) -> None:
    assert (find_loop(text) is not None) == loops


def test_a_loop_that_has_ended_does_not_count() -> None:
    looping = "the sea, " * 30
    assert len(looping) > LOOP_CHARACTERS and find_loop(looping)
    assert find_loop(looping + "and then the story begins in a small town far away.") is None


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(None, cpu_kernels=False, threads=1, kv_cache_gib=0.1, max_model_len=512)
    yield llm
    llm.close()


def chat(
    llm: LLM,
    lines: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    params: SamplingParams = GREEDY,
) -> tuple[TerminalChat, str]:
    """Type `lines` and return the conversation and what was printed."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    terminal_chat = TerminalChat(llm, params)
    terminal_chat.run()
    return terminal_chat, capsys.readouterr().out


def test_a_cut_answer_is_continued_by_an_empty_line(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    question = "Explain how iron is made."
    long, _ = chat(
        llm,
        question,
        monkeypatch,
        capsys,
        SamplingParams(temperature=0.0, max_tokens=24),
    )
    continued, output = chat(llm, f"{question}\n\n", monkeypatch, capsys)
    assert output.count("Cut at 12 tokens. Press Enter to continue") == 2
    assert continued.messages == long.messages, "the two parts are one answer"


def test_commands(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "Hello\n/retry\n/system Be brief.\n/continue\n/nonsense\n/help\n/quit\nnot sent\n"
    ended, output = chat(llm, lines, monkeypatch, capsys)
    assert ended.messages == [{"role": "system", "content": "Be brief."}]
    for text in (
        "A new conversation.",
        "The last answer was not cut.",
        "There is no command /nonsense.",
        "/system TEXT",
    ):
        assert text in output


def test_an_answer_that_repeats_itself_is_stopped(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only one token is allowed, so the answer can only repeat it."""
    assert llm.tokenizer is not None
    token_id = llm.tokenizer.encode(" iron")[0]
    params = SamplingParams(max_tokens=400, allowed_token_ids=[token_id], ignore_eos=True)
    stopped, output = chat(llm, "Say something.", monkeypatch, capsys, params)
    assert "Stopped, because the answer repeats itself." in output
    assert len(stopped.messages[-1]["content"]) < 400


def test_a_base_model_completes_the_text(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert llm.tokenizer is not None
    monkeypatch.setattr(llm.tokenizer, "chat_templates", {})
    ended, output = chat(llm, "The capital of France is\n\n", monkeypatch, capsys)
    assert "is a base model without a chat template" in output
    assert ended.messages[-1]["content"].startswith(" Paris")
    answer = llm.generate(
        "The capital of France is",
        SamplingParams(temperature=0.0, max_tokens=24),
        use_tqdm=False,
    )
    assert ended.messages[-1]["content"] == answer[0].outputs[0].text
