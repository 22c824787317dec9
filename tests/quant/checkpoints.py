"""A tiny Llama checkpoint, and the tokens that an engine generates from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import transformers

from tests.parity.cases import SPECIAL, VOCAB, ParityCase, make_checkpoint
from tests.parity.serve import (
    build_engine_loop,
    build_plan,
    greedy_request,
    output_token_ids,
    run_requests,
)

LLAMA_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
PROMPT = [5, 17, 80, 41, 3, 99, 23, 8, 64, 12]
NUM_GENERATED = 24


def make_llama(folder: Path) -> Path:
    case = ParityCase("llama", lambda: transformers.LlamaConfig(**LLAMA_SIZES, **SPECIAL))
    make_checkpoint(case, folder)
    return folder


def generate(folder: Path) -> list[int]:
    """Greedily generate NUM_GENERATED tokens from PROMPT, without native CPU kernels."""
    plan = build_plan(
        folder,
        48,
        cpu_kernels=False,
        block_size=4,
        max_num_batched_tokens=7,
        max_num_seqs=2,
        kv_cache_gib=0.01,
    )
    request = greedy_request("0", PROMPT, NUM_GENERATED)
    return output_token_ids(run_requests(build_engine_loop(plan), [request])["0"])
