"""Tokenizer workers: the same results as in this process, and an end to tasks that have none."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bloomery.errors import InvalidRequest, TemplateError
from bloomery.sampling import StructuredOutputs
from bloomery.text.chat import render_chat
from bloomery.text.tokenizer import EncodedToken, Tokenizer, TokenizerConfig
from bloomery.text.tokenizer_pool import MAX_RENDER_SECONDS, TokenizerPool
from tests.server.scripted_engine import CHAT_TEMPLATE, load_test_tokenizer

HELLO = [{"role": "user", "content": "Iron, fire and 火🔥"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MEMORY_HUNGRY = (
    "{% set x = ['a' * 900000] %}"
    "{% for i in range(99999) %}{% set _ = x.append(x[0] + i|string) %}{% endfor %}"
)
SANDBOX_ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ raise_exception.__globals__ }}",
)


def tokenizer_with_template(template: str) -> Tokenizer:
    base = load_test_tokenizer()
    extras = TokenizerConfig(base.bos_id, base.eos_ids, base.special_tokens, {"default": template})
    return Tokenizer(base.backend, replace(extras))


@asynccontextmanager
async def tokenizer_pool(
    template: str = CHAT_TEMPLATE, **limits: Any
) -> AsyncIterator[TokenizerPool]:
    pool = TokenizerPool(tokenizer_with_template(template), **{"processes": 1, **limits})
    try:
        yield pool
    finally:
        pool.close()


def test_workers_return_what_the_tokenizer_returns_here() -> None:
    async def main() -> None:
        tokenizer = load_test_tokenizer()
        text = "The smith and the iron. " * 300
        async with tokenizer_pool() as pool:
            assert await pool.encode(text, True) == tokenizer.encode(text)
            for last in (None, 3):
                encoded = await pool.encode_with_offsets(text, False, last)
                pieces = msgspec.json.decode(encoded, type=list[EncodedToken])
                assert pieces == tokenizer.encode_with_offsets(text, False)[-(last or 0) :]
            ids = tokenizer.encode(text, True)
            assert await pool.decode(ids) == tokenizer.decode(ids, skip_special=False)
            options = {"add_generation_prompt": True}
            chat = await pool.render_chat(HELLO, options, 10_000)
            assert chat.text == render_chat(tokenizer, HELLO)
            assert chat.ids == tokenizer.encode(chat.text, add_special=False)
            assert chat.system_length == 0
            messages = [{"role": "system", "content": "Answer in iambs."}, *HELLO]
            chat = await pool.render_chat(messages, options, 10_000, finds_system=True)
            shared = tokenizer.decode(chat.ids[: chat.system_length], skip_special=False)
            assert shared == render_chat(tokenizer, messages).partition(HELLO[0]["content"])[0]
            pid = pool.idle_workers[0].process.pid
            with pytest.raises(TemplateError, match="the first word is not the assistant's"):
                await pool.render_chat([{"role": "assistant", "content": "x"}], {}, 10_000)
            with pytest.raises(TemplateError, match="more than 5 characters"):
                await pool.render_chat(HELLO, {}, 5)
            pids = [worker.process.pid for worker in pool.idle_workers]
            assert pids == [pid], "a refused task does not replace its worker"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("template", "limits"),
    [(ENDLESS, {}), (MEMORY_HUNGRY, {"memory_bytes": 200 << 20})],
    ids=["time", "memory"],
)
def test_a_task_over_its_limit_is_ended(template: str, limits: dict[str, int]) -> None:
    async def main() -> None:
        async with tokenizer_pool(template, template_seconds=0.5, **limits) as pool:
            with pytest.raises(TemplateError):
                await pool.render_chat(HELLO, {}, 10_000_000)
            expected = load_test_tokenizer().encode("a b")
            assert await pool.encode("a b", True) == expected, "another worker takes over"

    asyncio.run(main())


def test_a_chat_within_its_limit_does_not_fail_for_the_sake_of_a_hint() -> None:
    """The search for the end of the system message renders again, which takes the same time."""
    slow = "{% for a in range(4000) %}{% for b in range(5000) %}{% endfor %}{% endfor %}"
    template = slow + "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = tokenizer_with_template(template)
    messages = [{"role": "system", "content": "Answer in iambs."}, *HELLO]
    render_chat(tokenizer, HELLO)  # compiles the template
    begin = time.process_time()
    render_chat(tokenizer, messages)
    seconds = time.process_time() - begin
    assert seconds > MAX_RENDER_SECONDS

    async def main() -> None:
        async with tokenizer_pool(template, template_seconds=1.7 * seconds) as pool:
            chat = await pool.render_chat(messages, {}, 10_000, finds_system=True)
            assert chat.ids == tokenizer.encode(chat.text, add_special=False)

    asyncio.run(main())


def test_a_number_beyond_64_bits_is_refused_and_the_worker_stays() -> None:
    async def main() -> None:
        async with tokenizer_pool() as pool:
            await pool.render_chat(HELLO, {}, 10_000)
            pid = pool.idle_workers[0].process.pid
            for messages, options in (
                ([{"role": "user", "content": [{"n": 10**30}]}], {}),
                (HELLO, {"chat_template_kwargs": {"n": -(2**70)}}),
            ):
                with pytest.raises(InvalidRequest, match="more than 64 bits") as error:
                    await pool.render_chat(messages, options, 10_000)
                assert error.value.field == "messages"
            assert [worker.process.pid for worker in pool.idle_workers] == [pid]

    asyncio.run(main())


def test_a_template_that_never_ends_has_no_response_format() -> None:
    async def main() -> None:
        endless = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
        async with tokenizer_pool(endless, text_seconds=0.3) as pool:
            lookup = await pool.find_response_format()
            assert lookup.source == "none"
            assert "did not come to an end" in lookup.tool_problem

    asyncio.run(main())


def test_a_worker_killed_while_idle_is_replaced() -> None:
    async def main() -> None:
        async with tokenizer_pool() as pool:
            await pool.encode("a", True)
            pid = pool.idle_workers[0].process.pid
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            expected = load_test_tokenizer().encode("a")
            assert await pool.encode("a", True) == expected, "the next task is not to blame"

    asyncio.run(main())


def test_a_prepared_worker_replaces_the_idle_one_and_gets_the_grammars() -> None:
    async def main() -> None:
        async with tokenizer_pool(processes=2) as pool:
            await pool.encode("a", True)
            (first_worker,) = pool.idle_workers
            _, early_grammar = await asyncio.gather(
                pool.prepare_grammars(),
                pool.compile_grammar(StructuredOutputs(choice=["no"]), "choice"),
            )
            assert "no" in early_grammar.grammar
            (prepared,) = pool.idle_workers
            assert prepared.has_vocabulary and not first_worker.is_running()
            busy_worker = await pool._take_worker()
            await pool.encode("a", True)  # starts another worker
            pool._add_idle(busy_worker)
            assert len(pool.idle_workers) == 2
            grammar = await pool.compile_grammar(StructuredOutputs(choice=["yes"]), "choice")
            assert "yes" in grammar.grammar
            workers_with_vocabulary = [w for w in pool.idle_workers if w.has_vocabulary]
            assert workers_with_vocabulary == [prepared]

    asyncio.run(main())


def test_a_worker_killed_during_a_task_fails_that_task() -> None:
    async def main() -> None:
        async with tokenizer_pool() as pool:
            await pool.encode("a", True)
            pid = pool.idle_workers[0].process.pid
            os.kill(pid, signal.SIGSTOP)
            task = asyncio.create_task(pool.encode("a", True))
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(InvalidRequest, match="takes too long"):
                await task

    asyncio.run(main())


@pytest.mark.parametrize("template", SANDBOX_ESCAPES)
def test_templates_do_not_escape_the_sandbox(template: str) -> None:
    """The template fails, or the forbidden attribute renders as nothing."""
    with suppress(TemplateError):
        assert render_chat(tokenizer_with_template(template), HELLO) == ""
