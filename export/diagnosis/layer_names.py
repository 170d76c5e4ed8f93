"""Names of the user's modules for the operators of a file that has lost them.

Exporters shorten names, and stored graphs have no modules. The layers with weights come in the same
order in every file that is made from a model, so a plain export of the float model names them.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed
from compress.export.latency.float_layers import weighted_layers
from compress.export.onnx.graph import PACKED_GATHER, inputs_of, sizes, stored
from compress.export.onnx.proto_io import read
from compress.export.onnx.stage import OnnxModel
from compress.export.onnx.translate import translate

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from compress.artifacts.artifact import Artifact

TABLES = {"Gather", PACKED_GATHER}
SCOPES = "pkg.torch.onnx.name_scopes"
"""Property that torch's exporter gives each operator: names of its modules, as a list's text."""
SEPARATOR = "@"
"""Between a module's name and the rest of an operator's or a value's name."""


def plain_export(source: EagerModel | GraphModel) -> tuple[ir.Model, list[str]]:
    """Return a float model as ONNX, and the modules of its layers with weights and of its tables.

    Raises:
        StageFailed: it has no ONNX form.
    """
    model, _ = translate(source, None, "compress explain")
    modules = set()
    if isinstance(source, EagerModel):
        modules = {name for name, _ in source.load().named_modules()}
    return model, [_module_of(node, modules) for node in layers_of(model)]


def as_onnx(artifact: Artifact) -> ir.Model:
    """Return an ONNX file's model, or the plain export of a model that is run by PyTorch.

    Raises:
        StageFailed: it is neither, or has no ONNX form.
    """
    if isinstance(artifact, OnnxModel):
        return read(artifact.payload_path, weights=True)
    if isinstance(artifact, EagerModel | GraphModel):
        return translate(artifact, None, "compress explain")[0]
    raise StageFailed(f"{artifact.kind} files are not taken apart; expected an ONNX file")


def layers_of(model: ir.Model) -> list[ir.Node]:
    """Return the layers with weights, in graph order, and then the lookups in tables."""
    return [*weighted_layers(model), *tables_of(model)]


def tables_of(model: ir.Model) -> list[ir.Node]:
    """Return the lookups in stored tables, in graph order; scales of a table's rows are none."""
    lookups = [(node, stored(node.inputs[0])) for node in model.graph if node.op_type in TABLES]
    return [n for n, table in lookups if table and len(s := sizes(table)) == 2 and s[1] > 1]


def fitting_names(model: ir.Model, names: Sequence[str]) -> list[str]:
    """Return the modules of a file's layers; by place and operator where it has more or fewer."""
    layers = layers_of(model)
    if len(layers) == len(names):
        return [*names]
    return [f"layer {place} ({node.op_type})" for place, node in enumerate(layers)]


def modules_by_node(model: ir.Model, names: Sequence[str]) -> list[str]:
    """Return the module of each operator; one without weights belongs to the layer before it.

    What stands before all layers belongs to the first one that reads it.

    Args:
        model: the file's model.
        names: modules of its layers, as :func:`plain_export` returns them.
    """
    named = zip(layers_of(model), fitting_names(model, names), strict=True)
    of_layer = dict(named)
    by_value: dict[ir.Value, str] = {}
    found: dict[ir.Node, str] = {}
    for node in model.graph:
        before = (by_value[value] for value in inputs_of(node) if by_value.get(value))
        found[node] = of_layer.get(node) or next(before, "")
        by_value |= dict.fromkeys(node.outputs, found[node])
    for node in reversed(model.graph):
        if not found[node]:
            found[node] = next((by_value[v] for v in node.outputs if by_value.get(v)), "")
        for value in inputs_of(node):
            by_value[value] = by_value.get(value) or found[node]
    return [*found.values()]


def named_copy(model: ir.Model, modules: Sequence[str]) -> ir.Model:
    """Return a model whose operators and inner values have names that begin with their module.

    onnxruntime names what it fuses after the operators that it was made of.
    """
    copy = model.clone()
    for number, (node, module) in enumerate(zip(copy.graph, modules, strict=True)):
        node.name = f"{module}{SEPARATOR}{number}"
        for value in node.outputs:
            if value.name and not value.is_graph_output():
                value.name = f"{module}{SEPARATOR}{value.name}"
    return copy


def _module_of(node: ir.Node, modules: set[str]) -> str:
    for value in inputs_of(node):
        module = str(value.name).rpartition(".")[0]
        if module and (not modules or module in modules):
            return module
    scopes = node.metadata_props.get(SCOPES, "[]")
    inner = [name for name in ast.literal_eval(scopes)[:-1] if name]
    return str(inner[-1] if inner else node.op_type)
