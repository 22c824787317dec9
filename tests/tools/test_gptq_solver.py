"""The GPTQ algorithm has less error than rounding to the nearest code."""

from __future__ import annotations

import torch

from bloomery.quant.int4 import quantize_int4
from bloomery.tools.gptq_solver import GptqResult, solve_gptq


def dequantize(result: GptqResult, bits: int) -> torch.Tensor:
    middle = 1 << bits - 1
    return (result.codes.float() - middle) * result.scale[:, result.g_idx.long()]


def output_error(values: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor) -> float:
    """|(values - weight) x|^2 / |weight x|^2, summed over the inputs x of the Hessian."""
    error = values - weight
    error_norm = ((error @ hessian) * error).sum()
    weight_norm = ((weight @ hessian) * weight).sum()
    return float(error_norm / weight_norm)


def test_gptq_has_less_output_error_than_rounding() -> None:
    torch.manual_seed(0)
    mixing = torch.randn(64, 64) * torch.logspace(0, -2, 64)  # makes the inputs correlated
    x = torch.randn(500, 64) @ mixing
    weight = torch.randn(48, 64)
    hessian = x.T @ x
    rounded = quantize_int4(weight, 4, 32).dequantize()
    rounding_error = output_error(rounded, weight, hessian)
    for act_order in (False, True):
        solved = dequantize(solve_gptq(weight, hessian, 4, 32, act_order), 4)
        assert output_error(solved, weight, hessian) < 0.6 * rounding_error


def test_columns_without_inputs_keep_their_values() -> None:
    torch.manual_seed(0)
    weight = torch.randn(32, 64)
    x = torch.randn(100, 64)
    x[:, 10:20] = 0
    values = dequantize(solve_gptq(weight, x.T @ x, 8, 32), 8)
    assert (values - weight)[:, 10:20].norm() < 0.02 * weight[:, 10:20].norm()
