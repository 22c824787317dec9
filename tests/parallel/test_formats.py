"""Every weight format over two tensor parallel ranks gives the tokens it gives in one process.

Formats are quantized while loading, quantized in the checkpoint, or GGUF blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from gguf import GGMLQuantizationType

from bloomery.engine.executor import Executor
from bloomery.executors.local import LocalExecutor
from bloomery.executors.multiprocess import MultiprocessExecutor
from bloomery.quant.gguf_blocks import BLOCK_DECODERS
from bloomery.quant.select import ON_LOAD_FORMATS
from tests.parallel.engines import start_engine_loop
from tests.parity.cases import SPECIAL, VOCAB, ParityCase, make_checkpoint
from tests.parity.gguf_writer import write_gguf
from tests.parity.serve import build_plan, greedy_request, output_token_ids, run_requests
from tests.quant.packers import PACKED_CASES as CHECKPOINT_FORMATS
from tests.quant.packers import repack_checkpoint

SIZES = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
# Half of each dimension is a multiple of the block size of every GGUF type.
WIDE_SIZES = SIZES | {"hidden_size": 512, "intermediate_size": 512, "head_dim": 128}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
PROMPT = [5, 17, 80, 41, 3, 99, 23, 8, 64, 12]

# The everyday run takes one checkpoint format of each method and one GGUF type.
FIRST_OF_METHOD = {name.partition("-")[0]: name for name in reversed(CHECKPOINT_FORMATS)}
CHECKPOINT_FORMAT_PARAMS = [
    name if name in FIRST_OF_METHOD.values() else pytest.param(name, marks=pytest.mark.slow)
    for name in CHECKPOINT_FORMATS
]
GGUF_TYPE_PARAMS = [
    name if name == "Q8_0" else pytest.param(name, marks=pytest.mark.slow)
    for name in ("BF16", *BLOCK_DECODERS)
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    case = ParityCase("llama", lambda: tf.LlamaConfig(**SIZES, **HEADS, **SPECIAL))
    make_checkpoint(case, folder)
    return folder


def generate(executor: Executor, model: Path, **options: Any) -> list[int]:
    plan = build_plan(
        model,
        48,
        block_size=4,
        max_num_batched_tokens=7,
        max_num_seqs=2,
        kv_cache_gib=0.01,
        **options,
    )
    loop, _ = start_engine_loop(executor, plan)
    outputs = run_requests(loop, [greedy_request("0", PROMPT, 16)])
    return output_token_ids(outputs["0"])


@pytest.mark.parametrize("name", ON_LOAD_FORMATS)
def test_formats_quantized_while_loading(
    name: str, llama: Path, rank_executors: dict[int, MultiprocessExecutor]
) -> None:
    expected = generate(LocalExecutor(), llama, quantization=name)
    assert generate(rank_executors[2], llama, quantization=name, tensor_parallel_size=2) == expected


@pytest.mark.parametrize("name", CHECKPOINT_FORMAT_PARAMS)
def test_formats_quantized_in_the_checkpoint(
    name: str, llama: Path, tmp_path: Path, rank_executors: dict[int, MultiprocessExecutor]
) -> None:
    packed = tmp_path / "packed"
    dequantized = tmp_path / "dequantized"
    case = CHECKPOINT_FORMATS[name]
    repack_checkpoint(llama, packed, dequantized, case, lambda module: ".layers." in module)
    expected = generate(LocalExecutor(), packed)
    assert generate(rank_executors[2], packed, tensor_parallel_size=2) == expected


@pytest.mark.parametrize("name", GGUF_TYPE_PARAMS)
def test_gguf_blocks(
    name: str, tmp_path: Path, rank_executors: dict[int, MultiprocessExecutor]
) -> None:
    case = ParityCase("llama", lambda: tf.LlamaConfig(**WIDE_SIZES, **HEADS, **SPECIAL))
    model = tmp_path / "model.gguf"
    write_gguf(make_checkpoint(case, tmp_path), model, GGMLQuantizationType[name])
    expected = generate(LocalExecutor(), model)
    assert len(set(expected)) > 4, "a model that repeats itself would hide differences"
    assert generate(rank_executors[2], model, tensor_parallel_size=2) == expected
