"""Which layers of a file float kernels multiply, as shares of the multiply-accumulates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from compress.export.diagnosis.costs import CountedCost
from compress.export.diagnosis.profile import Profile, as_onnx, fitting_names, plain_export
from compress.export.latency.float_layers import is_float, weighted_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir
    import torch

    from compress.artifacts.artifact import Artifact
    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.core.context import Context
    from compress.export.diagnosis.costs import Rerun


@dataclass
class MacsDiagnosis(CountedCost):
    """A file of which float kernels multiply too much; it is saved where integer kernels do it."""

    profile: Profile
    float_profile: Profile
    """Of the plain export of the float model that the file was made of."""
    quantized: frozenset[str]
    """Modules whose weights are stored in integers."""
    inputs: Sequence[torch.Tensor]
    threads: int

    @classmethod
    def create(
        cls,
        file: Artifact,
        source: EagerModel | GraphModel,
        missing: float,
        rerun: Rerun,
        context: Context,
    ) -> Self:
        """Count by module what the kernels of a file and of its float model multiply in a call.

        Args:
            file: what float kernels compute too much of.
            source: the float model that it was made of.
            missing: share of the multiply-accumulates that integer kernels lack.
            rerun: makes the file with other settings of a stage.
            context: data and threads of the run.

        Raises:
            StageFailed: the file is not taken apart, or the float model cannot be exported.
        """
        model = as_onnx(file)
        plain, names = plain_export(source)
        inputs = context.measured_batches(file.signature, file.signature.smallest_batch)[0]
        profile, float_profile = (
            Profile.measure(m, names, inputs, context.threads) for m in (model, plain)
        )
        own = fitting_names(model, names)
        layers = zip(own, weighted_layers(model), strict=False)  # tables follow the layers
        quantized = frozenset(name for name, layer in layers if not is_float(layer))
        return cls(
            missing, rerun, names, profile, float_profile, quantized, inputs, context.threads
        )

    def share_of(self, layer: str, *, floats_alone: bool) -> float | None:
        """Return the share of all multiply-accumulates that float kernels do for a module."""
        total = self.profile.macs
        return self.profile.float_macs.get(layer, 0) / total if total else None

    def saved_by(self, changed: ir.Model) -> float:
        """Return by how much the float kernels' share is smaller in a changed file."""
        profile = Profile.measure(changed, self.names, self.inputs, self.threads)
        return self.profile.float_share - profile.float_share
