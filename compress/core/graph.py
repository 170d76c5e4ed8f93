"""GraphModel: a torch.export program at rest; what quantization writes and exporters lower."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from compress.core.artifact import Artifact, Predictor, Step
from compress.core.eager import predicting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from compress.core.signature import Signature


class GraphModel(Artifact):
    """An ATen graph with its weights, quantize and dequantize operators included."""

    kind: ClassVar[str] = "graph"
    payload: ClassVar[str] = "model.pt2"

    @classmethod
    def create(
        cls,
        path: Path,
        program: torch.export.ExportedProgram,
        signature: Signature,
        *,
        lineage: tuple[Step, ...] = (),
        facts: dict[str, Any] | None = None,
    ) -> GraphModel:
        """Seal a program.

        Args:
            path: directory of the artifact.
            program: the exported program; it is not changed.
            signature: the model's interface.
            lineage: the stages so far.
            facts: what the producing stage found out.
        """
        from compress.core.program import save_program

        with cls.sealing(path, signature, lineage=lineage, facts=facts) as partial:
            save_program(program, partial / cls.payload)
        return cls.at(path)

    def program(self) -> torch.export.ExportedProgram:
        """Return the exported program; no code that the file might bring is executed.

        Raises:
            ArtifactInvalid: the file is truncated, or holds anything but tensors and a graph.
        """
        from compress.core.program import load_program

        return load_program(self.payload_path)

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
