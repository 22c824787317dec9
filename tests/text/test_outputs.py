"""Detokenization of streams, stop strings, and the assembly of completions."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from os.path import commonprefix

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.messages import (
    EngineRequest,
    FinishReason,
    ResolvedSampling,
    TokenLogprob,
    TokenOutput,
    pack_top,
)
from bloomery.response_format import ResponseEvent, ResponseFormat, ResponseParser
from bloomery.response_format.format import RegionMarkers
from bloomery.sampling import SamplingParams
from bloomery.text.outputs import (
    CompletionState,
    Detokenizer,
    Logprob,
    LogprobList,
    ParsedAnswer,
    ParsedCall,
    RequestState,
    StopStringMatcher,
    TextStream,
)
from bloomery.text.tokenizer import Tokenizer
from tests.text.vocabularies import (
    TOKENIZERS,
    embedded_tokenizer,
    golden_encodings,
    reduced_tokenizer,
    sample_texts,
)

kinds = pytest.mark.parametrize("kind", TOKENIZERS)


@lru_cache
def token_id_lists(tokenizer: Tokenizer, size: int = 24) -> st.SearchStrategy[list[int]]:
    """Draw lists of ids, with many incomplete characters, special tokens and invalid ids."""
    incomplete = [id for id in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.token_text(id)]
    special = sorted(tokenizer.special_ids) or [0]
    any_id = st.integers(0, tokenizer.vocab_size - 1)
    return st.lists(
        st.one_of(
            any_id,
            any_id,
            st.sampled_from(incomplete or [0]),
            st.sampled_from(special),
            st.integers(-3, 1 << 33),
        ),
        max_size=size,
    )


def stream_deltas(tokenizer: Tokenizer, ids: Sequence[int], **options: object) -> list[str]:
    text_stream = TextStream(tokenizer, **options)  # type: ignore[arg-type]
    deltas = [text_stream.push([id]) for id in ids] + [text_stream.finish()]
    assert text_stream.text == "".join(deltas)
    return deltas


# ---- deltas ------------------------------------------------------------------------------------


@kinds
@settings(deadline=None)
@given(data=st.data())
def test_deltas_add_up_to_the_decoded_text(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = data.draw(token_id_lists(tokenizer))
    skip = data.draw(st.booleans())
    assert "".join(stream_deltas(tokenizer, ids, skip_special=skip)) == tokenizer.decode(ids, skip)


@kinds
@settings(deadline=None)
@given(data=st.data())
def test_grouping_of_ids_does_not_change_the_text(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = data.draw(token_id_lists(tokenizer))
    text_stream = TextStream(tokenizer)
    rest = list(ids)
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        text_stream.push(rest[:count])
        rest = rest[count:]
    text_stream.finish()
    assert text_stream.text == tokenizer.decode(ids)
    assert text_stream.num_consumed == len(ids)


@kinds
@settings(deadline=None)
@given(data=st.data())
def test_prompt_text_is_not_part_of_the_completion(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]()
    prompt = data.draw(token_id_lists(tokenizer))
    ids = data.draw(token_id_lists(tokenizer))
    skip = data.draw(st.booleans())
    before = tokenizer.decode(prompt, skip)
    both = tokenizer.decode([*prompt, *ids], skip)
    if not both.startswith(before):  # the completion ends a character of the prompt
        assert before.endswith("\ufffd")
        before = commonprefix([before, both])
    assert (
        "".join(stream_deltas(tokenizer, ids, prompt=prompt, skip_special=skip))
        == both[len(before) :]
    )


@pytest.mark.parametrize(
    "name", ["gpt-2", "llama-spm", "gemma-4", "falcon", "qwen2", "llama-bpe", "deepseek-llm"]
)
def test_published_texts_stream_without_replacement_characters(name: str) -> None:
    for text, ids in golden_encodings()[name]["cases"]:
        deltas = stream_deltas(reduced_tokenizer(name), ids)
        assert "".join(deltas) == reduced_tokenizer(name).decode(ids)
        assert not any("\ufffd" in delta for delta in deltas), text


def test_a_delta_never_contains_a_part_of_a_character() -> None:
    for text in ("😀", "👨‍👩‍👧‍👦", "นี่คือ", "🏳️‍🌈 é 中"):
        deltas = stream_deltas(embedded_tokenizer(), embedded_tokenizer().encode(text))
        assert "".join(deltas) == text
        assert not any("\ufffd" in delta for delta in deltas)


def test_invalid_bytes_become_replacement_characters() -> None:
    tokenizer = reduced_tokenizer("llama-spm")
    first, second, letter = (
        tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (0xF0, 0x9F, 0x41)
    )
    assert stream_deltas(tokenizer, [first, second]) == [
        "",
        "",
        "\ufffd\ufffd",
    ]  # cut short by max_tokens
    assert stream_deltas(tokenizer, [first, letter, letter]) == ["", "\ufffdA", "A", ""]
    newline = tokenizer.token_to_id("<0x0A>")
    assert stream_deltas(tokenizer, [newline, first, second]) == [
        "\n",
        "",
        "",
        "\ufffd\ufffd",
    ]


def test_prompt_that_ends_within_a_character() -> None:
    ids = embedded_tokenizer().encode("\U0001f9ff")
    assert len(ids) > 1
    for cut in range(1, len(ids)):
        # The character belongs to the completion only if the completion ends it.
        assert (
            "".join(
                stream_deltas(
                    embedded_tokenizer(),
                    ids[cut:],
                    prompt=[*embedded_tokenizer().encode("The prompt "), *ids[:cut]],
                )
            )
            == "\U0001f9ff"
        )
        hello = embedded_tokenizer().encode("hello")
        assert (
            "".join(stream_deltas(embedded_tokenizer(), hello, prompt=[*hello, *ids[:cut]]))
            == "hello"
        )
        assert stream_deltas(embedded_tokenizer(), [], prompt=ids[:cut]) == [""]


def test_empty_completion_has_no_text() -> None:
    text_stream = TextStream(
        embedded_tokenizer(), embedded_tokenizer().encode("A long prompt"), ["x"]
    )
    assert text_stream.push([]) == text_stream.finish() == text_stream.text == ""


def test_space_between_prompt_and_completion_is_kept() -> None:
    tokenizer = reduced_tokenizer("llama-spm")
    hello = tokenizer.encode("Hello", add_special=False)
    assert stream_deltas(tokenizer, hello, prompt=hello)[0] == " Hello"
    assert stream_deltas(tokenizer, hello)[0] == "Hello"
    assert (
        stream_deltas(tokenizer, hello, prompt=[tokenizer.token_to_id("<unk>")])[0] == "Hello"
    )  # special tokens only


def test_cost_per_token_does_not_grow_with_the_text() -> None:
    ids = embedded_tokenizer().encode(" ".join(sample_texts(100)))
    detokenizer = Detokenizer(embedded_tokenizer())
    seconds = []
    for _ in range(9):
        start = time.process_time()
        for i in range(20_000):
            detokenizer.push(ids[i % len(ids)])
        seconds.append(time.process_time() - start)
    assert min(seconds[-3:]) < 3 * min(seconds[:3])
    assert min(seconds) / 20_000 < 50e-6


# ---- stop strings ------------------------------------------------------------------------------


def find_stop_reference(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Search by definition: the first end of any stop string, and the longest that ends there."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(deadline=None)
@given(
    chunks=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
def test_matcher_agrees_with_the_reference(
    chunks: list[str], stops: list[str], include: bool
) -> None:
    matcher = StopStringMatcher(stops, include)
    shown = ""
    pushed = ""
    for chunk in chunks:
        shown += matcher.push(chunk)
        pushed += chunk
        text, stop = find_stop_reference(pushed, stops)
        assert matcher.matched == stop
        if stop is not None:
            assert shown == text + (stop if include else "")
            return
        # The matcher holds back the longest end that may become a stop string, and no more.
        longest = max(
            (n for s in stops for n in range(len(s)) if pushed.endswith(s[:n])), default=0
        )
        assert shown == pushed[: len(pushed) - longest]
    assert shown + matcher.finish() == pushed


@settings(deadline=None)
@given(
    chunks=st.lists(st.text("ab", min_size=1, max_size=3), max_size=10),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    num_ignored=st.integers(0, 10),
)
def test_stop_string_before_min_tokens_is_text(
    chunks: list[str], stops: list[str], num_ignored: int
) -> None:
    matcher = StopStringMatcher(stops)
    shown = ""
    for i, chunk in enumerate(chunks):
        shown += matcher.push(chunk, can_stop=i >= num_ignored)
        if matcher.matched:
            break
    early = len("".join(chunks[:num_ignored]))
    text = "".join(chunks)
    for end in range(early + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            assert matcher.matched == max(complete, key=len)
            assert shown == text[: end - len(matcher.matched)]
            return
    assert matcher.matched is None
    assert shown + matcher.finish() == text


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_split_over_tokens_in_every_way(include: bool) -> None:
    stop = "own fox"
    before = "The quick br"
    after = " jumps"
    cuts = [cut for count in range(4) for cut in combinations(range(1, len(stop)), count)]
    assert len(cuts) == 1 + 6 + 15 + 20
    for cut in cuts:
        parts = [stop[a:b] for a, b in zip((0, *cut), (*cut, len(stop)))]
        groups = [embedded_tokenizer().encode(part) for part in [before, *parts, after]]
        text_stream = TextStream(embedded_tokenizer(), stop=[stop], include_stop=include)
        shown = [text_stream.push(group) for group in groups]
        assert text_stream.stopped == stop
        assert text_stream.text == "".join(shown) == before + (stop if include else "")
        assert not any("own" in delta for delta in shown) or include
        assert text_stream.num_consumed == sum(map(len, groups[:-1]))
        assert text_stream.finish() == ""


def test_text_held_back_is_shown_at_the_end() -> None:
    text_stream = TextStream(embedded_tokenizer(), stop=["fox jumps"])
    shown = text_stream.push(embedded_tokenizer().encode("The quick brown fox jum"))
    assert shown == "The quick brown "
    assert text_stream.finish() == "fox jum"
    assert text_stream.text == "The quick brown fox jum"
    assert text_stream.stopped is None


def test_first_complete_stop_string_wins() -> None:
    for stops in (["bcd", "ab"], ["ab", "bcd"]):
        matcher = StopStringMatcher(stops)
        assert matcher.push("abcd") == "" and matcher.matched == "ab"
    matcher = StopStringMatcher(["bc", "abc"])
    assert matcher.push("abc") == "" and matcher.matched == "abc"  # the longer of two


def test_min_tokens_delays_stop_strings() -> None:
    single_tokens = ["Say", " stop", " and", " stop", " now"]
    ids = [id for text in single_tokens for id in embedded_tokenizer().encode(text)]
    assert len(ids) == len(single_tokens)
    for min_tokens, consumed in ((0, 2), (1, 2), (2, 4), (3, 4), (4, 5)):
        text_stream = TextStream(embedded_tokenizer(), stop=["stop"], min_tokens=min_tokens)
        text_stream.push(ids)
        text_stream.finish()
        assert text_stream.num_consumed == consumed
        assert text_stream.stopped == ("stop" if consumed < 5 else None)
        assert (
            text_stream.text
            == {2: "Say ", 4: "Say stop and ", 5: "Say stop and stop now"}[consumed]
        )


def test_stop_string_and_eos_in_one_step() -> None:
    text_stream = TextStream(embedded_tokenizer(), stop=["END"])
    assert (
        text_stream.push([*embedded_tokenizer().encode("text END"), *embedded_tokenizer().eos_ids])
        == "text "
    )
    assert text_stream.stopped == "END"
    assert text_stream.num_consumed == len(embedded_tokenizer().encode("text END"))
    assert text_stream.push(embedded_tokenizer().encode("more")) == "" == text_stream.finish()


def test_stop_string_that_is_a_special_token() -> None:
    end = embedded_tokenizer().token_to_id("<|im_end|>")
    for include, text in ((False, "Hello fo"), (True, "Hello fo<|im_end|>")):
        text_stream = TextStream(
            embedded_tokenizer(), stop=["<|im_end|>", "fox"], include_stop=include
        )
        text_stream.push(
            [*embedded_tokenizer().encode("Hello fo"), end, *embedded_tokenizer().encode("more")]
        )
        assert (text_stream.text, text_stream.stopped) == (text, "<|im_end|>")
        assert text_stream.num_consumed == len(embedded_tokenizer().encode("Hello fo")) + 1
    shown = TextStream(embedded_tokenizer(), stop=["<|im_end|>"], skip_special=False)
    shown.push([*embedded_tokenizer().encode("Hello"), end])
    assert (shown.text, shown.stopped) == ("Hello", "<|im_end|>")


def test_stop_string_with_a_character_of_several_tokens() -> None:
    ids = embedded_tokenizer().encode("ab😀cd")
    text_stream = TextStream(embedded_tokenizer(), stop=["😀c"])
    for id in ids:
        text_stream.push([id])
    assert (text_stream.text, text_stream.stopped) == ("ab", "😀c")


def test_stop_string_is_found_in_the_last_flush() -> None:
    tokenizer = reduced_tokenizer("llama-spm")
    text_stream = TextStream(tokenizer, stop=["\ufffd"])
    text_stream.push(
        [*tokenizer.encode("Hello", add_special=False), tokenizer.token_to_id("<0xF0>")]
    )
    assert text_stream.finish() == ""
    assert (text_stream.text, text_stream.stopped) == ("Hello", "\ufffd")


def test_many_long_stop_strings() -> None:
    stops = ["a" * 1000 + str(i) for i in range(100)]
    text_stream = TextStream(embedded_tokenizer(), stop=stops)
    ids = embedded_tokenizer().encode("a" * 5000)
    text_stream.push(ids)
    text_stream.finish()
    assert text_stream.text == "a" * 5000


# ---- output assembly ---------------------------------------------------------------------------

REQUEST = EngineRequest("0", (1, 2), ResolvedSampling(), 4)
LOGPROB = TokenLogprob(7, -0.5, 1)


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("logprobs", [(), (LOGPROB,)])
def test_append_token_ids_gives_the_same_state_as_add_output(
    logprobs: tuple[TokenLogprob, ...], finish: FinishReason
) -> None:
    outputs = [
        TokenOutput("0", i, (7 + i,), logprobs, finish=finish if i == 3 else None) for i in range(4)
    ]
    state = CompletionState(0, REQUEST, (), None)
    expected = CompletionState(0, REQUEST, (), None)
    appended = []
    for output in outputs:
        appended.append(state.append_token_ids(output))
        if not appended[-1]:
            state.add_output(output)
        expected.add_output(output)
    assert state == expected and state.token_ids == [7, 8, 9, 10]
    assert state.finish_reason == finish
    assert appended == [False, True, True, False]


@pytest.mark.parametrize(
    ("last_id", "stop_reason"), [(7, 7), (2, None), (9, None)], ids=["stop id", "eos", "grammar"]
)
def test_only_a_stop_token_is_a_stop_reason(last_id: int, stop_reason: int | None) -> None:
    request = EngineRequest("0", (1,), ResolvedSampling(), 4, stop_ids=(2, 7))
    state = CompletionState(0, request, (2,), None)
    state.add_output(TokenOutput("0", 0, (last_id,), finish="stop"))
    assert state.finish_reason == "stop" and state.stop_reason == stop_reason


def test_a_parsed_answer_shows_its_content_alone() -> None:
    tokenizer = embedded_tokenizer()
    markers = RegionMarkers("<think>", "</think>")
    response_format = ResponseFormat(reasoning=markers)
    ids = tokenizer.encode("<think>Is it hot?</think>It is.<|im_end|>", add_special=False)
    request = EngineRequest("0", (1,), ResolvedSampling(), 100, stop_ids=tokenizer.eos_ids)
    requests = RequestState(
        "0",
        None,
        SamplingParams(),
        [request],
        tokenizer,
        lambda: ResponseParser(response_format, (), "", tokenizer.special_token_ids),
    )
    deltas = []
    for position, id in enumerate(ids):
        finish: FinishReason | None = "stop" if position == len(ids) - 1 else None
        delta, _ = requests.add_output(TokenOutput("0", position, (id,), finish=finish))
        assert delta is not None
        deltas.append(delta)
    (state,) = requests.completions.values()
    assert state.parsed is not None and state.parsed.reasoning == "Is it hot?"
    assert state.text == "".join(delta.text for delta in deltas) == "It is."
    kinds_of_events = [event.kind for delta in deltas for event in delta.events]
    assert kinds_of_events == sorted(kinds_of_events, reverse=True), "reasoning comes first"
    assert 0 < state.parsed.reasoning_tokens < len(ids)


def test_calls_without_an_id_get_one() -> None:
    answer = ParsedAnswer()
    first = answer.add_event(ResponseEvent("call", index=0, name="f"))
    answer.add_event(ResponseEvent("arguments", "{}", index=0))
    second = answer.add_event(ResponseEvent("call", index=1, name="g", id="functions.g:1"))
    assert first.id.startswith("call_") and second.id == "functions.g:1"
    assert answer.calls == [ParsedCall(first.id, "f", "{}"), ParsedCall(second.id, "g")]


def test_a_list_of_logprobs_makes_its_entries_when_they_are_read() -> None:
    top = ((7, -0.5), (8, -1.0))
    entries = (TokenLogprob(5, -2.0, 3, pack_top(top)), TokenLogprob(7, -0.5, 1))
    assert [entry.top for entry in entries] == [top, ()]
    logprobs = LogprobList(entries, None)
    expected = [
        {7: Logprob(-0.5, 1, ""), 8: Logprob(-1.0, 2, ""), 5: Logprob(-2.0, 3, "")},
        {7: Logprob(-0.5, 1, "")},
    ]
    assert len(logprobs) == 2
    assert list(logprobs) == expected
    assert logprobs == expected
    assert logprobs[-1:] == expected[-1:]
    copied = pickle.loads(pickle.dumps(logprobs))
    assert type(copied) is list
    assert copied == expected
