"""The embedded model through the offline API: what transformers says; batched, cached and chunked, the same."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery import LLM, AsyncLLM, SamplingParams
from bloomery.errors import InvalidRequest, PromptTooLong
from bloomery.text.answer import RequestOutput

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "embedded.json").read_text(encoding="utf-8")
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(None, native=False, threads=1, kv_cache_gib=0.5)
    yield made
    made.close()


def ask(llm: LLM, prompts: list, params: SamplingParams) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def test_greedy_equals_transformers(llm: LLM) -> None:
    """20 prompts, 64 tokens each, all in one batch."""
    outputs = ask(llm, [entry["prompt"] for entry in GOLDEN], GREEDY)
    for entry, out in zip(GOLDEN, outputs, strict=True):
        assert out.prompt_token_ids == entry["prompt_ids"]
        assert out.outputs[0].token_ids == entry["ids"], entry["prompt"]
        assert llm.tokenizer is not None
        assert out.outputs[0].text == llm.tokenizer.decode(entry["ids"])


@pytest.fixture
def control_c() -> Iterator[None]:
    """As a person's terminal has it; a test runner may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_leaves_the_engine_whole(llm: LLM, control_c: None) -> None:
    """Wherever Ctrl-C strikes, the next answer is what it would have been."""
    want = ask(llm, [GOLDEN[0]["prompt"]], GREEDY)[0].outputs[0].token_ids[:12]
    few = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    struck = 0
    for turn in range(25):
        before = signal.signal(
            signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT)
        )
        signal.setitimer(signal.ITIMER_REAL, 0.004 + 0.0037 * turn)
        try:
            for _ in llm.stream(GOLDEN[turn % len(GOLDEN)]["prompt"], GREEDY):
                pass
        except KeyboardInterrupt:
            struck += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert ask(llm, [GOLDEN[0]["prompt"]], few)[0].outputs[0].token_ids == want
    assert struck and not llm.loop.busy


def logprobs(out: RequestOutput) -> list[float]:
    found = out.outputs[0].logprobs
    assert found is not None
    return [
        entry[token].logprob for entry, token in zip(found, out.outputs[0].token_ids, strict=True)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 16},
        {"max_num_seqs": 1},
        {"block_size": 8},
        {"steps_in_flight": 3},
    ],
    ids=["uncached", "chunked", "alone", "blocks of 8", "steps in flight"],
)
def test_batched_cached_and_chunked_say_the_same(llm: LLM, options: dict) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
    prompts = [entry["prompt"] * 3 for entry in GOLDEN[:6]]
    want = ask(llm, prompts, params)
    again = ask(llm, prompts, params)
    assert all(out.num_cached_tokens > 0 for out in again if len(out.prompt_token_ids) > 16)
    other = LLM(None, native=False, threads=1, kv_cache_gib=0.1, max_model_len=512, **options)
    for outs in (again, ask(other, prompts, params)):
        for one, two in zip(want, outs, strict=True):
            assert one.outputs[0].token_ids == two.outputs[0].token_ids
            assert logprobs(one) == pytest.approx(logprobs(two), abs=1e-4)
    other.close()


def test_a_conversation_computes_only_its_new_tokens(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Tell me about the history of iron making, briefly."}]
    first = llm.chat(talk, SamplingParams(temperature=0.0, max_tokens=30), use_tqdm=False)[0]
    talk += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "And steel?"},
    ]
    second = llm.chat(talk, SamplingParams(temperature=0.0, max_tokens=5), use_tqdm=False)[0]
    assert second.num_cached_tokens >= (len(first.prompt_token_ids) + 25) // 16 * 16 - 16


def test_streams_add_up_and_may_interleave(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    one, two = (llm.stream(entry["prompt"], params) for entry in GOLDEN[:2])
    text = ["", ""]
    ids: list[list[int]] = [[], []]
    for pieces in zip(one, two, strict=True):
        for i, piece in enumerate(pieces):
            text[i] += piece.text
            ids[i] += piece.token_ids
    for i, out in enumerate(ask(llm, [entry["prompt"] for entry in GOLDEN[:2]], params)):
        assert (text[i], ids[i]) == (out.outputs[0].text, out.outputs[0].token_ids)


def test_leaving_a_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("Count to one thousand:", SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.loop.scheduler.busy
    while llm.loop.busy:
        llm.loop.step()
    blocks = llm.loop.scheduler.blocks
    assert blocks.available == blocks.count


def test_stop_strings_end_the_answer_and_the_request(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=64, stop=["Rome", "is Par"])
    out = ask(llm, ["Paris is the capital of France. The capital of France"], params)[0].outputs[0]
    assert out.finish_reason == "stop" and out.stop_reason == "is Par"
    assert out.text == " "
    assert not llm.loop.busy


def test_n_best_of_and_seeds(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=8)
    first = ask(llm, ["Hello"], params)[0]
    second = ask(llm, ["Hello", "Goodbye"], params)[0]
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 3
    best = ask(
        llm, ["Hello"], SamplingParams(n=1, best_of=3, temperature=1.0, seed=11, max_tokens=8)
    )[0]
    ranked = ask(
        llm, ["Hello"], SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=8, logprobs=0)
    )[0]
    top = max(ranked.outputs, key=lambda o: o.cumulative_logprob or -1e9)
    assert best.outputs[0].token_ids == top.token_ids


def test_prompt_logprobs_do_not_depend_on_the_cache_or_chunks(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    prompt = " ".join(["The capital of France is Paris."] * 12)
    cold = ask(llm, [prompt], params)[0]
    warm = ask(llm, [prompt], params)[0]
    small = LLM(
        None, native=False, threads=1, kv_cache_gib=0.1, max_model_len=512, max_num_batched_tokens=7
    )
    chunked = ask(small, [prompt], params)[0]
    small.close()
    for out in (cold, warm, chunked):
        found = out.prompt_logprobs
        assert found is not None and found[0] is None and len(found) == len(out.prompt_token_ids)
        values = [
            entry[token].logprob
            for entry, token in zip(found[1:], out.prompt_token_ids[1:], strict=True)
            if entry
        ]
        assert len(values) == len(found) - 1
        if out is cold:
            want = values
        assert values == pytest.approx(want, abs=1e-4)


def test_what_a_checkpoint_asks_for_is_the_default(llm: LLM) -> None:
    assert llm.tokenizer is not None
    own = llm.tokenizer.defaults
    assert llm.default_params == SamplingParams(temperature=0.2, top_p=0.9, max_tokens=None)
    try:
        llm.tokenizer.defaults = {"top_k": 7, "max_tokens": 3, "unknown": 1}
        assert llm.default_params == SamplingParams(top_k=7, max_tokens=3)
    finally:
        llm.tokenizer.defaults = own


def test_bad_input_is_refused_by_name_and_harms_nobody(llm: LLM) -> None:
    for prompts, params, field in (
        ([], None, None),
        (["ok", ""], GREEDY, "prompt"),
        ([{"prompt_token_ids": [1, 10**6]}], GREEDY, "prompt"),
        ([{"nothing": 1}], GREEDY, "prompt"),
        (["a", "b"], [GREEDY], "sampling_params"),
    ):
        if not prompts:
            assert ask(llm, prompts, GREEDY) == []
            continue
        with pytest.raises(InvalidRequest) as caught:
            ask(llm, prompts, params)
        assert caught.value.field == field
    with pytest.raises(PromptTooLong, match="tokens, but at most"):
        ask(llm, [{"prompt_token_ids": [5] * 9000}], GREEDY)
    assert (
        ask(llm, ["The capital of France is"], GREEDY)[0].outputs[0].token_ids == GOLDEN[0]["ids"]
    )


def test_asyncio_streams_side_by_side(llm: LLM) -> None:
    engine = AsyncLLM(None, native=False, threads=1, kv_cache_gib=0.2, max_model_len=1024)

    async def one(prompt: str) -> list[int]:
        found: list[int] = []
        async for piece in engine.stream(
            prompt, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        ):
            found += piece.token_ids
        return found

    async def leave() -> None:
        async for _ in engine.stream("Count:", SamplingParams(max_tokens=400, ignore_eos=True)):
            break

    async def every() -> list[list[int]]:
        answers = await asyncio.gather(*(one(entry["prompt"]) for entry in GOLDEN[:4]), leave())
        with pytest.raises(PromptTooLong):
            await one("word " * 2000)
        return answers[:4]

    answers = asyncio.run(every())
    assert answers == [entry["ids"][:16] for entry in GOLDEN[:4]]
    engine.close()
    assert not engine.thread.is_alive()
