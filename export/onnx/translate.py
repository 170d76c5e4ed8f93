"""From a module or a graph to ONNX, by torch's exporter, or by its older one where that fails."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import onnx
import torch

from compress.artifacts.graph_model import GraphModel, program_of
from compress.common.errors import StageFailed
from compress.graph.axis_bounds import axis_limit_facts
from compress.graph.torch_export import with_flat_outputs
from export.onnx.lowering import innermost_reason, lower
from export.onnx.passes.float16 import holds, refuse_bfloat16
from export.parity import compare

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from compress.artifacts.artifact import Artifact
    from compress.artifacts.eager_model import EagerModel
    from compress.common.forward import Predictor
    from compress.common.signature import Signature

logger = logging.getLogger(__name__)


class Translation(NamedTuple):
    """How a model became ONNX."""

    exporter: Literal["dynamo", "legacy"]
    half: bool
    """Whether weights are float16."""
    limits: dict[str, Any]
    """Facts on how large axes may be; the older exporter knows none."""
    problem: str = ""
    """Why the usual exporter failed, where the older one did not."""


def translate(
    source: EagerModel | GraphModel, opset: int | None, title: str
) -> tuple[onnx.ModelProto, Translation]:
    """Return a model as ONNX, and how; where torch's exporter fails, its older one has a try.

    Args:
        source: what is exported; a graph has no module that the older exporter could trace.
        opset: version of the operator set; the exporter's default where None.
        title: name of the stage, for the log.

    Raises:
        StageFailed: no exporter can translate the model; the usual one's reason is told.
    """
    try:
        program = program_of(source)
        refuse_bfloat16(program)
        limits = axis_limit_facts(program, source.signature, title)
        half = holds(program, torch.float16)
        graph = lower(program, source.signature, opset, emptied=True)
        return graph, Translation("dynamo", half, limits)
    except StageFailed as error:
        if isinstance(source, GraphModel):
            raise
        module = source.load()
        traced = _traced(module, source.signature, opset)
        if traced is None:
            raise
        problem = str(error)
    logger.warning(
        "%s: %s; exported by torch's older, deprecated exporter instead (dynamo=False)",
        *(title, problem),
    )
    half = any(tensor.dtype is torch.float16 for tensor in module.state_dict().values())
    return traced, Translation("legacy", half, {}, problem)


def prove_equal(
    source: Artifact,
    expected: Predictor,
    got: Predictor,
    seen: Sequence[tuple[torch.Tensor, ...]],
    translation: Translation,
    operators: Container[str],
) -> None:
    """Compare a translation with its source.

    Args:
        source: what was translated.
        expected: its answers.
        got: the translation's.
        seen: batches of real inputs.
        translation: how it was made.
        operators: those that it is made of.

    Raises:
        StageFailed: they answer otherwise; where the older exporter was tried, the usual one's
            failure is told first.
    """
    try:
        limits = translation.limits.get("axis_limits")
        compare.compare(source, expected, got, seen, limits, operators)
    except StageFailed as error:
        if not translation.problem:
            raise
        raise StageFailed(
            f"{translation.problem} (what torch's older exporter writes is wrong: {error})"
        ) from error


def _traced(
    module: torch.nn.Module, signature: Signature, opset: int | None
) -> onnx.ModelProto | None:
    """Return a module as the older exporter traces it; None where it fails, or guesses."""
    inputs = signature.example()
    try:
        with torch.no_grad(), _refusing_guesses(), TemporaryDirectory() as folder:
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
            return onnx.load(file)
    except Exception as error:  # noqa: BLE001 - the usual exporter's failure is told instead
        logger.debug("the older exporter failed too: %s", innermost_reason(error))
        return None


@contextlib.contextmanager
def _refusing_guesses() -> Iterator[None]:
    """Raise where tracing records a branch or number that other inputs would change; be quiet."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),  # whole graphs, at errors
    ):
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", torch.jit._trace.TracerWarning)
        yield
