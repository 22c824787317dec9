"""SamplingParams: the options of one generation, and the engine requests built from them.

Every value is checked here once, with messages in the user's words. All other code trusts a
ResolvedSampling. Servers narrow the ranges further. This file must not know HTTP, tokenizers or
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Never, get_args

from bloomery.errors import InvalidRequest, PromptTooLong
from bloomery.messages import EngineRequest, PoolingType, ResolvedSampling

SMALLEST_POSITIVE = 5e-324  # the smallest float64 above 0
LARGEST_FLOAT32 = 3.4e38
LARGEST_INT32 = 2**31 - 1
# What the sampler's tables hold for one request (kernels/sampling_rows.py).
MAX_LOGPROBS = 128
MAX_BAD_WORDS = 512  # of several tokens
MAX_BAD_WORD_TOKENS = 4096  # of all these together
MAX_BAD_WORD_LENGTH = 64  # tokens

# (field, minimum, maximum, what the field must be)
FLOAT_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("temperature", 0.0, LARGEST_FLOAT32, "a finite number, at least 0 (0 is greedy)"),
    ("top_p", SMALLEST_POSITIVE, 1.0, "above 0 and at most 1 (1 turns it off)"),
    ("min_p", 0.0, 1.0, "from 0 to 1 (0 turns it off)"),
    ("typical_p", SMALLEST_POSITIVE, 1.0, "above 0 and at most 1 (1 turns it off)"),
    ("repetition_penalty", 0.01, 100.0, "from 0.01 to 100 (1 turns it off)"),
    ("frequency_penalty", -2.0, 2.0, "from -2 to 2 (0 turns it off)"),
    ("presence_penalty", -2.0, 2.0, "from -2 to 2 (0 turns it off)"),
    (
        "watermark_gamma",
        SMALLEST_POSITIVE,
        1.0,
        "above 0 and at most 1: the share of the vocabulary that is favoured",
    ),
    ("watermark_delta", -100.0, 100.0, "from -100 to 100: what is added to the favoured logits"),
)
INT_RANGES: tuple[tuple[str, int, int, str], ...] = (
    ("n", 1, 16384, "a whole number from 1 to 16384"),
    ("best_of", 1, 16384, "a whole number from n to 16384, or None"),
    ("top_k", -1, LARGEST_INT32, "a whole number, at least 1, or 0 or -1 to turn it off"),
    ("seed", 0, 2**64 - 1, "a whole number from 0 to 2**64 - 1, or None for a random one"),
    ("min_tokens", 0, LARGEST_INT32, "a whole number, at least 0"),
    (
        "max_tokens",
        1,
        LARGEST_INT32,
        "a whole number, at least 1, or None for all the room that the prompt leaves",
    ),
    (
        "logprobs",
        0,
        LARGEST_INT32,
        "a whole number, at least 0, or None for no log-probabilities",
    ),
    (
        "prompt_logprobs",
        0,
        LARGEST_INT32,
        "a whole number, at least 0, or None for no log-probabilities",
    ),
    (
        "truncate_prompt_tokens",
        1,
        LARGEST_INT32,
        "a whole number, at least 1, or None to keep the whole prompt",
    ),
    ("priority", -100, 100, "a whole number from -100 to 100; lower is earlier"),
    (
        "deadline_ms",
        1,
        LARGEST_INT32,
        "a whole number of milliseconds, at least 1, or None for no deadline",
    ),
)
BOOL_FIELDS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "watermark",
    "detokenize",
    "skip_special_tokens",
)
OPTIONAL_FIELDS = {
    "best_of",
    "seed",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "deadline_ms",
}


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What an answer must match, under the names known from vLLM. Exactly one of six is set."""

    json: str | Mapping[str, Any] | bool | None = None  # a JSON schema, as text or as an object
    json_object: bool = False  # any JSON object
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # Lark or GBNF
    structural_tag: str | Mapping[str, Any] | None = None
    strict: bool = True  # False: keywords that cannot be enforced are relaxed, with a warning
    disable_any_whitespace: bool = False  # in JSON: no line breaks and no indentation
    whitespace_pattern: str | None = None  # in JSON: what may stand between tokens

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "structural_tag")
        given = [name for name in kinds if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            given_names = " and ".join(given) or "none"
            message = f"structured_outputs needs exactly one of {', '.join(kinds)} and json_object"
            raise InvalidRequest(f"{message}; given: {given_names}", field="structured_outputs")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                _raise_invalid(name, getattr(self, name), "a string")
        if not isinstance(self.choice, list | tuple | None):
            _raise_invalid("choice", self.choice, "a list of strings")
        if not isinstance(self.json, str | Mapping | bool | None):
            _raise_invalid("json", self.json, "a JSON schema")
        if not isinstance(self.structural_tag, str | Mapping | None):
            _raise_invalid("structural_tag", self.structural_tag, "an object or JSON text")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one generation, under the names known from vLLM and OpenAI."""

    n: int = 1
    best_of: int | None = None  # generate this many and return the n best by cumulative logprob
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # over prompt and output
    frequency_penalty: float = 0.0  # over output
    presence_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0  # until then no end of sequence, stop id or stop string
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None  # top tokens to report, before any logits processor
    prompt_logprobs: int | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    watermark: bool = False
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    truncate_prompt_tokens: int | None = None  # keep this many tokens of the prompt's end
    detokenize: bool = True
    skip_special_tokens: bool = True
    priority: int = 0  # lower runs earlier; a difference of 1 equals 10 s of waiting
    deadline_ms: int | None = None  # after arrival, when the request ends, even if still queued
    structured_outputs: StructuredOutputs | None = None  # what the answer must match

    def __post_init__(self) -> None:
        for name, minimum, maximum, rule in FLOAT_RANGES:
            value = getattr(self, name)
            if not _is_number(value) or not minimum <= value <= maximum:
                _raise_invalid(name, value, rule)
        for name, lowest, highest, rule in INT_RANGES:
            value = getattr(self, name)
            if value is None and name in OPTIONAL_FIELDS:
                continue
            if not _is_int(value) or not lowest <= value <= highest:
                _raise_invalid(name, value, rule)
        for name in BOOL_FIELDS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                _raise_invalid(name, value, "True or False")
        self._check_stop_and_bad_words()
        self._check_token_ids()
        self._check_logit_bias()
        self._check_combinations()
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            rule = "a StructuredOutputs or None"
            _raise_invalid("structured_outputs", self.structured_outputs, rule)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(self.stop or ())

    @property
    def num_sequences(self) -> int:
        """How many sequences are generated for one prompt."""
        return self.best_of or self.n

    def _check_stop_and_bad_words(self) -> None:
        is_valid_type = isinstance(self.stop, str | list | tuple | None)
        if not is_valid_type or not all(map(_is_nonempty_text, self.stop_strings)):
            rule = "a string or a list of strings, none of them empty"
            _raise_invalid("stop", self.stop, rule)
        is_valid_type = isinstance(self.bad_words, list | tuple | None)
        if not is_valid_type or not all(map(_is_nonempty_text, self.bad_words or ())):
            _raise_invalid("bad_words", self.bad_words, "a list of strings, none of them empty")

    def _check_token_ids(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            is_valid_type = isinstance(value, list | tuple | None)
            if not is_valid_type or not all(map(_is_int, value or ())):
                _raise_invalid(name, value, "a list of token ids (int), or None")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            rule = "None (all tokens) or a list with at least one token id"
            _raise_invalid("allowed_token_ids", self.allowed_token_ids, rule)

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping | None):
            rule = "a mapping of token ids to numbers, or None"
            _raise_invalid("logit_bias", self.logit_bias, rule)
        for token_id, bias in (self.logit_bias or {}).items():
            if not _is_int(token_id):
                _raise_invalid("logit_bias", token_id, "keyed by token ids (int)")
            if not _is_number(bias) or not -100 <= bias <= 100:
                rule = "from -100 to 100 for every token"
                _raise_invalid("logit_bias", bias, rule, f" for token {_short_repr(token_id)}")

    def _check_combinations(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            rule = f"at least n, which is {self.n}"
            _raise_invalid("best_of", self.best_of, rule, ": raise best_of or lower n")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            rule = f"at most max_tokens, which is {self.max_tokens}"
            advice = ": lower min_tokens or raise max_tokens"
            _raise_invalid("min_tokens", self.min_tokens, rule, advice)
        if self.stop_strings and not self.detokenize:
            advice = "use stop_token_ids or leave detokenize on"
            raise InvalidRequest(f"stop strings are looked for in text: {advice}", field="stop")


def build_requests(
    params: SamplingParams,
    prompt: Sequence[int],
    *,
    id: str,
    entropy: int,
    vocab_size: int,
    max_model_len: int,
    eos_ids: Sequence[int] = (),
    encode: Callable[[str], Sequence[int]] | None = None,
    cache_salt: str = "",
    tenant: str = "",
    grammar: str = "",
    system_length: int = 0,
    lora: str = "",
    lora_path: str = "",
) -> tuple[EngineRequest, ...]:
    """The `params.num_sequences` engine requests of one prompt.

    A single request has the id `id`; several have `id-0`, `id-1` and so on. `entropy` is a random
    64-bit number, used where no seed is given. `encode` turns text into ids without special tokens;
    only bad_words need it. Only the first request asks for log-probabilities of the prompt.
    `grammar` is the compiled grammar of the answer, "" if it is free. `system_length` counts the
    tokens of the prompt up to the end of its system message, if that is known. `lora` and
    `lora_path` are the LoRA adapter, "" for the base model.
    """
    prompt_ids = _fit_prompt(params, prompt, vocab_size, max_model_len)
    end_ids = () if params.ignore_eos else eos_ids
    stop_ids = tuple(dict.fromkeys((*end_ids, *(params.stop_token_ids or ()))))
    _check_ids_in_vocab("stop_token_ids", params.stop_token_ids or (), vocab_size)
    _check_ids_in_vocab("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_ids_in_vocab("logit_bias", tuple(params.logit_bias or ()), vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > vocab_size:
            _raise_invalid(name, count, f"at most the size of the vocabulary, {vocab_size}")
        if count is not None and count > MAX_LOGPROBS:
            _raise_invalid(name, count, f"at most {MAX_LOGPROBS}")
    bad_word_ids = _encode_bad_words(params, encode, vocab_size)
    sampling = _resolve_sampling(params, bad_word_ids, vocab_size)
    _check_choice_remains(sampling, stop_ids)
    max_tokens = max_model_len - len(prompt_ids)
    if params.max_tokens is not None:
        max_tokens = min(params.max_tokens, max_tokens)
    seed = entropy if params.seed is None else params.seed
    deadline = None if params.deadline_ms is None else params.deadline_ms / 1000
    requests = []
    for index in range(params.num_sequences):
        sequence_sampling = replace(
            sampling,
            seed=sequence_seed(seed, index),
            prompt_logprobs=params.prompt_logprobs if index == 0 else None,
        )
        request = EngineRequest(
            id=f"{id}-{index}" if params.num_sequences > 1 else id,
            prompt=prompt_ids,
            sampling=sequence_sampling,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            cache_salt=cache_salt,
            # A prompt that is too long loses its beginning.
            system_length=system_length if len(prompt_ids) == len(prompt) else 0,
            priority=params.priority,
            deadline=deadline,
            tenant=tenant,
            grammar=grammar,
            lora=lora,
            lora_path=lora_path,
        )
        requests.append(request)
    return tuple(requests)


def build_embedding_request(
    prompt: Sequence[int],
    pooling: PoolingType,
    *,
    id: str,
    vocab_size: int,
    max_model_len: int,
    cache_salt: str = "",
    tenant: str = "",
    lora: str = "",
    lora_path: str = "",
) -> EngineRequest:
    """The engine request for the embedding of one prompt, which may fill the whole context."""
    if pooling not in get_args(PoolingType):
        _raise_invalid("pooling", pooling, " or ".join(get_args(PoolingType)))
    if not len(prompt):
        raise InvalidRequest("the input has no tokens: give at least one", field="input")
    if len(prompt) > max_model_len:
        room = f"the context holds {max_model_len}: shorten it"
        raise PromptTooLong(f"the input has {len(prompt)} tokens, but {room}", field="input")
    _check_ids_in_vocab("input", prompt, vocab_size)
    return EngineRequest(
        id,
        tuple(prompt),
        ResolvedSampling(temperature=0.0),
        0,
        cache_salt=cache_salt,
        tenant=tenant,
        pooling=pooling,
        lora=lora,
        lora_path=lora_path,
    )


def sequence_seed(seed: int, index: int) -> int:
    """Seed of one of several sequences.

    Sequence 0 has the seed itself. Sequence i has the splitmix64 output for the state
    seed + i * 0x9E3779B97F4A7C15.
    """
    if index == 0:
        return seed
    mask = 2**64 - 1
    x = (seed + index * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
    return x ^ x >> 31


def select_best(cumulative_logprobs: Sequence[float], n: int) -> list[int]:
    """Indices of the n best of the best_of sequences, the best first, the earliest among equals.

    The sum of log-probabilities decides, not the mean, so shorter answers are favoured, as in
    other servers.
    """
    indices = range(len(cumulative_logprobs))
    return sorted(indices, key=lambda index: -cumulative_logprobs[index])[:n]


def _fit_prompt(
    params: SamplingParams, prompt: Sequence[int], vocab_size: int, max_model_len: int
) -> tuple[int, ...]:
    """Truncate the prompt if `params` say so, and check that it leaves room for one token."""
    if not len(prompt):
        raise InvalidRequest("the prompt has no tokens: give at least one", field="prompt")
    if params.truncate_prompt_tokens is not None:
        prompt = prompt[-params.truncate_prompt_tokens :]
    prompt_ids = tuple(prompt)
    if len(prompt_ids) >= max_model_len:
        message = (
            f"the prompt has {len(prompt_ids)} tokens, but at most {max_model_len - 1} fit: "
            f"the context holds {max_model_len}, prompt and answer together. "
            f"Shorten the prompt, or set truncate_prompt_tokens to keep only its end"
        )
        raise PromptTooLong(message, field="prompt")
    _check_ids_in_vocab("prompt", prompt_ids, vocab_size)
    return prompt_ids


def _resolve_sampling(
    params: SamplingParams, bad_word_ids: tuple[tuple[int, ...], ...], vocab_size: int
) -> ResolvedSampling:
    watermark = None
    if params.watermark:
        watermark = (float(params.watermark_gamma), float(params.watermark_delta))
    logprobs = params.logprobs
    if logprobs is None and params.num_sequences > params.n:
        logprobs = 0  # best_of compares cumulative log-probabilities
    return ResolvedSampling(
        temperature=float(params.temperature),
        top_k=params.top_k if 0 < params.top_k < vocab_size else 0,
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        typical_p=float(params.typical_p),
        repetition_penalty=float(params.repetition_penalty),
        frequency_penalty=float(params.frequency_penalty),
        presence_penalty=float(params.presence_penalty),
        logit_bias=tuple((token, float(bias)) for token, bias in (params.logit_bias or {}).items()),
        allowed_token_ids=tuple(dict.fromkeys(params.allowed_token_ids or ())),
        bad_words=bad_word_ids,
        min_tokens=params.min_tokens,
        watermark=watermark,
        logprobs=logprobs,
    )


def _encode_bad_words(
    params: SamplingParams, encode: Callable[[str], Sequence[int]] | None, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Token ids of each bad word at the start of a text and after a space.

    A word with an id that the model does not have cannot be generated and is left out.
    """
    if not params.bad_words:
        return ()
    if encode is None:
        message = "bad_words are text and no tokenizer is loaded: leave them out"
        raise InvalidRequest(message, field="bad_words")
    encoded: dict[tuple[int, ...], None] = {}  # an ordered set
    for word in params.bad_words:
        for space in ("", " "):
            ids = tuple(encode(space + word.lstrip()))
            if ids and all(0 <= token_id < vocab_size for token_id in ids):
                encoded[ids] = None
    _check_bad_word_sizes(tuple(encoded))
    return tuple(encoded)


def _check_bad_word_sizes(encoded_words: tuple[tuple[int, ...], ...]) -> None:
    """Check that the tables of the sampler have room for the words."""
    long_words = [word for word in encoded_words if len(word) > 1]
    num_tokens = sum(map(len, long_words))
    message = ""
    if any(len(word) > MAX_BAD_WORD_LENGTH for word in long_words):
        message = f"each of bad_words may have at most {MAX_BAD_WORD_LENGTH} tokens: shorten them"
    elif len(long_words) > MAX_BAD_WORDS or num_tokens > MAX_BAD_WORD_TOKENS:
        message = (
            f"bad_words may be at most {MAX_BAD_WORDS} words of several tokens with "
            f"{MAX_BAD_WORD_TOKENS} tokens in all, counted with and without a space before each: "
            "leave some out"
        )
    if message:
        raise InvalidRequest(message, field="bad_words")


def _check_choice_remains(sampling: ResolvedSampling, stop_ids: tuple[int, ...]) -> None:
    """Check that at least one token is allowed at the first position."""
    excluded = {ids[0] for ids in sampling.bad_words if len(ids) == 1}
    if sampling.min_tokens:
        excluded.update(stop_ids)
    if sampling.allowed_token_ids and excluded.issuperset(sampling.allowed_token_ids):
        message = (
            "all allowed_token_ids are excluded, by bad_words or, with min_tokens, as stop ids: "
            "allow at least one more token"
        )
        raise InvalidRequest(message, field="allowed_token_ids")


def _check_ids_in_vocab(name: str, ids: Sequence[int], vocab_size: int) -> None:
    # These checks in C are fast for long prompts; the loop below finds the invalid id.
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return
    for index, token_id in enumerate(ids):
        if not _is_int(token_id) or not 0 <= token_id < vocab_size:
            rule = f"token ids are whole numbers (int) from 0 to {vocab_size - 1}"
            message = f"{name} holds {_short_repr(token_id)} at index {index}; {rule}"
            raise InvalidRequest(message, field=name)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_nonempty_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _raise_invalid(name: str, value: Any, rule: str, advice: str = "") -> Never:
    raise InvalidRequest(f"{name} must be {rule}, not {_short_repr(value)}{advice}", field=name)


def _short_repr(value: Any) -> str:
    """The repr of a client's value for an error message, at most 64 characters long."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 64 else f"{text[:61]}..."
