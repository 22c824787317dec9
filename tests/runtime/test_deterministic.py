"""Deterministic mode: every token and every bit of its log-probabilities are those of the request alone.

Neighbours, chunk sizes, prefix hits, preemption and replay are tried in turn; the reference is the request by itself,
its prompt in one piece, in an engine without a prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers as tf
from gguf import GGMLQuantizationType as Kind

from bloomery.engine.loop import Loop
from bloomery.executors.chosen import chosen
from bloomery.messages import EngineRequest, ResolvedSampling, TokenLogprob, TokenOutput
from bloomery.runtime.forward import CPU_TILE, Steady
from bloomery.sampling import embedding_request
from tests.parity.cases import Case, make_checkpoint
from tests.parity.gguf_writer import write
from tests.parity.serve import engine, plan, run

VOCAB = 1003
COUNT = 12
LENGTH = 128
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**SIZES),
    "gemma2": lambda: tf.Gemma2Config(
        **SIZES, head_dim=16, sliding_window=9, attn_logit_softcapping=20.0
    ),
    "mixtral": lambda: tf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "bloom": lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=128, n_layer=2, n_head=8),
}
CASES = [("llama", "bfloat16"), *((name, "float32") for name in MODELS)]

Answer = tuple[list[int], list[TokenLogprob]]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def start(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Loop]:
    name, dtype = request.param
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(Case(name, MODELS[name]), folder)

    def made(blocks: int | None = None, **wishes: Any) -> Loop:
        wishes = {
            "max_num_batched_tokens": 512,
            "prefix_cache": False,
            "kv_cache_gib": 0.05,
            "block_size": 8,
            **wishes,
        }
        resolved = plan(folder, LENGTH, deterministic=True, dtype=dtype, **wishes)
        return engine(resolved, blocks)

    return made


def asked(random: Random, stem: list[int]) -> list[EngineRequest]:
    """Some greedy, some drawn, of many lengths, half of them with a common beginning."""
    made = []
    for number in range(6):
        prompt = stem[: random.choice([0, 24])] + [
            random.randrange(3, VOCAB) for _ in range(random.randrange(1, 40))
        ]
        sampling = ResolvedSampling(temperature=random.choice([0.0, 1.0]), seed=number, logprobs=20)
        made.append(EngineRequest(str(number), tuple(prompt), sampling, COUNT))
    return made


def answer(news: list[TokenOutput]) -> Answer:
    return [id for one in news for id in one.ids], [entry for one in news for entry in one.logprobs]


def test_alone_and_in_company(start: Callable[..., Loop]) -> None:
    random = Random(7)
    requests = asked(random, [random.randrange(3, VOCAB) for _ in range(24)])
    loop = start()
    want = {request.id: answer(run(loop, [request])[request.id]) for request in requests}

    def same(loop: Loop, order: list[EngineRequest], begun: int = 0) -> None:
        for id, news in run(loop, order).items():
            ids, logprobs = answer(news)
            assert (ids, logprobs) == (want[id][0][begun:], want[id][1][begun:]), f"request {id}"

    same(start(), requests)
    same(start(max_num_seqs=3), requests[::-1])
    chunked = start(max_num_batched_tokens=7)
    same(chunked, requests)
    assert isinstance(chunked.executor.worker.model, Steady)  # type: ignore[attr-defined]
    warm = start(max_num_batched_tokens=31, prefix_cache=True)
    same(warm, requests)
    same(warm, requests)
    assert run(warm, [requests[0]])["0"][-1].cached > 0 or len(requests[0].prompt) < 9
    tight = start(blocks=18, prefix_cache=True)
    same(tight, requests)
    assert tight.scheduler.preemptions, "nothing was preempted"
    replayed = [replace(request, emitted=tuple(want[request.id][0][:5])) for request in requests]
    same(start(max_num_batched_tokens=11), replayed, begun=5)


# what may stand beside the mode: weights of fewer bits, kept as they are stored or made so on loading, a rounded cache,
# and two ranks
VARIANTS: dict[str, dict[str, Any]] = {
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "gguf": {"gguf": True},
    "cache-int8": {"kv_cache_dtype": "int8"},
    "tp2": {"tp": 2},
    "tp2-gguf": {"tp": 2, "gguf": True},
}
SLOW = ("tp2-gguf",)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    write(
        make_checkpoint(Case("llama", MODELS["llama"]), folder),
        folder.with_suffix(".gguf"),
        Kind.Q4_0,
    )
    return folder


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in VARIANTS],
)
def test_beside_other_choices(checkpoint: Path, name: str) -> None:
    """Alone and whole; in company, in chunks, behind a warm prefix and preempted at once."""
    wishes = dict(VARIANTS[name])
    model = checkpoint.with_suffix(".gguf") if wishes.pop("gguf", False) else checkpoint

    def start(blocks: int | None = None, **more: Any) -> Loop:
        common = {
            "max_num_batched_tokens": 256,
            "prefix_cache": False,
            "kv_cache_gib": 0.05,
            "block_size": 8,
        }
        made = plan(model, LENGTH, deterministic=True, **common | wishes | more)
        return engine(made, blocks, chosen(made))

    random = Random(11)
    requests = asked(random, [random.randrange(3, VOCAB) for _ in range(24)])
    means = [
        embedding_request(
            request.prompt, "mean", id=f"mean {request.id}", vocab=VOCAB, max_length=LENGTH
        )
        for request in requests[:2]
    ]
    with closing(start()) as loop:
        alone = {one.id: run(loop, [one])[one.id] for one in (*requests, *means)}
    with closing(start(18, max_num_batched_tokens=13, prefix_cache=True)) as loop:
        crowd = run(loop, [*requests, *means])
        again = run(loop, requests)
        assert loop.scheduler.preemptions, "nothing was preempted"
    for request in requests:
        assert (
            answer(crowd[request.id]) == answer(again[request.id]) == answer(alone[request.id])
        ), request.id
    for mean in means:
        assert crowd[mean.id][-1].embedding == alone[mean.id][-1].embedding, mean.id


@contextmanager
def closing(loop: Loop) -> Iterator[Loop]:
    try:
        yield loop
    finally:
        loop.executor.close()


def test_tiles_are_full_and_their_lines_alike(start: Callable[..., Loop]) -> None:
    loop = start()
    model: Steady = loop.executor.worker.model  # type: ignore[attr-defined]
    assert model.grain == CPU_TILE and model.even(VOCAB, 8)
    seen = set()
    decoder = model.whole.decoder
    hidden = torch.randn(37, 128, dtype=decoder.dtype)
    seen.update(
        len(part) for part in (model._filled(part, 0) for part in hidden.split(model.grain))
    )
    assert seen == {CPU_TILE}
    with torch.inference_mode():
        assert model.logits(hidden).shape == (37, VOCAB)
        assert torch.equal(model.logits(hidden)[35:], model.logits(hidden[35:]))
