"""A file of prompts without a server: a prompt per line in, a line of JSON per answer out.

python examples/offline_batch.py [PROMPTS [MODEL]] > answers.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bloomery import LLM, SamplingParams

DEFAULT_PROMPTS = ["The capital of France is", "Water boils at", "A blacksmith works with"]


def main(prompt_file: str | None = None, model: str | None = None) -> None:
    prompts = Path(prompt_file).read_text().splitlines() if prompt_file else DEFAULT_PROMPTS
    llm = LLM(model)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    # All prompts at once: the engine chooses the batches.
    for result in llm.generate(prompts, params):
        answer = result.outputs[0]
        line = {"prompt": result.prompt, "answer": answer.text, "reason": answer.finish_reason}
        print(json.dumps(line))


if __name__ == "__main__":
    main(*sys.argv[1:])
