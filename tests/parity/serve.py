"""Runs a checkpoint in the real engine for tests: worker, scheduler and loop, without text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bloomery.artifacts.locate import locate_model
from bloomery.attention.base import AttentionMetadata, kv_cache_shape, plan_attention
from bloomery.attention.torch_paged import TorchPagedAttention
from bloomery.config import EngineConfig, EnginePlan, resolve_plan
from bloomery.describe import describe_model
from bloomery.engine.block_pool import BlockPool
from bloomery.engine.executor import Executor
from bloomery.engine.loop import EngineLoop
from bloomery.engine.scheduler import Scheduler
from bloomery.executors.local import LocalExecutor
from bloomery.messages import EngineRequest, ResolvedSampling, TokenOutput
from bloomery.models.decoder import Decoder
from bloomery.models.load import load_model


def build_plan(model: Path | str | None, max_model_len: int, **options: Any) -> EnginePlan:
    """Resolve the plan of an engine on the CPU; `options` are fields of EngineConfig."""
    config = EngineConfig(
        str(model) if model else None,
        device="cpu",
        threads=1,
        max_model_len=max_model_len,
        **options,
    )
    artifact = locate_model(config.model)
    context = describe_model(artifact).model.context
    return resolve_plan(
        config,
        name=artifact.name,
        path=str(artifact.path),
        kind=artifact.kind,
        dtype="float32",
        device="cpu",
        context=max(context, max_model_len),
    )


def build_engine_loop(
    plan: EnginePlan, pages: int | None = None, executor: Executor | None = None
) -> EngineLoop:
    """Start the executor; `pages` limits the KV cache, so that requests are preempted."""
    executor = executor or LocalExecutor()
    capacity = executor.start(plan)
    groups = capacity.cache_groups
    blocks = capacity.blocks
    if pages is not None:
        blocks = min(blocks, pages * sum(group.page_blocks for group in groups))
    kv = BlockPool(blocks, capacity.block_size, plan.prefix_cache, groups)
    return EngineLoop(
        Scheduler(kv, capacity.max_num_batched_tokens, capacity.max_num_seqs),
        executor,
        plan.steps_in_flight,
    )


def run_requests(loop: EngineLoop, requests: list[EngineRequest]) -> dict[str, list[TokenOutput]]:
    """Run requests together until all have ended; returns their outputs by request id."""
    outputs: dict[str, list[TokenOutput]] = {request.id: [] for request in requests}
    for request in requests:
        loop.add(request)
    while loop.busy:
        for entry in loop.step():
            outputs[entry.request].append(entry)
    return outputs


def greedy_request(id: str, prompt: list[int], count: int, **sampling: Any) -> EngineRequest:
    return EngineRequest(id, tuple(prompt), ResolvedSampling(temperature=0.0, **sampling), count)


def output_token_ids(outputs: list[TokenOutput]) -> list[int]:
    return [token for entry in outputs for token in entry.ids]


def prompt_logits(model: Path | None, tokens: list[int], max_len: int) -> torch.Tensor:
    """Return the logits of every position [tokens, vocab], from one pass over an empty KV cache."""
    decoder = load_model(
        locate_model(str(model) if model else None), "auto", torch.float32, torch.device("cpu")
    ).decoder
    return decoder_logits(decoder, tokens, max_len)


@torch.inference_mode()
def decoder_logits(decoder: Decoder, tokens: list[int], max_len: int) -> torch.Tensor:
    decoder.build_rope_cache(max_len)
    num_tokens = len(tokens)
    block_size = 16
    backend = TorchPagedAttention()
    num_blocks = -(-num_tokens // block_size)
    kv_caches = [
        torch.zeros(kv_cache_shape(layer.attention, num_blocks, block_size))
        for layer in decoder.spec.layers
    ]
    positions = torch.arange(num_tokens)
    metadata = AttentionMetadata.from_host(
        [num_tokens], [num_tokens], [range(num_blocks)], block_size, torch.device("cpu")
    )
    hidden = decoder(
        torch.tensor(tokens),
        positions,
        kv_caches,
        backend,
        plan_attention(backend, [metadata]),
    )
    return decoder.logits(hidden)
