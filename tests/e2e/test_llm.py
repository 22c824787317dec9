"""The embedded model through the offline API LLM.

It gives the tokens of transformers, and the same tokens whether prompts are batched, in the prefix
cache or computed in chunked prefill.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bloomery import LLM, SamplingParams
from bloomery.errors import InvalidRequest, PromptTooLong
from bloomery.text.outputs import RequestOutput

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "embedded.json").read_text(encoding="utf-8")
)
TOKENIZER = Path(__file__).parent.parent / "server" / "tokenizer.json"
NUM_INTERRUPTS = 50
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(None, cpu_kernels=False, threads=1, kv_cache_gib=0.5)
    yield llm
    llm.close()


def small_llm(**options: Any) -> LLM:
    return LLM(None, cpu_kernels=False, threads=1, kv_cache_gib=0.1, max_model_len=512, **options)


def generate(llm: LLM, prompts: list, params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def test_greedy_tokens_are_those_of_transformers(llm: LLM) -> None:
    """20 prompts, 64 tokens each, all in one batch."""
    outputs = generate(llm, [entry["prompt"] for entry in GOLDEN], GREEDY)
    for entry, output in zip(GOLDEN, outputs, strict=True):
        assert output.prompt_token_ids == entry["prompt_ids"]
        assert output.outputs[0].token_ids == entry["ids"], entry["prompt"]
        assert llm.tokenizer is not None
        assert output.outputs[0].text == llm.tokenizer.decode(entry["ids"])


@pytest.fixture
def default_interrupt_handler() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, as in a terminal; a test runner may ignore it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture
def tiny_llm(tmp_path: Path) -> Iterator[LLM]:
    """A model of random weights and two small layers: most of a step is the engine's own code."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "vocab_size": 406,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(TOKENIZER, tmp_path / "tokenizer.json")
    llm = LLM(
        str(tmp_path),
        load_format="dummy",
        device="cpu",
        cpu_kernels=False,
        threads=1,
        kv_cache_gib=0.01,
    )
    yield llm
    llm.close()


def test_an_interrupt_leaves_the_engine_usable(
    tiny_llm: LLM, default_interrupt_handler: None
) -> None:
    """After Ctrl-C at any point of a stream, the next request gets the tokens it always gets.

    The interrupts are spread over the time that one stream takes.
    """
    llm = tiny_llm
    prompts = [entry["prompt"] for entry in GOLDEN]
    short = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = generate(llm, [prompts[0]], short)[0].outputs[0].token_ids
    stream_seconds = min(seconds_to_stream(llm, prompts[0]) for _ in range(3))
    num_interrupts = 0
    for attempt in range(NUM_INTERRUPTS):
        previous = signal.signal(
            signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT)
        )
        delay_seconds = stream_seconds * (attempt + 0.5) / NUM_INTERRUPTS
        signal.setitimer(signal.ITIMER_REAL, delay_seconds)
        try:
            for _ in llm.stream(prompts[attempt % len(prompts)], GREEDY):
                pass
        except KeyboardInterrupt:
            num_interrupts += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert generate(llm, [prompts[0]], short)[0].outputs[0].token_ids == expected
    assert num_interrupts > NUM_INTERRUPTS // 2
    assert not llm.loop.busy


def seconds_to_stream(llm: LLM, prompt: str) -> float:
    start = time.monotonic()
    for _ in llm.stream(prompt, GREEDY):
        pass
    return time.monotonic() - start


def token_logprobs(output: RequestOutput) -> list[float]:
    """The log-probability of every token of the first completion."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    pairs = zip(completion.logprobs, completion.token_ids, strict=True)
    return [by_token[token].logprob for by_token, token in pairs]


LOGPROBS = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
LONG_PROMPTS = [entry["prompt"] * 3 for entry in GOLDEN[:6]]


@pytest.fixture(scope="module")
def batched_outputs(llm: LLM) -> list[RequestOutput]:
    return generate(llm, LONG_PROMPTS, LOGPROBS)


def check_equal_outputs(expected: list[RequestOutput], outputs: list[RequestOutput]) -> None:
    for reference, output in zip(expected, outputs, strict=True):
        assert reference.outputs[0].token_ids == output.outputs[0].token_ids
        assert token_logprobs(reference) == pytest.approx(token_logprobs(output), abs=1e-4)


def test_prefix_hits_do_not_change_the_tokens(
    llm: LLM, batched_outputs: list[RequestOutput]
) -> None:
    outputs = generate(llm, LONG_PROMPTS, LOGPROBS)
    long_outputs = [output for output in outputs if len(output.prompt_token_ids) > 16]
    assert all(output.num_cached_tokens > 0 for output in long_outputs)
    check_equal_outputs(batched_outputs, outputs)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 16},
        {"max_num_seqs": 1},
        {"block_size": 8},
        {"steps_in_flight": 3},
    ],
    ids=[
        "no prefix cache",
        "chunked prefill",
        "one sequence at a time",
        "blocks of 8",
        "steps in flight",
    ],
)
def test_scheduling_options_do_not_change_the_tokens(
    batched_outputs: list[RequestOutput], options: dict[str, Any]
) -> None:
    other = small_llm(**options)
    check_equal_outputs(batched_outputs, generate(other, LONG_PROMPTS, LOGPROBS))
    other.close()


def test_the_next_turn_of_a_chat_hits_the_prefix_cache(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me about the history of iron making, briefly."}]
    first_params = SamplingParams(temperature=0.0, max_tokens=30)
    first = llm.chat(messages, first_params, use_tqdm=False)[0]
    messages += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "And steel?"},
    ]
    second_params = SamplingParams(temperature=0.0, max_tokens=5)
    second = llm.chat(messages, second_params, use_tqdm=False)[0]
    assert second.num_cached_tokens >= (len(first.prompt_token_ids) + 25) // 16 * 16 - 16


def test_chats_with_one_system_message_compute_it_once(tmp_path: Path) -> None:
    """A model with recurrent states resumes where it ends, also in the batch that is the first."""
    config = {
        "model_type": "lfm2",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "full_attn_idxs": [1],
        "vocab_size": 406,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(TOKENIZER, tmp_path / "tokenizer.json")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    llm = LLM(
        str(tmp_path),
        load_format="dummy",
        device="cpu",
        cpu_kernels=False,
        threads=1,
        kv_cache_gib=0.01,
        block_size=4,
    )
    try:
        system = {"role": "system", "content": "Iron and fire and the smith and the water."}
        chats = [[system, {"role": "user", "content": word}] for word in ("one", "two", "six")]
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        outputs = llm.chat(chats, params, use_tqdm=False)
    finally:
        llm.close()
    assert [output.num_cached_tokens > 8 for output in outputs] == [False, True, True]


def test_interleaved_streams_add_up_to_the_outputs_of_generate(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [entry["prompt"] for entry in GOLDEN[:2]]
    first, second = (llm.stream(prompt, params) for prompt in prompts)
    texts = ["", ""]
    token_ids: list[list[int]] = [[], []]
    for deltas in zip(first, second, strict=True):
        for i, delta in enumerate(deltas):
            texts[i] += delta.text
            token_ids[i] += delta.token_ids
    for i, output in enumerate(generate(llm, prompts, params)):
        assert texts[i] == output.outputs[0].text
        assert token_ids[i] == output.outputs[0].token_ids


def test_closing_a_stream_frees_its_kv_blocks(llm: LLM) -> None:
    stream = llm.stream("Count to one thousand:", SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.loop.scheduler.busy
    while llm.loop.busy:
        llm.loop.step()
    block_pool = llm.loop.scheduler.block_pool
    assert block_pool.num_free_blocks == block_pool.num_blocks


def test_a_stop_string_ends_the_text_and_the_request(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=64, stop=["Rome", "is Par"])
    prompt = "Paris is the capital of France. The capital of France"
    completion = generate(llm, [prompt], params)[0].outputs[0]
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == "is Par"
    assert completion.text == " "
    assert not llm.loop.busy


def test_a_seed_fixes_all_n_completions_and_best_of_returns_the_likeliest(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=8)
    first = generate(llm, ["Hello"], params)[0]
    second = generate(llm, ["Hello", "Goodbye"], params)[0]
    first_ids = [completion.token_ids for completion in first.outputs]
    assert first_ids == [completion.token_ids for completion in second.outputs]
    assert len({tuple(token_ids) for token_ids in first_ids}) == 3
    best_of = SamplingParams(n=1, best_of=3, temperature=1.0, seed=11, max_tokens=8)
    all_three = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=8, logprobs=0)
    best = generate(llm, ["Hello"], best_of)[0].outputs[0]
    completions = generate(llm, ["Hello"], all_three)[0].outputs
    top = max(completions, key=lambda completion: completion.cumulative_logprob or -1e9)
    assert best.token_ids == top.token_ids


def test_prompt_logprobs_do_not_depend_on_the_prefix_cache_or_chunked_prefill(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    prompt = " ".join(["The capital of France is Paris."] * 12)
    uncached = generate(llm, [prompt], params)[0]
    cached = generate(llm, [prompt], params)[0]
    small = small_llm(max_num_batched_tokens=7)
    chunked = generate(small, [prompt], params)[0]
    small.close()
    expected: list[float] = []
    for output in (uncached, cached, chunked):
        entries = output.prompt_logprobs
        assert entries is not None
        assert entries[0] is None
        assert len(entries) == len(output.prompt_token_ids)
        pairs = zip(entries[1:], output.prompt_token_ids[1:], strict=True)
        values = [by_token[token].logprob for by_token, token in pairs if by_token]
        assert len(values) == len(entries) - 1
        expected = expected or values
        assert values == pytest.approx(expected, abs=1e-4)


def test_default_params_come_from_the_checkpoint(llm: LLM) -> None:
    assert llm.tokenizer is not None
    original_defaults = llm.tokenizer.sampling_defaults
    expected = SamplingParams(
        temperature=0.2,
        top_p=0.9,
        repetition_penalty=1.05,
        frequency_penalty=0.3,
        max_tokens=None,
    )
    assert llm.default_params == expected
    try:
        llm.tokenizer.sampling_defaults = {"top_k": 7, "max_tokens": 3, "unknown": 1}
        assert llm.default_params == SamplingParams(top_k=7, max_tokens=3)
    finally:
        llm.tokenizer.sampling_defaults = original_defaults


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert generate(llm, [], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        (["ok", ""], GREEDY, "prompt"),
        ([{"prompt_token_ids": [1, 10**6]}], GREEDY, "prompt"),
        ([{"nothing": 1}], GREEDY, "prompt"),
        (["a", "b"], [GREEDY], "sampling_params"),
    ],
    ids=["empty prompt", "unknown token", "no prompt", "too few params"],
)
def test_invalid_input_is_refused_by_field_and_harms_no_other_request(
    llm: LLM, prompts: list, params: Any, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate(llm, prompts, params)
    assert caught.value.field == field
    assert not llm.loop.busy
    short = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    output = generate(llm, ["The capital of France is"], short)[0]
    assert output.outputs[0].token_ids == GOLDEN[0]["ids"][:4]


def test_a_prompt_that_is_too_long_is_refused_and_harms_no_other_request(llm: LLM) -> None:
    with pytest.raises(PromptTooLong, match="tokens, but at most"):
        generate(llm, [{"prompt_token_ids": [5] * 9000}], GREEDY)
    output = generate(llm, ["The capital of France is"], GREEDY)[0]
    assert output.outputs[0].token_ids == GOLDEN[0]["ids"]
