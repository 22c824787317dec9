"""What fewer bits cost in quality: a model's answers to a page of real text, format by format, against full precision.

    PYTHONPATH=src python3 benchmarks/quality.py [MODEL] [--tokens 1024] [--packed FOLDER] [--plot docs/quality.svg]

Without MODEL: the embedded SmolLM2-135M. The page is the language reference that comes with Python. KL is of the full
precision's next-token distribution to the format's, averaged over positions, in nats; top-1 the share of positions with
the same likeliest token; bits those of all weights in memory. Arithmetic is float32 on the CPU, inputs never rounded.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics

import torch

from bloomery.artifacts.locate import Artifact, locate
from bloomery.attention.base import AttentionMetadata, cache_shape
from bloomery.attention.torch_paged import TorchPaged
from bloomery.describe import description
from bloomery.families import as_stored
from bloomery.models.checkpoint import open_source
from bloomery.models.decoder import Decoder
from bloomery.models.weights import Weights
from bloomery.tools.plot import Series, chart
from bloomery.quant.choose import ON_LOAD, choose
from bloomery.text.load import load_tokenizer

CPU = torch.device("cpu")
PAGE = (
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
KEPT = 16  # positions of each answer held back: they have seen too little


def page(tokens: int, encode) -> list[int]:
    text = "\n".join(topics[name] for name in PAGE if name in topics)
    return encode(text)[:tokens]


def load(artifact: Artifact, form: str) -> tuple[Decoder, int]:
    found = description(artifact)
    source = open_source(artifact)
    weights = Weights(
        source,
        as_stored(found.names, source.names()),
        torch.float32,
        CPU,
        choose(found.quantization, form),
    )
    return Decoder(found.model, weights), weights.bytes


@torch.inference_mode()
def logprobs(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    """[positions, vocab], every position in one pass."""
    n = len(ids)
    size = 16
    backend = TorchPaged()
    decoder.reach(n)
    blocks = -(-n // size)
    caches = [
        torch.zeros(cache_shape(layer.attention, blocks, size)) for layer in decoder.spec.layers
    ]
    every = torch.arange(n)
    step = AttentionMetadata(
        (n,),
        (n,),
        0,
        torch.tensor([0, n]),
        torch.tensor([n]),
        every,
        every,
        torch.arange(blocks)[None],
        size,
    )
    hidden = decoder(torch.tensor(ids), every, every, caches, backend, backend.plan(step))
    return decoder.logits(hidden)[KEPT:].log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--formats", nargs="+", default=list(ON_LOAD), choices=(*ON_LOAD, "none"))
    parser.add_argument(
        "--packed",
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="what `bloomery quantize` made of it",
    )
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    artifact = locate(args.model)
    ids = page(args.tokens, load_tokenizer(artifact).encode)
    decoder, size = load(artifact, "auto")
    count = size * 8 / 32
    full = logprobs(decoder, ids)
    target = torch.tensor(ids[KEPT + 1 :])
    print(f"{artifact.name}: {len(ids)} tokens, {count / 1e6:.0f} million weights\n")
    print(
        "| format | bits a weight | MB | perplexity | KL | same top-1 |\n|---|---|---|---|---|---|"
    )
    points = []
    ways = [(form, artifact, form) for form in args.formats if form != "none"]
    ways += [(Path(folder).name, locate(folder), "auto") for folder in args.packed]
    for form, origin, how in (("full", artifact, "auto"), *ways):
        if form == "full":
            got = full
            bits = 16.0
        else:
            decoder, size = load(origin, how)
            got = logprobs(decoder, ids)
            bits = size * 8 / count
        kl = float((full.exp() * (full - got)).sum(-1).mean())
        same = float((full.argmax(-1) == got.argmax(-1)).float().mean())
        perplexity = math.exp(-float(got[:-1].gather(1, target[:, None]).mean()))
        megabytes = bits * count / 8e6
        print(
            f"| {form} | {bits:.2f} | {megabytes:.0f} | {perplexity:.2f} | {kl:.4f} | {same:.1%} |",
            flush=True,
        )
        if form != "full":
            points.append((form, megabytes, max(kl, 1e-6)))
    if args.plot:
        series = [Series(name, [(megabytes, kl)], [name]) for name, megabytes, kl in points]
        args.plot.write_text(
            chart(
                f"{artifact.name}: quality against bytes",
                "MB of weights",
                "KL, nats",
                series,
                log_y=True,
            )
        )


if __name__ == "__main__":
    main()
