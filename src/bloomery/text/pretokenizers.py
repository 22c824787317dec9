"""Pre-tokenizers of byte-level BPE vocabularies, by the names that GGUF files use.

A pre-tokenizer splits a text into words before merging. Each entry reproduces the tokenizer.json of
the original model and was checked against that file or its published encodings. An unknown name is
refused: a similar pre-tokenizer would silently give other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer


@dataclass(frozen=True)
class PreTokenizerSpec:
    """How a text is normalised and split into words."""

    splits: tuple[str, ...] = ()  # regular expressions; each isolates its matches, in this order
    digits: bool = False  # isolate every digit, after the splits
    gpt2: bool = False  # split by GPT-2's own pattern, after the digits
    falcon: bool = False  # punctuation before GPT-2's pattern, digits in threes after it
    nfc: bool = False  # normalise to NFC first
    ignore_merges: bool = False  # a word that is in the vocabulary is always one token
    add_bos: bool = False  # for a file that does not state it

    def build_pre_tokenizer(self, add_prefix_space: bool = False) -> PreTokenizer:
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


def _tiktoken_pattern(digits: str, marks: str = "") -> str:
    """Match a word with at most one other character before it, digits, symbols, or white space."""
    letters = rf"[\p{{L}}{marks}]+" if marks else r"\p{L}+"
    return (
        rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased_pattern(digits: str, suffix: str) -> str:
    """Match like `_tiktoken_pattern`, but a capital letter also starts a word."""
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    word = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{word}{upper}*{lower}+{suffix}|{word}{upper}+{lower}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# The letters as deepseek-llm lists them. Escapes stand where NFC would change a character.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ"
    "-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹ"
    "ℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_PUNCTUATION = "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)

_GPT2 = PreTokenizerSpec(gpt2=True)
_NEOX = PreTokenizerSpec(gpt2=True, nfc=True)
_STARCODER = PreTokenizerSpec(digits=True, gpt2=True)
_LLAMA3 = PreTokenizerSpec((_tiktoken_pattern(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_GLM4 = replace(_LLAMA3, add_bos=False)
_QWEN2 = PreTokenizerSpec((_tiktoken_pattern(r"\p{N}"),), nfc=True)
_O200K = PreTokenizerSpec((_cased_pattern(r"\p{N}{1,3}", f"{_SUFFIX}?"),), ignore_merges=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizerSpec] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _NEOX,
    "olmo": _NEOX,
    "gpt-neox": _NEOX,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "smollm": _STARCODER,
    "command-r": replace(_STARCODER, nfc=True),
    "falcon": PreTokenizerSpec(falcon=True, gpt2=True),
    "bloom": PreTokenizerSpec((" ?[^(\\s|[.,!?…。，、।۔،])]+",)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": replace(_LLAMA3, ignore_merges=False, add_bos=False),
    "smaug-bpe": replace(_LLAMA3, ignore_merges=False, add_bos=False),
    "chatglm-bpe": _GLM4,
    "glm4": _GLM4,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    # Its published encodings were made without NFC.
    "qwen35": PreTokenizerSpec((_tiktoken_pattern(r"\p{N}", r"\p{M}"),)),
    "stablelm2": replace(_QWEN2, nfc=False),
    "tekken": PreTokenizerSpec((_cased_pattern(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "deepseek-llm": PreTokenizerSpec(
        ("[\r\n]", rf"\s?[{_CASED_LETTERS}]+", _PUNCTUATION, r"\s+$", _CJK), digits=True
    ),
    "deepseek-coder": PreTokenizerSpec(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK), digits=True),
    "deepseek-v3": PreTokenizerSpec(_DEEPSEEK3),
}

# Older GGUF files do not name their pre-tokenizer. These architectures have only one.
PRE_TOKENIZER_OF_ARCHITECTURE: Mapping[str, str] = {
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
