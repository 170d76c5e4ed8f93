"""The stage `export_program`: writes a model's torch.export graph as a portable `.pt2` file."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.common.forward import Predictor, torch_predictor
from compress.export.common.runtime import Runtime
from compress.export.exporter import Exporter

if TYPE_CHECKING:
    from compress.core.context import Context

logger = logging.getLogger(__name__)


class ExportProgram(Exporter[EagerModel, GraphModel]):
    """Write the traced graph with its weights as one `.pt2` file, checked against its source.

    It is portable: tied to no processor, and read with `torch.export.load` without the model's code
    or this toolkit. The other exporters read it as well.

        - {stage: export_program, name: portable}
    """

    stage: Literal["export_program"] = "export_program"

    runtime: ClassVar[Runtime] = Runtime(name="graph", title="torch.export")

    def write(self, model: EagerModel, file: Path, context: Context) -> dict[str, Any]:
        """Trace and write."""
        from compress.graph.torch_export import export_program, save_program

        program = export_program(model.load(), model.signature)
        save_program(program, file)
        operators = sum(node.op == "call_function" for node in program.graph.nodes)
        logger.info("%s: %d operators", self.title, operators)
        return {}

    @contextmanager
    def open(
        self, file: Path, model: EagerModel, facts: dict[str, Any], context: Context
    ) -> Iterator[Predictor]:
        """Read the file back."""
        from compress.graph.torch_export import load_program

        try:
            module = load_program(file).module()
        except ArtifactInvalid as error:  # such as a library's own operators
            reason = str(error).removeprefix(f"{file}: ")
            raise StageFailed(f"the graph cannot be stored: {reason}") from error
        with torch_predictor(module, "cpu", context.threads) as graph:
            yield graph
