"""`bloomery run` and `bloomery chat`: a conversation with a model in the terminal.

Answers are bounded, and a cut answer can be continued. An answer that repeats itself is stopped. A
base model, which has no chat template, completes the text that the user types.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from bloomery.errors import BloomeryError
from bloomery.recommend import recommend_model
from bloomery.sampling import SamplingParams

MAX_ANSWER_TOKENS = 1024  # of one answer, unless a flag says otherwise
COMMANDS_HELP = """\
  /continue       continue an answer that was cut; an empty line does the same
  /retry          answer the last message again
  /reset          forget the conversation
  /system TEXT    set the system prompt and start a new conversation
  /quit           end the chat; so does Ctrl-D
  /help           this list
  Ctrl-C stops an answer."""
# Control characters other than newline and tab. They are dropped from the model's output, which
# must not be able to drive the terminal.
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# A loop is a part that occurs this often in a row at the end of an answer and covers at least this
# many characters. The web page has a rule of its own that is much the same.
LOOP_REPEATS = 4
LOOP_CHARACTERS = 160
LOOP_WINDOW = 4000  # characters at the end of an answer that are searched
LOOP_CHECK_TOKENS = 16  # tokens between two searches


def find_loop(text: str) -> str | None:
    """Return the part that the end of `text` repeats, or None.

    Numbers count as equal, so a list of equal lines with running numbers is a loop. A part without
    a letter is not: tables and lists of zeros repeat on purpose.
    """
    end = re.sub(r"\d+", "0", text[-LOOP_WINDOW:])
    for length in range(1, len(end) // LOOP_REPEATS + 1):
        repeats = max(LOOP_REPEATS, ceil(LOOP_CHARACTERS / length))
        part = end[-length:]
        if end.endswith(part * repeats) and any(character.isalpha() for character in part):
            return part
    return None


@dataclass
class TerminalAnswer:
    """One answer as it was shown, and why it ended."""

    text: str = ""
    num_tokens: int = 0
    ttft_seconds: float = 0.0
    total_seconds: float = 0.0
    was_cut: bool = False  # by the bound on its length
    loop: str | None = None  # the part that it repeated

    @property
    def note(self) -> str:
        """What the user should know about the end of the answer."""
        if self.loop is not None:
            return "Stopped, because the answer repeats itself. /retry tries again."
        if self.was_cut:
            return f"Cut at {self.num_tokens} tokens. Press Enter to continue, or go on typing."
        return ""

    @property
    def summary(self) -> str:
        decode_seconds = self.total_seconds - self.ttft_seconds
        tokens_per_second = (self.num_tokens - 1) / max(decode_seconds, 1e-9)
        ttft_ms = self.ttft_seconds * 1000
        return f"{self.num_tokens} tokens, TTFT {ttft_ms:.0f} ms, {tokens_per_second:.0f} tokens/s"


@dataclass
class TerminalChat:
    """A conversation with a loaded model."""

    llm: Any
    params: SamplingParams
    system_prompt: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    can_continue: bool = False  # the last answer was cut

    def __post_init__(self) -> None:
        self.is_base_model = not self.llm.tokenizer.chat_templates
        self.reset()

    def run(self) -> None:
        """Read lines until the input ends or the user leaves."""
        if self.is_base_model:
            print(f"{self.llm.plan.name} is a base model without a chat template.")
            print("Type the beginning of a text and it continues; /help lists the commands.")
        else:
            print(f"{self.llm.plan.name}. Type a message; /help lists the commands.")
        for line in read_lines():
            if line.strip() in ("/quit", "/exit"):
                return
            try:
                self.run_line(line)
            except KeyboardInterrupt:  # before the answer has begun
                print()

    def run_line(self, line: str) -> None:
        if line.startswith("/"):
            self.run_command(line.strip())
        elif line.strip():
            self.answer(line)
        elif self.can_continue:
            self.answer_more()

    def run_command(self, line: str) -> None:
        command, _, argument = line.partition(" ")
        if command in ("/reset", "/system"):
            self.system_prompt = argument or self.system_prompt
            self.reset()
            print("A new conversation.")
        elif command == "/continue" and self.can_continue:
            self.answer_more()
        elif command == "/continue":
            print("The last answer was not cut.")
        elif command == "/retry":
            self.retry()
        elif command == "/help":
            print(COMMANDS_HELP)
        else:
            print(f"There is no command {command}.\n{COMMANDS_HELP}")

    def reset(self) -> None:
        self.messages = []
        self.can_continue = False
        if self.system_prompt and not self.is_base_model:
            self.messages = [{"role": "system", "content": self.system_prompt}]

    def answer(self, text: str) -> None:
        """Answer a message, or complete a text. An error leaves the conversation as it was."""
        conversation = [*self.messages, {"role": "user", "content": text}]
        if self.is_base_model:
            conversation = [{"role": "user", "content": text}]
        answer = self.generate(conversation)
        if answer is not None:
            self.messages = [*conversation, {"role": "assistant", "content": answer.text}]

    def answer_more(self) -> None:
        """Continue the last answer."""
        answer = self.generate(self.messages)
        if answer is not None:
            last = self.messages[-1]
            self.messages[-1] = {**last, "content": last["content"] + answer.text}

    def retry(self) -> None:
        """Answer the last message again, with other random numbers."""
        is_answered = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        if not is_answered:
            print("There is no answer yet.")
            return
        question = self.messages[-2]["content"]
        del self.messages[-2:]
        self.answer(question)

    def build_prompt(self, conversation: list[dict[str, str]]) -> Any:
        if self.is_base_model:
            return "".join(message["content"] for message in conversation)
        is_continued = conversation[-1]["role"] == "assistant"
        return self.llm.build_chat_prompt(conversation, continue_final_message=is_continued)

    def generate(self, conversation: list[dict[str, str]]) -> TerminalAnswer | None:
        """Stream an answer to the terminal; None after an error.

        Ctrl-C ends the answer early and keeps its text.
        """
        try:
            stream = self.llm.stream(self.build_prompt(conversation), self.params)
            answer = show_stream(stream)
        except BloomeryError as error:
            print(f"bloomery: {error}", file=sys.stderr)
            return None
        self.can_continue = answer.was_cut
        print()
        if answer.note:
            print_note(answer.note)
        if sys.stdout.isatty():
            print_note(answer.summary)
        return answer


def show_stream(stream: Iterator[Any]) -> TerminalAnswer:
    """Write the pieces of an answer as they arrive and stop it if it repeats itself."""
    answer = TerminalAnswer()
    start_time = time.monotonic()
    num_checked = 0
    try:
        for delta in stream:
            elapsed = time.monotonic() - start_time
            answer.ttft_seconds = answer.ttft_seconds or elapsed
            answer.text += delta.text
            answer.num_tokens += len(delta.token_ids)
            answer.was_cut = delta.finish_reason == "length"
            write_text(delta.text)
            if answer.num_tokens - num_checked >= LOOP_CHECK_TOKENS:
                num_checked = answer.num_tokens
                answer.loop = find_loop(answer.text)
            if answer.loop is not None:
                break
    except KeyboardInterrupt:
        pass
    finally:
        close = getattr(stream, "close", None)
        if close is not None:
            close()
    answer.total_seconds = time.monotonic() - start_time
    return answer


def read_lines() -> Iterator[str]:
    """Yield the lines that the user types, with line editing and history in a terminal."""
    prompt = "\n> " if sys.stdin.isatty() else ""
    if prompt:
        import readline  # noqa: F401  importing it gives input() editing and history
    while True:
        try:
            yield input(prompt)
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def write_text(text: str) -> None:
    """Write the model's output to the terminal, without control characters."""
    sys.stdout.write(CONTROL_CHARACTERS.sub("", text))
    sys.stdout.flush()


def print_note(text: str) -> None:
    """Print a line about the answer, dimmed in a terminal."""
    print(f"\x1b[2m{text}\x1b[0m" if sys.stdout.isatty() else text)


def print_recommendation(device: str) -> None:
    """Say that the embedded model is a small one, and which one is better for this machine."""
    recommended = recommend_model(device)
    if recommended is not None:
        print_note("This small model is for a first look. A better one for this machine:")
        print_note(f"  bloomery run {recommended.arguments}    (`bloomery models` lists more)")


def run_chat(llm: Any, params: SamplingParams, system_prompt: str | None) -> int:
    """Chat until the input ends. Without a bound in `params`, answers get the default one."""
    if params.max_tokens is None:
        params = replace(params, max_tokens=MAX_ANSWER_TOKENS)
    TerminalChat(llm, params, system_prompt).run()
    return 0
