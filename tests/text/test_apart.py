"""Work on text in children: the same results as here, and an end to what has none."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bloomery.errors import InvalidRequest, TemplateError
from bloomery.text.apart import Apart, left
from bloomery.text.chat import render
from bloomery.text.tokenizer import Extras, Piece, Tokenizer
from tests.server.speaker import TEMPLATE, words

HELLO = [{"role": "user", "content": "Iron, fire and 火🔥"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GREEDY = "{% set x = ['a' * 900000] %}{% for i in range(99999) %}{% set _ = x.append(x[0] + i|string) %}{% endfor %}"
ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ raise_exception.__globals__ }}",
)


def with_template(template: str) -> Tokenizer:
    made = words()
    extras = Extras(made.bos_id, made.eos_ids, made.special_tokens, {"default": template})
    return Tokenizer(made.backend, replace(extras))


@asynccontextmanager
async def apart(template: str = TEMPLATE, **limits: Any) -> AsyncIterator[Apart]:
    made = Apart(with_template(template), **{"processes": 1, **limits})
    try:
        yield made
    finally:
        made.close()


def test_the_same_as_here() -> None:
    async def main() -> None:
        tokenizer = words()
        long = "The smith and the iron. " * 300
        async with apart() as hands:
            assert await hands.encode(long, True) == tokenizer.encode(long)
            for last in (None, 3):
                found = msgspec.json.decode(await hands.pieces(long, False, last), type=list[Piece])
                assert found == tokenizer.pieces(long, False)[-(last or 0) :]
            ids = tokenizer.encode(long, True)
            assert await hands.decode(ids) == tokenizer.decode(ids, skip_special=False)
            text, ids = await hands.conversation(HELLO, {"add_generation_prompt": True}, 10_000)
            assert text == render(tokenizer, HELLO) and ids == tokenizer.encode(
                text, add_special=False
            )
            pid = hands.idle[0].process.pid
            with pytest.raises(TemplateError, match="the first word is not the assistant's"):
                await hands.conversation([{"role": "assistant", "content": "x"}], {}, 10_000)
            with pytest.raises(TemplateError, match="more than 5 characters"):
                await hands.conversation(HELLO, {}, 5)
            assert [hand.process.pid for hand in hands.idle] == [pid], (
                "a refusal is no reason to replace a child"
            )

    asyncio.run(main())


@pytest.mark.parametrize(
    ("template", "limits"), [(ENDLESS, {}), (GREEDY, {"memory": 200 << 20})], ids=["time", "memory"]
)
def test_what_does_not_end_is_ended(template: str, limits: dict[str, int]) -> None:
    async def main() -> None:
        async with apart(template, template_seconds=0.5, **limits) as hands:
            with pytest.raises(TemplateError):
                await hands.conversation(HELLO, {}, 10_000_000)
            assert await hands.encode("a b", True) == words().encode("a b"), (
                "another child takes over"
            )

    asyncio.run(main())


def test_a_killed_child_is_replaced() -> None:
    async def main() -> None:
        async with apart() as hands:
            await hands.encode("a", True)
            os.kill(hands.idle[0].process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, hands.idle[0].process.pid, os.WEXITED | os.WNOWAIT)
            assert await hands.encode("a", True) == words().encode("a"), (
                "whoever comes next is not to blame"
            )

    asyncio.run(main())


def test_a_child_killed_at_work_is_the_works_fault() -> None:
    async def main() -> None:
        async with apart() as hands:
            await hands.encode("a", True)
            pid = hands.idle[0].process.pid
            os.kill(pid, signal.SIGSTOP)
            asked = asyncio.create_task(hands.encode("a", True))
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(InvalidRequest, match="takes too long"):
                await asked

    asyncio.run(main())


@pytest.mark.parametrize("template", ESCAPES)
def test_templates_do_not_get_out_of_the_sandbox(template: str) -> None:
    """An error, or the nothing that an attribute is which a template may not see."""
    with suppress(TemplateError):
        assert render(with_template(template), HELLO) == ""


def test_a_child_whose_parent_is_gone_does_not_begin() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        assert not left(theirs)
        ours.send(b"a task")
        assert not left(theirs)
        ours.close()
        assert left(theirs), "though the task can still be read"
