"""GraphModel: a torch.export program at rest; what quantization writes and exporters lower."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from compress.core.artifact import Artifact, Predictor
from compress.core.eager import predicting
from compress.core.errors import ArtifactInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class GraphModel(Artifact):
    """An ATen graph with its weights, quantize and dequantize operators included."""

    kind: ClassVar[str] = "graph"
    payload: ClassVar[str] = "model.pt2"

    def program(self) -> torch.export.ExportedProgram:
        """Return the exported program.

        Raises:
            ArtifactInvalid: the file is not a program that this torch can read.
        """
        import torch

        try:
            return torch.export.load(self.payload_path)
        except Exception as error:
            raise ArtifactInvalid(
                f"{self.payload_path}: {type(error).__name__}: {error}"
            ) from error

    @contextmanager
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Give the graph, run by PyTorch, as a predictor."""
        with predicting(self.program().module().to(device), device, threads) as predict:
            yield predict

    def parameters(self) -> int:
        """Count the weights; scales and zero points are not weights."""
        from compress.core.measure import count_graph_weights

        return count_graph_weights(self.program())

    def macs(self) -> int:
        """Count multiply-accumulates for one sample."""
        from compress.core.measure import count_macs

        return count_macs(self.program().module(), self.signature.example(batch=1))
