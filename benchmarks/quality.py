"""Measures the quality of every quantization format compared with full precision, on real text.

    PYTHONPATH=src:. python3 benchmarks/quality.py [MODEL] [--tokens 1024] [--packed FOLDER]
        [--plot docs/quality.svg]

Without MODEL it takes the embedded SmolLM2-135M. The text is the language reference that comes with
Python. KL is the divergence of the format's next-token distribution from that of full precision,
in nats, averaged over positions. Top-1 is the fraction of positions with the same likeliest token.
Bits are those of all weights in memory. The arithmetic is float32 on the CPU; inputs are never
rounded.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import torch

from bloomery.artifacts.locate import ModelArtifact, locate_model
from bloomery.describe import describe_model
from bloomery.families import resolve_tensor_names
from bloomery.models.checkpoint import open_source
from bloomery.models.decoder import Decoder
from bloomery.models.weights import ModelWeights
from bloomery.quant.select import ON_LOAD_FORMATS, select_format
from bloomery.text.load import load_tokenizer
from bloomery.tools.plot import ChartSeries, draw_chart
from tests.parity.serve import decoder_logits

CPU = torch.device("cpu")
TOPICS = (
    "objects",
    "naming",
    "execmodel",
    "exceptions",
    "import",
    "types",
    "class",
    "function",
    "yieldexpr",
)
NUM_SKIPPED = 16  # first positions, which have too little context


def encode_text(num_tokens: int, encode: Callable[[str], list[int]]) -> list[int]:
    text = "\n".join(topics[name] for name in TOPICS if name in topics)
    return encode(text)[:num_tokens]


def load_decoder(artifact: ModelArtifact, format_name: str) -> tuple[Decoder, int]:
    model_info = describe_model(artifact)
    source = open_source(artifact)
    weights = ModelWeights(
        source,
        resolve_tensor_names(model_info, source),
        torch.float32,
        CPU,
        select_format(model_info.quantization, format_name),
    )
    return Decoder(model_info.model, weights), weights.loaded_bytes


def token_logprobs(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [positions, vocab], from one pass over all positions."""
    return decoder_logits(decoder, ids, len(ids))[NUM_SKIPPED:].log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument(
        "--formats", nargs="+", default=list(ON_LOAD_FORMATS), choices=(*ON_LOAD_FORMATS, "none")
    )
    parser.add_argument(
        "--packed",
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="checkpoints that `bloomery quantize` wrote",
    )
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    artifact = locate_model(args.model)
    ids = encode_text(args.tokens, load_tokenizer(artifact).encode)
    decoder, size = load_decoder(artifact, "auto")
    num_weights = size * 8 / 32
    full = token_logprobs(decoder, ids)
    target = torch.tensor(ids[NUM_SKIPPED + 1 :])
    print(f"{artifact.name}: {len(ids)} tokens, {num_weights / 1e6:.0f} million weights\n")
    print("| format | bits per weight | MB | perplexity | KL | same top-1 |")
    print("|---|---|---|---|---|---|")
    points = []
    variants = [(name, artifact, name) for name in args.formats if name != "none"]
    variants += [(Path(folder).name, locate_model(folder), "auto") for folder in args.packed]
    for name, origin, load_as in (("full", artifact, "auto"), *variants):
        if name == "full":
            logprobs = full
            bits = 16.0
        else:
            decoder, size = load_decoder(origin, load_as)
            logprobs = token_logprobs(decoder, ids)
            bits = size * 8 / num_weights
        kl = float((full.exp() * (full - logprobs)).sum(-1).mean())
        same = float((full.argmax(-1) == logprobs.argmax(-1)).float().mean())
        perplexity = math.exp(-float(logprobs[:-1].gather(1, target[:, None]).mean()))
        megabytes = bits * num_weights / 8e6
        print(
            f"| {name} | {bits:.2f} | {megabytes:.0f} | {perplexity:.2f} | {kl:.4f} | {same:.1%} |",
            flush=True,
        )
        if name != "full":
            points.append((name, megabytes, max(kl, 1e-6)))
    if args.plot:
        series = [ChartSeries(name, [(megabytes, kl)], [name]) for name, megabytes, kl in points]
        args.plot.write_text(
            draw_chart(
                f"{artifact.name}: quality against bytes",
                "MB of weights",
                "KL, nats",
                series,
                log_y=True,
            )
        )


if __name__ == "__main__":
    main()
