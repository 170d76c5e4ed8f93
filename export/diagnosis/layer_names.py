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
from compress.export.onnx.graph import PACKED_GATHER
from compress.export.onnx.proto_io import SCOPES, read
from compress.export.onnx.stage import OnnxModel
from compress.export.onnx.translate import translate

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx

    from compress.artifacts.artifact import Artifact

TABLES = {"Gather", PACKED_GATHER}
SEPARATOR = "@"
"""Between a module's name and the rest of an operator's or a value's name."""


def plain_export(source: EagerModel | GraphModel) -> tuple[onnx.ModelProto, list[str]]:
    """Return a float model as ONNX, and the modules of its layers with weights and of its tables.

    Raises:
        StageFailed: it has no ONNX form.
    """
    model, _ = translate(source, None, "compress explain")
    modules = set()
    if isinstance(source, EagerModel):
        modules = {name for name, _ in source.load().named_modules()}
    return model, [_module_of(node, modules) for node in layers_of(model)]


def as_onnx(artifact: Artifact) -> onnx.ModelProto:
    """Return an ONNX file's model, or the plain export of a model that is run by PyTorch.

    Raises:
        StageFailed: it is neither, or has no ONNX form.
    """
    if isinstance(artifact, OnnxModel):
        return read(artifact.payload_path, weights=True)
    if isinstance(artifact, EagerModel | GraphModel):
        return translate(artifact, None, "compress explain")[0]
    raise StageFailed(f"{artifact.kind} files are not taken apart; expected an ONNX file")


def layers_of(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Return the layers with weights, in graph order, and then the lookups in tables."""
    return [*weighted_layers(model), *tables_of(model)]


def tables_of(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Return the lookups in stored tables, in graph order; scales of a table's rows are none."""
    tables = {t.name for t in model.graph.initializer if len(t.dims) == 2 and t.dims[1] > 1}
    return [n for n in model.graph.node if n.op_type in TABLES and n.input[0] in tables]


def fitting_names(model: onnx.ModelProto, names: Sequence[str]) -> list[str]:
    """Return the modules of a file's layers; by place and operator where it has more or fewer."""
    layers = layers_of(model)
    if len(layers) == len(names):
        return [*names]
    return [f"layer {place} ({node.op_type})" for place, node in enumerate(layers)]


def modules_by_node(model: onnx.ModelProto, names: Sequence[str]) -> list[str]:
    """Return the module of each operator; one without weights belongs to the layer before it.

    What stands before all layers belongs to the first one that reads it.

    Args:
        model: the file's model.
        names: modules of its layers, as :func:`plain_export` returns them.
    """
    named = zip(layers_of(model), fitting_names(model, names), strict=True)
    of_layer = {node.output[0]: name for node, name in named}
    by_value: dict[str, str] = {}
    found: list[str] = []
    for node in model.graph.node:
        before = (by_value[name] for name in node.input if by_value.get(name))
        module = of_layer.get(node.output[0]) or next(before, "")
        found.append(module)
        by_value |= dict.fromkeys(node.output, module)
    for place in reversed(range(len(found))):
        node = model.graph.node[place]
        if not found[place]:
            found[place] = next((by_value[n] for n in node.output if by_value.get(n)), "")
        for name in node.input:
            by_value[name] = by_value.get(name) or found[place]
    return found


def named_copy(model: onnx.ModelProto, modules: Sequence[str]) -> onnx.ModelProto:
    """Return a model whose operators and inner values have names that begin with their module.

    onnxruntime names what it fuses after the operators that it was made of.
    """
    copy = type(model)()
    copy.CopyFrom(model)
    public = {value.name for value in (*copy.graph.input, *copy.graph.output)}
    names = {"": ""}
    for number, (node, module) in enumerate(zip(copy.graph.node, modules, strict=True)):
        node.name = f"{module}{SEPARATOR}{number}"
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)
        for place, name in enumerate(node.output):
            if name and name not in public:
                names[name] = f"{module}{SEPARATOR}{name}"
                node.output[place] = names[name]
    return copy


def _module_of(node: onnx.NodeProto, modules: set[str]) -> str:
    for name in node.input:
        module = str(name).rpartition(".")[0]
        if module and (not modules or module in modules):
            return module
    scopes = next((p.value for p in node.metadata_props if p.key == SCOPES), "[]")
    inner = [name for name in ast.literal_eval(scopes)[:-1] if name]
    return str(inner[-1] if inner else node.op_type)
