"""Steps with chunks over static buffers, padded as graphs want them, give the tokens of the batch the host builds.

The whole engine on the CPU, attention by interpreted kernels: requests of many lengths arrive while others are under
way, so that steps have several chunks, ones that end their prompt and ones that do not, and lines that are nobody's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers as tf

from bloomery.attention.triton_paged import TritonPaged
from bloomery.engine.loop import Loop
from bloomery.kernels import paged_decode, paged_prefill
from bloomery.kernels.launch import interpreted
from bloomery.messages import EngineRequest, ResolvedSampling
from bloomery.runtime.forward import Whole
from bloomery.runtime.mixed import LINES, NEAR, PROMPTS, MixedStep, layout
from bloomery.runtime.picker import Picker
from bloomery.runtime.replay import Captured
from bloomery.runtime.rows import Rows
from bloomery.runtime.worker import Worker
from tests.parity.cases import Case, make_checkpoint
from tests.parity.serve import engine, plan

VOCAB = 211
LENGTH = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**SIZES),
    "gemma2": lambda: tf.Gemma2Config(
        **SIZES, head_dim=8, sliding_window=9, attn_logit_softcapping=20.0
    ),
    "mixtral": lambda: tf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "bloom": lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4),
}
EXACT = ((), ())
PADDED = ((2, 4), (8, 16))
pytestmark = [
    pytest.mark.skipif(
        not interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
    ),
    pytest.mark.filterwarnings(
        "ignore::RuntimeWarning"
    ),  # interpreted kernels divide by zero for rows of nobody
]


class Counted(MixedStep):
    """What it was given."""

    def __init__(self, *given: Any, near: bool):
        super().__init__(*given)
        self.near = near
        self.seen = list[tuple[int, tuple[bool, ...]]]()

    def run(self, going: Any, chunks: Any, furthest: int) -> Any:
        self.seen.append((len(going), tuple(item.samples for item, _ in chunks)))
        return super().run(going, chunks, furthest if self.near else NEAR)


def with_mixed(
    worker: Worker, sizes: tuple[tuple[int, ...], tuple[int, ...]], near: bool
) -> Counted:
    backend = TritonPaged(
        decode=paged_decode.Tiling(16, 4, 2, splits=2, direct=1),
        prefill=paged_prefill.Tiling(32, 16, 4, 2, 2, 1),
    )
    model = Whole(worker.decoder, backend, worker.caches)
    mixed = Counted(
        model, worker.rows, worker.block_size, Picker(worker.sampler, PROMPTS), near=near
    )
    mixed.lines = list(sizes[0])
    mixed.sizes = list(sizes[1])
    worker.mixed = mixed
    return mixed


def served(loop: Loop, requests: list[tuple[int, EngineRequest]]) -> dict[str, list[int]]:
    """Requests come at their step."""
    found: dict[str, list[int]] = {request.id: [] for _, request in requests}
    step = 0
    while loop.busy or step <= max(at for at, _ in requests):
        for at, request in requests:
            if at == step:
                loop.add(request)
        for news in loop.step():
            found[news.request] += news.ids
        step += 1
    return found


def asked(random: Random) -> list[tuple[int, EngineRequest]]:
    """Greedy and drawn, one whose log-probabilities are wanted, at different times."""
    made = []
    for number in range(7):
        prompt = tuple(random.randrange(3, VOCAB) for _ in range(random.choice((1, 5, 17))))
        hot = {
            "temperature": random.choice((0.0, 1.0)),
            "top_k": random.choice((0, 5)),
            "seed": number,
        }
        wish = ResolvedSampling(
            **hot, logprobs=2 if number == 4 else None, prompt_logprobs=1 if number == 6 else None
        )
        made.append(
            (random.randrange(6), EngineRequest(str(number), prompt, wish, random.randint(2, 5)))
        )
    return made


@pytest.mark.parametrize(
    ("name", "sizes", "depth", "near"),
    [
        ("llama", EXACT, 1, False),
        ("llama", PADDED, 2, True),
        ("llama", PADDED, 2, False),
        ("gemma2", PADDED, 1, True),
        ("mixtral", PADDED, 2, False),
        ("bloom", PADDED, 2, True),
    ],
)
def test_tokens_are_those_of_the_batch(
    name: str, sizes: Any, depth: int, near: bool, tmp_path: Path
) -> None:
    make_checkpoint(Case(name, MODELS[name]), tmp_path)
    wishes = {
        "max_num_batched_tokens": 12,
        "max_num_seqs": 4,
        "block_size": 4,
        "kv_cache_gib": 0.01,
        "prefix_cache": False,
    }
    settings = plan(tmp_path, LENGTH, steps_in_flight=depth, native=False, **wishes)
    plainly = engine(settings)
    mixing = engine(settings)
    mixed = with_mixed(mixing.executor.worker, sizes, near)
    requests = asked(Random(6))
    assert served(mixing, requests) == served(plainly, requests)
    going, chunks = zip(*mixed.seen, strict=True)
    assert max(going) > 1 and max(map(len, chunks)) > 1
    assert any(all(one) for one in chunks) and any(not all(one) for one in chunks)


@pytest.mark.parametrize(("rows", "most"), [(4, 512), (64, 2048), (272, 8192), (300, 300)])
def test_whatever_size_comes_is_captured_beforehand(rows: int, most: int) -> None:
    held = Rows(rows, 4, 0, torch.device("cpu"))
    runs = object.__new__(Captured)  # nothing is captured here, which would take a GPU
    mixed = MixedStep(None, held, 16, None, most, runs)  # type: ignore[arg-type]
    usual = mixed.usual()
    assert len(set(usual)) == len(usual) and usual[0] == (rows, mixed.most, False)
    for lines in range(rows + 1):
        for tokens in range(lines + 1, mixed.most + 1, 7):
            size = (
                next(size for size in mixed.lines if size >= lines),
                next(n for n in mixed.sizes if n >= tokens),
            )
            assert (*size, False) in usual
            assert (*size, True) in usual or lines > LINES[0]


def test_an_empty_step_is_all_padding() -> None:
    sent = layout((), (), 3, 5, 9).tolist()
    assert sent[: 3 + 2 * PROMPTS] == [9] * (3 + 2 * PROMPTS)
    starts = sent[3 + 2 * PROMPTS :][: PROMPTS + 1]
    assert starts == [0] * PROMPTS + [5]
    assert sent[3 + 3 * PROMPTS + 1 :] == [0] * (PROMPTS + 5)
