"""Random LoRA adapters in PEFT's files, and what PEFT computes with them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import torch

from bloomery.config import EnginePlan
from bloomery.engine.block_pool import BlockPool
from bloomery.engine.executor import Executor
from bloomery.engine.loop import EngineLoop
from bloomery.engine.scheduler import Scheduler
from bloomery.executors.local import LocalExecutor
from bloomery.messages import EngineRequest
from tests.parity.serve import greedy_request

RANK = 4


def save_adapter(
    model: Any,
    folder: Path,
    targets: Sequence[str] | str = "all-linear",
    seed: int = 1,
    **config: Any,
) -> Any:
    """Save a random adapter and return PEFT's model with it.

    Weights that it replaces, such as biases, are random as well. `unload()` of the result gives the
    base model back.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about choices that a user of PEFT may not have meant
        torch.manual_seed(seed)
        options = {"r": RANK, "lora_alpha": 8, "init_lora_weights": False} | config
        options.setdefault("fan_in_fan_out", model.config.model_type == "gpt2")
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(target_modules=targets, **options)
        ).eval()
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
        adapted.save_pretrained(str(folder))
    return adapted


@torch.no_grad()
def greedy_tokens(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Continue a prompt greedily."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def build_adapter_loop(plan: EnginePlan, executor: Executor | None = None) -> EngineLoop:
    """Start an engine that takes adapters."""
    executor = executor or LocalExecutor()
    capacity = executor.start(plan)
    pool = BlockPool(capacity.blocks, capacity.block_size, plan.prefix_cache, capacity.cache_groups)
    scheduler = Scheduler(
        pool,
        capacity.max_num_batched_tokens,
        capacity.max_num_seqs,
        stages=capacity.stages,
        max_loras=plan.max_loras,
    )
    return EngineLoop(scheduler, executor, plan.steps_in_flight, max_cpu_loras=plan.max_cpu_loras)


def adapted_request(
    id: str, prompt: list[int], count: int, folder: Path | None = None
) -> EngineRequest:
    """A greedy request, with the adapter of a folder if there is one."""
    request = greedy_request(id, prompt, count)
    if folder is None:
        return request
    return replace(request, lora=str(folder), lora_path=str(folder))
