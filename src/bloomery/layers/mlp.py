"""The feed-forward block of a decoder layer, and the activations of all MLPs."""

from __future__ import annotations

from bloomery.fusion import ActivationEpilogue, NormPrologue
from bloomery.kernels.activation import CLAMPED_SWIGLU
from bloomery.layers.linear import AddResidual, LinearLayer, ResidualStream
from bloomery.spec import MlpSpec


def build_activation(
    spec: MlpSpec, params: tuple[float, float, float] = (0.0, 0.0, 0.0)
) -> ActivationEpilogue:
    """Return the activation of an MLP; `params` are the learned ones, if it has some."""
    if spec.clamp is not None:
        limit, alpha, offset = spec.clamp.limit, spec.clamp.alpha, spec.clamp.up_offset
        return ActivationEpilogue(CLAMPED_SWIGLU, True, (float(limit), float(alpha), float(offset)))
    return ActivationEpilogue(spec.activation, spec.gated, params)


class MlpBlock:
    """down(activation(up(x))), or down(activation(gate) * up) where the activation is gated."""

    def __init__(self, activation: ActivationEpilogue, up: LinearLayer, down: LinearLayer):
        self.activation = activation
        self.up = up
        self.down = down

    def __call__(
        self,
        x: ResidualStream,
        prologue: NormPrologue | None = None,
        epilogue: AddResidual | None = None,
    ) -> ResidualStream:
        """x [tokens, hidden] -> [tokens, hidden]."""
        activated = self.up(x, prologue, self.activation)
        if epilogue is None:
            return self.down(activated)
        return self.down(activated, None, epilogue)
