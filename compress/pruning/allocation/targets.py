"""Pruning targets: the share of a model's cost that should remain."""

from __future__ import annotations

from typing import Literal, Self, TypeAlias

from pydantic import model_validator

from compress.common.config import Count, Ratio, Settings

Quantity: TypeAlias = Literal["macs", "parameters", "latency"]


class Target(Settings):
    """The share of the model's cost that remains after pruning; exactly one quantity."""

    macs: Ratio | None = None
    """Share of the multiply-accumulates that remains: 0.5 leaves at most half of them."""
    parameters: Ratio | None = None
    """Share of the weights that remains."""
    latency: Ratio | None = None
    """Share of the latency of a call that remains. Where a later stage exports the model to ONNX
    Runtime or OpenVINO for the CPU, it is the latency there: the widths that lose least are solved
    from the times of single kernels, whatever the `scope`, and the result is measured, alternating
    with the unpruned model. Without such a stage, candidates are measured in PyTorch. The same
    tables of kernels in the store lead to the same widths."""
    batch: Count = 1
    """Samples per call when `latency` is measured."""

    @model_validator(mode="after")
    def _one_quantity(self) -> Self:
        given = [name for name in ("macs", "parameters", "latency") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                f"target needs exactly one of macs, parameters and latency, found "
                f"{' and '.join(given) or 'none'}; write target: {{macs: 0.5}}"
            )
        if not self.has_default("batch") and self.latency is None:
            raise ValueError("target.batch is for latency; leave it out")
        return self

    @property
    def quantity(self) -> Quantity:
        """The quantity to reduce."""
        if self.macs:
            return "macs"
        return "parameters" if self.parameters else "latency"

    @property
    def undisturbed(self) -> bool:
        """Whether latency is measured, so that nothing else may run at the same time."""
        return self.latency is not None

    @property
    def share(self) -> float:
        """The share of it that remains."""
        return self.macs or self.parameters or self.latency or 1.0
