"""Random damage to a GGUF file and to the files of a model folder.

    python -m tests.chaos.damaged_files COUNT SEED

Each damaged checkpoint is opened as a server does it before it reads a weight: the model is located
and described, the header of its weights is checked, and its tokenizer is loaded. The checkpoint
must open or raise a BloomeryError within two seconds of processor time, and the process may grow by
at most 200 MB.
"""

from __future__ import annotations

import json
import math
import resource
import shutil
import struct
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

from bloomery.artifacts.gguf import read_gguf
from bloomery.artifacts.locate import locate_model
from bloomery.artifacts.safetensors import index_checkpoint
from bloomery.describe import describe_model
from bloomery.errors import BloomeryError
from bloomery.text.chat import render_chat
from bloomery.text.load import load_tokenizer

MAX_FILE_SECONDS = 2.0  # of processor time
MAX_GROWTH_BYTES = 200e6
HEADER_BYTES = 200  # where damage is likely to be in a header
ABSURD_COUNTS = (2**64 - 1, 2**63, 2**40, 2**32, 0, 10**9)
TEST_TOKENIZER = Path(__file__).parents[1] / "server" / "tokenizer.json"
MODEL_CONFIG = {
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
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
)


@dataclass
class DamageReport:
    outcomes: Counter[str]  # "opened" and "refused"
    slowest_seconds: float  # processor time of the slowest checkpoint
    growth_bytes: int  # growth of the peak memory

    @property
    def is_within_limits(self) -> bool:
        is_fast = self.slowest_seconds < MAX_FILE_SECONDS
        return is_fast and self.growth_bytes < MAX_GROWTH_BYTES


def write_safetensors(path: Path) -> None:
    """Write a safetensors file with two tensors of zeros."""
    shapes = {"model.embed_tokens.weight": [32, 8], "model.norm.weight": [8]}
    header = {}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    header_bytes = json.dumps(header).encode()
    length = struct.pack("<Q", len(header_bytes))
    path.write_bytes(length + header_bytes + bytes(offset))


def write_gguf(path: Path) -> None:
    """Write a GGUF file of a llama model with one layer and a tokenizer of six tokens."""
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
    writer.add_chat_template(CHAT_TEMPLATE)
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


def write_model_folder(path: Path) -> None:
    """Write a model folder as Hugging Face has it: config, weights and tokenizer."""
    path.mkdir()
    write_safetensors(path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(MODEL_CONFIG))
    shutil.copy(TEST_TOKENIZER, path / "tokenizer.json")
    tokenizer_config = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def damage(data: bytes, random: Random) -> bytes:
    """Change, remove or repeat bytes, or set an 8-byte count to an absurd value.

    Half of the damage is within the first HEADER_BYTES.
    """
    damaged = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 3])):
        end = len(damaged)
        if random.random() >= 0.5:
            end = min(end, HEADER_BYTES)
        offset = random.randrange(end)
        match random.randrange(6):
            case 0:
                damaged[offset] = random.randrange(256)
            case 1:
                damaged[offset] ^= 1 << random.randrange(8)
            case 2:
                del damaged[offset:]
            case 3:
                del damaged[offset : offset + random.randrange(1, 40)]
            case 4:
                damaged[offset:offset] = damaged[offset : offset + random.randrange(1, 40)]
            case 5:
                damaged[offset : offset + 8] = struct.pack("<Q", random.choice(ABSURD_COUNTS))
        if not damaged:
            break
    return bytes(damaged)


def open_checkpoint(path: Path) -> str:
    """Do what a server does before it reads the first weight; return "opened" or "refused"."""
    try:
        artifact = locate_model(str(path))
        if artifact.kind == "gguf":
            read_gguf(artifact.path)
        else:
            index_checkpoint(artifact.path)
        describe_model(artifact)
        tokenizer = load_tokenizer(artifact)
        tokenizer.encode("The iron")
        render_chat(tokenizer, [{"role": "user", "content": "a"}])
    except BloomeryError:
        return "refused"
    return "opened"


def try_damaged_files(count: int, seed: int) -> DamageReport:
    """Open `count` damaged checkpoints; a damaged file is restored before the next one."""
    random = Random(seed)
    outcomes = Counter[str]()
    slowest_seconds = 0.0
    with tempfile.TemporaryDirectory() as name:
        gguf_path = Path(name) / "good.gguf"
        folder = Path(name) / "good"
        write_gguf(gguf_path)
        write_model_folder(folder)
        for checkpoint in (gguf_path, folder):
            if open_checkpoint(checkpoint) != "opened":
                raise AssertionError(f"{checkpoint} is valid and was refused")
        paths = [gguf_path, *sorted(folder.iterdir())]
        originals = {path: path.read_bytes() for path in paths}
        peak_before = peak_memory_bytes()
        for _ in range(count):
            # The GGUF file holds what is several files in the folder: it is chosen more often.
            path = random.choice([gguf_path, gguf_path, *paths])
            path.write_bytes(damage(originals[path], random))
            begin = time.process_time()
            checkpoint = gguf_path if path == gguf_path else folder
            outcomes[open_checkpoint(checkpoint)] += 1
            slowest_seconds = max(slowest_seconds, time.process_time() - begin)
            path.write_bytes(originals[path])
    return DamageReport(outcomes, slowest_seconds, peak_memory_bytes() - peak_before)


def peak_memory_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(count: int, seed: int) -> int:
    report = try_damaged_files(count, seed)
    figures = {
        "row": "files",
        "files": report.outcomes.total(),
        **report.outcomes,
        "slowest_s": round(report.slowest_seconds, 3),
        "growth_mb": round(report.growth_bytes / 1e6, 1),
    }
    print(json.dumps(figures))
    return 0 if report.is_within_limits else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
