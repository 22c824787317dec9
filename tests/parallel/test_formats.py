"""Every format of weights over two ranks gives the tokens it gives in one process: rounded while loading, ready made,
and as GGUF."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers as tf
from gguf import GGMLQuantizationType as Kind

from bloomery.engine.blocks import Blocks
from bloomery.engine.loop import Loop
from bloomery.engine.scheduler import Scheduler
from bloomery.executors.local import Local
from bloomery.executors.processes import Processes
from bloomery.quant.choose import ON_LOAD
from bloomery.quant.gguf_blocks import STEPS
from tests.parity.cases import SPECIAL, VOCAB, Case, make_checkpoint
from tests.parity.gguf_writer import write
from tests.parity.serve import greedy, ids, plan, run
from tests.quant.packers import CASES as READY_MADE
from tests.quant.packers import repack

SIZES = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "head_dim": 128,
}  # halves are whole blocks of every type
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
PROMPT = [5, 17, 80, 41, 3, 99, 23, 8, 64, 12]
BLOCKS = [
    name if name == "Q8_0" else pytest.param(name, marks=pytest.mark.slow)
    for name in ("BF16", *STEPS)
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint(Case("llama", lambda: tf.LlamaConfig(**SIZES, **HEADS, **SPECIAL)), folder)
    return folder


def answer(executor: Local | Processes, model: Path, **wishes: object) -> list[int]:
    wanted = plan(
        model,
        48,
        block_size=4,
        max_num_batched_tokens=7,
        max_num_seqs=2,
        kv_cache_gib=0.01,
        **wishes,
    )
    capacity = executor.start(wanted)
    blocks = Blocks(capacity.blocks, capacity.block_size, wanted.prefix_cache)
    scheduler = Scheduler(blocks, capacity.max_num_batched_tokens, capacity.max_num_seqs)
    return ids(run(Loop(scheduler, executor, wanted.depth), [greedy("0", PROMPT, 16)])["0"])


@pytest.mark.parametrize("name", ON_LOAD)
def test_rounded_while_loading(name: str, llama: Path, crews: dict[int, Processes]) -> None:
    assert answer(crews[2], llama, quantize=name, tp=2) == answer(Local(), llama, quantize=name)


# Of each method one, and all in the long form.
FIRST = {name.partition("-")[0]: name for name in reversed(READY_MADE)}.values()
ALL = [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in READY_MADE]


@pytest.mark.parametrize("name", ALL)
def test_ready_made(name: str, llama: Path, tmp_path: Path, crews: dict[int, Processes]) -> None:
    packed = tmp_path / "packed"
    meant = tmp_path / "meant"
    repack(llama, packed, meant, READY_MADE[name], lambda module: ".layers." in module)
    assert answer(crews[2], packed, tp=2) == answer(Local(), packed)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_gguf(name: str, tmp_path: Path, crews: dict[int, Processes]) -> None:
    case = Case("llama", lambda: tf.LlamaConfig(**SIZES | WIDE, **HEADS, **SPECIAL))
    write(make_checkpoint(case, tmp_path), tmp_path / "model.gguf", Kind[name])
    want = answer(Local(), tmp_path / "model.gguf")
    assert len(set(want)) > 4, "a model that says little tells little"
    assert answer(crews[2], tmp_path / "model.gguf", tp=2) == want
