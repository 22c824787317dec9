"""LoRA adapters compared with PEFT, on tiny random checkpoints and random adapters.

Logits of a prompt are compared, then greedy tokens of a batch in which every request has another
adapter or none: they must be those that the request gets from PEFT alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bloomery.artifacts.locate import locate_model
from bloomery.errors import InvalidRequest
from bloomery.executors.multiprocess import MultiprocessExecutor
from bloomery.layers.mlp import MlpBlock
from bloomery.models.adapter_memory import AdapterMemory
from bloomery.models.load import LoadedModel, load_model
from bloomery.native.thread_pool import ThreadPool
from bloomery.sampling import build_embedding_request
from tests.parity.adapters import (
    RANK,
    adapted_request,
    build_adapter_loop,
    greedy_tokens,
    save_adapter,
    write_gguf_adapter,
)
from tests.parity.cases import CASES, VOCAB, make_checkpoint
from tests.parity.gguf_writer import write_gguf
from tests.parity.serve import build_plan, decoder_logits, output_token_ids, run_requests

CPU = torch.device("cpu")
# Layers separate, fused and grouped by head, transposed, tied, with biases, experts in a stack.
FAMILIES = ("llama", "bloom", "falcon-40b", "gpt2", "gemma2", "phi3", "opt", "mixtral", "laguna")
REPLACED = (
    ("gemma", {"targets": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens"]}),
    ("llama", {"targets": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    ("llama", {"targets": ["q_proj", "embed_tokens", "lm_head"]}),
    ("gemma", {"targets": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
    ("qwen2", {"targets": ["q_proj", "v_proj"], "bias": "all"}),
    (
        "qwen2",
        {
            "targets": r".*\.self_attn\.(q|k)_proj",
            "bias": "lora_only",
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"layers.1.self_attn.k_proj": 32},
        },
    ),
    ("llama", {"targets": ["q_proj", "down_proj"], "layers_to_transform": [0, 2]}),
    (
        "zamba2-adapted",
        {
            "targets": [
                *["in_proj", "out_proj", "linear", "q_proj", "v_proj", "o_proj"],
                *["gate_up_proj", "down_proj"],
            ]
        },
    ),
    (
        "mixtral",
        {
            "targets": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
)


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def load_with_slots(folder: Path, pool: ThreadPool | None = None) -> LoadedModel:
    memory = AdapterMemory(2, 2 * RANK, torch.float32, CPU)
    return load_model(
        locate_model(str(folder)), "auto", torch.float32, CPU, pool=pool, adapter_memory=memory
    )


def adapter_logits(loaded: LoadedModel, adapter: Path, tokens: list[int]) -> torch.Tensor:
    """Return the logits of a prompt whose adapter is in the second slot."""
    reader = loaded.adapter_reader
    assert reader is not None
    reader.memory.load(1, reader.read(str(adapter)))
    slots = torch.ones(len(tokens), dtype=torch.int32)
    return decoder_logits(loaded.decoder, tokens, 64, slots)


@torch.no_grad()
def check_logits(folder: Path, adapter: Path, adapted: Any) -> None:
    tokens = random_tokens(24, seed=5)
    expected = adapted(torch.tensor([tokens])).logits[0]
    for pool in (None, ThreadPool(1)):
        loaded = load_with_slots(folder, pool)
        base = decoder_logits(loaded.decoder, tokens, 64)
        actual = adapter_logits(loaded, adapter, tokens)
        assert (actual - expected).abs().max() <= 1e-4
        assert (base - expected).abs().max() > 0.1, "the adapter has no effect"


def make_model(name: str, folder: Path) -> Any:
    return make_checkpoint(next(case for case in CASES if case.name == name), folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_layer_equal_peft(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "model")
    adapted = save_adapter(model, tmp_path / "adapter")
    check_logits(tmp_path / "model", tmp_path / "adapter", adapted)


@pytest.mark.parametrize("family, config", REPLACED)
def test_logits_of_partial_and_replaced_layers_equal_peft(
    family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(family, tmp_path / "model")
    adapted = save_adapter(model, tmp_path / "adapter", **config)
    check_logits(tmp_path / "model", tmp_path / "adapter", adapted)


def test_an_adapter_of_shared_modules_changes_all_their_layers(tmp_path: Path) -> None:
    """Where training has run a shared block as one module, the file has it in its first layer."""
    model = make_model("zamba2-adapted", tmp_path / "model")
    targets = ["q_proj", "o_proj", "gate_up_proj", "linear"]
    adapted = save_adapter(model, tmp_path / "adapter", targets)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    assert any("layers.1.shared" in name for name in tensors)
    layers = adapted.base_model.model.model.layers
    values = layers[1].shared_transformer.state_dict()  # layers 1 and 4 share a block
    layers[4].shared_transformer.load_state_dict(values)
    shared = {name: tensor for name, tensor in tensors.items() if "layers.4.shared" not in name}
    assert len(shared) < len(tensors)
    save_file(shared, file)
    check_logits(tmp_path / "model", tmp_path / "adapter", adapted)


def test_adapters_of_low_rank_parts_are_refused(tmp_path: Path) -> None:
    model = make_model("zamba2-adapted", tmp_path / "model")
    save_adapter(model, tmp_path / "adapter")
    reader = load_with_slots(tmp_path / "model").adapter_reader
    assert reader is not None
    with pytest.raises(InvalidRequest, match="a low-rank part of the base model"):
        reader.read(str(tmp_path / "adapter"))


OPTIONS = {
    "enable_lora": True,
    "max_lora_rank": 2 * RANK,
    "max_num_batched_tokens": 24,
    "block_size": 4,
    "kv_cache_gib": 0.01,
    "steps_in_flight": 2,
}


HYBRID_LAYERS = ["in_proj", "q_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize(
    "family, targets",
    [
        ("llama", "all-linear"),
        ("mixtral", "all-linear"),
        ("nemotron_h", HYBRID_LAYERS),
        ("falcon_h1", HYBRID_LAYERS),
        ("zamba2-adapted", [*HYBRID_LAYERS, "gate_up_proj", "down_proj", "linear"]),
    ],
)
@pytest.mark.parametrize("cpu_kernels", [False, True])
def test_a_mixed_batch_gives_each_request_the_tokens_of_its_adapter(
    family: str, targets: list[str] | str, cpu_kernels: bool, tmp_path: Path
) -> None:
    """Three adapters share two slots, and some requests have none."""
    model = make_model(family, tmp_path / "model")
    prompts = [random_tokens(9 + i, seed=i) for i in range(6)]
    folders = [tmp_path / f"adapter{i}" for i in range(3)]
    choices = [*folders, None, folders[0], folders[1]]
    count = 8
    expected = [greedy_tokens(model, prompts[3], count)]
    by_folder = {}
    for seed, folder in enumerate(folders):
        adapted = save_adapter(model, folder, targets, seed=seed)
        for i, choice in enumerate(choices):
            if choice == folder:
                by_folder[i] = greedy_tokens(adapted, prompts[i], count)
        model = adapted.unload()
    plan = build_plan(
        tmp_path / "model", 64, cpu_kernels=cpu_kernels, max_num_seqs=4, max_loras=2, **OPTIONS
    )
    loop = build_adapter_loop(plan)
    requests = [
        adapted_request(str(i), prompts[i], count, choice) for i, choice in enumerate(choices)
    ]
    outputs = run_requests(loop, requests)
    for i, request in enumerate(requests):
        errors = [output.error for output in outputs[request.id] if output.error]
        assert not errors
        assert output_token_ids(outputs[request.id]) == by_folder.get(i, expected[0])
    worker = loop.executor.worker  # type: ignore[attr-defined]
    assert worker.cpu_traced == cpu_kernels


def test_an_embedding_leaves_the_adapters_of_its_step_as_they_are(tmp_path: Path) -> None:
    """An embedding goes through the projection before the head, without any adapter."""
    model = make_model("opt-350m", tmp_path / "model")
    prompt = random_tokens(9, seed=1)
    base = greedy_tokens(model, prompt, 1)
    adapted = save_adapter(model, tmp_path / "adapter", ["project_out"], lora_alpha=64)
    expected = greedy_tokens(adapted, prompt, 1)
    assert expected != base
    loop = build_adapter_loop(build_plan(tmp_path / "model", 64, max_num_seqs=4, **OPTIONS))
    folder = tmp_path / "adapter"
    run_requests(loop, [adapted_request("first", random_tokens(4, seed=2), 1, folder)])
    embedding = build_embedding_request(
        prompt, "last", id="embedding", vocab_size=VOCAB, max_model_len=64
    )
    outputs = run_requests(loop, [adapted_request("answer", prompt, 1, folder), embedding])
    assert outputs["embedding"][-1].embedding
    assert output_token_ids(outputs["answer"]) == expected


@pytest.mark.parametrize(
    "family, parallel",
    [
        ("llama", {"tensor_parallel_size": 2}),
        pytest.param("mixtral", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("llama", {"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_several_ranks_give_the_tokens_of_one(
    family: str, parallel: dict[str, int], tmp_path: Path
) -> None:
    """Each rank has a part of every adapter; a bad adapter fails its own request only."""
    model = make_model(family, tmp_path / "model")
    prompt = random_tokens(12, seed=3)
    base = greedy_tokens(model, prompt, 6)
    targets = ["q_proj", "v_proj", "o_proj", "down_proj", "gate_proj", "embed_tokens", "lm_head"]
    adapted = save_adapter(
        model, tmp_path / "adapter", "all-linear" if family == "mixtral" else targets
    )
    expected = greedy_tokens(adapted, prompt, 6)
    plan = build_plan(tmp_path / "model", 64, max_num_seqs=4, max_loras=2, **OPTIONS | parallel)
    executor = MultiprocessExecutor()
    try:
        loop = build_adapter_loop(plan, executor)
        requests = [
            adapted_request("base", prompt, 6),
            adapted_request("adapted", prompt, 6, tmp_path / "adapter"),
            adapted_request("bad", prompt, 6, tmp_path / "nothing"),
        ]
        outputs = run_requests(loop, requests)
    finally:
        executor.close()
    assert output_token_ids(outputs["base"]) == base
    assert output_token_ids(outputs["adapted"]) == expected
    assert "there is no such adapter" in str(outputs["bad"][-1].error)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "bloom"])
def test_adapters_of_a_gguf_file_equal_peft(family: str, tmp_path: Path) -> None:
    """From PEFT, with the names of transformers, and converted to GGUF where layers stay apart."""
    model = make_model(family, tmp_path / "model")
    file = tmp_path / "model.gguf"
    write_gguf(model, file)
    adapted = save_adapter(model, tmp_path / "adapter")
    check_logits(file, tmp_path / "adapter", adapted)
    if family in ("llama", "qwen3"):
        converted = tmp_path / "adapter.gguf"
        write_gguf_adapter(adapted, converted, family, permuted=family == "llama")
        check_logits(file, converted, adapted)


@pytest.mark.parametrize("quantize", ["int8", "fp8", "nf4"])
def test_adapters_of_quantized_weights_equal_peft(quantize: str, tmp_path: Path) -> None:
    """PEFT computes with the weights that the format stores."""
    model = make_model("llama", tmp_path / "model")
    memory = AdapterMemory(2, RANK, torch.float32, CPU)
    loaded = load_model(
        locate_model(str(tmp_path / "model")),
        "auto",
        torch.float32,
        CPU,
        quantize=quantize,
        adapter_memory=memory,
    )
    decoder = loaded.decoder
    assert decoder.head is not None and decoder.embed is not None
    with torch.no_grad():
        model.lm_head.weight.copy_(decoder.head.linear.matrix.gather(torch.arange(VOCAB)))
        model.model.embed_tokens.weight.copy_(decoder.embed.matrix.gather(torch.arange(VOCAB)))
        for layer, own in zip(model.model.layers, decoder.layers):
            attention, mlp = own.attention, own.mlp
            assert attention is not None and isinstance(mlp, MlpBlock)
            for linear, parent, modules in (
                (attention.qkv, layer.self_attn, ("q_proj", "k_proj", "v_proj")),
                (attention.out, layer.self_attn, ("o_proj",)),
                (mlp.up, layer.mlp, ("gate_proj", "up_proj")),
                (mlp.down, layer.mlp, ("down_proj",)),
            ):
                weights = [getattr(parent, name).weight for name in modules]
                rows = torch.arange(sum(len(weight) for weight in weights))
                values = linear.matrix.gather(rows)
                for weight, part in zip(weights, values.split([len(w) for w in weights])):
                    assert not torch.equal(weight, part), "the weights are not quantized"
                    weight.copy_(part)
    adapted = save_adapter(model, tmp_path / "adapter", ["q_proj", "v_proj", "up_proj"])
    tokens = random_tokens(24, seed=5)
    with torch.no_grad():
        expected = adapted(torch.tensor([tokens])).logits[0]
    actual = adapter_logits(loaded, tmp_path / "adapter", tokens)
    assert (actual - expected).abs().max() <= 1e-4


METERED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {}),
    ("bloom", {"r": 2}),  # half of the largest rank
    ("mixtral", next(config for family, config in REPLACED if family == "mixtral")),
    ("nemotron_h", {"targets": ["in_proj", "q_proj", "v_proj"]}),
    ("zamba2-adapted", {"targets": ["in_proj", "q_proj", "gate_up_proj"]}),
    ("llama", {"targets": ["q_proj", "embed_tokens", "lm_head"]}),
)


@pytest.mark.parametrize("family, config", METERED)
def test_the_floor_grows_by_the_adapters_of_the_step(
    family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """A step reads the matrices of its adapters once, and of experts those it is routed to."""
    model = make_model(family, tmp_path / "model")
    for name in ("first", "second"):
        model = save_adapter(model, tmp_path / name, **config).unload()
    values = {"dense": 0, "experts": 0}
    for name, tensor in load_file(tmp_path / "first" / "adapter_model.safetensors").items():
        if "lora_" in name and "embed" not in name:  # of an embedding a step reads a row
            values["experts" if "experts" in name else "dense"] += tensor.numel()
    loop = build_adapter_loop(build_plan(tmp_path / "model", 64, max_loras=2, **OPTIONS))
    worker = loop.executor.worker  # type: ignore[attr-defined]
    first, second = tmp_path / "first", tmp_path / "second"

    def floor_seconds(*folders: Path | None) -> tuple[float, int]:
        """The floor of requests of one token each, so that each of them has one step."""
        before = loop.timing
        requests = [
            adapted_request(f"{number} {before.steps}", [5 + number], 1, folder)
            for number, folder in enumerate(folders)
        ]
        outputs = run_requests(loop, requests)
        assert all(outputs[request.id][-1].error is None for request in requests)
        return loop.timing.floor - before.floor, loop.timing.steps - before.steps

    floor_seconds(first, second)  # reads the adapters, one after the other
    base, steps = floor_seconds(None, None, None)
    assert steps == 1
    for folders, num_adapters, tokens in (
        ((first, None, None), 1, 1),
        ((first, second, None), 2, 1),
        ((first, first, None), 1, 2),
    ):
        seconds, steps = floor_seconds(*folders)
        assert steps == 1
        used = 1 - (1 - 2 / 4) ** tokens  # two of four experts
        read_bytes = 4 * num_adapters * (values["dense"] + used * values["experts"])
        added = read_bytes / worker.roofline.hardware.bandwidth
        assert seconds - base == pytest.approx(added, rel=1e-6)


@pytest.mark.parametrize("deterministic", [False, True])
def test_sixteen_adapters_in_one_batch_give_what_each_gives_alone(
    deterministic: bool, tmp_path: Path
) -> None:
    """And so does a request without an adapter among them."""
    model = make_model("llama", tmp_path / "model")
    folders: list[Path | None] = [None]
    for seed in range(16):
        folder = tmp_path / f"adapter{seed}"
        model = save_adapter(model, folder, ["q_proj", "o_proj", "up_proj"], seed=seed).unload()
        folders.append(folder)
    plan = build_plan(
        tmp_path / "model",
        64,
        cpu_kernels=True,
        max_num_seqs=17,
        max_loras=16,
        deterministic=deterministic,
        **OPTIONS,
    )
    loop = build_adapter_loop(plan)
    requests = [
        adapted_request(str(i), random_tokens(6, seed=i), 4, folder)
        for i, folder in enumerate(folders)
    ]
    together = run_requests(loop, requests)
    distinct = set()
    for request in requests:
        alone = run_requests(loop, [replace(request, id=f"alone {request.id}")])
        tokens = output_token_ids(alone[f"alone {request.id}"])
        assert output_token_ids(together[request.id]) == tokens
        distinct.add(tuple(tokens))
    assert len(distinct) > 8, "the adapters have no effect"
