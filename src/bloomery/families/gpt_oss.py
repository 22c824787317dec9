"""gpt-oss: attention sinks, a window in every other layer, and experts with a clamped SwiGLU.

The experts are stored stacked: in bfloat16 as [expert, in, out], in MXFP4 as blocks of rows.
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.llama import NAMES
from bloomery.families.moe import name_stacked_experts
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.window import read_layer_windows
from bloomery.spec import MlpSpec, ModelSpec, MoeSpec, RouterSpec, SwigluClamp

GPT_OSS_NAMES = name_stacked_experts(
    NAMES, "mlp.experts", interleaved=True, router="mlp.router", sinks="self_attn.sinks"
)
GPT_OSS = (
    defaults(vocab=201088, hidden=2880, mlp=2880, layers=36, heads=64, kv_heads=8, context=131072)
    | defaults(head_dim=64, attention_bias=True, sliding_window=128, rms_norm_eps=1e-5)
    | defaults(num_experts=128, num_experts_per_tok=4, hidden_act="silu", rope_theta=150000.0)
    | defaults(
        rope_parameters={
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        }
    )
)


def read_gpt_oss(config: ConfigReader) -> ModelSpec:
    config.require("hidden_act", "silu")
    config.get("initial_context_length")  # repeats the original context of the rope
    clamp = SwigluClamp(
        limit=config.number("swiglu_limit", 7.0),
        alpha=config.number("swiglu_alpha", 1.702),
        up_offset=1.0,
    )
    experts = MoeSpec(
        num_experts=config.size("num_experts"),
        top_k=config.size("num_experts_per_tok"),
        mlp=MlpSpec(config.size("intermediate_size"), bias=True, clamp=clamp),
        router=RouterSpec(score_chosen_only=True, bias=True),
    )
    windows = read_layer_windows(config, lambda i: i % 2 == 0)
    layers = [
        replace(read_layer(config, window=window, sinks=True), mlp=experts) for window in windows
    ]
    return read_model(config, layers)


FAMILIES = {"gpt_oss": ModelFamily(read_gpt_oss, GPT_OSS_NAMES, GPT_OSS)}
