"""Specs from GGUF metadata and tensor shapes. tests/parity checks what these specs compute."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.attention.base import softmax_scale
from bloomery.errors import UnsupportedModel
from bloomery.families import ModelDescription
from bloomery.families.gguf import ARCHITECTURES, LAYER_NORM_EPSILON, RMS_EPSILON, describe_gguf
from bloomery.families.gguf_recurrent import RECURRENT_ARCHITECTURES
from bloomery.spec import (
    AlibiSpec,
    AttentionSpec,
    FusedTensor,
    LinearScaling,
    LongRopeScaling,
    MlpSpec,
    MoeSpec,
    RopeSpec,
    RouterSpec,
    SplitTensors,
    YarnScaling,
)

SIZES = {
    "block_count": 3,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 128,
    "attention.head_count": 4,
}
# Further keys that the converters of these architectures always write.
STATED: dict[str, dict[str, Any]] = {
    "granite": {"logit_scale": 4.0},
    "starcoder": {"attention.head_count_kv": 1},
    "cohere2": {"attention.sliding_window": 5},
    "cohere2moe": {"attention.sliding_window": 5},
}
EXPERTS = {"expert_count": 4, "expert_used_count": 2}
SSM = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}
for arch in ("qwen35", "qwen35moe", "qwen3next", "granitehybrid", "nemotron_h", "nemotron_h_moe"):
    STATED[arch] = SSM
STATED["falcon-h1"] = SSM
STATED["granitehybrid"] = SSM | {"logit_scale": 4.0}
STATED["lfm2"] = STATED["lfm2moe"] = {"shortconv.l_cache": 3}
WITH_EXPERTS = (
    "afmoe",
    "cohere2moe",
    "dots1",
    "ernie4_5-moe",
    "glm4moe",
    "gpt-oss",
    "granitemoe",
    "hunyuan-moe",
    "hy_v3",
    "laguna",
    "lfm2moe",
    "llama4",
    "mellum",
    "minimax-m2",
    "nemotron_h_moe",
    "olmoe",
    "phimoe",
    "qwen2moe",
    "qwen35moe",
    "qwen3next",
    "qwen3moe",
    "qwen3vlmoe",
)
WITH_QK_NORM = ("hunyuan-dense", "hunyuan-moe", "minimax-m2")
XIELU = {
    "xielu.alpha_p": [0.5] * 3,
    "xielu.alpha_n": [0.25] * 3,
    "xielu.beta": [0.5] * 3,
    "xielu.eps": [-1e-6] * 3,
}
for arch in WITH_EXPERTS:
    size = {"expert_feed_forward_length": 24}
    STATED[arch] = STATED.get(arch, {}) | EXPERTS | size


def expert_tensors(*layers: int, shared: bool = False) -> dict[str, tuple[int, ...]]:
    kinds: dict[str, tuple[int, ...]] = {"ffn_gate_inp": (4, 32), "ffn_down_exps": (4, 32, 24)}
    kinds |= {"ffn_down_shexp": (32, 40)} if shared else {}
    return {f"blk.{i}.{name}.weight": shape for i in layers for name, shape in kinds.items()}


def recurrent_tensors(arch: str) -> dict[str, tuple[int, ...]]:
    """Layer 0 has attention, layer 1 is recurrent, and both are everywhere in Falcon-H1."""
    conv = "shortconv.conv" if arch.startswith("lfm2") else "ssm_conv1d"
    recurrent = range(3) if arch == "falcon-h1" else [1]
    tensors: dict[str, tuple[int, ...]] = {f"blk.{i}.{conv}.weight": (96, 4) for i in recurrent}
    tensors |= {f"blk.{i}.attn_output.weight": (32, 32) for i in (0, 2)}
    if arch == "nemotron_h_moe":  # the blocks of a layer are layers of their own
        tensors |= expert_tensors(2, shared=True)
        del tensors["blk.2.attn_output.weight"]
    return tensors


def describe(
    arch: str,
    changes: dict[str, Any] | None = None,
    tensors: dict[str, tuple[int, ...]] | None = None,
    **divisors: Any,
) -> ModelDescription:
    epsilon = {ARCHITECTURES[arch].epsilon_key if arch in ARCHITECTURES else RMS_EPSILON: 1e-5}
    stated = SIZES | epsilon | STATED.get(arch, {}) | (changes or {})
    metadata = {f"{arch}.{key}": value for key, value in stated.items() if value is not None}
    blocks: dict[str, tuple[int, ...]] = {f"blk.{i}.attn_norm.weight": (32,) for i in range(3)}
    has_experts = arch in WITH_EXPERTS and arch != "nemotron_h_moe"
    if has_experts and not any("_exps" in name for name in tensors or ()):
        blocks |= expert_tensors(0, 1, 2)
    if arch in RECURRENT_ARCHITECTURES:
        blocks |= recurrent_tensors(arch)
    if arch in WITH_QK_NORM:
        blocks |= {f"blk.{i}.attn_q_norm.weight": (8,) for i in range(3)}
    vectors = {f"{name}.weight": values for name, values in divisors.items()}
    shapes = {
        "token_embd.weight": (101, 32),
        **blocks,
        **{name: (len(v),) for name, v in vectors.items()},
    }
    general = {"general.architecture": arch, **XIELU}
    return describe_gguf(general | metadata, shapes | (tensors or {}), vectors.__getitem__)


def attention_of(description: ModelDescription, layer: int = 0) -> AttentionSpec:
    return description.model.layers[layer].attention


def rope_of(description: ModelDescription, layer: int = 0) -> RopeSpec:
    position = attention_of(description, layer).position
    assert isinstance(position, RopeSpec)
    return position


def windows_of(description: ModelDescription) -> list[int | None]:
    return [layer.attention.window for layer in description.model.layers]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sizes(arch: str) -> None:
    description = describe(arch)
    model = description.model
    assert (model.vocab, model.hidden, model.context, len(model.layers)) == (101, 32, 64, 3)
    assert (attention_of(description).num_heads, attention_of(description).head_dim) == (4, 8)
    assert model.tied and not model.head_bias
    assert not any(spec.bias or spec.out_bias for spec in model.attentions)
    assert not any(layer.attn_norm.unit_offset for layer in model.layers if layer.attn_norm)
    assert description.unread == ()


# ---- metadata ----------------------------------------------------------------------------------


def test_architectures_with_interleaved_rope() -> None:
    paired = {
        arch
        for arch in ARCHITECTURES
        if getattr(attention_of(describe(arch)).position, "interleaved", False)
    }
    assert paired == {
        "llama",
        "llama4",
        "mistral3",
        "granite",
        "granitehybrid",
        "granitemoe",
        "granite_swa",
        "smollm3",
        "command-r",
        "cohere2",
        "cohere2moe",
        "glm4",
        "ernie4_5",
        "ernie4_5-moe",
        "arcee",
    }


def test_head_dim_may_differ_from_hidden_size_per_head() -> None:
    description = describe(
        "llama",
        {"attention.key_length": 16, "attention.value_length": 16, "attention.head_count_kv": 2},
    )
    assert (
        attention_of(description).head_dim,
        attention_of(description).num_kv_heads,
        rope_of(description).dim,
    ) == (
        16,
        2,
        16,
    )


def test_partial_rope() -> None:
    assert rope_of(describe("gptneox", {"rope.dimension_count": 2})).dim == 2
    # 88 * (30 / 88) is slightly below 30 in floating point.
    assert (
        rope_of(describe("phi2", {"attention.key_length": 88, "rope.dimension_count": 30})).dim
        == 30
    )
    with pytest.raises(UnsupportedModel, match="partial_rotary_factor"):
        describe("llama", {"rope.dimension_count": 4})


def test_rope_scalings() -> None:
    assert rope_of(describe("llama", {"rope.freq_base": 5e5})).theta == 5e5
    assert (
        rope_of(
            describe("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0})
        ).scaling
        is None
    )
    assert rope_of(
        describe("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    ).scaling == LinearScaling(4.0)
    assert rope_of(describe("llama", {"rope.scale_linear": 4.0})).scaling == LinearScaling(4.0)
    stretch = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
    }
    assert rope_of(describe("qwen2", stretch)).scaling == YarnScaling(
        4.0, 16, attention_factor=0.1 * math.log(4) + 1
    )
    stretch |= {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_attn_factor": 1.5}
    assert rope_of(describe("qwen2", stretch)).scaling == YarnScaling(
        4.0, 16, beta_fast=8.0, attention_factor=1.5
    )


def test_rope_frequency_divisors() -> None:
    llama3 = [1.0, 1.0, 2.5, 8.0]
    assert rope_of(describe("llama", rope_freqs=llama3)).scaling == LongRopeScaling(
        tuple(llama3), tuple(llama3), 64
    )
    short = [1.0, 1.0, 1.5, 2.0]
    long = [1.0, 2.0, 4.0, 8.0]
    stated = {"rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": 1.25}
    description = describe("phi3", stated, rope_factors_short=short, rope_factors_long=long)
    assert rope_of(description).scaling == LongRopeScaling(
        tuple(short), tuple(long), 16, 1.25, 1.25
    )
    assert description.names.ignored == ("rope_freqs.weight", "rope_factors_*.weight")


def test_windows() -> None:
    assert windows_of(describe("llama")) == [None] * 3
    assert windows_of(describe("llama", {"attention.sliding_window": 5})) == [5] * 3
    assert windows_of(describe("phi3", {"attention.sliding_window": 0})) == [None] * 3
    assert windows_of(describe("gemma2")) == [4096, None, 4096]
    assert windows_of(describe("gemma3")) == [None] * 3
    assert windows_of(describe("gemma3", {"attention.sliding_window": 5})) == [5] * 3
    by = {"attention.sliding_window": 5}
    assert windows_of(describe("gemma3", by | {"attention.sliding_window_pattern": 2})) == [
        5,
        None,
        5,
    ]
    assert windows_of(
        describe("gemma3", by | {"attention.sliding_window_pattern": [False, True, True]})
    ) == [None, 5, 5]


def test_gemma3_window_layers_have_their_own_theta() -> None:
    stated = {
        "attention.sliding_window": 5,
        "attention.sliding_window_pattern": 3,
        "rope.freq_base": 1e6,
    }
    stated |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    description = describe("gemma3", stated)
    assert [rope_of(description, i) for i in (0, 2)] == [
        RopeSpec(8, 1e4),
        RopeSpec(8, 1e6, scaling=LinearScaling(8.0)),
    ]
    assert rope_of(describe("gemma3", stated | {"rope.freq_base_swa": 500.0})).theta == 500.0


def test_attention_scale() -> None:
    assert softmax_scale(attention_of(describe("gemma2", {"attention.key_length": 16}))) == 16**-0.5
    largest = {"block_count": 46, "attention.key_length": 16}
    blocks = {f"blk.{i}.attn_norm.weight": (32,) for i in range(46)}
    assert softmax_scale(attention_of(describe("gemma2", largest, blocks))) == 8**-0.5
    assert softmax_scale(attention_of(describe("granite"))) == 8**-0.5
    assert softmax_scale(attention_of(describe("granite", {"attention.scale": 0.2}))) == 0.2
    assert softmax_scale(attention_of(describe("llama", {"attention.scale": 0.2}))) == 0.2


def test_multipliers_and_caps() -> None:
    granite = describe(
        "granite", {"embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 4.0}
    ).model
    assert (granite.embed_scale, granite.layers[0].residual_scale, granite.logit_scale) == (
        3.0,
        0.5,
        0.25,
    )
    assert describe("command-r", {"logit_scale": 0.0625}).model.logit_scale == 0.0625
    gemma = describe("gemma2", {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0})
    assert (attention_of(gemma).softcap, gemma.model.logit_softcap) == (20.0, 10.0)


def test_mpt() -> None:
    description = describe(
        "mpt",
        {"attention.max_alibi_bias": 4.0, "attention.clamp_kqv": 6.0, "attention.head_count_kv": 1},
    )
    assert attention_of(description) == AttentionSpec(4, 1, 8, AlibiSpec(max_bias=4.0), clip=6.0)
    learned = describe("mpt", tensors={"position_embd.weight": (64, 32)})
    assert (attention_of(learned).position, learned.model.positions) == (None, 64)


def test_list_with_equal_values_for_every_layer() -> None:
    assert attention_of(describe("llama", {"attention.head_count_kv": [2, 2, 2]})).num_kv_heads == 2
    with pytest.raises(
        UnsupportedModel, match=r"llama\.attention\.head_count_kv must be a whole number"
    ):
        describe("llama", {"attention.head_count_kv": [2, 2, 4]})


# ---- tensors -----------------------------------------------------------------------------------


def test_output_head_and_its_bias() -> None:
    description = describe("phi2", tensors={"output.weight": (101, 32), "output.bias": (101,)})
    assert not description.model.tied and description.model.head_bias


def test_biases_layer_by_layer() -> None:
    description = describe(
        "qwen2", tensors={"blk.1.attn_q.bias": (32,), "blk.2.attn_output.bias": (32,)}
    )
    biases = [
        (layer.attention.bias, layer.attention.out_bias) for layer in description.model.layers
    ]
    assert biases == [(False, False), (True, False), (False, True)]
    mlps = [
        layer.mlp
        for layer in describe("starcoder2", tensors={"blk.0.ffn_up.bias": (128,)}).model.layers
    ]
    assert [isinstance(mlp, MlpSpec) and mlp.bias for mlp in mlps] == [True, False, False]
    norms = [
        layer.attn_norm
        for layer in describe("mpt", tensors={"blk.2.attn_norm.bias": (32,)}).model.layers
    ]
    assert [norm is not None and norm.bias for norm in norms] == [False, False, True]


def test_fused_and_split_tensors() -> None:
    assert describe("qwen2").names.attn_qkv == SplitTensors(("attn_q", "attn_k", "attn_v"))
    assert describe(
        "phi2", tensors={"blk.0.attn_qkv.weight": (96, 32)}
    ).names.attn_qkv == FusedTensor("attn_qkv")
    assert describe(
        "llama", tensors={"blk.0.ffn_gate.weight": (128, 32)}
    ).names.mlp_up == SplitTensors(("ffn_gate", "ffn_up"))
    assert describe("phi3").names.mlp_up == FusedTensor("ffn_up")
    assert describe("bloom").names.mlp_up == "ffn_up"


def test_falcon_norms() -> None:
    one = describe("falcon")
    two = describe("falcon", tensors={"blk.0.attn_norm_2.weight": (32,)})
    assert one.model.layers[0].mlp_norm is None and one.names.extra["attn_norm"] == "attn_norm"
    assert two.model.layers[0].mlp_norm is not None
    assert (two.names.extra["attn_norm"], two.names.extra["mlp_norm"]) == (
        "attn_norm_2",
        "attn_norm",
    )


def test_stablelm_parallel_residual_follows_from_its_norms() -> None:
    stated = {"use_parallel_residual": True}
    assert describe("stablelm", stated).model.layers[0].parallel
    layer = describe("stablelm", stated, {"blk.0.ffn_norm.weight": (32,)}).model.layers[0]
    assert not layer.parallel and layer.mlp_norm is not None
    assert (
        attention_of(describe("stablelm", tensors={"blk.0.attn_q_norm.weight": (4, 8)})).qk_norm
        is not None
    )


def test_experts() -> None:
    mixtral = describe("llama", EXPERTS, expert_tensors(0, 1, 2)).model.layers[0].mlp
    assert mixtral == MoeSpec(4, 2, MlpSpec(128))
    qwen2 = describe("qwen2moe", EXPERTS, expert_tensors(0, 1, 2, shared=True)).model.layers[0].mlp
    assert qwen2 == MoeSpec(
        4, 2, MlpSpec(24), RouterSpec(normalize=False), shared=MlpSpec(40), shared_gate=True
    )
    description = describe(
        "qwen3moe", EXPERTS | {"expert_feed_forward_length": 24}, expert_tensors(1, 2)
    )
    assert [layer.mlp for layer in description.model.layers] == [
        MlpSpec(128),
        *[MoeSpec(4, 2, MlpSpec(24))] * 2,
    ]
    assert description.names.stacked_experts and description.names.expert_up == SplitTensors(
        ("ffn_gate_exps", "ffn_up_exps")
    )
    together = expert_tensors(0, 1, 2) | {"blk.0.ffn_gate_up_exps.weight": (4, 48, 32)}
    assert describe("qwen3moe", EXPERTS, together).names.expert_up == FusedTensor(
        "ffn_gate_up_exps"
    )


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("rwkv6", {}, r"general\.architecture 'rwkv6' is not one Bloomery knows. Known: llama, "),
        ("llama", {"embedding_length": None}, r"llama\.embedding_length is missing"),
        ("llama", {RMS_EPSILON: None}, r"llama\.attention\.layer_norm_rms_epsilon is missing"),
        ("bloom", {LAYER_NORM_EPSILON: None}, r"bloom\.attention\.layer_norm_epsilon is missing"),
        (
            "llama",
            {"attention.head_count": "many"},
            r"llama\.attention\.head_count must be a whole number, not 'many'",
        ),
        (
            "llama",
            {"block_count": 2**31},
            r"llama\.block_count is 2147483648, and there are tensors of 3 layers",
        ),
        ("llama", {"attention.head_count_kv": 3}, "4 heads cannot share 3 key-value heads"),
        (
            "llama",
            {"attention.value_length": 4},
            r"llama\.attention\.value_length 4 is not supported, only 8",
        ),
        ("llama", {"attention.causal": False}, r"llama\.attention\.causal False is not supported"),
        ("llama", {"rope.scaling.type": "ntk"}, r"llama\.rope\.scaling\.type 'ntk' is not known"),
        ("llama", {"rope.scaling.alpha": 2.0}, r"llama\.rope\.scaling\.alpha is not known"),
        ("llama", {"rope.scaling.type": "longrope"}, "does not go with the divisors"),
        ("llama", {"rope.scaling.attn_factor": 1.5}, r"llama\.rope\.scaling\.attn_factor is 1\.5"),
        (
            "qwen2",
            {"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5},
            "yarn_ext_factor 0.5 is not",
        ),
        ("granite", {"rope.scaling.finetuned": False}, r"granite\.rope\.scaling\.finetuned False"),
        (
            "falcon",
            {"tensor_data_layout": "other"},
            r"falcon\.tensor_data_layout 'other' is not supported",
        ),
        ("starcoder", {"attention.head_count_kv": 2}, "2 is not supported"),
        (
            "mpt",
            {"attention.head_count_kv": 2},
            r"mpt\.attention\.head_count_kv 2 is not supported",
        ),
        (
            "seed_oss",
            {"attention.sliding_window": 5},
            r"seed_oss\.attention\.sliding_window is not supported",
        ),
        ("glm4", {"rope.dimension_sections": [2, 1, 1, 0]}, r"rope\.dimension_sections is not"),
        ("glm4moe", {"nextn_predict_layers": 3}, r"glm4moe\.nextn_predict_layers is 3"),
        (
            "qwen3moe",
            {"expert_weights_scale": 2.5},
            r"qwen3moe\.expert_weights_scale 2\.5 is not supported",
        ),
        (
            "gemma3",
            {"attention.sliding_window": 5, "attention.sliding_window_pattern": "six"},
            "a number or a list",
        ),
        (
            "gemma3",
            {"attention.sliding_window": 5, "attention.sliding_window_pattern": [True]},
            "1 layers of 3",
        ),
        (
            "qwen3moe",
            EXPERTS | {"expert_gating_func": 2},
            r"qwen3moe\.expert_gating_func 2 is not supported",
        ),
        (
            "cohere2",
            {"attention.sliding_window": None},
            r"cohere2\.attention\.sliding_window is missing",
        ),
    ],
)
def test_unsupported_metadata_is_refused(arch: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message) as error:
        describe(arch, changes)
    assert str(error.value).startswith("GGUF file: ") and "config.json" not in str(error.value)


def test_unsupported_tensors_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"vocabulary and no model"):
        describe_gguf({"general.architecture": "llama"}, {}, {}.__getitem__)
    with pytest.raises(
        UnsupportedModel, match="does not go with the divisors in rope_freqs.weight"
    ):
        describe("llama", rope_freqs=[1.0, 2.0])
    with pytest.raises(UnsupportedModel, match="must hold 4 positive numbers"):
        describe("llama", rope_freqs=[1.0, 2.0, 0.0, 4.0])
    with pytest.raises(UnsupportedModel, match="does not go with the divisors"):
        describe("llama", {"rope.scaling.factor": 2.0}, rope_freqs=[1.0] * 4)
    with pytest.raises(UnsupportedModel, match="does not go with the divisors"):
        describe("phi3", rope_factors_short=[1.0] * 4)
    with pytest.raises(
        UnsupportedModel, match="expert_feed_forward_length 99 is not supported, only 24"
    ):
        describe("qwen3moe", EXPERTS | {"expert_feed_forward_length": 99}, expert_tensors(0, 1, 2))
    with pytest.raises(UnsupportedModel, match="use_qk_norm"):
        describe("cohere2", tensors={"blk.0.attn_q_norm.weight": (4, 8)})
    with pytest.raises(
        UnsupportedModel,
        match=r"tensor blk\.0\.attn_q_norm\.weight is not part of this architecture",
    ):
        describe("mpt", tensors={"blk.0.attn_q_norm.weight": (32,)})
    for stem in ("attn_sinks.weight", "attn_gate.weight", "exp_probs_b.bias", "exp_probs_b"):
        with pytest.raises(UnsupportedModel, match=rf"blk\.1\.{stem} is not part of this arch"):
            describe("llama", tensors={f"blk.1.{stem}": (4,)})
    for name in (
        "blk.0.ffn_gate.0.weight",
        "blk.1.attn_q.scale",
        "blk.2.attn_drains.weight",
        "cls.weight",
    ):
        with pytest.raises(UnsupportedModel, match=f"tensor {name} is not part of any model"):
            describe("llama", tensors={name: (32,)})


def test_layers_for_multi_token_prediction_are_skipped() -> None:
    extra = {"block_count": 3, "nextn_predict_layers": 1}
    tensors = {"blk.2.nextn.eh_proj.weight": (32, 64)}
    description = describe("glm4moe", extra, tensors)
    assert len(description.model.layers) == 2
    assert "blk.2.*" in description.names.ignored and description.unread == ()


def test_vision_files_are_served_as_text() -> None:
    sections = {"rope.dimension_sections": [2, 1, 1, 0]}
    tensors = {"v.blk.0.attn_q.weight": (8, 8), "mm.0.weight": (8, 8)}
    description = describe("qwen3vl", sections, tensors)
    assert description.text_part_only and description.unread == ()
    assert not describe("qwen3").text_part_only


def test_head_counts_per_layer() -> None:
    heads = {"attention.head_count": [4, 2, 4], "attention.key_length": 8}
    heads["attention.value_length"] = 8
    heads["attention.head_count_kv"] = 2
    layers = describe("laguna", heads).model.layers
    assert [layer.attention.num_heads for layer in layers] == [4, 2, 4]
    with pytest.raises(UnsupportedModel, match=r"llama\.attention\.head_count"):
        describe("llama", heads)


def test_unread_keys_are_listed() -> None:
    description = describe(
        "llama", {"pooling_type": 1, "attn_logit_softcapping": 30.0, "vocab_size": 101}
    )
    assert description.unread == ("llama.attn_logit_softcapping", "llama.pooling_type")


KEYS = [
    *SIZES,
    RMS_EPSILON,
    LAYER_NORM_EPSILON,
    *EXPERTS,
    "attention.key_length",
    "attention.sliding_window",
    "rope.freq_base",
]
KEYS += [
    "attention.sliding_window_pattern",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
]
KEYS += [
    "attention.max_alibi_bias",
    "attention.clamp_kqv",
    "logit_scale",
    "attention.scale",
    "embedding_scale",
]
ODD = st.one_of(
    st.integers(-(2**63), 2**64),
    st.floats(),
    st.booleans(),
    st.text(max_size=5),
    st.lists(st.integers(0, 3)),
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(ARCHITECTURES)), st.dictionaries(st.sampled_from(KEYS), ODD, max_size=3)
)
def test_odd_values_never_crash(arch: str, changes: dict[str, Any]) -> None:
    try:
        describe(arch, changes)
    except UnsupportedModel as error:
        assert str(error).startswith("GGUF file: ")
