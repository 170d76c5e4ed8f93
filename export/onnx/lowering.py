"""From a torch.export program to an ONNX model, by torch's own exporter and our rewrites."""

from __future__ import annotations

import copy
import functools
import logging
import re
import sys
import warnings
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from onnxscript.values import TracedOnnxFunction
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.fx.passes import type_promotion

from compress.common.errors import StageFailed, first_line
from compress.common.process import gc_disabled
from compress.export.common.runtime import NO_UINT16_IN_OPSET, UINT16_OPSET
from compress.export.onnx.graph import INPUT, OUTPUT, name_values_, strip_
from compress.export.onnx.passes.dynamic_quant import TRANSLATIONS as DYNAMIC
from compress.export.onnx.passes.dynamic_quant import fuse_integer_products_, lower_quantized_rnns_
from compress.export.onnx.passes.float_layers import (
    has_weights_of,
    separate_float_layers_,
    separate_shared_integers_,
    separate_transposes_,
)
from compress.export.onnx.passes.matmul_nbits import use_packed_weights
from compress.export.onnx.passes.operator_forms import TRANSLATIONS as FORMS
from compress.export.onnx.passes.stored_integers import INT4_OPSET, has_four_bit_weights
from compress.export.onnx.passes.zero_pads import fold_zero_pads_
from compress.export.onnx.proto_io import write
from compress.graph.axis_bounds import dynamic_shapes
from compress.graph.library_cache import cached_composite_ops, patched_attribute
from compress.graph.rnn import any_sequence_length

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import onnx_ir as ir
    from torch.export import ExportedProgram

    from compress.common.signature import Signature

NOISY_LOGGERS = (
    "torch.onnx._internal.exporter._registration",
    "onnxscript.optimizer._constant_folding",  # it leaves alone what it cannot fold
    "onnx_ir.passes.common.initializer_deduplication",
)
UNHELPFUL = (
    *("torchvision is not installed", "Evaluation failed", "Failed to infer the signature"),
    *("Skipping constant folding", "Skipped deduplication"),
)
TRANSLATIONS = {**DYNAMIC, **FORMS}
"""Operators that torch's exporter has no ONNX form for, or one that loses digits → our form."""
_build_registry = ONNXRegistry.from_torchlib
TERMINAL_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def lower(
    program: ExportedProgram, signature: Signature, opset: int | None, *, free_weights: bool = False
) -> ir.Model:
    """Translate a program; inputs, outputs and axes get the signature's names.

    Without an `opset` it is the exporter's default. The model's weights are the program's own, but
    where it has a transposed or folded copy: `free_weights` empties what it does not read. Raise
    StageFailed where an operator has no ONNX form, or the operator set is not available.
    """
    if any(torch.uint16 in node.args for node in program.graph.nodes):
        if opset is not None and opset < UINT16_OPSET:
            raise StageFailed(NO_UINT16_IN_OPSET.format(opset))
        opset = opset or UINT16_OPSET
    if opset is None and has_four_bit_weights(program):
        opset = INT4_OPSET
    inputs = {INPUT.format(i): spec.name for i, spec in enumerate(signature.inputs)}
    outputs = {OUTPUT.format(i): spec.name for i, spec in enumerate(signature.outputs)}
    half = has_weights_of(program, torch.float16)
    try:
        with (
            _quiet(),
            any_sequence_length(),
            cached_registry(),
            cached_composite_ops(),
            numbers_for_tensors(),
            # With gradients, attention with a learned mask is decomposed otherwise than traced.
            torch.no_grad(),
        ):
            program = use_packed_weights(program, signature)
            make_attention_contiguous_(program)
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
    model = exported.model
    if free_weights:
        # Deleting the program would not free them: onnxscript (0.7) references the last graphs that
        # it rewrote.
        read = {id(getattr(tensor, "raw", None)) for tensor in model.graph.initializers.tensors()}
        for weight in program.state_dict.values():
            if id(weight) not in read:
                weight.data = weight.data.new_empty(0)
    name_values_(model, inputs | outputs)
    lower_quantized_rnns_(model)
    fuse_integer_products_(model)
    fold_zero_pads_(model)
    separate_float_layers_(model)
    separate_shared_integers_(model)
    if half:
        separate_transposes_(model)
    written = model.opset_imports[""]
    if opset is not None and written != opset:
        raise StageFailed(f"opset {opset} was asked for and the exporter wrote {written}")
    return model


def lower_to_file(
    program: ExportedProgram, signature: Signature, opset: int | None, file: Path
) -> None:
    """Translate a program, and write it as a small ONNX file."""
    model = lower(program, signature, opset)
    strip_(model)
    write(model, file)


def make_attention_contiguous_(program: ExportedProgram) -> None:
    """Copy the transposed outputs of fused attention into contiguous memory, in place."""
    # A view after the traced kernel may not fit the strides that attention has once the exporter
    # has decomposed it. In ONNX the copy is no operator.
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


def innermost_reason(error: BaseException) -> str:
    """Return in one line what started a chain of errors; the outer ones say how to report it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {TERMINAL_ESCAPE.sub('', first_line(error))}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide notes of the exporter that no user can act on."""

    def matters(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not any(part in text for part in UNHELPFUL)

    loggers = [logging.getLogger(name) for name in NOISY_LOGGERS]
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


@contextmanager
def cached_registry() -> Iterator[None]:
    """Have torch's exporter use a copy of a cached table of operators, in a block."""

    # torch 2.13 builds it from 600 functions in each export: a third of a small model's time.
    def copy_of_registry(**version: int) -> Any:
        # Operators that are not registered yet are left out, and torchvision registers its own.
        registry = copy.copy(_registry("torchvision" in sys.modules, **version))
        registry.functions = {name: [*forms] for name, forms in registry.functions.items()}
        return registry

    with patched_attribute(ONNXRegistry, "from_torchlib", staticmethod(copy_of_registry)):
        yield


@contextmanager
def numbers_for_tensors() -> Iterator[None]:
    """Have torch's exporter take numbers for operands that are tensors, as calls do, in a block."""
    # Of `1.0 - integers`, torch 2.13 makes `sub.Tensor(1.0, floats)`, whose overload it then does
    # not find: its check of types takes no number for a tensor.
    find: Any = getattr(type_promotion, "find_compatible_op_overload", None)

    def find_overload(packet: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        try:
            return find(packet, args, named)
        except RuntimeError:
            as_tensors = (torch.tensor(x) if isinstance(x, int | float) else x for x in args)
            return find(packet, tuple(as_tensors), named)

    with patched_attribute(type_promotion, "find_compatible_op_overload", find_overload):
        yield


@functools.cache
def _registry(_vision: bool, **version: int) -> Any:
    # onnxscript 0.7 parses the source of each function to find its domain, which is its opset's.
    domain_alone = property(lambda self: SimpleNamespace(domain=self.opset.domain))
    with gc_disabled(), patched_attribute(TracedOnnxFunction, "function_ir", domain_alone):
        return _build_registry(**version)
