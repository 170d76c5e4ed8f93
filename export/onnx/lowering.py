"""From a module or a graph to ONNX: torch's exporter and our rewrites, or its older exporter."""

from __future__ import annotations

import copy
import functools
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import onnx_ir as ir
import torch
from onnx_ir.passes.common import NameFixPass
from onnxscript.rewriter.rules.common import _no_op
from onnxscript.values import TracedOnnxFunction
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.fx.passes import type_promotion

from compress.artifacts.graph_model import GraphModel, program_of
from compress.common.errors import StageFailed, first_line
from compress.common.foreign.patching import patched_attribute
from compress.common.forward import batched_experts, plain_attention
from compress.common.process import gc_disabled
from compress.export.common.runtime import NO_BFLOAT16, NO_UINT16_IN_OPSET, UINT16_OPSET
from compress.export.onnx.decomposition import retraced_where_needed
from compress.export.onnx.graph import INPUT, OUTPUT, count_operators, name_values_, strip_
from compress.export.onnx.passes.dynamic_quant import TRANSLATIONS as DYNAMIC
from compress.export.onnx.passes.dynamic_quant import fuse_integer_products_, lower_quantized_rnns_
from compress.export.onnx.passes.float_layers import (
    drop_whole_slices_,
    fold_zero_pads_,
    has_weights_of,
    pool_means_,
    separate_float_layers_,
    separate_shared_integers_,
    separate_transposes_,
)
from compress.export.onnx.passes.matmul_nbits import use_packed_weights
from compress.export.onnx.passes.operator_forms import TRANSLATIONS as FORMS
from compress.export.onnx.passes.stored_integers import INT4_OPSET, compact_, has_four_bit_weights
from compress.export.onnx.proto_io import read
from compress.graph.library_cache import cached_composite_ops
from compress.graph.torch_export import (
    any_sequence_length,
    dynamic_shapes,
    input_limit_facts,
    with_flat_outputs,
)

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from compress.artifacts.eager_model import EagerModel
    from compress.common.signature import Signature

logger = logging.getLogger(__name__)
NOISY_LOGGERS = (
    "torch.onnx._internal.exporter._core",
    "torch.onnx._internal.exporter._registration",
    "onnxscript.optimizer._constant_folding",  # it leaves alone what it cannot fold
    "onnx_ir.passes.common.initializer_deduplication",
)
UNHELPFUL = (
    *("torchvision is not installed", "Evaluation failed", "Failed to infer the signature"),
    *("Skipping constant folding", "Skipped deduplication"),
    "nn_module_stack not found",  # of operators that were added to a graph
    "Setting shape and type of tensors is not supported",  # of operators with several outputs
)
TRANSLATIONS = {**DYNAMIC, **FORMS}
"""Operators that torch's exporter has no ONNX form for, or one that loses digits → our form."""
_build_registry = ONNXRegistry.from_torchlib
# onnxscript 0.7 leaves out sums with numbers within 1e-8 of 0, and products with those within 1e-5
# of 1: log(x + 1e-10) became log(x).
for _rule in _no_op.rules:
    for _value in (value for node in _rule._target_pattern for value in node.inputs):
        if hasattr(_value, "_abs_tol"):
            _value._abs_tol = _value._rel_tol = 0.0
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
            known_types(),
            retraced_where_needed(),
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
    for spec, value in zip(signature.inputs, model.graph.inputs, strict=True):
        value.shape = ir.Shape(spec.shape)  # the exporter writes 32*height_parts for a multiple
    lower_quantized_rnns_(model)
    fuse_integer_products_(model)
    drop_whole_slices_(model)
    fold_zero_pads_(model)
    pool_means_(model)
    separate_float_layers_(model)
    separate_shared_integers_(model)
    if half:
        separate_transposes_(model)
    NameFixPass()(model)  # a pass may have made a name that the exporter or the model has
    written = model.opset_imports[""]
    if opset is not None and written != opset:
        raise StageFailed(f"opset {opset} was asked for and the exporter wrote {written}")
    return model


def translate_small(source: EagerModel | GraphModel, title: str) -> tuple[ir.Model, dict[str, Any]]:
    """Return a model as `export_onnx` writes it by default, without metadata; and its facts."""
    graph, translation = translate(source, None, title)
    compact_(graph)
    strip_(graph)
    return graph, {"operators": count_operators(graph), **translation.facts}


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
        return not any(part in record.getMessage() for part in UNHELPFUL)

    with warnings.catch_warnings(), ExitStack() as restore:
        for noisy in map(logging.getLogger, NOISY_LOGGERS):
            noisy.addFilter(matters)
            restore.callback(noisy.removeFilter, matters)
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
        # Inputs that share a named axis are meant to.
        warnings.filterwarnings("ignore", message=r"# The axis name: .* will not be used")
        # torch 2.15 calls it in its own form of LSTM layers.
        warnings.filterwarnings("ignore", "_check_is_size will be removed", FutureWarning)
        yield


def cached_registry() -> AbstractContextManager[None]:
    """Have torch's exporter use a copy of a cached table of operators, in a block."""

    # torch 2.13 builds it from 600 functions in each export: a third of a small model's time.
    def copy_of_registry(**version: int) -> Any:
        # Operators that are not registered yet are left out, and torchvision registers its own.
        registry = copy.copy(_registry("torchvision" in sys.modules, **version))
        registry.functions = {name: [*forms] for name, forms in registry.functions.items()}
        return registry

    return patched_attribute(ONNXRegistry, "from_torchlib", staticmethod(copy_of_registry))


def numbers_for_tensors() -> AbstractContextManager[None]:
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

    return patched_attribute(type_promotion, "find_compatible_op_overload", find_overload)


def known_types() -> AbstractContextManager[None]:
    """Have torch's exporter read the types of operators that it promotes none for, in a block."""
    # To promote types, torch 2.13 runs each operator on fake tensors: a tenth of the export's time.
    interpreter: Any = getattr(type_promotion, "_TypePromotionInterpreter", type_promotion)

    def run_node(self: Any, node: torch.fx.Node) -> Any:
        with self._set_current_node(node):
            if rule := type_promotion.get_type_promotion_rule(node, self.type_promotion_table):
                self._maybe_promote_node(node, rule)  # which sets the values of what it changes
        if node.op == "call_function" and "val" in node.meta:
            return node.meta["val"]
        return torch.fx.Interpreter.run_node(self, node)

    return patched_attribute(interpreter, "run_node", run_node)


@functools.cache
def _registry(_vision: bool, **version: int) -> Any:
    # onnxscript 0.7 parses the source of each function to find its domain, which is its opset's.
    domain_alone = property(lambda self: SimpleNamespace(domain=self.opset.domain))
    with gc_disabled(), patched_attribute(TracedOnnxFunction, "function_ir", domain_alone):
        return _build_registry(**version)


BY_OLDER_EXPORTER = "by torch's older, deprecated exporter: "
"""How the warning begins that a file has in its manifest; why the usual exporter failed follows."""


class Translation(NamedTuple):
    """How a model became ONNX."""

    exporter: Literal["dynamo", "legacy"]
    half: bool
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
    inputs = signature.example()
    try:
        with (
            torch.no_grad(),
            plain_attention(),
            batched_experts(),
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),  # it prints whole graphs at errors
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
