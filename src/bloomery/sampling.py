"""What a user may ask of a generation, under the names people know, and the requests that it becomes.

Every value is checked here once, in the user's words; beyond this file a Sampling is taken as true. Servers narrow
the ranges further (how many stop strings, how hot). This file must not know HTTP, tokenizers or tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Never, get_args

from bloomery.errors import InvalidRequest, PromptTooLong
from bloomery.messages import PoolingType, EngineRequest, ResolvedSampling

POSITIVE = 5e-324  # the least number above 0
LARGEST = 3.4e38  # what float32 holds
COUNT = 2**31 - 1

NUMBERS: tuple[tuple[str, float, float, str], ...] = (
    ("temperature", 0.0, LARGEST, "a finite number, at least 0 (0 is greedy)"),
    ("top_p", POSITIVE, 1.0, "above 0 and at most 1 (1 turns it off)"),
    ("min_p", 0.0, 1.0, "from 0 to 1 (0 turns it off)"),
    ("typical_p", POSITIVE, 1.0, "above 0 and at most 1 (1 turns it off)"),
    ("repetition_penalty", 0.01, 100.0, "from 0.01 to 100 (1 turns it off)"),
    ("frequency_penalty", -2.0, 2.0, "from -2 to 2 (0 turns it off)"),
    ("presence_penalty", -2.0, 2.0, "from -2 to 2 (0 turns it off)"),
    (
        "watermark_gamma",
        POSITIVE,
        1.0,
        "above 0 and at most 1: the share of the vocabulary that is favoured",
    ),
    ("watermark_delta", -100.0, 100.0, "from -100 to 100: what is added to the favoured logits"),
)
WHOLES: tuple[tuple[str, int, int, str], ...] = (
    ("n", 1, 16384, "a whole number from 1 to 16384"),
    ("best_of", 1, 16384, "a whole number from n to 16384, or None"),
    ("top_k", -1, COUNT, "a whole number, at least 1, or 0 or -1 to turn it off"),
    ("seed", 0, 2**64 - 1, "a whole number from 0 to 2**64 - 1, or None for a random one"),
    ("min_tokens", 0, COUNT, "a whole number, at least 0"),
    (
        "max_tokens",
        1,
        COUNT,
        "a whole number, at least 1, or None for all the room that the prompt leaves",
    ),
    ("logprobs", 0, COUNT, "a whole number, at least 0, or None for no log-probabilities"),
    ("prompt_logprobs", 0, COUNT, "a whole number, at least 0, or None for no log-probabilities"),
    (
        "truncate_prompt_tokens",
        1,
        COUNT,
        "a whole number, at least 1, or None to keep the whole prompt",
    ),
    ("priority", -100, 100, "a whole number from -100 to 100; lower is earlier"),
    (
        "deadline_ms",
        1,
        COUNT,
        "a whole number of milliseconds, at least 1, or None for no deadline",
    ),
)
FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "watermark",
    "detokenize",
    "skip_special_tokens",
)
OPTIONAL = {
    "best_of",
    "seed",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "deadline_ms",
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    n: int = 1
    best_of: int | None = (
        None  # generate so many and return the n with the highest cumulative log-probability
    )
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
    min_tokens: int = 0  # no end of sequence, stop id or stop string before so many tokens
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = (
        None  # of each token: its own and those of the n best, under the model itself
    )
    prompt_logprobs: int | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    watermark: bool = False
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    truncate_prompt_tokens: int | None = None  # keep only the last so many
    detokenize: bool = True
    skip_special_tokens: bool = True
    priority: int = 0  # lower is earlier: one less is worth ten seconds of waiting
    deadline_ms: int | None = None  # after so long it is ended where it is, be it in the queue

    def __post_init__(self) -> None:
        for name, least, most, words in NUMBERS:
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not least <= value <= most
            ):
                _refuse(name, value, words)
        for name, lowest, highest, words in WHOLES:
            value = getattr(self, name)
            if not (value is None and name in OPTIONAL) and not (
                _is_whole(value) and lowest <= value <= highest
            ):
                _refuse(name, value, words)
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "True or False")
        self._check_lists()
        self._check_together()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def children(self) -> int:
        """How many sequences one prompt becomes."""
        return self.best_of or self.n

    def _check_lists(self) -> None:
        if not isinstance(self.stop, str | list | tuple | None) or not all(
            map(_is_text, self.stop_strings)
        ):
            _refuse("stop", self.stop, "a string or a list of strings, none of them empty")
        if not isinstance(self.bad_words, list | tuple | None) or not all(
            map(_is_text, self.bad_words or ())
        ):
            _refuse("bad_words", self.bad_words, "a list of strings, none of them empty")
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple | None) or not all(map(_is_whole, value or ())):
                _refuse(name, value, "a list of token ids (int), or None")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _refuse(
                "allowed_token_ids",
                self.allowed_token_ids,
                "None (all tokens) or a list with at least one token id",
            )
        self._check_bias()

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping | None):
            _refuse("logit_bias", self.logit_bias, "a mapping of token ids to numbers, or None")
        for token, bias in (self.logit_bias or {}).items():
            if not _is_whole(token):
                _refuse("logit_bias", token, "keyed by token ids (int)")
            if (
                isinstance(bias, bool)
                or not isinstance(bias, int | float)
                or not -100 <= bias <= 100
            ):
                _refuse(
                    "logit_bias",
                    bias,
                    "from -100 to 100 for every token",
                    f" for token {_shown(token)}",
                )

    def _check_together(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            _refuse(
                "best_of",
                self.best_of,
                f"at least n, which is {self.n}",
                ": raise best_of or lower n",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            words = f"at most max_tokens, which is {self.max_tokens}"
            _refuse("min_tokens", self.min_tokens, words, ": lower min_tokens or raise max_tokens")
        if self.stop_strings and not self.detokenize:
            message = (
                "stop strings are looked for in text: use stop_token_ids or leave detokenize on"
            )
            raise InvalidRequest(message, field="stop")


def requests(
    params: SamplingParams,
    prompt: Sequence[int],
    *,
    id: str,
    entropy: int,
    vocab: int,
    max_length: int,
    eos_ids: Sequence[int] = (),
    encode: Callable[[str], Sequence[int]] | None = None,
    salt: str = "",
    tenant: str = "",
) -> tuple[EngineRequest, ...]:
    """One prompt as `params.children` requests, named `id`, or `id-0`, `id-1` ... if there are several.

    `entropy` is a random 64-bit number of the caller's, used where no seed is given. `encode` turns text into ids
    without special tokens; only bad_words need it. Log-probabilities of the prompt are asked of the first alone.
    """
    tokens = _fitted(params, prompt, vocab, max_length)
    stop_ids = tuple(
        dict.fromkeys((*(() if params.ignore_eos else eos_ids), *(params.stop_token_ids or ())))
    )
    _check_ids("stop_token_ids", params.stop_token_ids or (), vocab)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab)
    _check_ids("logit_bias", tuple(params.logit_bias or ()), vocab)
    for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if asked is not None and asked > vocab:
            _refuse(name, asked, f"at most the size of the vocabulary, {vocab}")
    sampling = _resolved(params, _words(params, encode, vocab), vocab)
    _check_choice(sampling, stop_ids)
    room = max_length - len(tokens)
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    seed = entropy if params.seed is None else params.seed
    several = params.children > 1
    return tuple(
        EngineRequest(
            id=f"{id}-{child}" if several else id,
            prompt=tokens,
            sampling=replace(
                sampling,
                seed=child_seed(seed, child),
                prompt_logprobs=params.prompt_logprobs if child == 0 else None,
            ),
            max_tokens=limit,
            stop_ids=stop_ids,
            salt=salt,
            priority=params.priority,
            deadline=None if params.deadline_ms is None else params.deadline_ms / 1000,
            tenant=tenant,
        )
        for child in range(params.children)
    )


def embedding_request(
    prompt: Sequence[int],
    pooling: PoolingType,
    *,
    id: str,
    vocab: int,
    max_length: int,
    salt: str = "",
    tenant: str = "",
) -> EngineRequest:
    """One prompt as a request for its embedding; unlike a prompt to be completed it may fill the context."""
    if pooling not in get_args(PoolingType):
        _refuse("pooling", pooling, " or ".join(get_args(PoolingType)))
    if not len(prompt):
        raise InvalidRequest("the input has no tokens: give at least one", field="input")
    if len(prompt) > max_length:
        message = (
            f"the input has {len(prompt)} tokens, but the context holds {max_length}: shorten it"
        )
        raise PromptTooLong(message, field="input")
    _check_ids("input", prompt, vocab)
    return EngineRequest(
        id,
        tuple(prompt),
        ResolvedSampling(temperature=0.0),
        0,
        salt=salt,
        tenant=tenant,
        pooling=pooling,
    )


def child_seed(seed: int, child: int) -> int:
    """Child 0 has the seed itself; child i the splitmix64 output for the state seed + i * 0x9E3779B97F4A7C15."""
    if child == 0:
        return seed
    mask = 2**64 - 1
    x = (seed + child * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
    return x ^ x >> 31


def choose(cumulative: Sequence[float], n: int) -> list[int]:
    """Which n of the best_of sequences to return, best first: by cumulative log-probability, earliest among equals.

    A sum, not a mean: shorter answers are favoured, as they are elsewhere.
    """
    return sorted(range(len(cumulative)), key=lambda child: -cumulative[child])[:n]


def _fitted(
    params: SamplingParams, prompt: Sequence[int], vocab: int, max_length: int
) -> tuple[int, ...]:
    if not len(prompt):
        raise InvalidRequest("the prompt has no tokens: give at least one", field="prompt")
    tokens = tuple(
        prompt
        if params.truncate_prompt_tokens is None
        else prompt[-params.truncate_prompt_tokens :]
    )
    if len(tokens) >= max_length:
        raise PromptTooLong(
            f"the prompt has {len(tokens)} tokens, but at most {max_length - 1} fit: the context holds {max_length}, "
            f"prompt and answer together. Shorten the prompt, or set truncate_prompt_tokens to keep only its end",
            field="prompt",
        )
    _check_ids("prompt", tokens, vocab)
    return tokens


def _resolved(
    params: SamplingParams, bad_words: tuple[tuple[int, ...], ...], vocab: int
) -> ResolvedSampling:
    ranked = params.children > params.n  # best_of compares cumulative log-probabilities
    return ResolvedSampling(
        temperature=float(params.temperature),
        top_k=params.top_k if 0 < params.top_k < vocab else 0,
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        typical_p=float(params.typical_p),
        repetition_penalty=float(params.repetition_penalty),
        frequency_penalty=float(params.frequency_penalty),
        presence_penalty=float(params.presence_penalty),
        logit_bias=tuple((token, float(bias)) for token, bias in (params.logit_bias or {}).items()),
        allowed_token_ids=tuple(dict.fromkeys(params.allowed_token_ids or ())),
        bad_words=bad_words,
        min_tokens=params.min_tokens,
        watermark=(float(params.watermark_gamma), float(params.watermark_delta))
        if params.watermark
        else None,
        logprobs=0 if params.logprobs is None and ranked else params.logprobs,
    )


def _words(
    params: SamplingParams, encode: Callable[[str], Sequence[int]] | None, vocab: int
) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands at the start of a text and after a space; ids the model does not have cannot appear."""
    if not params.bad_words:
        return ()
    if encode is None:
        raise InvalidRequest(
            "bad_words are text and no tokenizer is loaded: leave them out", field="bad_words"
        )
    spelled = [
        tuple(encode(space + word.lstrip())) for word in params.bad_words for space in ("", " ")
    ]
    return tuple(
        dict.fromkeys(
            word for word in spelled if word and all(0 <= token < vocab for token in word)
        )
    )


def _check_choice(sampling: ResolvedSampling, stop_ids: tuple[int, ...]) -> None:
    """Something must remain to choose from at the first token."""
    out = {word[0] for word in sampling.bad_words if len(word) == 1} | (
        set(stop_ids) if sampling.min_tokens else set()
    )
    if sampling.allowed_token_ids and out.issuperset(sampling.allowed_token_ids):
        message = "every one of allowed_token_ids is ruled out by bad_words or, with min_tokens, by being a stop id"
        raise InvalidRequest(f"{message}: allow at least one more token", field="allowed_token_ids")


def _check_ids(name: str, ids: Sequence[int], vocab: int) -> None:
    if (
        set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab
    ):  # long prompts one by one take their time
        return
    for index, token in enumerate(ids):
        if not _is_whole(token) or not 0 <= token < vocab:
            remedy = f"token ids are whole numbers (int) from 0 to {vocab - 1}"
            raise InvalidRequest(
                f"{name} holds {_shown(token)} at index {index}; {remedy}", field=name
            )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _refuse(name: str, value: Any, words: str, more: str = "") -> Never:
    raise InvalidRequest(f"{name} must be {words}, not {_shown(value)}{more}", field=name)


def _shown(value: Any) -> str:
    """A value as an error may repeat it: short, whatever a client sent."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print whole numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 64 else f"{text[:61]}..."
