"""Real config.json files: the values that matter, and agreement with transformers."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import pytest
import transformers as tf

from bloomery.families import describe_config
from bloomery.spec import (
    AlibiSpec,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MoeSpec,
    RopeSpec,
)
from tests.families.hub_configs import CONFIGS


@dataclass(frozen=True)
class ExpectedModel:
    heads: tuple[int, int, int]  # heads, key-value heads, head dimension
    position: RopeSpec | AlibiSpec | None  # of the first layer
    context: int
    tied: bool = False
    bias: tuple[bool, bool] = (False, False)  # q, k and v; out
    windows: tuple[int | None, ...] = (None,)  # repeated over the layers


EXPECTED = {
    "bloom": ExpectedModel((112, 112, 128), AlibiSpec(), 2048, tied=True, bias=(True, True)),
    "octocoder": ExpectedModel((48, 1, 128), None, 8192, tied=True, bias=(True, True)),
    "falcon-7b": ExpectedModel((71, 1, 64), RopeSpec(64), 2048, tied=True),
    "falcon-40b": ExpectedModel((128, 8, 64), RopeSpec(64), 2048, tied=True),
    "falcon-11b": ExpectedModel((32, 8, 128), RopeSpec(128, 5000042.0), 8192, tied=True),
    "falcon-rw-1b": ExpectedModel(
        (32, 32, 64), AlibiSpec(scale=0.125), 2048, tied=True, bias=(True, True)
    ),
    "mpt-7b": ExpectedModel((32, 32, 128), AlibiSpec(), 2048, tied=True),
    "Llama-2-7b": ExpectedModel((32, 32, 128), RopeSpec(128), 4096),
    "Llama-3.1-8B": ExpectedModel(
        (32, 8, 128), RopeSpec(128, 5e5, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)), 131072
    ),
    "Mistral-7B-v0.1": ExpectedModel((32, 8, 128), RopeSpec(128), 32768, windows=(4096,)),
    "Mistral-7B-v0.3": ExpectedModel((32, 8, 128), RopeSpec(128, 1e6), 32768),
    "Mixtral-8x7B-v0.1": ExpectedModel((32, 8, 128), RopeSpec(128, 1e6), 32768),
    "Qwen2.5-7B": ExpectedModel((28, 4, 128), RopeSpec(128, 1e6), 131072, bias=(True, False)),
    "Qwen1.5-MoE-A2.7B": ExpectedModel((16, 16, 128), RopeSpec(128, 1e6), 8192, bias=(True, False)),
    "Qwen3-30B-A3B": ExpectedModel((32, 4, 128), RopeSpec(128, 1e6), 40960),
    "gemma-2b": ExpectedModel((8, 1, 256), RopeSpec(256), 8192, tied=True),
    "gemma-2-9b": ExpectedModel((16, 8, 256), RopeSpec(256), 8192, tied=True, windows=(4096, None)),
    "gemma-3-4b-it": ExpectedModel(
        (8, 4, 256), RopeSpec(256), 131072, tied=True, windows=(1024,) * 5 + (None,)
    ),
    "gpt2": ExpectedModel((12, 12, 64), None, 1024, tied=True, bias=(True, True)),
    "pythia-6.9b": ExpectedModel((32, 32, 128), RopeSpec(32), 2048, bias=(True, True)),
    "gpt-j-6b": ExpectedModel((16, 16, 256), RopeSpec(64, interleaved=True), 2048),
    "opt-350m": ExpectedModel((16, 16, 64), None, 2048, tied=True, bias=(True, True)),
    "opt-6.7b": ExpectedModel((32, 32, 128), None, 2048, tied=True, bias=(True, True)),
    "phi-2": ExpectedModel((32, 32, 80), RopeSpec(32), 2048, bias=(True, True)),
    "command-r": ExpectedModel(
        (64, 64, 128), RopeSpec(128, 8e6, interleaved=True), 131072, tied=True
    ),
    "command-r7b": ExpectedModel(
        (32, 8, 128), RopeSpec(128, 5e4, True), 8192, tied=True, windows=(4096,) * 3 + (None,)
    ),
    "starcoder2-15b": ExpectedModel(
        (48, 4, 128), RopeSpec(128, 1e5), 16384, tied=True, bias=(True, True), windows=(4096,)
    ),
    "stablelm-2-1_6b": ExpectedModel((32, 32, 64), RopeSpec(16), 4096, bias=(True, False)),
    "stablelm-2-12b": ExpectedModel((32, 8, 160), RopeSpec(40), 4096),
    "granite-3.0-8b": ExpectedModel((32, 8, 128), RopeSpec(128), 4096, tied=True),
    "OLMo-2-1124-7B": ExpectedModel((32, 32, 128), RopeSpec(128, 5e5), 4096),
    "SmolLM3-3B": ExpectedModel((16, 4, 128), RopeSpec(128, 5e6), 65536, tied=True),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_expected_values(name: str) -> None:
    model = describe_config(CONFIGS[name]).model
    expected = EXPECTED[name]
    first = model.layers[0].attention
    assert (first.num_heads, first.num_kv_heads, first.head_dim) == expected.heads
    assert first.position == expected.position
    assert (first.bias, first.out_bias) == expected.bias
    assert (model.tied, model.context) == (expected.tied, expected.context)
    pattern = expected.windows * len(model.layers)
    assert [layer.attention.window for layer in model.layers] == list(pattern[: len(model.layers)])


@pytest.mark.parametrize("name", CONFIGS)
def test_older_keys_are_read_as_in_transformers(name: str) -> None:
    modern = tf.AutoConfig.for_model(**copy.deepcopy(CONFIGS[name])).to_dict()
    theirs = describe_config(modern)
    ours = describe_config(CONFIGS[name])
    assert ours.model == theirs.model
    assert ours.names == theirs.names


def test_gemma_3_full_attention_layers_have_their_own_rope() -> None:
    model = describe_config(CONFIGS["gemma-3-4b-it"]).model
    assert model.layers[5].attention.position == RopeSpec(256, 1e6, scaling=LinearScaling(8.0))
    assert model.layers[5].attention.scale == 256**-0.5
    assert len(model.layers) == 34 and model.embed_scale == 2560**0.5 and model.vocab == 262208


def test_phi_3_128k_has_longrope_scaling() -> None:
    model = describe_config(CONFIGS["Phi-3-mini-128k"]).model
    position = model.layers[0].attention.position
    assert isinstance(position, RopeSpec) and isinstance(position.scaling, LongRopeScaling)
    assert (position.dim, position.scaling.original_context, model.context) == (96, 4096, 131072)
    attention_factor = math.sqrt(1 + math.log(32) / math.log(4096))
    assert (
        position.scaling.short_attention_factor
        == position.scaling.long_attention_factor
        == pytest.approx(attention_factor)
    )
    assert model.layers[0].attention.window == 262144


def test_every_fourth_layer_of_command_r7b_and_smollm3_has_no_position() -> None:
    for name, period in (("command-r7b", 4), ("SmolLM3-3B", 4)):
        layers = describe_config(CONFIGS[name]).model.layers
        assert [layer.attention.position is None for layer in layers] == [
            (i + 1) % period == 0 for i in range(len(layers))
        ]


def test_experts() -> None:
    mixtral = describe_config(CONFIGS["Mixtral-8x7B-v0.1"]).model.layers[0].mlp
    assert isinstance(mixtral, MoeSpec) and (
        mixtral.num_experts,
        mixtral.top_k,
        mixtral.renormalize,
    ) == (
        8,
        2,
        True,
    )
    qwen2 = describe_config(CONFIGS["Qwen1.5-MoE-A2.7B"]).model.layers[0].mlp
    assert (
        isinstance(qwen2, MoeSpec)
        and qwen2.shared is not None
        and qwen2.shared_gate
        and not qwen2.renormalize
    )
    assert (qwen2.mlp.size, qwen2.shared.size) == (1408, 5632)
    qwen3 = describe_config(CONFIGS["Qwen3-30B-A3B"]).model.layers[0].mlp
    assert isinstance(qwen3, MoeSpec) and (
        qwen3.num_experts,
        qwen3.top_k,
        qwen3.shared,
        qwen3.renormalize,
    ) == (
        128,
        8,
        None,
        True,
    )


def test_values_of_unusual_models() -> None:
    opt = describe_config(CONFIGS["opt-350m"]).model
    assert (opt.embed_dim, opt.hidden, opt.final_norm, opt.positions) == (512, 1024, None, 2050)
    assert opt.layers[0].attn_norm is None and opt.layers[0].attn_sum_norm is not None
    granite = describe_config(CONFIGS["granite-3.0-8b"]).model
    assert (granite.embed_scale, granite.logit_scale, granite.layers[0].residual_scale) == (
        12.0,
        1 / 16,
        0.22,
    )
    assert granite.layers[0].attention.scale == 0.0078125
    stable = describe_config(CONFIGS["stablelm-2-12b"]).model.layers[0]
    assert stable.parallel and stable.mlp_norm is None and stable.attention.qk_norm_over == "each"
    falcon = describe_config(CONFIGS["falcon-11b"])
    assert (
        falcon.names.extra["attn_norm"] == "input_layernorm"
        and falcon.model.layers[0].mlp_norm is None
    )
    assert describe_config(CONFIGS["falcon-40b"]).names.extra["mlp_norm"] == "ln_mlp"
    assert describe_config(CONFIGS["octocoder"]).model.layers[0].mlp.activation == "gelu"
    assert describe_config(CONFIGS["gemma-2b"]).model.layers[0].mlp.activation == "gelu_tanh"
    assert describe_config(CONFIGS["command-r"]).model.logit_scale == 0.0625
