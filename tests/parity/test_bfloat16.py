"""Mixture-of-experts models in bfloat16: as close to float32 as transformers in bfloat16 is.

Rounding may route a token to another expert, in both implementations. Such a token has a large
error, and chance decides which implementation has more of them. So the median error over many
tokens must not be larger than that of transformers; the mean may be a little larger.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from bloomery import LLM, SamplingParams
from tests.parity.cases import CASES, VOCAB, make_checkpoint

NUM_PROMPTS = 60
SCORE_PROMPT = SamplingParams(
    temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False
)


NAMES = [
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "glm4_moe-groups",
    "laguna-window",
    "llama4_text",
    "lfm2_moe",
    "nemotron_h-latent",
    "qwen3_next",
]


@pytest.mark.parametrize("name", NAMES)
def test_experts_round_no_more_than_transformers(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    model = make_checkpoint(case, tmp_path)
    prompts = torch.randint(
        3, VOCAB, (NUM_PROMPTS, case.prompt), generator=torch.Generator().manual_seed(7)
    )
    next_tokens = prompts[:, 1:, None]
    with torch.no_grad():
        exact, expected = (
            reference(prompts).logits.float().log_softmax(-1)[:, :-1].gather(2, next_tokens)[..., 0]
            for reference in (model, copy.deepcopy(model).bfloat16())
        )
    llm = LLM(
        str(tmp_path),
        dtype="bfloat16",
        device="cpu",
        threads=1,
        skip_tokenizer_init=True,
        kv_cache_gib=0.01,
        max_num_seqs=8,
        max_model_len=case.length,
    )
    outputs = llm.generate(prompts.tolist(), SCORE_PROMPT, use_tqdm=False)
    llm.close()
    actual = torch.tensor(
        [
            [
                entry[id].logprob
                for entry, id in zip(out.prompt_logprobs[1:], out.prompt_token_ids[1:], strict=True)
            ]
            for out in outputs
        ]
    )
    error = (actual - exact).abs()
    allowed = (expected - exact).abs()
    assert 0 < error.median() <= allowed.median()
    assert error.mean() <= 1.5 * allowed.mean()
