"""Real config.json files: the values that matter, and agreement with transformers."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import pytest
import transformers as tf

from bloomery.families import describe_config
from bloomery.spec import (
    AlibiSpec,
    AttentionGateSpec,
    GatedDeltaNetSpec,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Mamba2Spec,
    MambaSpec,
    MoeSpec,
    NormSpec,
    RecurrentSpec,
    RopeSpec,
    RouterSpec,
    ShortConvSpec,
    YarnScaling,
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
    "Ministral-8B-Instruct-2410": ExpectedModel(
        (32, 8, 128), RopeSpec(128, 1e8), 32768, windows=(32768,)
    ),
    "glm-4-9b-chat": ExpectedModel(
        (32, 2, 128), RopeSpec(64, interleaved=True), 131072, bias=(True, False)
    ),
    "GLM-4-9B-0414": ExpectedModel(
        (32, 2, 128), RopeSpec(64, interleaved=True), 32768, bias=(True, False)
    ),
    "ERNIE-4.5-0.3B": ExpectedModel(
        (16, 2, 128), RopeSpec(128, 5e5, interleaved=True), 131072, tied=True
    ),
    "Seed-OSS-36B": ExpectedModel((80, 8, 128), RopeSpec(128, 1e7), 524288, bias=(True, False)),
    "Olmo-3-7B": ExpectedModel(
        (32, 32, 128), RopeSpec(128, 5e5), 65536, windows=(4096,) * 3 + (None,)
    ),
    "EXAONE-4.0-32B": ExpectedModel(
        (40, 8, 128),
        RopeSpec(128, 1e6, scaling=Llama3Scaling(16.0, 1.0, 4.0, 8192)),
        131072,
        windows=(4096,) * 3 + (None,),
    ),
    "Apertus-8B": ExpectedModel(
        (32, 8, 128), RopeSpec(128, 12e6, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)), 65536
    ),
    "helium-1-preview-2b": ExpectedModel((20, 20, 128), RopeSpec(128, 1e5, interleaved=True), 4096),
    "Minitron-4B": ExpectedModel((24, 8, 128), RopeSpec(64), 4096),
    "Qwen2-VL-2B": ExpectedModel(
        (12, 2, 128), RopeSpec(128, 1e6), 32768, tied=True, bias=(True, False)
    ),
    "Qwen2.5-VL-7B": ExpectedModel((28, 4, 128), RopeSpec(128, 1e6), 128000, bias=(True, False)),
    "Qwen3-VL-4B": ExpectedModel((32, 8, 128), RopeSpec(128, 5e6), 262144, tied=True),
    "Qwen3-VL-30B-A3B": ExpectedModel((32, 4, 128), RopeSpec(128, 5e6), 262144),
    "Ministral-3-8B": ExpectedModel(
        (32, 8, 128), RopeSpec(128, 1e6, scaling=YarnScaling(16.0, 16384)), 262144
    ),
    "SmolLM3-3B": ExpectedModel((16, 4, 128), RopeSpec(128, 5e6), 65536, tied=True),
    "GLM-4.5-Air": ExpectedModel((96, 8, 128), RopeSpec(64, 1e6), 131072, bias=(True, False)),
    "dots.llm1": ExpectedModel((32, 32, 128), RopeSpec(128, 1e7), 32768),
    "MiniMax-M2": ExpectedModel((48, 8, 128), RopeSpec(64, 5e6), 196608),
    "ERNIE-4.5-21B-A3B": ExpectedModel((20, 4, 128), RopeSpec(128, 5e5, True), 131072, tied=True),
    "OLMoE-1B-7B": ExpectedModel((16, 16, 128), RopeSpec(128), 4096),
    "Hunyuan-A13B": ExpectedModel(
        (32, 8, 128), RopeSpec(128, 1e4 * 1000 ** (128 / 126)), 32768, tied=True
    ),
    "Hy3": ExpectedModel((64, 8, 128), RopeSpec(128, 11158840.0), 262144),
    "granite-3.0-1b-a400m": ExpectedModel((16, 8, 64), RopeSpec(64), 4096, tied=True),
    "Trinity-Nano": ExpectedModel(
        (8, 2, 128), RopeSpec(128), 131072, windows=(2048, 2048, 2048, None)
    ),
    "Laguna-XS": ExpectedModel(
        (48, 8, 128), RopeSpec(64, 5e5), 262144, windows=(None, 512, 512, 512)
    ),
    "Mellum2-12B-A2.5B": ExpectedModel(
        (32, 4, 128), RopeSpec(128, 5e5), 131072, windows=(1024, 1024, 1024, None)
    ),
    "gpt-oss-20b": ExpectedModel(
        (64, 8, 64),
        RopeSpec(
            64,
            150000.0,
            scaling=YarnScaling(
                32.0, 4096, attention_factor=0.1 * math.log(32) + 1, truncate=False
            ),
        ),
        131072,
        bias=(True, True),
        windows=(128, None),
    ),
    "Llama-4-Scout": ExpectedModel(
        (40, 8, 128), RopeSpec(128, 5e5, True, Llama3Scaling(16.0, 1.0, 1.0, 8192)), 10485760
    ),
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


def test_olmo_3_scales_the_rope_of_full_attention_only() -> None:
    layers = describe_config(CONFIGS["Olmo-3-7B"]).model.layers
    scaling = YarnScaling(8.0, 8192, attention_factor=1.2079441541679836)
    assert layers[3].attention.position == RopeSpec(128, 5e5, scaling=scaling)


def test_vision_models_are_served_as_text() -> None:
    vision = {name for name, config in CONFIGS.items() if "vision_config" in config}
    assert vision == {name for name in CONFIGS if describe_config(CONFIGS[name]).text_part_only}
    assert {"gemma-3-4b-it", "Qwen2.5-VL-7B", "Qwen3-VL-30B-A3B", "Ministral-3-8B"} <= vision


def test_experts() -> None:
    mixtral = describe_config(CONFIGS["Mixtral-8x7B-v0.1"]).model.layers[0].mlp
    assert isinstance(mixtral, MoeSpec) and (
        mixtral.num_experts,
        mixtral.top_k,
        mixtral.router.normalize,
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
        and not qwen2.router.normalize
    )
    assert (qwen2.mlp.size, qwen2.shared.size) == (1408, 5632)
    qwen3 = describe_config(CONFIGS["Qwen3-30B-A3B"]).model.layers[0].mlp
    assert isinstance(qwen3, MoeSpec) and (
        qwen3.num_experts,
        qwen3.top_k,
        qwen3.shared,
        qwen3.router.normalize,
    ) == (
        128,
        8,
        None,
        True,
    )


@dataclass(frozen=True)
class ExpectedHybrid:
    mixer: RecurrentSpec
    # Layers with attention; all others are recurrent or have no mixer.
    attention: tuple[int, ...]
    heads: tuple[int, int, int]  # heads, key-value heads, head dimension
    position: RopeSpec | None


HYBRIDS = {
    "Qwen3.6-35B-A3B": ExpectedHybrid(
        GatedDeltaNetSpec(16, 32, 128, 128),
        tuple(range(3, 40, 4)),
        (16, 2, 256),
        RopeSpec(64, 1e7),
    ),
    "Qwen3.6-27B": ExpectedHybrid(
        GatedDeltaNetSpec(16, 48, 128, 128),
        tuple(range(3, 64, 4)),
        (24, 4, 256),
        RopeSpec(64, 1e7),
    ),
    "Qwen3-Next-80B-A3B": ExpectedHybrid(
        GatedDeltaNetSpec(16, 32, 128, 128),
        tuple(range(3, 48, 4)),
        (16, 2, 256),
        RopeSpec(64, 1e7),
    ),
    "LFM2-1.2B": ExpectedHybrid(
        ShortConvSpec(2048), (2, 5, 8, 10, 12, 14), (32, 8, 64), RopeSpec(64, 1e6)
    ),
    "LFM2-8B-A1B": ExpectedHybrid(
        ShortConvSpec(2048), (2, 6, 10, 14, 18, 21), (32, 8, 64), RopeSpec(64, 1e6)
    ),
    "Nemotron-3-Nano-30B-A3B": ExpectedHybrid(
        Mamba2Spec(64, 64, 128, 8, norm=NormSpec(eps=1e-5), norm_groups=8),
        (5, 12, 19, 26, 33, 42),
        (32, 2, 128),
        None,
    ),
    "granite-4.0-h-small": ExpectedHybrid(
        Mamba2Spec(128, 64, 128, norm=NormSpec(eps=1e-5)), (5, 15, 25, 35), (32, 8, 128), None
    ),
    "Falcon-H1-0.5B": ExpectedHybrid(
        Mamba2Spec(
            24,
            64,
            128,
            norm=None,
            part_scales=tuple(
                1.25 * factor for factor in CONFIGS["Falcon-H1-0.5B"]["ssm_multipliers"]
            ),
        ),
        tuple(range(36)),
        (8, 2, 128),
        RopeSpec(128, 1e11),
    ),
    "Jamba-1.5-Mini": ExpectedHybrid(
        MambaSpec(8192, 16, 256, norm=NormSpec()), (4, 12, 20, 28), (32, 8, 128), None
    ),
    "Bamba-9B": ExpectedHybrid(
        Mamba2Spec(128, 64, 128, norm=NormSpec(eps=1e-5)), (9, 18, 27), (32, 8, 128), RopeSpec(64)
    ),
    "Zamba2-1.2B": ExpectedHybrid(
        Mamba2Spec(64, 64, 128, norm=NormSpec(eps=1e-5)),
        (5, 11, 17, 23, 29, 35),
        (32, 32, 128),
        RopeSpec(128),
    ),
    "Zamba2-7B": ExpectedHybrid(
        Mamba2Spec(112, 64, 64, 2, norm=NormSpec(eps=1e-5), norm_groups=2),
        (6, 11, *range(17, 78, 6)),
        (32, 32, 224),
        RopeSpec(224),
    ),
    "Olmo-Hybrid-7B": ExpectedHybrid(
        GatedDeltaNetSpec(30, 30, 96, 192, norm=NormSpec(eps=1e-5), beta_scale=2.0),
        tuple(range(3, 32, 4)),
        (30, 30, 128),
        None,
    ),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_expected_mixers(name: str) -> None:
    expected = HYBRIDS[name]
    layers = describe_config(CONFIGS[name]).model.layers
    assert {layer.recurrent for layer in layers} - {None} == {expected.mixer}
    attention_layers = [i for i, layer in enumerate(layers) if layer.attention is not None]
    assert tuple(attention_layers) == expected.attention
    attention = layers[attention_layers[0]].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == expected.heads
    assert attention.position == expected.position


def test_values_of_recurrent_models() -> None:
    qwen = describe_config(CONFIGS["Qwen3.6-35B-A3B"]).model
    assert qwen.layers[0].attn_norm == NormSpec(unit_offset=True)
    assert qwen.layers[3].attention.gate == AttentionGateSpec("packed")
    moe = qwen.layers[0].mlp
    assert (moe.num_experts, moe.top_k, moe.mlp.size, moe.shared.size) == (256, 8, 512, 512)
    assert moe.shared_gate and moe.router.normalize
    assert describe_config(CONFIGS["LFM2-1.2B"]).model.layers[0].mlp.size == 8192
    nano = describe_config(CONFIGS["Nemotron-3-Nano-30B-A3B"]).model
    assert [layer.mlp is None for layer in nano.layers[:6]] == [True, False] * 2 + [True, True]
    moe = nano.layers[1].mlp
    assert (moe.num_experts, moe.top_k, moe.mlp.size, moe.shared.size) == (128, 6, 1856, 3712)
    assert not moe.mlp.gated and moe.mlp.activation == "relu2" and moe.router.scale == 2.5
    falcon = describe_config(CONFIGS["Falcon-H1-0.5B"]).model.layers[0]
    assert falcon.attention.scale == 0.39062499999999994 * 128**-0.5
    assert (falcon.attention_scale, falcon.recurrent_scale) == (0.9375, 0.23570226039551587)
    assert falcon.mlp_scale == 0.8838834764831844 * 0.5859375
    assert falcon.mlp.clamp.alpha == 0.8838834764831844
    zamba = describe_config(CONFIGS["Zamba2-7B"])
    blocks = [layer.shared_block for layer in zamba.model.layers if layer.shared_block]
    assert [block.index for block in blocks] == [0, 1] * 6 + [0]
    behind_block = zamba.model.layers[11]
    assert behind_block.attention.scale == 112**-0.5
    assert (behind_block.attention.low_rank, behind_block.mlp.low_rank) == (0, 128)
    assert zamba.unread == ()
    olmo = describe_config(CONFIGS["Olmo-Hybrid-7B"]).model.layers
    assert (olmo[0].attn_norm, olmo[0].attn_post_norm) == (NormSpec(), None)
    assert (olmo[3].attn_norm, olmo[3].attn_post_norm) == (None, NormSpec())


@dataclass(frozen=True)
class ExpectedExperts:
    experts: tuple[int, int, int]  # experts, experts per token, size of an expert
    router: RouterSpec
    shared: int | None = None  # size of the shared expert
    first: int = 0  # layer with experts


SIGMOID = RouterSpec(score="sigmoid", correction_bias=True, min_normalizer=1e-20)
EXPERTS = {
    "GLM-4.5-Air": ExpectedExperts((128, 8, 1408), SIGMOID, 1408, first=1),
    "Solar-Open-100B": ExpectedExperts((128, 8, 1280), SIGMOID, 1280),
    "dots.llm1": ExpectedExperts((128, 6, 1408), replace(SIGMOID, scale=2.5), 2816, first=1),
    "MiniMax-M2": ExpectedExperts((256, 8, 1536), SIGMOID),
    "ERNIE-4.5-21B-A3B": ExpectedExperts(
        (64, 6, 1536), RouterSpec(correction_bias=True, min_normalizer=1e-12), 3072, first=1
    ),
    "OLMoE-1B-7B": ExpectedExperts((64, 8, 1024), RouterSpec(normalize=False)),
    "Hunyuan-A13B": ExpectedExperts((64, 8, 3072), RouterSpec(), 3072),
    "Hy3": ExpectedExperts((192, 8, 1536), replace(SIGMOID, scale=2.826), 1536, first=1),
    "granite-3.0-1b-a400m": ExpectedExperts((32, 8, 512), RouterSpec(score_chosen_only=True)),
    "Trinity-Nano": ExpectedExperts((128, 8, 256), replace(SIGMOID, scale=2.826), 256, first=2),
    "Laguna-XS": ExpectedExperts(
        (256, 8, 512), replace(SIGMOID, scale=2.5, min_normalizer=0.0), 512, first=1
    ),
    "Mellum2-12B-A2.5B": ExpectedExperts((64, 8, 896), RouterSpec()),
    "Phi-3.5-MoE": ExpectedExperts(
        (16, 2, 6400), RouterSpec(score="sparsemixer", normalize=False, threshold=0.02)
    ),
    "North-Mini": ExpectedExperts(
        (128, 8, 768), RouterSpec(score="sigmoid", normalize=False), first=1
    ),
    "Llama-4-Scout": ExpectedExperts(
        (16, 1, 8192), RouterSpec(score="sigmoid", normalize=False, weights_input=True), 8192
    ),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_expected_experts(name: str) -> None:
    expected = EXPERTS[name]
    layers = describe_config(CONFIGS[name]).model.layers
    assert [isinstance(layer.mlp, MoeSpec) for layer in layers] == [
        i >= expected.first for i in range(len(layers))
    ]
    moe = layers[-1].mlp
    assert isinstance(moe, MoeSpec)
    assert (moe.num_experts, moe.top_k, moe.mlp.size) == expected.experts
    assert moe.router == expected.router
    assert (moe.shared and moe.shared.size) == expected.shared


def test_layers_for_multi_token_prediction_are_ignored() -> None:
    for name, pattern in (("GLM-4.5-Air", "*layers.46.*"), ("Hy3", "*layers.80.*")):
        ignored = describe_config(CONFIGS[name]).names.ignored
        assert pattern in ignored and not any("layers.45" in other for other in ignored)


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
