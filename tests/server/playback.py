"""An engine that answers with given texts, for tests of tool calls and reasoning.

A test says what the model writes. A request with a grammar fails if the text does not match it.
The tokenizer is the test tokenizer with a chat template that has tools and reasoning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bloomery.messages import NewRequestData
from bloomery.text.tokenizer import Tokenizer, TokenizerConfig
from tests.server.scripted_engine import (
    BLOCK_SIZE,
    InProcessEngine,
    ScriptedExecutor,
    load_test_tokenizer,
)

# Tools and reasoning as many models write them. `enable_thinking: false` closes the reasoning.
TOOL_TEMPLATE_PATH = Path(__file__).parent / "tools.jinja"
TOOL_TEMPLATE = TOOL_TEMPLATE_PATH.read_text(encoding="utf-8")


def load_tool_tokenizer(template: str = TOOL_TEMPLATE) -> Tokenizer:
    """The test tokenizer with a chat template that has tools and reasoning."""
    plain = load_test_tokenizer()
    config = TokenizerConfig(1, (2,), plain.special_tokens, {"default": template})
    return Tokenizer(plain.backend, config)


class PlaybackExecutor(ScriptedExecutor):
    """Samples the tokens of a text, then the end of sequence."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__(BLOCK_SIZE, tokenizer)
        self.tokenizer = tokenizer
        self.answer_tokens: list[int] = []

    def allowed_token(self, prefix: list[int], token: int, mask: Any) -> int:
        """The given token, so that a request fails if its grammar does not allow it."""
        return token

    def next_token(self, prefix: list[int], request: NewRequestData) -> int:
        position = len(prefix) - request.prompt_len
        if position < len(self.answer_tokens):
            return self.answer_tokens[position]
        return self.eos_id


class PlaybackEngine(InProcessEngine):
    """Answers every request with the same text, which a test may change."""

    executor: PlaybackExecutor

    def __init__(self, tokenizer: Tokenizer, answer: str = "", **options: Any):
        super().__init__(tokenizer, **options)
        self.set_answer(answer)

    def create_executor(self) -> PlaybackExecutor:
        return PlaybackExecutor(self.tokenizer)

    def set_answer(self, text: str) -> None:
        self.executor.answer_tokens = self.tokenizer.encode(text, add_special=False)

    @property
    def last_prompt(self) -> str:
        """The text of the last request's prompt."""
        return self.tokenizer.decode(self.received[-1].prompt, skip_special=False)
