"""GGUF metadata to specs, without files: what is translated, what is read off tensors, what is refused in which words.
That the specs compute the right thing is shown in parity/.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.errors import UnsupportedModel
from bloomery.families import Description
from bloomery.families.gguf import ARCHITECTURES, LAYER, RMS, describe
from bloomery.spec import Alibi, Attention, Fused, Linear, LongRope, Mlp, Moe, Rope, Split, Yarn

SIZES = {
    "block_count": 3,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 128,
    "attention.head_count": 4,
}
# What the architectures' converters always state beyond that.
STATED: dict[str, dict[str, Any]] = {
    "granite": {"logit_scale": 4.0},
    "starcoder": {"attention.head_count_kv": 1},
    "cohere2": {"attention.sliding_window": 5},
}


def read(
    arch: str,
    changes: dict[str, Any] | None = None,
    tensors: dict[str, tuple[int, ...]] | None = None,
    **divisors: Any,
) -> Description:
    epsilon = {ARCHITECTURES[arch].epsilon if arch in ARCHITECTURES else RMS: 1e-5}
    stated = SIZES | epsilon | STATED.get(arch, {}) | (changes or {})
    metadata = {f"{arch}.{key}": value for key, value in stated.items() if value is not None}
    blocks = {f"blk.{i}.attn_norm.weight": (32,) for i in range(3)}
    vectors = {f"{name}.weight": values for name, values in divisors.items()}
    shapes = {
        "token_embd.weight": (101, 32),
        **blocks,
        **{name: (len(v),) for name, v in vectors.items()},
    }
    return describe(
        {"general.architecture": arch, **metadata}, shapes | (tensors or {}), vectors.__getitem__
    )


def attention(found: Description, layer: int = 0) -> Attention:
    return found.model.layers[layer].attention


def turned(found: Description, layer: int = 0) -> Rope:
    position = attention(found, layer).position
    assert isinstance(position, Rope)
    return position


def windows(found: Description) -> list[int | None]:
    return [layer.attention.window for layer in found.model.layers]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sizes(arch: str) -> None:
    found = read(arch)
    model = found.model
    assert (model.vocab, model.hidden, model.context, len(model.layers)) == (101, 32, 64, 3)
    assert (attention(found).num_heads, attention(found).head_dim) == (4, 8)
    assert model.tied and not model.head_bias
    assert not any(layer.attention.bias or layer.attention.out_bias for layer in model.layers)
    assert not any(layer.attn_norm.unit_offset for layer in model.layers if layer.attn_norm)
    assert found.unread == ()


# ---- what is said --------------------------------------------------------------------------------


def test_only_files_for_paired_rotation_are_read_so() -> None:
    paired = {
        arch
        for arch in ARCHITECTURES
        if getattr(attention(read(arch)).position, "interleaved", False)
    }
    assert paired == {"llama", "granite", "smollm3", "command-r", "cohere2"}


def test_heads_wider_than_their_share() -> None:
    found = read(
        "llama",
        {"attention.key_length": 16, "attention.value_length": 16, "attention.head_count_kv": 2},
    )
    assert (attention(found).head_dim, attention(found).num_kv_heads, turned(found).dim) == (
        16,
        2,
        16,
    )


def test_part_of_a_head_turns() -> None:
    assert turned(read("gptneox", {"rope.dimension_count": 2})).dim == 2
    # 88 * (30 / 88) is a hair under 30
    assert turned(read("phi2", {"attention.key_length": 88, "rope.dimension_count": 30})).dim == 30
    with pytest.raises(UnsupportedModel, match="partial_rotary_factor"):
        read("llama", {"rope.dimension_count": 4})


def test_rotary_scalings() -> None:
    assert turned(read("llama", {"rope.freq_base": 5e5})).theta == 5e5
    assert (
        turned(read("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0})).scaling
        is None
    )
    assert turned(
        read("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    ).scaling == Linear(4.0)
    assert turned(read("llama", {"rope.scale_linear": 4.0})).scaling == Linear(4.0)
    stretch = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
    }
    assert turned(read("qwen2", stretch)).scaling == Yarn(4.0, 16, attention=0.1 * math.log(4) + 1)
    stretch |= {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_attn_factor": 1.5}
    assert turned(read("qwen2", stretch)).scaling == Yarn(4.0, 16, beta_fast=8.0, attention=1.5)


def test_divisors_of_frequencies() -> None:
    llama3 = [1.0, 1.0, 2.5, 8.0]
    assert turned(read("llama", rope_freqs=llama3)).scaling == LongRope(
        tuple(llama3), tuple(llama3), 64
    )
    short = [1.0, 1.0, 1.5, 2.0]
    long = [1.0, 2.0, 4.0, 8.0]
    stated = {"rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": 1.25}
    found = read("phi3", stated, rope_factors_short=short, rope_factors_long=long)
    assert turned(found).scaling == LongRope(tuple(short), tuple(long), 16, 1.25, 1.25)
    assert found.names.ignored == ("rope_freqs.weight", "rope_factors_*.weight")


def test_windows() -> None:
    assert windows(read("llama")) == [None] * 3
    assert windows(read("llama", {"attention.sliding_window": 5})) == [5] * 3
    assert windows(read("phi3", {"attention.sliding_window": 0})) == [None] * 3
    assert windows(read("gemma2")) == [4096, None, 4096]
    assert windows(read("gemma3")) == [None] * 3
    assert windows(read("gemma3", {"attention.sliding_window": 5})) == [5] * 3
    by = {"attention.sliding_window": 5}
    assert windows(read("gemma3", by | {"attention.sliding_window_pattern": 2})) == [5, None, 5]
    assert windows(
        read("gemma3", by | {"attention.sliding_window_pattern": [False, True, True]})
    ) == [None, 5, 5]


def test_gemma3_turns_local_layers_at_their_own_speed() -> None:
    stated = {
        "attention.sliding_window": 5,
        "attention.sliding_window_pattern": 3,
        "rope.freq_base": 1e6,
    }
    stated |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    found = read("gemma3", stated)
    assert [turned(found, i) for i in (0, 2)] == [Rope(8, 1e4), Rope(8, 1e6, scaling=Linear(8.0))]
    assert turned(read("gemma3", stated | {"rope.freq_base_swa": 500.0})).theta == 500.0


def test_scale_of_scores() -> None:
    assert attention(read("gemma2", {"attention.key_length": 16})).softmax_scale == 16**-0.5
    largest = {"block_count": 46, "attention.key_length": 16}
    blocks = {f"blk.{i}.attn_norm.weight": (32,) for i in range(46)}
    assert attention(read("gemma2", largest, blocks)).softmax_scale == 8**-0.5
    assert attention(read("granite")).softmax_scale == 8**-0.5
    assert attention(read("granite", {"attention.scale": 0.2})).softmax_scale == 0.2
    assert attention(read("llama", {"attention.scale": 0.2})).softmax_scale == 0.2


def test_multipliers_and_caps() -> None:
    granite = read(
        "granite", {"embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 4.0}
    ).model
    assert (granite.embed_scale, granite.layers[0].residual_scale, granite.logit_scale) == (
        3.0,
        0.5,
        0.25,
    )
    assert read("command-r", {"logit_scale": 0.0625}).model.logit_scale == 0.0625
    gemma = read("gemma2", {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0})
    assert (attention(gemma).softcap, gemma.model.logit_softcap) == (20.0, 10.0)


def test_mpt() -> None:
    found = read(
        "mpt",
        {"attention.max_alibi_bias": 4.0, "attention.clamp_kqv": 6.0, "attention.head_count_kv": 1},
    )
    assert attention(found) == Attention(4, 1, 8, Alibi(max_bias=4.0), clip=6.0)
    learned = read("mpt", tensors={"position_embd.weight": (64, 32)})
    assert (attention(learned).position, learned.model.positions) == (None, 64)


def test_a_list_that_says_the_same_of_every_layer() -> None:
    assert attention(read("llama", {"attention.head_count_kv": [2, 2, 2]})).num_kv_heads == 2
    with pytest.raises(
        UnsupportedModel, match=r"llama\.attention\.head_count_kv must be a whole number"
    ):
        read("llama", {"attention.head_count_kv": [2, 2, 4]})


# ---- what the tensors tell -----------------------------------------------------------------------


def test_head() -> None:
    found = read("phi2", tensors={"output.weight": (101, 32), "output.bias": (101,)})
    assert not found.model.tied and found.model.head_bias


def test_biases_layer_by_layer() -> None:
    found = read("qwen2", tensors={"blk.1.attn_q.bias": (32,), "blk.2.attn_output.bias": (32,)})
    told = [(layer.attention.bias, layer.attention.out_bias) for layer in found.model.layers]
    assert told == [(False, False), (True, False), (False, True)]
    mlps = [
        layer.mlp
        for layer in read("starcoder2", tensors={"blk.0.ffn_up.bias": (128,)}).model.layers
    ]
    assert [isinstance(mlp, Mlp) and mlp.bias for mlp in mlps] == [True, False, False]
    norms = [
        layer.attn_norm
        for layer in read("mpt", tensors={"blk.2.attn_norm.bias": (32,)}).model.layers
    ]
    assert [norm is not None and norm.bias for norm in norms] == [False, False, True]


def test_fused_and_split() -> None:
    assert read("qwen2").names.attn_qkv == Split(("attn_q", "attn_k", "attn_v"))
    assert read("phi2", tensors={"blk.0.attn_qkv.weight": (96, 32)}).names.attn_qkv == Fused(
        "attn_qkv"
    )
    assert read("llama", tensors={"blk.0.ffn_gate.weight": (128, 32)}).names.mlp_up == Split(
        ("ffn_gate", "ffn_up")
    )
    assert read("phi3").names.mlp_up == Fused("ffn_up")
    assert read("bloom").names.mlp_up == "ffn_up"


def test_falcons_norms() -> None:
    one = read("falcon")
    two = read("falcon", tensors={"blk.0.attn_norm_2.weight": (32,)})
    assert one.model.layers[0].mlp_norm is None and one.names.extra["attn_norm"] == "attn_norm"
    assert two.model.layers[0].mlp_norm is not None
    assert (two.names.extra["attn_norm"], two.names.extra["mlp_norm"]) == (
        "attn_norm_2",
        "attn_norm",
    )


def test_stablelm_goes_by_its_norms() -> None:
    stated = {"use_parallel_residual": True}
    assert read("stablelm", stated).model.layers[0].parallel
    layer = read("stablelm", stated, {"blk.0.ffn_norm.weight": (32,)}).model.layers[0]
    assert not layer.parallel and layer.mlp_norm is not None
    assert (
        attention(read("stablelm", tensors={"blk.0.attn_q_norm.weight": (4, 8)})).qk_norm
        is not None
    )


EXPERTS = {"expert_count": 4, "expert_used_count": 2}


def routed(*layers: int, shared: bool = False) -> dict[str, tuple[int, ...]]:
    kinds: dict[str, tuple[int, ...]] = {"ffn_gate_inp": (4, 32), "ffn_down_exps": (4, 32, 24)}
    kinds |= {"ffn_down_shexp": (32, 40)} if shared else {}
    return {f"blk.{i}.{name}.weight": shape for i in layers for name, shape in kinds.items()}


def test_experts() -> None:
    mixtral = read("llama", EXPERTS, routed(0, 1, 2)).model.layers[0].mlp
    assert mixtral == Moe(4, 2, Mlp(128), renormalize=True)
    qwen2 = read("qwen2moe", EXPERTS, routed(0, 1, 2, shared=True)).model.layers[0].mlp
    assert qwen2 == Moe(4, 2, Mlp(24), renormalize=False, shared=Mlp(40), shared_gate=True)
    found = read("qwen3moe", EXPERTS | {"expert_feed_forward_length": 24}, routed(1, 2))
    assert [layer.mlp for layer in found.model.layers] == [Mlp(128), *[Moe(4, 2, Mlp(24))] * 2]
    assert found.names.stacked_experts and found.names.expert_up == Split(
        ("ffn_gate_exps", "ffn_up_exps")
    )
    together = routed(0, 1, 2) | {"blk.0.ffn_gate_up_exps.weight": (4, 48, 32)}
    assert read("qwen3moe", EXPERTS, together).names.expert_up == Fused("ffn_gate_up_exps")


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "changes", "words"),
    [
        ("rwkv6", {}, r"general\.architecture 'rwkv6' is not one Bloomery knows. Known: llama, "),
        ("llama", {"embedding_length": None}, r"llama\.embedding_length is missing"),
        ("llama", {RMS: None}, r"llama\.attention\.layer_norm_rms_epsilon is missing"),
        ("bloom", {LAYER: None}, r"bloom\.attention\.layer_norm_epsilon is missing"),
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
            "olmo2",
            {"attention.sliding_window": 5},
            r"olmo2\.attention\.sliding_window is not supported",
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
def test_refused(arch: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words) as error:
        read(arch, changes)
    assert str(error.value).startswith("GGUF file: ") and "config.json" not in str(error.value)


def test_refused_for_its_tensors() -> None:
    with pytest.raises(UnsupportedModel, match=r"vocabulary and no model"):
        describe({"general.architecture": "llama"}, {}, {}.__getitem__)
    with pytest.raises(
        UnsupportedModel, match="does not go with the divisors in rope_freqs.weight"
    ):
        read("llama", rope_freqs=[1.0, 2.0])
    with pytest.raises(UnsupportedModel, match="must hold 4 positive numbers"):
        read("llama", rope_freqs=[1.0, 2.0, 0.0, 4.0])
    with pytest.raises(UnsupportedModel, match="does not go with the divisors"):
        read("llama", {"rope.scaling.factor": 2.0}, rope_freqs=[1.0] * 4)
    with pytest.raises(UnsupportedModel, match="does not go with the divisors"):
        read("phi3", rope_factors_short=[1.0] * 4)
    with pytest.raises(
        UnsupportedModel, match="expert_feed_forward_length 99 is not supported, only 24"
    ):
        read("qwen3moe", EXPERTS | {"expert_feed_forward_length": 99}, routed(0, 1, 2))
    with pytest.raises(UnsupportedModel, match="use_qk_norm"):
        read("cohere2", tensors={"blk.0.attn_q_norm.weight": (4, 8)})
    with pytest.raises(
        UnsupportedModel,
        match=r"tensor blk\.0\.attn_q_norm\.weight is not part of this architecture",
    ):
        read("mpt", tensors={"blk.0.attn_q_norm.weight": (32,)})
    for name in (
        "blk.0.ffn_gate.0.weight",
        "blk.1.attn_q.scale",
        "blk.2.attn_sinks.weight",
        "cls.weight",
    ):
        with pytest.raises(UnsupportedModel, match=f"tensor {name} is not part of any model"):
            read("llama", tensors={name: (32,)})


def test_keys_without_a_meaning_are_listed() -> None:
    found = read("llama", {"pooling_type": 1, "attn_logit_softcapping": 30.0, "vocab_size": 101})
    assert found.unread == ("llama.attn_logit_softcapping", "llama.pooling_type")


KEYS = [
    *SIZES,
    RMS,
    LAYER,
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
def test_odd_values_are_refused_or_mean_something(arch: str, changes: dict[str, Any]) -> None:
    try:
        read(arch, changes)
    except UnsupportedModel as error:
        assert str(error).startswith("GGUF file: ")
