"""A server whose model answers a prompt with a text that a function chooses.

So a test can let the model call a tool, read its result in the next prompt and then answer. A
request with a grammar fails if the text does not match it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from bloomery.messages import NewRequestData
from bloomery.server.service import ServerSettings
from bloomery.text.tokenizer import Tokenizer
from tests.server.conftest import HttpTestServer, start_server
from tests.server.playback import TOOL_TEMPLATE, PlaybackExecutor, load_tool_tokenizer
from tests.server.scripted_engine import InProcessEngine

ChooseAnswer = Callable[[str], str]  # prompt -> answer


class PlayingExecutor(PlaybackExecutor):
    """Samples the tokens of the text that is chosen for a prompt."""

    def __init__(self, tokenizer: Tokenizer, choose_answer: ChooseAnswer):
        super().__init__(tokenizer)
        self.choose_answer = choose_answer
        self.prompts: list[str] = []
        self.answers: dict[int, list[int]] = {}  # by hash of the prompt

    def next_token(self, prefix: list[int], request: NewRequestData) -> int:
        prompt = prefix[: request.prompt_len]
        key = hash(tuple(prompt))
        if len(prefix) == request.prompt_len:
            text = self.tokenizer.decode(prompt, skip_special=False)
            self.prompts.append(text)
            self.answers[key] = self.tokenizer.encode(self.choose_answer(text), add_special=False)
        self.answer_tokens = self.answers[key]
        return super().next_token(prefix, request)


class PlayingEngine(InProcessEngine):
    """A backend whose model plays chosen answers."""

    executor: PlayingExecutor

    def __init__(self, tokenizer: Tokenizer, choose_answer: ChooseAnswer, **options: Any):
        self.choose_answer = choose_answer
        super().__init__(tokenizer, **options)

    def create_executor(self) -> PlayingExecutor:
        return PlayingExecutor(self.tokenizer, self.choose_answer)


def start_playing_server(
    choose_answer: ChooseAnswer,
    exit_stack: ExitStack,
    settings: ServerSettings | None = None,
    template: str = TOOL_TEMPLATE,
    **options: Any,
) -> HttpTestServer:
    """A server for tools and reasoning, with room for long prompts."""
    tokenizer = load_tool_tokenizer(template)
    options = {"num_blocks": 2048, "max_model_len": 8192, **options}
    engine = PlayingEngine(tokenizer, choose_answer, **options)
    return start_server(engine, tokenizer, settings or ServerSettings(model="player"), exit_stack)
