"""Text while it is generated: the deltas add up to the whole, and stop strings end it where they should."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from os.path import commonprefix

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.text.detokenizer import Detokenizer, StopStrings, TextStream
from bloomery.text.tokenizer import Tokenizer
from tests.text.vocabularies import KINDS, cut_down, embedded, golden, sample_texts

kinds = pytest.mark.parametrize("kind", KINDS)


@lru_cache
def ids_of(tokenizer: Tokenizer, size: int = 24) -> st.SearchStrategy[list[int]]:
    """Any tokens, with parts of characters and ids that do not exist more often than chance would have them."""
    half = [id for id in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.token_text(id)]
    special = sorted(tokenizer.special_ids) or [0]
    anything = st.integers(0, tokenizer.vocab_size - 1)
    return st.lists(
        st.one_of(
            anything,
            anything,
            st.sampled_from(half or [0]),
            st.sampled_from(special),
            st.integers(-3, 1 << 33),
        ),
        max_size=size,
    )


def stream(tokenizer: Tokenizer, ids: Sequence[int], **options: object) -> list[str]:
    made = TextStream(tokenizer, **options)  # type: ignore[arg-type]
    deltas = [made.push([id]) for id in ids] + [made.finish()]
    assert made.text == "".join(deltas)
    return deltas


# ---- deltas ------------------------------------------------------------------------------------


@kinds
@settings(deadline=None)
@given(data=st.data())
def test_deltas_add_up_to_the_decoded_whole(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    ids = data.draw(ids_of(tokenizer))
    skip = data.draw(st.booleans())
    assert "".join(stream(tokenizer, ids, skip_special=skip)) == tokenizer.decode(ids, skip)


@kinds
@settings(deadline=None)
@given(data=st.data())
def test_how_ids_are_bunched_does_not_matter(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    ids = data.draw(ids_of(tokenizer))
    made = TextStream(tokenizer)
    rest = list(ids)
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        made.push(rest[:count])
        rest = rest[count:]
    made.finish()
    assert made.text == tokenizer.decode(ids)
    assert made.consumed == len(ids)


@kinds
@settings(deadline=None)
@given(data=st.data())
def test_after_a_prompt_only_the_answer_shows(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    prompt = data.draw(ids_of(tokenizer))
    ids = data.draw(ids_of(tokenizer))
    skip = data.draw(st.booleans())
    before = tokenizer.decode(prompt, skip)
    whole = tokenizer.decode([*prompt, *ids], skip)
    if not whole.startswith(before):  # the answer completes a character that the prompt began
        assert before.endswith("\ufffd")
        before = commonprefix([before, whole])
    assert "".join(stream(tokenizer, ids, prompt=prompt, skip_special=skip)) == whole[len(before) :]


@pytest.mark.parametrize(
    "name", ["gpt-2", "llama-spm", "gemma-4", "falcon", "qwen2", "llama-bpe", "deepseek-llm"]
)
def test_published_texts_stream_without_a_broken_character(name: str) -> None:
    for text, ids in golden()[name]["cases"]:
        deltas = stream(cut_down(name), ids)
        assert "".join(deltas) == cut_down(name).decode(ids)
        assert not any("\ufffd" in delta for delta in deltas), text


def test_characters_come_whole() -> None:
    for text in ("😀", "👨‍👩‍👧‍👦", "นี่คือ", "🏳️‍🌈 é 中"):
        deltas = stream(embedded(), embedded().encode(text))
        assert "".join(deltas) == text
        assert not any("\ufffd" in delta for delta in deltas)


def test_bytes_that_are_no_text_show_at_once_or_at_the_end() -> None:
    tokenizer = cut_down("llama-spm")
    first, second, letter = (tokenizer.id_of(f"<0x{byte:02X}>") for byte in (0xF0, 0x9F, 0x41))
    assert stream(tokenizer, [first, second]) == ["", "", "\ufffd\ufffd"]  # cut short by max_tokens
    assert stream(tokenizer, [first, letter, letter]) == ["", "\ufffdA", "A", ""]
    newline = tokenizer.id_of("<0x0A>")
    assert stream(tokenizer, [newline, first, second]) == [
        "\n",
        "",
        "",
        "\ufffd\ufffd",
    ]  # a newline never waits


def test_a_prompt_that_ends_within_a_character() -> None:
    ids = embedded().encode("\U0001f9ff")
    assert len(ids) > 1
    for cut in range(1, len(ids)):
        # completed by the answer: the character is the answer's; not completed: nothing of it is
        assert (
            "".join(
                stream(
                    embedded(), ids[cut:], prompt=[*embedded().encode("The prompt "), *ids[:cut]]
                )
            )
            == "\U0001f9ff"
        )
        hello = embedded().encode("hello")
        assert "".join(stream(embedded(), hello, prompt=[*hello, *ids[:cut]])) == "hello"
        assert stream(embedded(), [], prompt=ids[:cut]) == [""]


def test_no_token_shows_nothing_of_the_prompt() -> None:
    made = TextStream(embedded(), embedded().encode("A long prompt"), ["x"])
    assert made.push([]) == made.finish() == made.text == ""


def test_the_space_between_prompt_and_answer_is_kept() -> None:
    tokenizer = cut_down("llama-spm")
    hello = tokenizer.encode("Hello", add_special=False)
    assert stream(tokenizer, hello, prompt=hello)[0] == " Hello"
    assert stream(tokenizer, hello)[0] == "Hello"
    assert (
        stream(tokenizer, hello, prompt=[tokenizer.id_of("<unk>")])[0] == "Hello"
    )  # a prompt of hidden tokens only


def test_a_token_s_cost_does_not_grow_with_the_text_before_it() -> None:
    ids = embedded().encode(" ".join(sample_texts(100)))
    detokenizer = Detokenizer(embedded())
    spent = []
    for _ in range(9):
        start = time.process_time()
        for i in range(20_000):
            detokenizer.push(ids[i % len(ids)])
        spent.append(time.process_time() - start)
    assert min(spent[-3:]) < 3 * min(spent[:3])
    assert min(spent) / 20_000 < 50e-6


# ---- stop strings ------------------------------------------------------------------------------


def plain_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The definition: the first character at which a stop string is complete; the longest one there."""
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
def test_stop_strings_against_their_definition(
    chunks: list[str], stops: list[str], include: bool
) -> None:
    matcher = StopStrings(stops, include)
    shown = ""
    seen = ""
    for chunk in chunks:
        shown += matcher.push(chunk)
        seen += chunk
        text, stop = plain_stop(seen, stops)
        assert matcher.found == stop
        if stop is not None:
            assert shown == text + (stop if include else "")
            return
        # held back is the longest tail that may become a stop string, and no more
        longest = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert shown == seen[: len(seen) - longest]
    assert shown + matcher.finish() == seen


@settings(deadline=None)
@given(
    chunks=st.lists(st.text("ab", min_size=1, max_size=3), max_size=10),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    unarmed=st.integers(0, 10),
)
def test_a_stop_string_complete_too_early_is_text(
    chunks: list[str], stops: list[str], unarmed: int
) -> None:
    matcher = StopStrings(stops)
    shown = ""
    for i, chunk in enumerate(chunks):
        shown += matcher.push(chunk, armed=i >= unarmed)
        if matcher.found:
            break
    early = len("".join(chunks[:unarmed]))
    text = "".join(chunks)
    for end in range(early + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            assert matcher.found == max(complete, key=len)
            # what was shown before it could count is not taken back
            assert shown == text[: end - len(matcher.found)]
            return
    assert matcher.found is None
    assert shown + matcher.finish() == text


@pytest.mark.parametrize("include", [False, True])
def test_every_split_of_a_stop_string(include: bool) -> None:
    stop = "own fox"
    before = "The quick br"
    after = " jumps"
    cuts = [cut for count in range(4) for cut in combinations(range(1, len(stop)), count)]
    assert len(cuts) == 1 + 6 + 15 + 20
    for cut in cuts:
        parts = [stop[a:b] for a, b in zip((0, *cut), (*cut, len(stop)))]
        groups = [embedded().encode(part) for part in [before, *parts, after]]
        made = TextStream(embedded(), stop=[stop], include_stop=include)
        shown = [made.push(group) for group in groups]
        assert made.stopped == stop
        assert made.text == "".join(shown) == before + (stop if include else "")
        assert not any("own" in delta for delta in shown) or include
        assert made.consumed == sum(map(len, groups[:-1]))
        assert made.finish() == ""


def test_a_tail_that_became_no_stop_string_is_shown_at_the_end() -> None:
    made = TextStream(embedded(), stop=["fox jumps"])
    shown = made.push(embedded().encode("The quick brown fox jum"))
    assert shown == "The quick brown "
    assert made.finish() == "fox jum"
    assert made.text == "The quick brown fox jum"
    assert made.stopped is None


def test_the_earliest_to_be_complete_wins() -> None:
    for stops in (["bcd", "ab"], ["ab", "bcd"]):
        matcher = StopStrings(stops)
        assert matcher.push("abcd") == "" and matcher.found == "ab"
    matcher = StopStrings(["bc", "abc"])
    assert matcher.push("abc") == "" and matcher.found == "abc"  # at the same character, the longer


def test_min_tokens_postpones_stop_strings() -> None:
    words = ["Say", " stop", " and", " stop", " now"]
    ids = [id for word in words for id in embedded().encode(word)]
    assert len(ids) == len(words)
    for least, consumed in ((0, 2), (1, 2), (2, 4), (3, 4), (4, 5)):
        made = TextStream(embedded(), stop=["stop"], min_tokens=least)
        made.push(ids)
        made.finish()
        assert made.consumed == consumed
        assert made.stopped == ("stop" if consumed < 5 else None)
        assert made.text == {2: "Say ", 4: "Say stop and ", 5: "Say stop and stop now"}[consumed]


def test_a_stop_string_and_the_end_of_sequence_in_one_step() -> None:
    made = TextStream(embedded(), stop=["END"])
    assert made.push([*embedded().encode("text END"), *embedded().eos_ids]) == "text "
    assert made.stopped == "END"
    assert made.consumed == len(embedded().encode("text END"))
    assert made.push(embedded().encode("more")) == "" == made.finish()


def test_a_stop_string_that_is_a_hidden_token_ends_the_answer() -> None:
    end = embedded().id_of("<|im_end|>")
    for include, text in ((False, "Hello fo"), (True, "Hello fo<|im_end|>")):
        made = TextStream(embedded(), stop=["<|im_end|>", "fox"], include_stop=include)
        made.push([*embedded().encode("Hello fo"), end, *embedded().encode("more")])
        assert (made.text, made.stopped) == (text, "<|im_end|>")
        assert made.consumed == len(embedded().encode("Hello fo")) + 1
    shown = TextStream(embedded(), stop=["<|im_end|>"], skip_special=False)
    shown.push([*embedded().encode("Hello"), end])
    assert (shown.text, shown.stopped) == ("Hello", "<|im_end|>")


def test_a_stop_string_within_a_character_s_bytes() -> None:
    ids = embedded().encode("ab😀cd")
    made = TextStream(embedded(), stop=["😀c"])
    for id in ids:
        made.push([id])
    assert (made.text, made.stopped) == ("ab", "😀c")


def test_the_last_flush_goes_through_the_stop_strings_too() -> None:
    tokenizer = cut_down("llama-spm")
    made = TextStream(tokenizer, stop=["\ufffd"])
    made.push([*tokenizer.encode("Hello", add_special=False), tokenizer.id_of("<0xF0>")])
    assert made.finish() == ""
    assert (made.text, made.stopped) == ("Hello", "\ufffd")


def test_many_long_stop_strings_cost_no_more_a_token() -> None:
    stops = ["a" * 1000 + str(i) for i in range(100)]
    made = TextStream(embedded(), stop=stops)
    ids = embedded().encode("a" * 5000)
    made.push(ids)
    made.finish()
    assert made.text == "a" * 5000
