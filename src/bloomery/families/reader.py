"""Typed access to config.json. A value of the wrong type or of an unknown kind is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from bloomery.errors import UnsupportedModel
from bloomery.spec import ActivationName

T = TypeVar("T")
REQUIRED: Any = object()  # the default of a key that must be present
EMPTY: Mapping[str, Any] = MappingProxyType({})

# Keys that transformers writes into every config and that do not affect inference.
IGNORED_KEYS = """
    architectures model_type torch_dtype dtype transformers_version _name_or_path auto_map
    use_cache prefix verbose bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id
    decoder_start_token_id tokenizer_class tokenizer_name initializer_range init_std init_device
    init_config gradient_checkpointing pretraining_tp attention_dropout hidden_dropout resid_pdrop
    embd_pdrop emb_pdrop attn_pdrop dropout layerdrop classifier_dropout activation_dropout
    embedding_dropout residual_dropout embedding_fraction router_jitter_noise input_jitter_noise
    router_aux_loss_coef num_nextn_predict_layers mtp_layer_types mtp_mlp_layer_types
    output_router_logits output_attentions output_hidden_states return_dict id2label label2id
    problem_type task_specific_params summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout chunk_size_feed_forward is_encoder_decoder
    is_decoder tie_encoder_decoder cross_attention_hidden_size quantization_config
    cache_implementation attn_impl slow_but_exact attention_softmax_in_fp32
    scale_attention_softmax_in_fp32 reorder_and_upcast_attn masked_softmax_fusion
    bias_dropout_fusion skip_bias_add skip_bias_add_qkv n_ctx vision_config boi_token_index
    eoi_token_index image_token_index mm_tokens_per_image image_token_id video_token_id
    vision_start_token_id vision_end_token_id vision_token_id spatial_merge_size
    multimodal_projector_bias projector_hidden_act vision_feature_layer mrope_section
    mrope_interleaved mtp_num_hidden_layers mtp_use_dedicated_embeddings mtp_layers_block_type
    mtp_hybrid_override_pattern mamba_ssm_dtype mamba_ssm_cache_dtype mamba_chunk_size chunk_size
    expand use_mamba_kernels use_mambapy use_associative_scan use_mem_eff_path num_logits_to_keep
    moe_shared_expert_overlap rescale_prenorm_residual residual_in_fp32 z_loss_coefficient
    time_step_min time_step_max time_step_floor linear_a_log_min linear_a_log_max linear_dt_min
    linear_dt_max linear_dt_init_floor mamba_expand mamba_proj_bias attention_hidden_size
    hybrid_layer_ids kv_channels num_query_groups
"""
IGNORED = frozenset(IGNORED_KEYS.split())

# Names of older families for the same value. Two of them in one file must agree.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_k", "experts_per_token"),
    "moe_intermediate_size": ("expert_hidden_dim",),
    "num_shared_experts": ("n_shared_experts", "moe_num_shared_experts"),
    "rope_theta": ("rotary_emb_base",),
    "partial_rotary_factor": ("rotary_pct",),
    "rope_type": ("type",),
    "mamba_n_heads": ("mamba_num_heads", "n_mamba_heads"),
    "mamba_d_head": ("mamba_head_dim", "mamba_headdim"),
    "mamba_d_state": ("ssm_state_size",),
    "mamba_n_groups": ("n_groups", "mamba_ngroups"),
    "mamba_d_conv": ("conv_kernel",),
    "mamba_conv_bias": ("use_conv_bias",),
    "time_step_limit": ("mamba_dt_limit",),
    "sliding_window_pattern": ("_sliding_window_pattern",),
}

# Short names of keys, for `defaults`.
SHORT_NAMES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "mlp": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "context": "max_position_embeddings",
    "tied": "tie_word_embeddings",
}

ACTIVATIONS: Mapping[str, ActivationName] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}


def defaults(**values: Any) -> dict[str, Any]:
    """Return defaults for keys that config.json leaves out; see SHORT_NAMES."""
    return {SHORT_NAMES.get(name, name): value for name, value in values.items()}


class ConfigReader:
    """One object of config.json; `path` is its place in the file, for error messages.

    `defaults` are the family's values of absent keys. A key with the value null takes the default
    of the call instead. The reader records which keys were read, so that the others can be logged.
    """

    def __init__(
        self, values: Mapping[str, Any], path: str = "", defaults: Mapping[str, Any] = EMPTY
    ):
        self.values = values
        self.path = path
        self.defaults = defaults
        self.names_read: set[str] = set()
        self.sections: dict[str, ConfigReader] = {}

    def get(self, name: str, default: Any = None) -> Any:
        """Return the raw value, or `default` for a null and for a key without any value."""
        keys = (name, *SYNONYMS.get(name, ()))
        self.names_read.update(keys)
        stated = [key for key in keys if self.values.get(key) is not None]
        if stated:
            value = self.values[stated[0]]
            if any(self.values[key] != value for key in stated):
                raise self.error(" and ".join(stated), "contradict each other")
            return value
        is_null = any(key in self.values for key in keys)
        family_default = None if is_null else self.defaults.get(name)
        return default if family_default is None else family_default

    def error(self, name: str, reason: str) -> UnsupportedModel:
        """Return the error for that key, as the file spells it, to be raised."""
        keys = (name, *SYNONYMS.get(name, ()))
        stated = next((key for key in keys if self.values.get(key) is not None), name)
        return UnsupportedModel(f"config.json: {self.path}{stated} {reason}")

    def number(self, name: str, default: Any = REQUIRED) -> float:
        value = self._get_typed(name, default, (int, float), "a number")
        if not abs(value) < 1e30:
            raise self.error(name, f"is {value}, which no model has")
        return float(value)

    def integer(self, name: str, default: Any = REQUIRED) -> int:
        value = self._get_typed(name, default, int, "a whole number")
        if not 0 <= value < 2**40:
            raise self.error(name, f"is {value}, which no model has")
        return int(value)

    def size(self, name: str, default: Any = REQUIRED) -> int:
        """Return a whole number of at least 1."""
        value = self.integer(name, default)
        if value == 0:
            raise self.error(name, "is 0, which no model has")
        return value

    def head_dim(self) -> int:
        """Return the head dimension: as stated, or hidden_size / num_attention_heads."""
        hidden = self.size("hidden_size")
        heads = self.size("num_attention_heads")
        if self.get("head_dim") is None and hidden % heads:
            raise self.error("hidden_size", f"{hidden} does not divide into {heads} heads")
        return self.size("head_dim", hidden // heads)

    def layers(self) -> range:
        """Return the layer indices; bounded, because a tuple of specs is built from them."""
        count = self.size("num_hidden_layers")
        if count > 10_000:
            raise self.error("num_hidden_layers", f"is {count}, which no model has")
        return range(count)

    def optional_number(self, name: str) -> float | None:
        if self.get(name) is None:
            return None
        return self.number(name)

    def list_of(self, name: str, kind: type[T], default: Sequence[T] = ()) -> tuple[T, ...]:
        values = self.get(name, default)
        accepted = (int, float) if kind is float else kind
        is_list = isinstance(values, (list, tuple))
        if not is_list or not all(isinstance(value, accepted) for value in values):
            raise self.error(name, f"must be a list of {kind.__name__}, not {values!r}")
        return tuple(values)

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        return bool(self._get_typed(name, default, bool, "true or false"))

    def text(self, name: str, default: Any = REQUIRED) -> str:
        return str(self._get_typed(name, default, str, "a string"))

    def choice(self, name: str, known: Mapping[str, T], default: Any = REQUIRED) -> T:
        """Return what `known` has for the value of that key."""
        return self.look_up(name, known, self.text(name, default))

    def look_up(self, name: str, known: Mapping[str, T], value: str) -> T:
        """Return what `known` has for a value that was read from that key."""
        if value not in known:
            raise self.error(name, f"{value!r} is not known. Known: {', '.join(known)}")
        return known[value]

    def check_layer_count(self, name: str, values: Sequence[Any]) -> None:
        """Refuse the list of that key if it does not have a value for each layer."""
        num_layers = len(self.layers())
        if len(values) != num_layers:
            raise self.error(name, f"names {len(values)} layers of {num_layers}")

    def layer_choices(
        self, name: str, known: Mapping[str, T], default: Callable[[int], T]
    ) -> tuple[T, ...]:
        """Return what `known` has for each layer's value, `default(i)` if the key is absent."""
        values = tuple(self.look_up(name, known, value) for value in self.list_of(name, str))
        if not values:
            return tuple(default(i) for i in self.layers())
        self.check_layer_count(name, values)
        return values

    def layer_sizes(self, name: str, default: int) -> tuple[int, ...]:
        """Return the size of each layer: one number for all layers, or a list with one for each."""
        num_layers = len(self.layers())
        if not isinstance(self.get(name), list):
            return (self.size(name, default),) * num_layers
        sizes = self.list_of(name, int)
        if len(sizes) != num_layers or not all(0 < size < 2**40 for size in sizes):
            raise self.error(name, f"must be a size, or one for each of {num_layers} layers")
        return sizes

    def activation(self, name: str, default: Any = REQUIRED) -> ActivationName:
        return self.choice(name, ACTIVATIONS, default)

    def require(self, name: str, supported: Any) -> None:
        """Refuse every value but the one that Bloomery supports; an absent key is accepted."""
        value = self.get(name, supported)
        if value != supported:
            raise self.error(name, f"{value!r} is not supported, only {supported!r}")

    def section(self, name: str, defaults: Mapping[str, Any] = EMPTY) -> ConfigReader:
        """Return the object of that name; an absent one reads as empty."""
        value = self.get(name, EMPTY)
        if not isinstance(value, Mapping):
            raise self.error(name, f"must be an object, not {value!r}")
        return self.sections.setdefault(name, ConfigReader(value, f"{self.path}{name}.", defaults))

    def unread(self) -> tuple[str, ...]:
        """Return the keys that were not read, here and in all sections."""
        unread = {self.path + name for name in self.values if name not in self.names_read | IGNORED}
        for section in self.sections.values():
            unread.update(section.unread())
        return tuple(sorted(unread))

    def _get_typed(self, name: str, default: Any, kind: Any, expected: str) -> Any:
        value = self.get(name, default)
        if value is REQUIRED:
            raise self.error(name, "is missing")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(name, f"must be {expected}, not {value!r}")
        return value
