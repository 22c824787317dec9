"""Packs small matrices with the formats' own libraries and writes tests/golden/quant.safetensors.

    python -m tests.quant.make_library_golden AWQ_FOLDER GPTQ_FOLDER

bitsandbytes and compressed-tensors must be installed. The folders are the unpacked archives of
autoawq 0.2.9 and auto-gptq 0.7.1. Single files of them are loaded, because neither package can be
imported with a current torch. The file holds the packed tensors as `case/suffix`, and the values
that the library unpacks them to as `case/means`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file

GOLDEN_FILE = Path(__file__).parent.parent / "golden" / "quant.safetensors"
ROWS = 32
COLUMNS = 64
GROUP_SIZE = 32
NUM_GROUPS = COLUMNS // GROUP_SIZE


def load_module(file: Path) -> ModuleType:
    """Load one file of a package without importing the package."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pack_bitsandbytes(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    import bitsandbytes.functional as bnb

    golden: dict[str, torch.Tensor] = {}
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            name = f"bnb-{kind}{'-nested' if nested else ''}"
            codes, state = bnb.quantize_4bit(
                weight, blocksize=64, quant_type=kind, compress_statistics=nested
            )
            golden[f"{name}/weight"] = codes
            for suffix, tensor in state.as_dict(packed=True).items():
                golden[f"{name}/weight.{suffix}"] = tensor
            golden[f"{name}/means"] = bnb.dequantize_4bit(codes, state)
    codes, absmax, _ = bnb.int8_vectorwise_quant(weight.half())
    golden["bnb-int8/weight"] = codes
    golden["bnb-int8/SCB"] = absmax
    golden["bnb-int8/means"] = bnb.int8_vectorwise_dequant(codes, absmax)
    return golden


def pack_compressed_tensors(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    golden: dict[str, torch.Tensor] = {}
    for bits in (4, 8):
        middle = 2 ** (bits - 1)
        codes = torch.randint(-middle, middle, weight.shape).to(torch.int8)
        zero_points = torch.randint(-middle, middle, (ROWS, NUM_GROUPS)).to(torch.int8)
        scale = torch.rand(ROWS, NUM_GROUPS) + 0.5
        packed_zero_points = pack_to_int32(zero_points, bits, packed_dim=0).contiguous()
        name = f"compressed-{bits}"
        golden[f"{name}/weight_packed"] = pack_to_int32(codes, bits)
        golden[f"{name}/weight_zero_point"] = packed_zero_points
        golden[f"{name}/weight_scale"] = scale
        golden[f"{name}/weight_shape"] = torch.tensor(weight.shape)
        column_zero_points = zero_points.float().repeat_interleave(GROUP_SIZE, 1)
        column_scale = scale.repeat_interleave(GROUP_SIZE, 1)
        golden[f"{name}/means"] = (codes - column_zero_points) * column_scale
    return golden


def pack_awq(folder: Path) -> dict[str, torch.Tensor]:
    library = load_module(folder / "awq" / "utils" / "packing_utils.py")
    limits = torch.iinfo(torch.int32)

    def random_words(rows: int) -> torch.Tensor:
        shape = (rows, ROWS // 8)
        return torch.randint(limits.min, limits.max, shape, dtype=torch.int32)

    codes = random_words(COLUMNS)
    zero_points = random_words(NUM_GROUPS)
    scales = torch.rand(NUM_GROUPS, ROWS) + 0.5
    values = library.dequantize_gemm(codes, zero_points, scales, 4, GROUP_SIZE)
    return {
        "awq/qweight": codes,
        "awq/qzeros": zero_points,
        "awq/scales": scales,
        "awq/means": values.T.contiguous(),
    }


def pack_gptq(folder: Path, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    library = load_module(folder / "auto_gptq" / "nn_modules" / "qlinear" / "qlinear_cuda_old.py")
    golden: dict[str, torch.Tensor] = {}
    for bits in (2, 3, 4, 8):
        largest_code = 2**bits - 1
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False).half()
        linear.weight.data = weight.half()
        groups = weight.unflatten(1, (-1, GROUP_SIZE))
        low = groups.amin(-1)
        high = groups.amax(-1)
        scales = ((high - low) / largest_code).half()
        zero_points = (-low / scales).round().clamp(1, largest_code)
        g_idx = torch.arange(COLUMNS) // GROUP_SIZE
        packed = library.QuantLinear(bits, GROUP_SIZE, COLUMNS, ROWS, False)
        packed.pack(linear, scales.float(), zero_points.float(), g_idx)
        name = f"gptq-{bits}"
        for suffix in ("qweight", "qzeros", "scales", "g_idx"):
            golden[f"{name}/{suffix}"] = getattr(packed, suffix)
        golden[f"{name}/means"] = packed(torch.eye(COLUMNS).half()).T.contiguous()
    return golden


def main() -> None:
    torch.manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS)
    golden = {
        "weight": weight,
        **pack_bitsandbytes(weight),
        **pack_compressed_tensors(weight),
        **pack_awq(Path(sys.argv[1])),
        **pack_gptq(Path(sys.argv[2]), weight),
    }
    save_file({name: tensor.contiguous().clone() for name, tensor in golden.items()}, GOLDEN_FILE)


if __name__ == "__main__":
    main()
