"""Runs a checkpoint in the real engine for tests: worker, scheduler and loop, without text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bloomery.artifacts.locate import locate_model
from bloomery.attention.base import AttentionMetadata, kv_cache_shape, plan_attention
from bloomery.attention.torch_paged import TorchPagedAttention
from bloomery.cache_groups import count_state_blocks
from bloomery.config import EngineConfig, EnginePlan, resolve_plan
from bloomery.describe import describe_model
from bloomery.engine.build import create_block_pool
from bloomery.engine.executor import Executor
from bloomery.engine.loop import EngineLoop
from bloomery.engine.scheduler import Scheduler
from bloomery.executors.local import LocalExecutor
from bloomery.kernels.state_cache import LayerStates, RecurrentMetadata, count_part_blocks
from bloomery.messages import EngineCapacity, EngineRequest, ResolvedSampling, TokenOutput
from bloomery.models.decoder import Decoder
from bloomery.models.load import load_model
from bloomery.spec import RecurrentSpec, state_parts


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
    capacity = limit_blocks(executor.start(plan), pages)
    return EngineLoop(
        Scheduler(
            create_block_pool(plan, capacity),
            capacity.max_num_batched_tokens,
            capacity.max_num_seqs,
        ),
        executor,
        plan.steps_in_flight,
    )


def limit_blocks(capacity: EngineCapacity, pages: int | None) -> EngineCapacity:
    """Return the capacity with blocks for `pages` only, and for the states of three sequences."""
    if pages is None:
        return capacity
    groups = capacity.cache_groups
    blocks = pages * sum(group.page_blocks for group in groups) + 3 * count_state_blocks(groups)
    return replace(capacity, blocks=min(capacity.blocks, blocks))


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
def decoder_logits(
    decoder: Decoder,
    tokens: list[int],
    max_len: int,
    adapter_slots: torch.Tensor | None = None,
) -> torch.Tensor:
    decoder.build_rope_cache(max_len)
    num_tokens = len(tokens)
    block_size = 16
    backend = TorchPagedAttention()
    num_blocks = -(-num_tokens // block_size)
    kv_caches = [
        torch.zeros(kv_cache_shape(layer.attention, num_blocks, block_size))
        if layer.attention is not None
        else None
        for layer in decoder.spec.layers
    ]
    states = [
        None if layer.recurrent is None else new_states(layer.recurrent, num_tokens)
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
        states=states,
        adapter_slots=adapter_slots,
    )
    return decoder.logits(hidden)


def new_states(spec: RecurrentSpec, num_tokens: int) -> LayerStates:
    """Return the states of one sequence at its begin, in blocks that hold a few rows each."""
    parts = state_parts(spec)
    block_values = 3 * max(part.width for part in parts) + 1
    num_blocks = sum(count_part_blocks(part, block_values) for part in parts)
    metadata = RecurrentMetadata(
        num_decodes=0,
        query_start_loc=torch.tensor([0, num_tokens]),
        seq_lens=torch.tensor([num_tokens]),
        state_pieces=torch.arange(num_blocks).flip(0)[None],
        host_query_lens=(num_tokens,),
        host_seq_lens=(num_tokens,),
    )
    return LayerStates(torch.full((num_blocks, block_values), torch.nan), metadata)
