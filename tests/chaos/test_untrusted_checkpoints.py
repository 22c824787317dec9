"""A model folder is data: none of its code is run, and nothing is fetched because of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LOAD_PROGRAM = """
import socket, sys
def connect(*_): raise SystemExit("a connection")
socket.socket.connect = connect
from bloomery import LLM, SamplingParams
from bloomery.errors import BloomeryError
few = SamplingParams(max_tokens=1, detokenize=False)
for folder in sys.argv[1:]:
    try:
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, device="cpu", threads=1)
        llm.generate([{"prompt_token_ids": [1, 2]}], few, use_tqdm=False)
        print("loads")
    except BloomeryError:
        print("refuses")
raise SystemExit("transformers was imported" if "transformers" in sys.modules else 0)
"""
CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"auto_map": {"AutoModelForCausalLM": "canary.Model", "AutoConfig": "canary.Config"}},
        "loads",
    ),
    (
        {"auto_map": {"AutoConfig": "elsewhere/canary--canary.Config"}, "trust_remote_code": True},
        "loads",
    ),
    (
        {
            "_attn_implementation_internal": "elsewhere/kernels",
            "_attn_implementation": "elsewhere/kernels",
        },
        "loads",
    ),
    (
        {
            "architectures": ["CanaryForCausalLM"],
            "model_type": "canary",
            "auto_map": {"AutoModel": "canary.M"},
        },
        "refuses",
    ),
]


def test_code_in_a_model_folder_is_never_run(tmp_path: Path) -> None:
    """A known architecture loads whatever other keys say; an unknown one is refused."""
    canary = tmp_path / "canary"
    folders = [tmp_path / str(number) for number in range(len(CASES))]
    for folder, (more, _) in zip(folders, CASES, strict=True):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(MODEL_CONFIG | more))
        for name in ("canary.py", "modeling_llama.py", "__init__.py", "sitecustomize.py"):
            (folder / name).write_text(f"open({str(canary)!r}, 'w')\n")
    done = subprocess.run(
        [sys.executable, "-c", LOAD_PROGRAM, *map(str, folders)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.split() == [what for _, what in CASES]
    assert not canary.exists()
