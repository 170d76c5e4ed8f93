"""The stage `export_program`: writes a model's torch.export graph as a portable `.pt2` file."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.core.stage import Stage
from compress.export.parity.stored_parity import ComparesStoredFile

if TYPE_CHECKING:
    from compress.core.context import Context

logger = logging.getLogger(__name__)


class ExportProgram(ComparesStoredFile, Stage[EagerModel, GraphModel]):
    """Write the traced graph with its weights as one `.pt2` file, checked against its source.

    It is portable: tied to no processor, and read with `torch.export.load` without the model's code
    or this toolkit. The other exporters read it as well.
    """

    stage: Literal["export_program"] = "export_program"

    def run(self, model: EagerModel, context: Context) -> GraphModel:
        """Trace, write, read back, compare with the source."""
        from compress.common.forward import torch_predictor
        from compress.export.parity.compare import check_parity
        from compress.graph.torch_export import export_program, load_program, save_program

        program = export_program(model.load(), model.signature)
        with GraphModel.atomic_write(
            context.root,
            model.signature,
            lineage=self.lineage(model),
            carried=model.carried_files(),
        ) as partial:
            file = partial / GraphModel.payload
            save_program(program, file)
            try:
                module = load_program(file).module()
            except ArtifactInvalid as error:  # such as a library's own operators
                reason = str(error).removeprefix(f"{file}: ")
                raise StageFailed(f"the graph cannot be stored: {reason}") from error
            with torch_predictor(module, "cpu", context.threads) as graph:
                check_parity(model, graph, context)
        operators = sum(node.op == "call_function" for node in program.graph.nodes)
        logger.info("%s: %d operators", self.title, operators)
        return GraphModel.from_directory(context.root)
