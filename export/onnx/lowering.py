"""From a torch.export program to an ONNX model, by torch's own exporter."""

from __future__ import annotations

import logging
import re
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from compress.common.errors import StageFailed, first_line
from compress.graph.axis_bounds import dynamic_shapes
from compress.graph.library_cache import cached_composite_ops
from compress.graph.rnn import any_sequence_length
from export.common.targets import SIXTEEN_BITS_SINCE, no_sixteen_bits
from export.onnx.metadata import INPUT, OUTPUT, rename_
from export.onnx.passes.dynamic_quant import TRANSLATIONS as DYNAMIC
from export.onnx.passes.dynamic_quant import multiply_integers_
from export.onnx.passes.float16 import holds, part_transposes_
from export.onnx.passes.float_layers import keep_floats_
from export.onnx.passes.matmul_nbits import with_packed_products
from export.onnx.passes.rnn import compute_recurrences_
from export.onnx.passes.stable_forms import TRANSLATIONS as STABLE
from export.onnx.proto_io import proto_of
from export.onnx.torch_registry import operators_read_once

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx
    from torch.export import ExportedProgram

    from compress.common.signature import Signature

LOGGERS = (
    "torch.onnx._internal.exporter._registration",
    "onnxscript.optimizer._constant_folding",  # it leaves alone what it cannot fold
)
TRANSLATIONS = {**DYNAMIC, **STABLE}
"""Forms of operators that torch's exporter has none for, or loses digits with."""
TERMINAL_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def lower(
    program: ExportedProgram, signature: Signature, opset: int | None, *, emptied: bool = False
) -> onnx.ModelProto:
    """Translate a program; inputs, outputs and axes bear the signature's names.

    Args:
        program: the model's graph.
        signature: its interface.
        opset: version of the operator set; the exporter's default where None.
        emptied: whether the program's weights go, so that they are not in memory twice.

    Raises:
        StageFailed: an operator has no ONNX form, or the operator set is not available.
    """
    opset = _wide_enough(opset, program)
    inputs = {INPUT.format(i): spec.name for i, spec in enumerate(signature.inputs)}
    outputs = {OUTPUT.format(i): spec.name for i, spec in enumerate(signature.outputs)}
    half = holds(program, torch.float16)
    try:
        # With gradients, attention with a learned mask is decomposed otherwise than it was traced.
        with _quiet(), any_sequence_length(), _looking_once(), torch.no_grad():
            program = with_packed_products(program, signature)
            lay_out_attention_(program)
            exported = torch.onnx.export(
                program,
                dynamo=True,
                input_names=list(inputs),
                output_names=list(outputs),
                dynamic_shapes=dynamic_shapes(signature),
                opset_version=opset,
                custom_translation_table=TRANSLATIONS,
                verbose=False,
            )
    except Exception as error:
        raise StageFailed(f"the model has no ONNX form: {innermost_reason(error)}") from error
    if exported is None:
        raise StageFailed("torch.onnx.export gave nothing back, expected a model")
    model = proto_of(exported, emptied=emptied)
    rename_(model, inputs | outputs)
    compute_recurrences_(model)
    multiply_integers_(model)
    keep_floats_(model)
    if half:
        part_transposes_(model)
    found = model.opset_import[0].version
    if opset is not None and found != opset:
        raise StageFailed(f"opset {opset} was asked for and the exporter wrote {found}")
    return model


def lay_out_attention_(program: ExportedProgram) -> None:
    """Copy fused attention's transposed answers into memory of their own, in place.

    They lie in memory as the tracer's kernel left them, and then as what the exporter decomposes it
    to leaves them: a reshape made a view for the first does not fit the second. In ONNX the copy
    is no operator.
    """
    aten = torch.ops.aten
    layout: dict[str, Any] = {"memory_format": torch.contiguous_format}
    for part in program.graph_module.modules():
        graph = part.graph if isinstance(part, torch.fx.GraphModule) else torch.fx.Graph()
        for attention in graph.find_nodes(
            op="call_function", target=aten.scaled_dot_product_attention.default
        ):
            for moved in attention.users:
                if moved.target in (aten.transpose.int, aten.permute.default):
                    with graph.inserting_after(moved):
                        copy = graph.call_function(aten.clone.default, (moved,), layout)
                    copy.meta["val"] = moved.meta["val"]
                    moved.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy)


def _wide_enough(opset: int | None, program: ExportedProgram) -> int | None:
    """Return the operator set asked for, or the one that 16-bit activations need."""
    if not any(torch.uint16 in node.args for node in program.graph.nodes):
        return opset
    if opset is not None and opset < SIXTEEN_BITS_SINCE:
        raise StageFailed(no_sixteen_bits(opset))
    return opset or SIXTEEN_BITS_SINCE


def innermost_reason(error: BaseException) -> str:
    """Return in one line what started a chain of errors; the outer ones tell how to report it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {TERMINAL_ESCAPE.sub('', first_line(error))}"


@contextmanager
def _looking_once() -> Iterator[None]:
    with operators_read_once(), cached_composite_ops():
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide notes of the exporter that no user can act on."""

    def matters(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "torchvision is not installed" not in text and "Evaluation failed" not in text

    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(matters)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
            # Inputs that share a named axis are meant to.
            warnings.filterwarnings("ignore", message=r"# The axis name: .* will not be used")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(matters)
