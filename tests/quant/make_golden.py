"""Small matrices packed by the formats' own libraries, and what these unpack them to: tests/golden/quant.safetensors.

    python -m tests.quant.make_golden AWQ_FOLDER GPTQ_FOLDER

needs bitsandbytes and compressed-tensors installed, and the unpacked archives of autoawq 0.2.9 and auto-gptq 0.7.1, of
which single files are read: neither package imports beside a current torch.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file

OUT = Path(__file__).parent.parent / "golden" / "quant.safetensors"
ROWS = 32
WIDTH = 64
GROUP = 32


def module(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def bitsandbytes(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    import bitsandbytes.functional as bnb

    found: dict[str, torch.Tensor] = {}
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            name = f"bnb-{kind}{'-nested' if nested else ''}"
            codes, state = bnb.quantize_4bit(
                weight, blocksize=64, quant_type=kind, compress_statistics=nested
            )
            found[f"{name}/weight"] = codes
            found |= {
                f"{name}/weight.{part}": tensor
                for part, tensor in state.as_dict(packed=True).items()
            }
            found[f"{name}/means"] = bnb.dequantize_4bit(codes, state)
    codes, largest, _ = bnb.int8_vectorwise_quant(weight.half())
    found |= {"bnb-int8/weight": codes, "bnb-int8/SCB": largest}
    found["bnb-int8/means"] = bnb.int8_vectorwise_dequant(codes, largest)
    return found


def compressed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    found: dict[str, torch.Tensor] = {}
    for bits in (4, 8):
        half = 2 ** (bits - 1)
        codes = torch.randint(-half, half, weight.shape).to(torch.int8)
        zeros = torch.randint(-half, half, (ROWS, WIDTH // GROUP)).to(torch.int8)
        scale = torch.rand(ROWS, WIDTH // GROUP) + 0.5
        name = f"compressed-{bits}"
        found |= {
            f"{name}/weight_packed": pack_to_int32(codes, bits),
            f"{name}/weight_zero_point": pack_to_int32(zeros, bits, packed_dim=0).contiguous(),
            f"{name}/weight_scale": scale,
            f"{name}/weight_shape": torch.tensor(weight.shape),
        }
        zero, step = (part.float().repeat_interleave(GROUP, 1) for part in (zeros, scale))
        found[f"{name}/means"] = (codes - zero) * step
    return found


def awq(folder: Path) -> dict[str, torch.Tensor]:
    library = module(folder / "awq" / "utils" / "packing_utils.py")
    whole = torch.iinfo(torch.int32)
    words = torch.randint(whole.min, whole.max, (WIDTH, ROWS // 8), dtype=torch.int32)
    zeros = torch.randint(whole.min, whole.max, (WIDTH // GROUP, ROWS // 8), dtype=torch.int32)
    scales = torch.rand(WIDTH // GROUP, ROWS) + 0.5
    means = library.dequantize_gemm(words, zeros, scales, 4, GROUP).T.contiguous()
    return {"awq/qweight": words, "awq/qzeros": zeros, "awq/scales": scales, "awq/means": means}


def gptq(folder: Path, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    library = module(folder / "auto_gptq" / "nn_modules" / "qlinear" / "qlinear_cuda_old.py")
    found: dict[str, torch.Tensor] = {}
    for bits in (2, 3, 4, 8):
        linear = torch.nn.Linear(WIDTH, ROWS, bias=False).half()
        linear.weight.data = weight.half()
        groups = weight.unflatten(1, (-1, GROUP))
        low = groups.amin(-1)
        high = groups.amax(-1)
        scales = ((high - low) / (2**bits - 1)).half()
        zeros = (-low / scales).round().clamp(1, 2**bits - 1)
        made = library.QuantLinear(bits, GROUP, WIDTH, ROWS, False)
        made.pack(linear, scales.float(), zeros.float(), torch.arange(WIDTH) // GROUP)
        name = f"gptq-{bits}"
        found |= {
            f"{name}/{part}": getattr(made, part)
            for part in ("qweight", "qzeros", "scales", "g_idx")
        }
        found[f"{name}/means"] = made(torch.eye(WIDTH).half()).T.contiguous()
    return found


def main() -> None:
    torch.manual_seed(0)
    weight = torch.randn(ROWS, WIDTH)
    found = {"weight": weight} | bitsandbytes(weight) | compressed(weight) | awq(Path(sys.argv[1]))
    found |= gptq(Path(sys.argv[2]), weight)
    save_file({name: tensor.contiguous().clone() for name, tensor in found.items()}, OUT)


if __name__ == "__main__":
    main()
