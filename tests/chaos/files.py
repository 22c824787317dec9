"""Damaged models: `python -m tests.chaos.files COUNT SEED` spoils a GGUF file and the files of a folder at random.

Each is located, described, its weights' header checked and its tokenizer loaded, as a server would before it reads a
weight. What comes of it must be the model or one of our own errors, within two seconds of a core; the process may take
200 MB.
"""

from __future__ import annotations

import json
import resource
import shutil
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from bloomery.artifacts.gguf import read
from bloomery.artifacts.locate import locate
from bloomery.artifacts.safetensors import index
from bloomery.describe import description
from bloomery.errors import BloomeryError
from bloomery.text.chat import render
from bloomery.text.load import load_tokenizer

SECONDS = 2.0
BYTES = 200e6
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"


def safetensors(path: Path) -> None:
    shapes = {"model.embed_tokens.weight": [32, 8], "model.norm.weight": [8]}
    header = {}
    at = 0
    for name, shape in shapes.items():
        size = 4 * (shape[0] * shape[1] if len(shape) > 1 else shape[0])
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + bytes(at))


def gguf_file(path: Path) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<s>", "</s>", "a", "b", "ab", "Ġ"])
    writer.add_token_types([3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    writer.add_tensor("token_embd.weight", np.zeros((6, 8), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    for name, rows, columns in (
        ("attn_q", 8, 8),
        ("attn_k", 4, 8),
        ("attn_v", 4, 8),
        ("attn_output", 8, 8),
        ("ffn_gate", 16, 8),
        ("ffn_up", 16, 8),
        ("ffn_down", 8, 16),
    ):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((rows, columns), np.float32))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def folder(path: Path) -> None:
    path.mkdir()
    safetensors(path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    shutil.copy(Path(__file__).parents[1] / "server" / "words.json", path / "tokenizer.json")
    (path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"})
    )


def spoiled(data: bytes, random: Random) -> bytes:
    """Bytes changed, removed, repeated, or a count of eight bytes made absurd. Heads more often than the rest."""
    spoilt = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 3])):
        at = random.randrange(len(spoilt) if random.random() < 0.5 else min(len(spoilt), 200))
        match random.randrange(6):
            case 0:
                spoilt[at] = random.randrange(256)
            case 1:
                spoilt[at] ^= 1 << random.randrange(8)
            case 2:
                del spoilt[at:]
            case 3:
                del spoilt[at : at + random.randrange(1, 40)]
            case 4:
                spoilt[at:at] = spoilt[at : at + random.randrange(1, 40)]
            case 5:
                spoilt[at : at + 8] = struct.pack(
                    "<Q", random.choice([2**64 - 1, 2**63, 2**40, 2**32, 0, 10**9])
                )
        if not spoilt:
            break
    return bytes(spoilt)


def opened(path: Path) -> str:
    """As before the first weight is read: what it came to."""
    try:
        artifact = locate(str(path))
        if artifact.kind == "gguf":
            read(artifact.path)
        else:
            index(artifact.path)
        description(artifact)
        tokenizer = load_tokenizer(artifact)
        tokenizer.encode("The iron")
        render(tokenizer, [{"role": "user", "content": "a"}])
    except BloomeryError:
        return "refused"
    return "opened"


def trial(count: int, seed: int) -> tuple[Counter[str], float, float]:
    """Outcomes, the slowest of them in seconds of a core, and the bytes by which the process has grown."""
    random = Random(seed)
    seen = Counter[str]()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        gguf_file(root / "good.gguf")
        folder(root / "good")
        goods = [root / "good.gguf", *sorted((root / "good").iterdir())]
        whole = {path: path.read_bytes() for path in goods}
        for path in (root / "good.gguf", root / "good"):
            if opened(path) != "opened":
                raise AssertionError(f"{path} is good and was refused")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(count):
            path = random.choice([goods[0], goods[0], *goods])
            path.write_bytes(spoiled(whole[path], random))
            begun = time.process_time()
            seen[opened(path if path.suffix == ".gguf" else path.parent)] += 1
            slowest = max(slowest, time.process_time() - begun)
            path.write_bytes(whole[path])
    return seen, slowest, 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


if __name__ == "__main__":
    outcomes, longest, grown = trial(int(sys.argv[1]), int(sys.argv[2]))
    figures = {
        "row": "files",
        "files": sum(outcomes.values()),
        **outcomes,
        "slowest_s": round(longest, 3),
    }
    print(json.dumps(figures | {"grown_mb": round(grown / 1e6, 1)}))
    sys.exit(0 if longest < SECONDS and grown < BYTES else 1)
