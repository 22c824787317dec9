"""Checkpoints in 16 bits give the results of the same values in float32, in half of the memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bloomery import LLM, SamplingParams
from tests.parity.cases import CASES, make_checkpoint

PROMPTS = [[5, 6, 7], list(range(5, 45)), [9]]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)


def answer(folder: Path) -> tuple[list[object], int]:
    """The tokens and logprobs of all prompts, and the bytes of the weights."""
    llm = LLM(str(folder), skip_tokenizer_init=True, kv_cache_gib=0.05, device="cpu")
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False
    )
    weights_bytes = llm.capacity.weights_bytes
    llm.close()
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs], (
        weights_bytes
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "bloom", "qwen3_moe", "lfm2", "gemma3"])
def test_16_bit_checkpoints(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    folders = [tmp_path / "float32", tmp_path / "rounded"]
    for folder in folders:
        make_checkpoint(case, folder)
    for folder, stored in zip(folders, (torch.float32, dtype), strict=True):
        file = folder / "model.safetensors"
        rounded = {key: value.to(dtype).to(stored) for key, value in load_file(file).items()}
        save_file(rounded, file, {"format": "pt"})
    (expected, float32_bytes), (actual, weights_bytes) = map(answer, folders)
    assert actual == expected
    assert weights_bytes < 0.6 * float32_bytes
