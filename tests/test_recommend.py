"""Recommended models: the shapes in the table, and what fits which memory."""

from __future__ import annotations

import pytest

from bloomery.hardware import find_hardware
from bloomery.recommend import OPEN_MODELS, list_fits, recommend_model
from bloomery.roofline import count_parameters
from bloomery.tools.list_models import format_list

# Billions of parameters, from the models' own pages.
PUBLISHED_SIZES = {
    "Qwen/Qwen3-0.6B": 0.6,
    "Qwen/Qwen3-1.7B": 1.7,
    "HuggingFaceTB/SmolLM3-3B": 3.08,
    "Qwen/Qwen3-4B-Instruct-2507": 4.0,
    "Qwen/Qwen3-8B": 8.2,
    "Qwen/Qwen3-14B": 14.8,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30.5,
    "Qwen/Qwen3-32B": 32.8,
    "meta-llama/Llama-3.3-70B-Instruct": 70.6,
    "openai/gpt-oss-20b": 20.9,
    "openai/gpt-oss-120b": 116.8,
}


@pytest.mark.parametrize("entry", OPEN_MODELS, ids=lambda entry: entry.name)
def test_shapes_have_the_published_number_of_parameters(entry) -> None:
    billions = count_parameters(entry.describe()).total / 1e9
    assert billions == pytest.approx(PUBLISHED_SIZES[entry.name], rel=0.02)


def test_more_memory_fits_more_models_in_higher_precision() -> None:
    small_gpu = find_hardware("l4")
    large_gpu = find_hardware("h200")
    on_small = list(list_fits(small_gpu, small_gpu.memory_bytes))
    on_large = list(list_fits(large_gpu, large_gpu.memory_bytes))
    assert sum(fit.fits for fit in on_small) < sum(fit.fits for fit in on_large)
    eight_billion = [
        next(fit for fit in fits if "8B" in fit.model) for fits in (on_small, on_large)
    ]
    assert [fit.precision for fit in eight_billion] == ["bf16", "bf16"]
    thirty_two = [next(fit for fit in fits if "32B" in fit.model) for fits in (on_small, on_large)]
    assert [fit.precision for fit in thirty_two] == ["int4", "bf16"]
    assert thirty_two[0].arguments == "Qwen/Qwen3-32B --quantization int4"


def test_gpt_oss_is_served_as_it_is_stored() -> None:
    laptop = find_hardware("zen3-2")
    fits = {fit.model: fit for fit in list_fits(laptop, 32e9)}
    fit = fits["openai/gpt-oss-20b"]
    assert fit.fits and fit.arguments == "openai/gpt-oss-20b"
    assert fit.gigabytes == pytest.approx(14.4, abs=0.1)
    assert fits["Qwen/Qwen3-14B"].tokens_per_second < fit.tokens_per_second


def test_this_machine_gets_a_recommendation_that_anybody_may_download() -> None:
    recommended = recommend_model("cpu")
    assert recommended is not None
    assert recommended.fits and recommended.is_comfortable and not recommended.gated


def test_the_list_says_what_is_too_large() -> None:
    cpu = find_hardware("zen3-2")
    text = format_list(cpu, cpu.memory_bytes, list(list_fits(cpu, cpu.memory_bytes)))
    assert "bloomery run Qwen/Qwen3-0.6B" in text
    assert "too large" in text and "good" in text
