"""config.json, read by name and by type. A value of the wrong kind or outside a known set is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from bloomery.errors import UnsupportedModel
from bloomery.spec import Activation

T = TypeVar("T")
REQUIRED: Any = object()
NOTHING: Mapping[str, Any] = MappingProxyType({})

# What transformers writes into every config and what has no bearing on inference.
BEARINGLESS = """
    architectures model_type torch_dtype dtype transformers_version _name_or_path auto_map use_cache prefix verbose
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id tokenizer_class
    tokenizer_name initializer_range init_std init_device init_config gradient_checkpointing pretraining_tp
    attention_dropout hidden_dropout resid_pdrop embd_pdrop emb_pdrop attn_pdrop dropout layerdrop classifier_dropout
    activation_dropout embedding_dropout residual_dropout embedding_fraction router_jitter_noise router_aux_loss_coef
    output_router_logits output_attentions output_hidden_states return_dict id2label label2id problem_type
    task_specific_params summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    chunk_size_feed_forward is_encoder_decoder is_decoder tie_encoder_decoder cross_attention_hidden_size
    quantization_config cache_implementation attn_impl slow_but_exact attention_softmax_in_fp32
    scale_attention_softmax_in_fp32 reorder_and_upcast_attn masked_softmax_fusion bias_dropout_fusion skip_bias_add
    skip_bias_add_qkv n_ctx vision_config boi_token_index eoi_token_index image_token_index mm_tokens_per_image
"""
BENIGN = frozenset(BEARINGLESS.split())

# Older families' words for the same thing. Two of them in one file must agree.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "num_experts": ("num_local_experts",),
    "rope_theta": ("rotary_emb_base",),
    "partial_rotary_factor": ("rotary_pct",),
    "rope_type": ("type",),
    "sliding_window_pattern": ("_sliding_window_pattern",),
}

# The sizes that most families have defaults for, in short.
SIZES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "mlp": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "context": "max_position_embeddings",
    "tied": "tie_word_embeddings",
}

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def defaults(**said: Any) -> dict[str, Any]:
    """What keys that config.json leaves out mean: sizes in short, the rest by their own names."""
    return {SIZES.get(name, name): value for name, value in said.items()}


class Reader:
    """One object of config.json; `path` says where it stands, for messages.

    `defaults` are what the family's absent keys mean. A null is not absent: it takes the default of the call.
    """

    def __init__(
        self, values: Mapping[str, Any], path: str = "", defaults: Mapping[str, Any] = NOTHING
    ):
        self.values = values
        self.path = path
        self.defaults = defaults
        self.read: set[str] = set()
        self.inner: dict[str, Reader] = {}

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value; `default` for a null, and for what neither the file nor the family states."""
        words = (name, *SYNONYMS.get(name, ()))
        self.read.update(words)
        stated = [word for word in words if self.values.get(word) is not None]
        if any(self.values[word] != self.values[stated[0]] for word in stated):
            raise self.wrong(" and ".join(stated), "contradict each other")
        if stated:
            return self.values[stated[0]]
        value = None if any(word in self.values for word in words) else self.defaults.get(name)
        return default if value is None else value

    def wrong(self, name: str, why: str) -> UnsupportedModel:
        """The error for that key, to be raised."""
        return UnsupportedModel(f"config.json: {self.path}{name} {why}")

    def number(self, name: str, default: Any = REQUIRED) -> float:
        value = self._typed(name, default, (int, float), "a number")
        if not abs(value) < 1e30:
            raise self.wrong(name, f"is {value}, which no model has")
        return float(value)

    def whole(self, name: str, default: Any = REQUIRED) -> int:
        value = self._typed(name, default, int, "a whole number")
        if not 0 <= value < 2**40:
            raise self.wrong(name, f"is {value}, which no model has")
        return int(value)

    def size(self, name: str, default: Any = REQUIRED) -> int:
        """A whole number that counts something there must be at least one of."""
        value = self.whole(name, default)
        if value == 0:
            raise self.wrong(name, "is 0, which no model has")
        return value

    def head_dim(self) -> int:
        """Width of a head: as stated, or the hidden size shared out among the heads."""
        hidden = self.size("hidden_size")
        heads = self.size("num_attention_heads")
        if self.get("head_dim") is None and hidden % heads:
            raise self.wrong("hidden_size", f"{hidden} does not divide into {heads} heads")
        return self.size("head_dim", hidden // heads)

    def layers(self) -> range:
        """The numbers of the layers; bounded, because a tuple of specs is built from them."""
        count = self.size("num_hidden_layers")
        if count > 10_000:
            raise self.wrong("num_hidden_layers", f"is {count}, which no model has")
        return range(count)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def items(self, name: str, kind: type[T], default: Sequence[T] = ()) -> tuple[T, ...]:
        values = self.get(name, default)
        wanted = (int, float) if kind is float else kind
        if not isinstance(values, (list, tuple)) or not all(
            isinstance(value, wanted) for value in values
        ):
            raise self.wrong(name, f"must be a list of {kind.__name__}, not {values!r}")
        return tuple(values)

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        return bool(self._typed(name, default, bool, "true or false"))

    def text(self, name: str, default: Any = REQUIRED) -> str:
        return str(self._typed(name, default, str, "a string"))

    def choice(self, name: str, known: Mapping[str, T], default: Any = REQUIRED) -> T:
        value = self.text(name, default)
        if value not in known:
            raise self.wrong(name, f"{value!r} is not known. Known: {', '.join(known)}")
        return known[value]

    def activation(self, name: str, default: Any = REQUIRED) -> Activation:
        return self.choice(name, ACTIVATIONS, default)

    def must(self, name: str, wanted: Any) -> None:
        """Refuse a switch we do not implement when it is thrown."""
        value = self.get(name, wanted)
        if value != wanted:
            raise self.wrong(name, f"{value!r} is not supported, only {wanted!r}")

    def under(self, name: str, defaults: Mapping[str, Any] = NOTHING) -> Reader:
        """The object of that name; an absent one reads as empty."""
        value = self.get(name, NOTHING)
        if not isinstance(value, Mapping):
            raise self.wrong(name, f"must be an object, not {value!r}")
        return self.inner.setdefault(name, Reader(value, f"{self.path}{name}.", defaults))

    def unread(self) -> tuple[str, ...]:
        own = (self.path + name for name in self.values if name not in self.read | BENIGN)
        return tuple(
            sorted({*own, *(name for reader in self.inner.values() for name in reader.unread())})
        )

    def _typed(self, name: str, default: Any, kind: Any, words: str) -> Any:
        value = self.get(name, default)
        if value is REQUIRED:
            raise self.wrong(name, "is missing")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(name, f"must be {words}, not {value!r}")
        return value
