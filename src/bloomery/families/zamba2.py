"""Zamba2: Mamba-2 in every layer. In some layers a transformer block comes before it, which reads
the embeddings too. One or two of these blocks take turns; each use has low-rank parts of its own.
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_attention, read_model
from bloomery.families.layer_blocks import name_shared_blocks
from bloomery.families.llama import NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.recurrent import mamba_names, read_mamba2
from bloomery.families.rope import read_rope
from bloomery.spec import (
    FusedTensor,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    SharedBlockSpec,
    SplitTensors,
    TensorNames,
)

BLOCK = "shared_transformer."
QKV = tuple(f"{BLOCK}self_attn.{name}_proj" for name in "qkv")
GATE_UP = f"{BLOCK}feed_forward.gate_up_proj"
# The lists of the low-rank parts of all uses.
LOW_RANK = {name: f"{BLOCK}self_attn.linear_{name[-6]}_adapter_list" for name in QKV} | {
    GATE_UP: f"{GATE_UP}_adapter_list"
}
ZAMBA2_NAMES = mamba_names(
    replace(
        NAMES,
        attn_qkv=SplitTensors(QKV),
        attn_out=f"{BLOCK}self_attn.o_proj",
        mlp_up=FusedTensor(GATE_UP),
        mlp_down=f"{BLOCK}feed_forward.down_proj",
        extra={
            "attn_norm": "input_layernorm",
            "mlp_norm": f"{BLOCK}pre_ff_layernorm",
            "shared_block_norm": f"{BLOCK}input_layernorm",
            "shared_block_out": "linear",
        },
        final_norm="model.final_layernorm",
    )
)
HAS_BLOCK = {"hybrid": True, "mamba": False, "linear_attention": False}
DEFAULT_USES = (*range(6, 43, 6), 47, 51)
ZAMBA2 = (
    defaults(vocab=32000, hidden=2560, layers=54, heads=32, context=4096, hidden_act="gelu")
    | defaults(rms_norm_eps=1e-5, tied=True, mamba_n_heads=8, mamba_n_groups=1, mamba_d_state=64)
    | defaults(mamba_d_conv=4, mamba_expand=2, num_mem_blocks=1, adapter_rank=128)
)


def read_uses(config: ConfigReader) -> list[int]:
    """Return the layers with a block."""
    has_block = config.layer_choices("layers_block_type", HAS_BLOCK, lambda i: i in DEFAULT_USES)
    return [i for i in config.layers() if has_block[i]]


def read_names(config: ConfigReader) -> TensorNames:
    """Say where layers with a block have their tensors.

    Where the embeddings are not tied, each layer may have a copy of its block.
    """
    uses = read_uses(config)
    own_copies = not config.flag("tie_word_embeddings")
    aliases = name_shared_blocks(uses, config.size("num_mem_blocks"), BLOCK, LOW_RANK, own_copies)
    for i in uses:
        layer = f"model.layers.{i}."
        for name in ("mamba.", "input_layernorm."):
            aliases[layer + name] = (f"{layer}mamba_decoder.{name}",)
    return replace(ZAMBA2_NAMES, aliases=aliases)


def read_zamba2(config: ConfigReader) -> ModelSpec:
    config.require("use_long_context", False)
    config.require("use_shared_mlp_adapter", True)
    hidden = config.size("hidden_size")
    rank = config.size("adapter_rank")
    bias = config.flag("add_bias_linear", False)
    head_dim = 2 * hidden // config.size("num_attention_heads")
    config.require("attention_head_dim", head_dim)
    rope = read_rope(config, head_dim)
    attention = read_attention(
        config,
        head_dim=head_dim,
        position=rope if config.flag("use_mem_rope", False) else None,
        scale=(head_dim / 2) ** -0.5,
        low_rank=rank if config.flag("use_shared_attention_adapter", False) else 0,
    )
    mlp = MlpSpec(
        config.size("intermediate_size", 4 * hidden),
        config.activation("hidden_act"),
        bias=bias,
        low_rank=rank,
    )
    norm = NormSpec("rms", config.number("rms_norm_eps"))
    mixer = read_mamba2(
        config, conv_bias=True, in_bias=bias, out_bias=bias, norm=NormSpec("rms", 1e-5)
    )
    plain = LayerSpec(None, None, attn_norm=norm, recurrent=mixer)
    behind_block = replace(plain, attention=attention, mlp=mlp, mlp_norm=norm)
    layers = [plain] * len(config.layers())
    num_blocks = config.size("num_mem_blocks")
    for use, i in enumerate(read_uses(config)):
        index = use % num_blocks if config.flag("tie_word_embeddings") else use
        layers[i] = replace(behind_block, shared_block=SharedBlockSpec(index, norm))
    return read_model(config, layers)


FAMILIES = {"zamba2": ModelFamily(read_zamba2, read_names, ZAMBA2)}
