"""Experts in bfloat16: no further from transformers in float32 than transformers' own bfloat16 is.

A rounding may send a token to another expert, here as there: such a token is far off, whoever computes it, and who has
more of them is chance. So it is the median over many tokens that must not be larger; the mean may be, by a little.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from bloomery import LLM, SamplingParams
from tests.parity.cases import CASES, VOCAB, make_checkpoint

PROMPTS = 60
SCORED = SamplingParams(
    temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False
)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_experts_round_no_more_than_transformers(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    model = make_checkpoint(case, tmp_path)
    prompts = torch.randint(
        3, VOCAB, (PROMPTS, case.prompt), generator=torch.Generator().manual_seed(7)
    )
    asked = prompts[:, 1:, None]
    with torch.no_grad():
        exact, theirs = (
            one(prompts).logits.float().log_softmax(-1)[:, :-1].gather(2, asked)[..., 0]
            for one in (model, copy.deepcopy(model).bfloat16())
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
    outs = llm.generate(prompts.tolist(), SCORED, use_tqdm=False)
    llm.close()
    ours = torch.tensor(
        [
            [
                entry[id].logprob
                for entry, id in zip(out.prompt_logprobs[1:], out.prompt_token_ids[1:], strict=True)
            ]
            for out in outs
        ]
    )
    far = (ours - exact).abs()
    allowed = (theirs - exact).abs()
    assert 0 < far.median() <= allowed.median() and far.mean() <= 1.5 * allowed.mean()
