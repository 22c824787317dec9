"""The feed-forward block of a decoder layer."""

from __future__ import annotations

from bloomery.fusion import ActivationEpilogue, NormPrologue
from bloomery.layers.linear import AddResidual, LinearLayer, ResidualStream
from bloomery.spec import MlpSpec


class MlpBlock:
    """down(activation(up(x))), or down(activation(gate) * up) where the spec is gated."""

    def __init__(self, spec: MlpSpec, up: LinearLayer, down: LinearLayer):
        self.up = up
        self.down = down
        self.activation = ActivationEpilogue(spec.activation, spec.gated)

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
