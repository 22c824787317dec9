"""SamplingParams: invalid values are refused by name, valid ones become engine requests."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.errors import InvalidRequest, PromptTooLong
from bloomery.sampling import SamplingParams, build_requests, select_best, sequence_seed

NOT_NUMBERS = [math.nan, math.inf, -math.inf, "0.5", None, True, [1.0], 1j, 10**400]
NOT_INTEGERS = [1.5, "2", True, [1], math.nan, 10**400, 10**5000]

INVALID_VALUES = {
    "temperature": [*NOT_NUMBERS, -0.1],
    "top_p": [*NOT_NUMBERS, 0, 0.0, 1.01, -0.5],
    "min_p": [*NOT_NUMBERS, -0.1, 1.01],
    "typical_p": [*NOT_NUMBERS, 0, 1.01],
    "repetition_penalty": [*NOT_NUMBERS, 0, -1.0, 101],
    "frequency_penalty": [*NOT_NUMBERS, -2.1, 2.5],
    "presence_penalty": [*NOT_NUMBERS, -2.1, 2.5],
    "watermark_gamma": [*NOT_NUMBERS, 0, 1.5],
    "watermark_delta": [*NOT_NUMBERS, 1000],
    "n": [*NOT_INTEGERS, None, 0, -1, 10**9],
    "best_of": [*NOT_INTEGERS, 0, -1, 10**9],
    "top_k": [*NOT_INTEGERS, None, -5],
    "seed": [*NOT_INTEGERS, -1, 2**64],
    "min_tokens": [*NOT_INTEGERS, None, -1],
    "max_tokens": [*NOT_INTEGERS, 0, -1, 10**12],
    "logprobs": [*NOT_INTEGERS, -1],
    "prompt_logprobs": [*NOT_INTEGERS, -1],
    "truncate_prompt_tokens": [*NOT_INTEGERS, 0, -1],
    "stop": ["", [""], ["a", 5], 5, {"a"}, ["a", None]],
    "bad_words": ["text", [""], [5]],
    "stop_token_ids": [5, "5", [1.5], [True], ["5"]],
    "allowed_token_ids": [5, [], (), [1.5], [True]],
    "logit_bias": [[1, 2], {"5": 1.0}, {5: math.nan}, {5: 101}, {5: "1"}, {True: 1.0}, {5: None}],
    "ignore_eos": [1, "yes", None],
    "watermark": [0, "no"],
    "detokenize": [None],
    "skip_special_tokens": ["x"],
    "include_stop_str_in_output": [1],
}


@pytest.mark.parametrize("name", INVALID_VALUES)
def test_invalid_values_are_refused_by_name(name):
    for value in INVALID_VALUES[name]:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{name: value})
        assert caught.value.field == name
        assert caught.value.status == 400
        assert str(caught.value).startswith(f"{name} must be ")
        assert len(str(caught.value)) < 300


def test_error_messages():
    with pytest.raises(
        InvalidRequest, match=r"^top_p must be above 0 and at most 1 \(1 turns it off\), not 1.01$"
    ):
        SamplingParams(top_p=1.01)
    with pytest.raises(
        InvalidRequest,
        match=r"^best_of must be at least n, which is 4, not 2: raise best_of or lower n$",
    ):
        SamplingParams(n=4, best_of=2)
    with pytest.raises(
        InvalidRequest,
        match=r"^logit_bias must be from -100 to 100 for every token, not 1000 for token 7$",
    ):
        SamplingParams(logit_bias={7: 1000})
    with pytest.raises(InvalidRequest, match=r"\.\.\.$"):
        SamplingParams(temperature="x" * 10**6)


def test_valid_values_are_accepted():
    SamplingParams()
    SamplingParams(
        temperature=0,
        top_k=-1,
        top_p=1,
        min_p=1,
        typical_p=0.001,
        seed=2**64 - 1,
        max_tokens=None,
        n=128,
    )
    SamplingParams(
        temperature=7.5, frequency_penalty=-2, presence_penalty=2, repetition_penalty=1, logprobs=0
    )
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(n=2).num_sequences == 2
    assert SamplingParams(n=2, best_of=5).num_sequences == 5


def test_contradictory_values_are_refused():
    for field, values in {
        "best_of": {"n": 2, "best_of": 1},
        "min_tokens": {"min_tokens": 20, "max_tokens": 10},
        "stop": {"stop": "x", "detokenize": False},
    }.items():
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**values)
        assert caught.value.field == field


# ---- engine requests -----------------------------------------------------------------------


def requests_for(params: SamplingParams, prompt=(1, 2, 3), **overrides):
    values = {
        "id": "r",
        "entropy": 77,
        "vocab_size": 100,
        "max_model_len": 50,
        "eos_ids": (9, 8),
    } | overrides
    return build_requests(params, prompt, **values)


def check_refused(field: str, params: SamplingParams, prompt=(1, 2, 3), **overrides) -> str:
    with pytest.raises(InvalidRequest) as caught:
        requests_for(params, prompt, **overrides)
    assert caught.value.field == field
    return str(caught.value)


def test_default_request():
    (request,) = requests_for(SamplingParams(), cache_salt="tenant")
    assert (request.id, request.prompt, request.max_tokens, request.cache_salt) == (
        "r",
        (1, 2, 3),
        16,
        "tenant",
    )
    assert request.stop_ids == (9, 8)
    assert request.emitted == ()
    assert request.sampling.seed == 77
    assert (request.sampling.logprobs, request.sampling.watermark) == (None, None)


def test_every_value_reaches_the_request():
    params = SamplingParams(
        temperature=1,
        top_k=-1,
        top_p=0.9,
        min_p=0.1,
        typical_p=0.5,
        repetition_penalty=2,
        frequency_penalty=1,
        presence_penalty=-1,
        logit_bias={5: 3, 99: -1.5},
        seed=5,
        min_tokens=2,
        logprobs=4,
        prompt_logprobs=6,
        allowed_token_ids=[4, 5, 4],
        watermark=True,
        watermark_gamma=0.25,
        watermark_delta=3,
    )
    (request,) = requests_for(params)
    s = request.sampling
    assert (s.temperature, s.top_k, s.top_p, s.min_p, s.typical_p) == (1.0, 0, 0.9, 0.1, 0.5)
    assert (s.repetition_penalty, s.frequency_penalty, s.presence_penalty) == (2.0, 1.0, -1.0)
    assert s.logit_bias == ((5, 3.0), (99, -1.5))
    assert (s.seed, s.min_tokens, s.logprobs, s.prompt_logprobs) == (5, 2, 4, 6)
    assert (s.allowed_token_ids, s.watermark) == ((4, 5), (0.25, 3.0))
    numbers = (
        s.temperature,
        s.repetition_penalty,
        s.frequency_penalty,
        s.logit_bias[0][1],
        s.watermark[1],
    )
    assert all(type(number) is float for number in numbers)


@pytest.mark.parametrize(
    ("top_k", "resolved"), [(0, 0), (-1, 0), (1, 1), (99, 99), (100, 0), (2**31 - 1, 0)]
)
def test_top_k_is_off_when_it_excludes_nothing(top_k, resolved):
    assert requests_for(SamplingParams(top_k=top_k))[0].sampling.top_k == resolved


def test_stop_ids_are_eos_ids_and_stop_token_ids():
    assert requests_for(SamplingParams(stop_token_ids=[5, 9, 5]))[0].stop_ids == (9, 8, 5)
    assert requests_for(SamplingParams(stop_token_ids=[5], ignore_eos=True))[0].stop_ids == (5,)
    assert requests_for(SamplingParams(ignore_eos=True))[0].stop_ids == ()


def test_n_sequences_have_their_own_ids_and_seeds():
    requests = requests_for(SamplingParams(n=4, seed=5, prompt_logprobs=1))
    assert [request.id for request in requests] == ["r-0", "r-1", "r-2", "r-3"]
    seeds = [request.sampling.seed for request in requests]
    assert seeds == [sequence_seed(5, index) for index in range(4)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 4
    assert [request.sampling.prompt_logprobs for request in requests] == [1, None, None, None]
    seeds = [request.sampling.seed for request in requests_for(SamplingParams(n=2))]
    assert seeds == [77, sequence_seed(77, 1)]
    assert len(requests_for(SamplingParams(n=3, temperature=0.0))) == 3


def test_sequence_seeds_are_those_of_splitmix64():
    # The published first outputs of splitmix64 from state 0.
    assert sequence_seed(0, 1) == 0xE220A8397B1DCDAF
    assert sequence_seed(0, 2) == 0x6E789E6AA1B965F4


@given(st.integers(0, 2**64 - 1))
def test_sequence_seeds_differ(seed):
    seeds = [sequence_seed(seed, index) for index in range(128)]
    assert len(set(seeds)) == 128
    assert all(0 <= s < 2**64 for s in seeds)


def test_best_of_asks_for_logprobs_to_compare():
    assert [c.sampling.logprobs for c in requests_for(SamplingParams(n=1, best_of=3))] == [0, 0, 0]
    assert requests_for(SamplingParams(n=1, best_of=2, logprobs=5))[1].sampling.logprobs == 5
    assert requests_for(SamplingParams(n=2, best_of=2))[0].sampling.logprobs is None
    assert select_best([-5.0, -1.0, -3.0, -1.0], 3) == [1, 3, 2]
    assert select_best([-5.0], 1) == [0]


def test_max_tokens_is_cut_to_the_context():
    assert requests_for(SamplingParams(max_tokens=100))[0].max_tokens == 47
    assert requests_for(SamplingParams(max_tokens=None))[0].max_tokens == 47
    assert requests_for(SamplingParams(max_tokens=47))[0].max_tokens == 47
    assert requests_for(SamplingParams(max_tokens=5), [1] * 49)[0].max_tokens == 1
    for length in (50, 51, 500):
        with pytest.raises(
            PromptTooLong, match=f"{length} tokens, but at most 49 fit: the context holds 50"
        ):
            requests_for(SamplingParams(), [1] * length)


def test_truncation_keeps_the_end_of_the_prompt():
    assert requests_for(SamplingParams(truncate_prompt_tokens=2))[0].prompt == (2, 3)
    assert requests_for(SamplingParams(truncate_prompt_tokens=10))[0].prompt == (1, 2, 3)
    (request,) = requests_for(SamplingParams(truncate_prompt_tokens=49), list(range(100)))
    assert request.prompt == tuple(range(51, 100))
    with pytest.raises(PromptTooLong):
        requests_for(SamplingParams(truncate_prompt_tokens=50), list(range(100)))


def test_invalid_prompts_are_refused():
    assert "no tokens" in check_refused("prompt", SamplingParams(), [])
    for token in (-1, 100, 2**63, 1.5, True, None, "a", 10**5000):
        assert "at index 2;" in check_refused("prompt", SamplingParams(), [1, 2, token])


def test_ids_outside_the_vocabulary_are_refused():
    assert "100 at index 1" in check_refused(
        "stop_token_ids", SamplingParams(stop_token_ids=[1, 100])
    )
    check_refused("allowed_token_ids", SamplingParams(allowed_token_ids=[-1]))
    check_refused("logit_bias", SamplingParams(logit_bias={100: 1.0}))
    check_refused("logprobs", SamplingParams(logprobs=101))
    check_refused("prompt_logprobs", SamplingParams(prompt_logprobs=101))
    assert requests_for(SamplingParams(logprobs=100))[0].sampling.logprobs == 100


def encode_letters(text: str) -> list[int]:
    return [ord(character) - 32 for character in text]


def test_bad_words_that_the_sampler_has_no_room_for_are_refused():
    too_long = SamplingParams(bad_words=["a" * 65])
    assert "64 tokens" in check_refused("bad_words", too_long, encode=encode_letters)
    many_words = [chr(65 + i % 26) + chr(65 + i // 26) * 40 for i in range(100)]
    too_many = SamplingParams(bad_words=many_words)
    assert "4096 tokens" in check_refused("bad_words", too_many, encode=encode_letters)
    requests_for(SamplingParams(bad_words=["a" * 63]), encode=encode_letters)


def test_bad_words_are_encoded_with_and_without_a_space():
    (request,) = requests_for(SamplingParams(bad_words=["ab", " c"]), encode=encode_letters)
    assert request.sampling.bad_words == ((65, 66), (0, 65, 66), (67,), (0, 67))
    params = SamplingParams(bad_words=["a"])
    assert requests_for(params, encode=lambda text: [7])[0].sampling.bad_words == ((7,),)
    assert requests_for(params, encode=lambda text: [7, 100])[0].sampling.bad_words == ()
    assert "tokenizer" in check_refused("bad_words", SamplingParams(bad_words=["a"]))


def test_at_least_one_token_must_remain_allowed():
    check_refused("allowed_token_ids", SamplingParams(allowed_token_ids=[9, 8], min_tokens=1))
    check_refused(
        "allowed_token_ids",
        SamplingParams(allowed_token_ids=[65], bad_words=["a"]),
        encode=encode_letters,
    )
    requests_for(SamplingParams(allowed_token_ids=[9, 8, 7], min_tokens=1))
    requests_for(SamplingParams(allowed_token_ids=[9, 8]))
    requests_for(SamplingParams(allowed_token_ids=[65], bad_words=["aa"]), encode=encode_letters)
