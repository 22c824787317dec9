"""Write embedded.json: how transformers continues each prompt with the embedded GGUF in float32.

python -m tests.golden.make_embedded
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from bloomery.artifacts.locate import locate_model
from tests.golden.prompts import PROMPTS

FILE = Path(__file__).parent / "embedded.json"


def load_reference() -> tuple[object, object]:
    path = locate_model(None).path
    transformers.utils.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return tokenizer, model.eval()


def main() -> None:
    tokenizer, model = load_reference()
    entries = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids  # type: ignore[operator]
        with torch.inference_mode():
            output = model.generate(  # type: ignore[attr-defined]
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=64,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        entries.append(
            {
                "prompt": prompt,
                "prompt_ids": ids[0].tolist(),
                "ids": output[0, ids.shape[1] :].tolist(),
            }
        )
    FILE.write_text(json.dumps(entries, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
