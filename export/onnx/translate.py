"""From a module or a graph to ONNX: by torch's exporter, or by its older one where that fails."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from compress.artifacts.graph_model import GraphModel, program_of
from compress.common.errors import StageFailed
from compress.common.forward import plain_attention
from compress.export.common.runtime import NO_BFLOAT16
from compress.export.onnx.lowering import innermost_reason, lower
from compress.export.onnx.passes.float_layers import has_weights_of
from compress.export.onnx.proto_io import read
from compress.graph.axis_bounds import input_limit_facts
from compress.graph.torch_export import with_flat_outputs

if TYPE_CHECKING:
    import onnx_ir as ir

    from compress.artifacts.eager_model import EagerModel
    from compress.common.signature import Signature

logger = logging.getLogger(__name__)

BY_OLDER_EXPORTER = "by torch's older, deprecated exporter: "
"""How the warning begins that a file has in its manifest; why the usual exporter failed follows."""


class Translation(NamedTuple):
    """How a model became ONNX."""

    exporter: Literal["dynamo", "legacy"]
    half: bool
    """Whether weights are float16."""
    facts: dict[str, Any]
    """Largest sizes of axes and rows of tables (the older exporter knows none), or a warning for
    the manifest."""


def translate(
    source: EagerModel | GraphModel, opset: int | None, title: str
) -> tuple[ir.Model, Translation]:
    """Return a model as ONNX; where torch's exporter fails, its older one is tried.

    Raise StageFailed with the usual exporter's message where both fail.
    """
    try:
        program = program_of(source)
        if has_weights_of(program, torch.bfloat16):
            raise StageFailed(NO_BFLOAT16)
        facts = input_limit_facts(program, source.signature, title)
        half = has_weights_of(program, torch.float16)
        graph = lower(program, source.signature, opset, free_weights=True)
        return graph, Translation("dynamo", half, facts)
    except StageFailed as error:
        if isinstance(source, GraphModel):
            raise  # a graph has no module that the older exporter could trace
        module = source.load()
        legacy = _export_legacy(module, source.signature, opset)
        if legacy is None:
            raise
        problem = str(error)
    logger.warning(
        "%s: %s; exported by torch's older, deprecated exporter instead (dynamo=False)",
        *(title, problem),
    )
    half = any(tensor.dtype is torch.float16 for tensor in module.state_dict().values())
    facts = {"warnings": [BY_OLDER_EXPORTER + problem]}
    return legacy, Translation("legacy", half, facts)


def _export_legacy(
    module: torch.nn.Module, signature: Signature, opset: int | None
) -> ir.Model | None:
    """Return a module as the older exporter traces it; None where it fails."""
    inputs = signature.example()
    try:
        with (
            torch.no_grad(),
            plain_attention(),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),  # it prints whole graphs at errors
            TemporaryDirectory() as folder,
        ):
            warnings.simplefilter("ignore")
            # Tracing recorded a branch or a number that other inputs would change.
            warnings.simplefilter("error", torch.jit._trace.TracerWarning)
            file = Path(folder) / "model.onnx"
            torch.onnx.export(
                with_flat_outputs(module, inputs),
                inputs,
                file,
                dynamo=False,
                input_names=[spec.name for spec in signature.inputs],
                output_names=[spec.name for spec in signature.outputs],
                dynamic_axes={
                    spec.name: {i: d for i, d in enumerate(spec.shape) if isinstance(d, str)}
                    for spec in signature.inputs
                },
                opset_version=opset,
            )
            return read(file, weights=True)
    except Exception as error:  # noqa: BLE001 - the usual exporter's failure is raised instead
        logger.debug("the older exporter failed too: %s", innermost_reason(error))
        return None
