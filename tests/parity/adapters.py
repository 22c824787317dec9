"""Random LoRA adapters in PEFT's files, and what PEFT computes with them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import peft
import torch

from bloomery.config import EnginePlan
from bloomery.engine.build import create_block_pool
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
    scheduler = Scheduler(
        create_block_pool(plan, capacity),
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


def write_gguf_adapter(adapted: Any, path: Path, architecture: str, permuted: bool) -> None:
    """Write PEFT's adapter as llama.cpp's converter does.

    permuted: the rows of q and k are stored for interleaved rope.
    """
    config = adapted.config
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(adapted.peft_config["default"].lora_alpha))
    for name, module in adapted.base_model.model.named_modules():
        if not hasattr(module, "lora_A") or not len(module.lora_A):
            continue
        target = f"{names.mapping[name][1]}.weight"
        a = module.lora_A["default"].weight.detach()
        b = module.lora_B["default"].weight.detach()
        if permuted and name.endswith(("q_proj", "k_proj")):
            num_heads = len(b) // config.head_dim
            b = b.unflatten(0, (num_heads, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(f"{target}.lora_a", a.numpy())
        writer.add_tensor(f"{target}.lora_b", b.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
