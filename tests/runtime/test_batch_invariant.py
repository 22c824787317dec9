"""Deterministic mode: a request gets the same tokens and logprobs, bit for bit, in any batch.

Other requests, chunk sizes, prefix hits, preemption and replay are tried one after another. The
reference is the request alone, with its prompt in one chunk, in an engine without a prefix cache.
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
from gguf import GGMLQuantizationType

from bloomery.cache_groups import count_state_blocks
from bloomery.engine.loop import EngineLoop
from bloomery.errors import ConfigError
from bloomery.executors.select import select_executor
from bloomery.families import describe_config
from bloomery.messages import EngineRequest, ResolvedSampling, TokenLogprob, TokenOutput
from bloomery.runtime.batch_invariant import (
    CPU_TILE_SIZE,
    BatchInvariantForward,
    check_deterministic_mode,
)
from bloomery.sampling import build_embedding_request
from tests.parity.cases import ParityCase, make_checkpoint
from tests.parity.gguf_writer import write_gguf
from tests.parity.serve import build_engine_loop, build_plan, run_requests

VOCAB = 1003
MAX_TOKENS = 12
MAX_LEN = 128
BLOCK_SIZE = 8
MODEL_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**MODEL_SIZES),
    "gemma2": lambda: tf.Gemma2Config(
        **MODEL_SIZES, head_dim=16, sliding_window=9, attn_logit_softcapping=20.0
    ),
    "mixtral": lambda: tf.MixtralConfig(**MODEL_SIZES, num_local_experts=4, num_experts_per_tok=2),
    "bloom": lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=128, n_layer=2, n_head=8),
    "qwen3_5_text": lambda: tf.Qwen3_5TextConfig(
        **MODEL_SIZES,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "falcon_h1": lambda: tf.FalconH1Config(
        **MODEL_SIZES, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16
    ),
    "lfm2": lambda: tf.Lfm2Config(**MODEL_SIZES, full_attn_idxs=[1]),
    "jamba": lambda: tf.JambaConfig(
        **MODEL_SIZES, attn_layer_period=2, attn_layer_offset=1, num_experts=2
    ),
}
MODEL_DTYPES = [("llama", "bfloat16"), *((name, "float32") for name in MODELS)]
FEW_BLOCKS = 18  # of the KV cache: requests are preempted

TokensAndLogprobs = tuple[list[int], list[TokenLogprob]]
StartEngine = Callable[..., EngineLoop]


@pytest.fixture(scope="module", params=MODEL_DTYPES, ids=lambda case: f"{case[0]}-{case[1]}")
def start_engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> StartEngine:
    name, dtype = request.param
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(ParityCase(name, MODELS[name]), folder)

    def start(blocks: int | None = None, **options: Any) -> EngineLoop:
        defaults = {
            "max_num_batched_tokens": 512,
            "prefix_cache": False,
            "kv_cache_gib": 0.05,
            "block_size": BLOCK_SIZE,
        }
        settings = build_plan(
            folder, MAX_LEN, deterministic=True, dtype=dtype, **defaults | options
        )
        return build_engine_loop(settings, blocks)

    return start


def make_requests(random: Random) -> list[EngineRequest]:
    """Greedy and sampled requests of many lengths, half of them with a common prefix."""
    prefix = [random.randrange(3, VOCAB) for _ in range(24)]
    requests = []
    for number in range(6):
        shared = prefix[: random.choice([0, 24])]
        suffix = [random.randrange(3, VOCAB) for _ in range(random.randrange(1, 40))]
        sampling = ResolvedSampling(temperature=random.choice([0.0, 1.0]), seed=number, logprobs=20)
        requests.append(EngineRequest(str(number), tuple(shared + suffix), sampling, MAX_TOKENS))
    return requests


def collect(outputs: list[TokenOutput]) -> TokensAndLogprobs:
    tokens = [token for output in outputs for token in output.ids]
    logprobs = [entry for output in outputs for entry in output.logprobs]
    return tokens, logprobs


def test_a_request_gives_the_same_bits_alone_and_in_any_batch(start_engine: StartEngine) -> None:
    requests = make_requests(Random(7))
    loop = start_engine()
    expected = {
        request.id: collect(run_requests(loop, [request])[request.id]) for request in requests
    }

    def check(loop: EngineLoop, requests: list[EngineRequest], num_emitted: int = 0) -> None:
        for id, outputs in run_requests(loop, requests).items():
            tokens, logprobs = expected[id]
            remaining = (tokens[num_emitted:], logprobs[num_emitted:])
            assert collect(outputs) == remaining, f"request {id}"

    check(start_engine(), requests)
    check(start_engine(max_num_seqs=3), requests[::-1])
    chunked = start_engine(max_num_batched_tokens=7)
    check(chunked, requests)
    worker = chunked.executor.worker  # type: ignore[attr-defined]
    assert isinstance(worker.model, BatchInvariantForward)
    warm = start_engine(max_num_batched_tokens=31, prefix_cache=True)
    check(warm, requests)
    check(warm, requests)
    num_cached = run_requests(warm, [requests[0]])["0"][-1].cached
    assert num_cached > 0 or len(requests[0].prompt) < BLOCK_SIZE + 1
    few_blocks = FEW_BLOCKS + 3 * count_state_blocks(warm.scheduler.block_pool.groups)
    small = start_engine(blocks=few_blocks, prefix_cache=True)
    check(small, requests)
    assert small.scheduler.num_preemptions, "nothing was preempted"
    replayed = []
    for request in requests:
        tokens, _ = expected[request.id]
        replayed.append(replace(request, emitted=tuple(tokens[:5])))
    check(start_engine(max_num_batched_tokens=11), replayed, num_emitted=5)


# Options that deterministic mode can be combined with: quantized weights, stored so or quantized on
# loading, a quantized KV cache, and two tensor parallel ranks.
VARIANTS: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "gguf": {"gguf": True},
    "cache-int8": {"kv_cache_dtype": "int8"},
    "tp2": {"tensor_parallel_size": 2},
    "tp2-gguf": {"tensor_parallel_size": 2, "gguf": True},
}
SLOW_VARIANTS = ("tp2-gguf",)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder; a GGUF file of the same model is next to it."""
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    model = make_checkpoint(ParityCase("llama", MODELS["llama"]), folder)
    write_gguf(model, folder.with_suffix(".gguf"), GGMLQuantizationType.Q4_0)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW_VARIANTS else name
        for name in VARIANTS
    ],
)
def test_deterministic_mode_works_with_other_options(checkpoint: Path, name: str) -> None:
    """Compare single requests with a batch that has chunks, prefix hits and preemption."""
    variant = dict(VARIANTS[name])
    model = checkpoint.with_suffix(".gguf") if variant.pop("gguf", False) else checkpoint

    def start(blocks: int | None = None, **options: Any) -> EngineLoop:
        defaults = {
            "max_num_batched_tokens": 256,
            "prefix_cache": False,
            "kv_cache_gib": 0.05,
            "block_size": BLOCK_SIZE,
        }
        settings = build_plan(model, MAX_LEN, deterministic=True, **defaults | variant | options)
        return build_engine_loop(settings, blocks, select_executor(settings))

    requests = make_requests(Random(11))
    embeddings = [
        build_embedding_request(
            request.prompt, "mean", id=f"mean {request.id}", vocab_size=VOCAB, max_model_len=MAX_LEN
        )
        for request in requests[:2]
    ]
    with closing(start()) as loop:
        alone = {
            request.id: run_requests(loop, [request])[request.id]
            for request in (*requests, *embeddings)
        }
    with closing(start(FEW_BLOCKS, max_num_batched_tokens=13, prefix_cache=True)) as loop:
        batched = run_requests(loop, [*requests, *embeddings])
        repeated = run_requests(loop, requests)
        assert loop.scheduler.num_preemptions, "nothing was preempted"
    for request in requests:
        expected = collect(alone[request.id])
        assert collect(batched[request.id]) == expected, request.id
        assert collect(repeated[request.id]) == expected, request.id
    for request in embeddings:
        assert batched[request.id][-1].embedding == alone[request.id][-1].embedding, request.id


@contextmanager
def closing(loop: EngineLoop) -> Iterator[EngineLoop]:
    try:
        yield loop
    finally:
        loop.executor.close()


def test_tiles_are_full_and_place_invariant(start_engine: StartEngine) -> None:
    loop = start_engine()
    model: BatchInvariantForward = loop.executor.worker.model  # type: ignore[attr-defined]
    assert model.tile_size == CPU_TILE_SIZE and model.is_place_invariant(VOCAB)
    hidden = torch.randn(37, 128, dtype=model.forward.decoder.dtype)
    tiles = [model._pad_tile(part, 0) for part in hidden.split(model.tile_size)]
    assert {len(tile) for tile in tiles} == {CPU_TILE_SIZE}
    with torch.inference_mode():
        logits = model.compute_logits(hidden)
        assert logits.shape == (37, VOCAB)
        assert torch.equal(logits[35:], model.compute_logits(hidden[35:]))


@pytest.mark.parametrize("name", MODELS)
def test_recurrent_layers_are_refused_on_gpus(name: str) -> None:
    """Equal bits of recurrent layers have been shown on CPUs only."""
    model = describe_config(MODELS[name]().to_dict()).model
    check_deterministic_mode(model, torch.device("cpu"))
    if not model.recurrents:
        check_deterministic_mode(model, torch.device("cuda"))
        return
    with pytest.raises(ConfigError, match="without --deterministic, or with --device cpu"):
        check_deterministic_mode(model, torch.device("cuda"))
