"""Ids that nobody looks at before the end are folded in the short way: the answer is the one of the long way."""

from __future__ import annotations

import pytest

from bloomery.messages import EngineRequest, ResolvedSampling, TokenLogprob, TokenOutput
from bloomery.text.answer import Answer

REQUEST = EngineRequest("0", (1, 2), ResolvedSampling(), 4)
WON = TokenLogprob(7, -0.5, 1)


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("logprobs", [(), (WON,)])
def test_folding_in_both_ways(logprobs: tuple[TokenLogprob, ...], finish: str) -> None:
    news = [
        TokenOutput("0", i, (7 + i,), logprobs, finish=finish if i == 3 else None) for i in range(4)
    ]  # type: ignore[arg-type]
    short = Answer(0, REQUEST, (), None)
    long = Answer(0, REQUEST, (), None)
    folded = [short.gain(one) or not short.take(one) for one in news]
    for one in news:
        long.take(one)
    assert short == long and short.token_ids == [7, 8, 9, 10] and short.finish_reason == finish
    assert folded == [False, not logprobs, not logprobs, False]
