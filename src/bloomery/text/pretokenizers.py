"""The ways byte-level vocabularies cut text into words before merging, under the names GGUF files give them.

Each entry is what the tokenizer.json of the original model says, checked against that file or its published
encodings. A name that is not here is refused: a near miss would shift token borders without anyone noticing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer


@dataclass(frozen=True)
class Words:
    splits: tuple[str, ...] = ()  # each isolates its matches, one after the other
    digits: bool = False  # every digit by itself, after the splits
    gpt2: bool = False  # then GPT-2's own pattern
    falcon: bool = False  # punctuation before GPT-2's pattern, digits in threes after it
    nfc: bool = False  # characters composed first
    whole_words: bool = (
        False  # a word that is in the vocabulary is one token, whatever the merges say
    )
    add_bos: bool = False  # where the file does not say

    def pre_tokenizer(self, add_prefix_space: bool = False) -> PreTokenizer:
        steps: list[PreTokenizer] = [
            pre_tokenizers.Split(Regex(split), "isolated") for split in self.splits
        ]
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.falcon:
            steps.append(pre_tokenizers.Punctuation("contiguous"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space, use_regex=self.gpt2))
        if self.falcon:
            steps.append(pre_tokenizers.Digits(individual_digits=False))
            steps.append(pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"))
        return pre_tokenizers.Sequence(steps)


_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _tiktoken(digits: str, marks: str = "") -> str:
    """A word with at most one other character before it; digits; other characters; white space."""
    letters = rf"[\p{{L}}{marks}]+" if marks else r"\p{L}+"
    return rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(digits: str, suffix: str) -> str:
    """The same, where a capital letter also begins a word."""
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    word = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{word}{upper}*{lower}+{suffix}|{word}{upper}+{lower}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED_LETTERS = (  # as deepseek-llm lists them; escapes where composing the source would change a character
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7d"
    "ᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎ"
    "ꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_PUNCTUATION = "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)

_GPT2 = Words(gpt2=True)
_NEOX = Words(gpt2=True, nfc=True)
_STARCODER = Words(digits=True, gpt2=True)
_LLAMA3 = Words((_tiktoken(r"\p{N}{1,3}"),), whole_words=True, add_bos=True)
_GLM4 = replace(_LLAMA3, add_bos=False)
_QWEN2 = Words((_tiktoken(r"\p{N}"),), nfc=True)
_O200K = Words((_cased(r"\p{N}{1,3}", f"{_SUFFIX}?"),), whole_words=True)

WORDS: Mapping[str, Words] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _NEOX,
    "olmo": _NEOX,
    "gpt-neox": _NEOX,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "smollm": _STARCODER,
    "command-r": replace(_STARCODER, nfc=True),
    "falcon": Words(falcon=True, gpt2=True),
    "bloom": Words((" ?[^(\\s|[.,!?…。，、।۔،])]+",)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": replace(_LLAMA3, whole_words=False, add_bos=False),
    "smaug-bpe": replace(_LLAMA3, whole_words=False, add_bos=False),
    "chatglm-bpe": _GLM4,
    "glm4": _GLM4,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": Words((_tiktoken(r"\p{N}", r"\p{M}"),)),  # its published encodings compose nothing
    "stablelm2": replace(_QWEN2, nfc=False),
    "tekken": Words((_cased(r"\p{N}", ""),), whole_words=True, add_bos=True),
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "deepseek-llm": Words(
        ("[\r\n]", rf"\s?[{_CASED_LETTERS}]+", _PUNCTUATION, r"\s+$", _CJK), digits=True
    ),
    "deepseek-coder": Words(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK), digits=True),
    "deepseek-v3": Words(_DEEPSEEK3),
}

# Files from before the name was written: the architectures that only ever had one.
WORDS_OF_ARCHITECTURE: Mapping[str, str] = {
    "gpt2": "gpt-2",
    "gptneox": "gpt-neox",
    "mpt": "mpt",
    "starcoder": "starcoder",
    "starcoder2": "starcoder",
    "refact": "refact",
    "falcon": "falcon",
    "bloom": "bloom",
    "qwen2": "qwen2",
    "command-r": "command-r",
}
