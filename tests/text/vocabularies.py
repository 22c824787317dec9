"""Tokenizers for tests: of the embedded model, reduced real ones, and small trained ones."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordLevel

from bloomery.artifacts import gguf
from bloomery.artifacts.locate import locate_model
from bloomery.text.gguf_tokenizer import build_gguf_tokenizer
from bloomery.text.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"

LINES = (
    "def f(x: int) -> str:\n    return f'{x!r}\\n'  # a comment",
    'for (int i = 0; i < 10; ++i) { printf("%d\\n", i); }',
    "The quick brown fox doesn't jump; it's we'll, I'VE and y'all's.",
    "Zażółć gęślą jaźń. Größe, naïve café, ÅNGSTRÖM, İstanbul'da",
    "Съешь ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα",
    "你好，世界！我想在apple工作1314151天～ 日本語のテキスト、カタカナ。 한국어 문장입니다",
    "مرحبا بالعالم، كيف حالك؟ שלום עולם नमस्ते दुनिया กขคงจฉ កាន់តែ",
    "😀 🚀🚀 👨‍👩‍👧‍👦 🏳️‍🌈 🇨🇭 ✅ 1️⃣ 🦙.cpp",
    "e\u0301 a\u0300\u0301 \u0928\u093f ﬁ ½ ² Ⅷ ٣ ৪ ㎏ \ufeff\u200b\u00ad",
    "   leading,  double,   triple    spaces\t\ttabs\n\n\nlines\r\nwindows\r",
    "\u00a0\u2003\u3000\u2028\u2029\x0b\x0c\x1c\x85",
    "3 33 333 3333 33333 3.14 1,000,000 0xFF 1e-9 ١٢٣",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_end <im_end|> </s><s>[INST]",
    "https://example.com/a/b?c=d&e=f#g user@example.org C:\\path\\to\\file.txt",
    "!!!??...---===___***///\\\\\\|||~~~```'''\"\"\"",
    "\x00\x01\x7f control \ue000 private \U0010fffd last",
    '{"key": [1, 2.5, null, true, "välue"], "nested": {"a": {}}}',
    "",
    " ",
    "\n",
)


def sample_texts(count: int, seed: int = 0) -> list[str]:
    """Return LINES, then random mixtures of parts of them, some of them long."""
    random_source = random.Random(seed)
    texts = list(LINES)
    while len(texts) < count:
        pieces = []
        for _ in range(random_source.choice((1, 2, 3, 5, 40))):
            line = random_source.choice(LINES)
            start = random_source.randrange(len(line) + 1)
            pieces.append(line[start : start + random_source.randrange(1, 24)])
        texts.append(random_source.choice(("", " ", "\n", "  ")).join(pieces))
    return texts


@lru_cache
def embedded_path() -> Path:
    return locate_model(None).path


@lru_cache
def embedded_tokenizer() -> Tokenizer:
    return build_gguf_tokenizer(gguf.read_gguf(embedded_path()).metadata)


@lru_cache
def transformers_tokenizer() -> Any:
    """Return the tokenizer that transformers builds from the embedded file."""
    from transformers import AutoTokenizer  # slow to import

    return AutoTokenizer.from_pretrained(embedded_path().parent, gguf_file=embedded_path().name)


@lru_cache
def golden_encodings() -> dict[str, Any]:
    encodings: dict[str, Any] = json.loads((DATA / "golden.json").read_text(encoding="utf-8"))
    return encodings


@lru_cache
def reduced_tokenizer(name: str) -> Tokenizer:
    """Return a real vocabulary, reduced to the tokens that its golden encodings use."""
    return build_gguf_tokenizer(golden_encodings()[name]["metadata"])


@lru_cache
def metaspace_tokenizer() -> Tokenizer:
    backend = Backend(BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>"], show_progress=False)
    )
    return Tokenizer(backend)


@lru_cache
def word_level_tokenizer() -> Tokenizer:
    backend = Backend(WordLevel({"<unk>": 0, "the": 1, "fox": 2, "é": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(backend)


TOKENIZERS = {
    "byte level": embedded_tokenizer,
    "byte fallback": lambda: reduced_tokenizer("llama-spm"),
    "byte fallback, no prefix space": lambda: reduced_tokenizer("gemma-4"),
    "metaspace": metaspace_tokenizer,
    "words": word_level_tokenizer,
}
