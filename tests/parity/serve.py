"""A checkpoint behind the real engine, for tests: worker, scheduler and loop, no text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bloomery.artifacts.locate import locate
from bloomery.attention.base import AttentionMetadata, cache_shape
from bloomery.attention.torch_paged import TorchPaged
from bloomery.config import Config, Plan, resolve
from bloomery.describe import description
from bloomery.engine.blocks import Blocks
from bloomery.engine.executor import Executor
from bloomery.engine.loop import Loop
from bloomery.engine.scheduler import Scheduler
from bloomery.executors.local import Local
from bloomery.messages import EngineRequest, ResolvedSampling, TokenOutput
from bloomery.models.decoder import Decoder
from bloomery.models.load import load


def plan(model: Path | str | None, length: int, **wishes: Any) -> Plan:
    config = Config(
        str(model) if model else None, device="cpu", threads=1, max_model_len=length, **wishes
    )
    artifact = locate(config.model)
    context = description(artifact).model.context
    return resolve(
        config,
        name=artifact.name,
        path=str(artifact.path),
        kind=artifact.kind,
        dtype="float32",
        device="cpu",
        context=max(context, length),
    )


def engine(plan: Plan, blocks: int | None = None, executor: Executor | None = None) -> Loop:
    executor = executor or Local()
    capacity = executor.start(plan)
    kv = Blocks(blocks or capacity.blocks, capacity.block_size, plan.prefix_cache)
    return Loop(
        Scheduler(kv, capacity.max_num_batched_tokens, capacity.max_num_seqs), executor, plan.depth
    )


def run(loop: Loop, requests: list[EngineRequest]) -> dict[str, list[TokenOutput]]:
    news: dict[str, list[TokenOutput]] = {request.id: [] for request in requests}
    for request in requests:
        loop.add(request)
    while loop.busy:
        for entry in loop.step():
            news[entry.request].append(entry)
    return news


def greedy(id: str, prompt: list[int], count: int, **sampling: Any) -> EngineRequest:
    return EngineRequest(id, tuple(prompt), ResolvedSampling(temperature=0.0, **sampling), count)


def ids(news: list[TokenOutput]) -> list[int]:
    return [token for entry in news for token in entry.ids]


def logits(model: Path | None, tokens: list[int], length: int) -> torch.Tensor:
    """Every position's logits, the whole prompt in one pass over a fresh cache."""
    decoder = load(
        locate(str(model) if model else None), "auto", torch.float32, torch.device("cpu")
    ).decoder
    return decoder_logits(decoder, tokens, length)


@torch.inference_mode()
def decoder_logits(decoder: Decoder, tokens: list[int], length: int) -> torch.Tensor:
    decoder.reach(length)
    n = len(tokens)
    size = 16
    backend = TorchPaged()
    blocks = -(-n // size)
    caches = [
        torch.zeros(cache_shape(layer.attention, blocks, size)) for layer in decoder.spec.layers
    ]
    every = torch.arange(n)
    step = AttentionMetadata(
        (n,),
        (n,),
        int(n == 1),
        torch.tensor([0, n]),
        torch.tensor([n]),
        every,
        every,
        torch.arange(blocks)[None],
        size,
    )
    hidden = decoder(torch.tensor(tokens), every, every, caches, backend, backend.plan(step))
    return decoder.logits(hidden)
