"""Real config.json files mean what their authors meant: checked by value, and against transformers' reading of them."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import pytest
import transformers as tf

from bloomery.families import describe
from bloomery.spec import Alibi, Linear, Llama3, LongRope, Moe, Rope
from tests.families.hub import CONFIGS


@dataclass(frozen=True)
class Essence:
    heads: tuple[int, int, int]  # heads, key-value heads, width
    position: Rope | Alibi | None  # of the first layer
    context: int
    tied: bool = False
    bias: tuple[bool, bool] = (False, False)  # q, k and v; out
    windows: tuple[int | None, ...] = (None,)  # repeated over the layers


ESSENCES = {
    "bloom": Essence((112, 112, 128), Alibi(), 2048, tied=True, bias=(True, True)),
    "octocoder": Essence((48, 1, 128), None, 8192, tied=True, bias=(True, True)),
    "falcon-7b": Essence((71, 1, 64), Rope(64), 2048, tied=True),
    "falcon-40b": Essence((128, 8, 64), Rope(64), 2048, tied=True),
    "falcon-11b": Essence((32, 8, 128), Rope(128, 5000042.0), 8192, tied=True),
    "falcon-rw-1b": Essence((32, 32, 64), Alibi(scale=0.125), 2048, tied=True, bias=(True, True)),
    "mpt-7b": Essence((32, 32, 128), Alibi(), 2048, tied=True),
    "Llama-2-7b": Essence((32, 32, 128), Rope(128), 4096),
    "Llama-3.1-8B": Essence(
        (32, 8, 128), Rope(128, 5e5, scaling=Llama3(8.0, 1.0, 4.0, 8192)), 131072
    ),
    "Mistral-7B-v0.1": Essence((32, 8, 128), Rope(128), 32768, windows=(4096,)),
    "Mistral-7B-v0.3": Essence((32, 8, 128), Rope(128, 1e6), 32768),
    "Mixtral-8x7B-v0.1": Essence((32, 8, 128), Rope(128, 1e6), 32768),
    "Qwen2.5-7B": Essence((28, 4, 128), Rope(128, 1e6), 131072, bias=(True, False)),
    "Qwen1.5-MoE-A2.7B": Essence((16, 16, 128), Rope(128, 1e6), 8192, bias=(True, False)),
    "Qwen3-30B-A3B": Essence((32, 4, 128), Rope(128, 1e6), 40960),
    "gemma-2b": Essence((8, 1, 256), Rope(256), 8192, tied=True),
    "gemma-2-9b": Essence((16, 8, 256), Rope(256), 8192, tied=True, windows=(4096, None)),
    "gemma-3-4b-it": Essence(
        (8, 4, 256), Rope(256), 131072, tied=True, windows=(1024,) * 5 + (None,)
    ),
    "gpt2": Essence((12, 12, 64), None, 1024, tied=True, bias=(True, True)),
    "pythia-6.9b": Essence((32, 32, 128), Rope(32), 2048, bias=(True, True)),
    "gpt-j-6b": Essence((16, 16, 256), Rope(64, interleaved=True), 2048),
    "opt-350m": Essence((16, 16, 64), None, 2048, tied=True, bias=(True, True)),
    "opt-6.7b": Essence((32, 32, 128), None, 2048, tied=True, bias=(True, True)),
    "phi-2": Essence((32, 32, 80), Rope(32), 2048, bias=(True, True)),
    "command-r": Essence((64, 64, 128), Rope(128, 8e6, interleaved=True), 131072, tied=True),
    "command-r7b": Essence(
        (32, 8, 128), Rope(128, 5e4, True), 8192, tied=True, windows=(4096,) * 3 + (None,)
    ),
    "starcoder2-15b": Essence(
        (48, 4, 128), Rope(128, 1e5), 16384, tied=True, bias=(True, True), windows=(4096,)
    ),
    "stablelm-2-1_6b": Essence((32, 32, 64), Rope(16), 4096, bias=(True, False)),
    "stablelm-2-12b": Essence((32, 8, 160), Rope(40), 4096),
    "granite-3.0-8b": Essence((32, 8, 128), Rope(128), 4096, tied=True),
    "OLMo-2-1124-7B": Essence((32, 32, 128), Rope(128, 5e5), 4096),
    "SmolLM3-3B": Essence((16, 4, 128), Rope(128, 5e6), 65536, tied=True),
}


@pytest.mark.parametrize("name", ESSENCES)
def test_essential_values(name: str) -> None:
    model = describe(CONFIGS[name]).model
    essence = ESSENCES[name]
    first = model.layers[0].attention
    assert (first.num_heads, first.num_kv_heads, first.head_dim) == essence.heads
    assert first.position == essence.position
    assert (first.bias, first.out_bias) == essence.bias
    assert (model.tied, model.context) == (essence.tied, essence.context)
    pattern = essence.windows * len(model.layers)
    assert [layer.attention.window for layer in model.layers] == list(pattern[: len(model.layers)])


@pytest.mark.parametrize("name", CONFIGS)
def test_older_words_mean_what_transformers_makes_of_them(name: str) -> None:
    modern = tf.AutoConfig.for_model(**copy.deepcopy(CONFIGS[name])).to_dict()
    theirs = describe(modern)
    ours = describe(CONFIGS[name])
    assert ours.model == theirs.model
    assert ours.names == theirs.names


def test_gemma_3_turns_its_global_layers_by_another_clock() -> None:
    model = describe(CONFIGS["gemma-3-4b-it"]).model
    assert model.layers[5].attention.position == Rope(256, 1e6, scaling=Linear(8.0))
    assert model.layers[5].attention.scale == 256**-0.5
    assert len(model.layers) == 34 and model.embed_scale == 2560**0.5 and model.vocab == 262208


def test_phi_3_128k_has_two_sets_of_divisors() -> None:
    model = describe(CONFIGS["Phi-3-mini-128k"]).model
    position = model.layers[0].attention.position
    assert isinstance(position, Rope) and isinstance(position.scaling, LongRope)
    assert (position.dim, position.scaling.original, model.context) == (96, 4096, 131072)
    gain = math.sqrt(1 + math.log(32) / math.log(4096))
    assert (
        position.scaling.short_attention == position.scaling.long_attention == pytest.approx(gain)
    )
    assert model.layers[0].attention.window == 262144


def test_layers_that_command_r7b_and_smollm3_leave_without_positions() -> None:
    for name, period in (("command-r7b", 4), ("SmolLM3-3B", 4)):
        layers = describe(CONFIGS[name]).model.layers
        assert [layer.attention.position is None for layer in layers] == [
            (i + 1) % period == 0 for i in range(len(layers))
        ]


def test_experts() -> None:
    mixtral = describe(CONFIGS["Mixtral-8x7B-v0.1"]).model.layers[0].mlp
    assert isinstance(mixtral, Moe) and (mixtral.experts, mixtral.top_k, mixtral.renormalize) == (
        8,
        2,
        True,
    )
    qwen2 = describe(CONFIGS["Qwen1.5-MoE-A2.7B"]).model.layers[0].mlp
    assert (
        isinstance(qwen2, Moe)
        and qwen2.shared is not None
        and qwen2.shared_gate
        and not qwen2.renormalize
    )
    assert (qwen2.mlp.size, qwen2.shared.size) == (1408, 5632)
    qwen3 = describe(CONFIGS["Qwen3-30B-A3B"]).model.layers[0].mlp
    assert isinstance(qwen3, Moe) and (
        qwen3.experts,
        qwen3.top_k,
        qwen3.shared,
        qwen3.renormalize,
    ) == (
        128,
        8,
        None,
        True,
    )


def test_the_odd_ones() -> None:
    opt = describe(CONFIGS["opt-350m"]).model
    assert (opt.embed_dim, opt.hidden, opt.final_norm, opt.positions) == (512, 1024, None, 2050)
    assert opt.layers[0].attn_norm is None and opt.layers[0].attn_sum_norm is not None
    granite = describe(CONFIGS["granite-3.0-8b"]).model
    assert (granite.embed_scale, granite.logit_scale, granite.layers[0].residual_scale) == (
        12.0,
        1 / 16,
        0.22,
    )
    assert granite.layers[0].attention.scale == 0.0078125
    stable = describe(CONFIGS["stablelm-2-12b"]).model.layers[0]
    assert stable.parallel and stable.mlp_norm is None and stable.attention.qk_norm_over == "each"
    falcon = describe(CONFIGS["falcon-11b"])
    assert (
        falcon.names.extra["attn_norm"] == "input_layernorm"
        and falcon.model.layers[0].mlp_norm is None
    )
    assert describe(CONFIGS["falcon-40b"]).names.extra["mlp_norm"] == "ln_mlp"
    assert describe(CONFIGS["octocoder"]).model.layers[0].mlp.activation == "gelu"
    assert describe(CONFIGS["gemma-2b"]).model.layers[0].mlp.activation == "gelu_tanh"
    assert describe(CONFIGS["command-r"]).model.logit_scale == 0.0625
