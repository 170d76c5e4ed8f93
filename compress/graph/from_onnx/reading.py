"""Reads an ONNX file: its graph with constants folded, and its weights."""

import base64
import zlib
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from onnx.inliner import inline_selected_functions
from torch import nn

from compress.common.atomic_files import file_below
from compress.common.errors import ArtifactInvalid, first_few, raised_as
from compress.graph.from_onnx.module import STANDARD, OnnxModule, torch_dtype, weight_names
from compress.graph.from_onnx.registry import OPERATORS
from compress.graph.from_onnx.shape_tensor import LARGEST, from_numpy

MOVES = {"Concat", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}
MOVED = 2**24  # elements of the largest constant that is moved when a file is read, not in each run
NAMED = 5  # nodes whose names a refusal lists for each operator


def read_graph(file: Path) -> ir.Model:
    """Read a graph, with functions inlined, constants folded and operators all known.

    Weights in a file beside it stay there. Raises ArtifactInvalid with all operators that have no
    equivalent, or where such a file is missing, too short or outside of the folder.
    """
    model = ir.load(file)
    for value, tensor in find_weights_(model, file):
        with raised_as(ArtifactInvalid, f"{file}: weight {value.name!r} in a file beside it"):
            array = tensor.numpy()  # onnx-ir maps it
        if tensor.nbytes <= 8 * LARGEST:  # which may be a shape, and is packed with the graph
            value.const_value = ir.tensor(np.array(array), dtype=tensor.dtype, name=value.name)
    return simplify(model, str(file))


def find_weights_(model: ir.Model, file: Path) -> list[tuple[ir.Value, ir.ExternalTensor]]:
    """Let weights in files beside a model's be read, in place; return them.

    Raises ArtifactInvalid where such a file is outside of the folder.
    """
    ir.external_data.set_base_dir(model.graph, file.parent)  # of what nodes hold
    found: list[tuple[ir.Value, ir.ExternalTensor]] = []
    for value in (v for graph in model.graphs() for v in graph.initializers.values()):
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            # onnx and onnx-ir take neither links, of which the cache of Hugging Face's hub is made,
            # nor files with two names, as package managers make them. Resolved paths they take.
            place = file_below(file, str(tensor.location)).resolve()
            where = (place, tensor.offset, tensor.length, tensor.dtype)
            name = str(value.name)
            value.const_value = ir.ExternalTensor(*where, shape=tensor.shape, name=name)
            found.append((value, value.const_value))
    return found


def simplify(model: ir.Model, what: str) -> ir.Model:
    """Fold constants and expand operators that ONNX defines by others; raises ArtifactInvalid."""
    from onnxscript.optimizer import fold_constants, inline

    from compress.graph.from_onnx.patterns import fuse

    inline(model)
    fold_constants(model, should_fold=_is_folded, output_size_limit=MOVED)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    fuse(model)
    _expand_functions(model)
    passes.RemoveUnusedNodesPass()(model)
    missing: dict[str, list[str]] = defaultdict(list)
    for node in model.graph.all_nodes():
        if not is_known(node):
            full = ".".join(filter(None, (node.domain, node.op_type)))
            missing[full].append(str(node.name or node.outputs[0].name))
    if missing:
        listed = ", ".join(
            f"{name} ({len(nodes)}: {first_few(nodes, NAMED)})"
            for name, nodes in sorted(missing.items())
        )
        raise ArtifactInvalid(f"{what}: has operators without an equivalent in PyTorch: {listed}")
    return model


def _is_folded(node: ir.Node) -> bool | None:
    """Return whether a node that reads constants is computed now; None for the default limits."""
    # These limits are a few thousand elements, and no ConstantOfShape, of which torch's exporter
    # computes the sizes of paddings.
    if node.op_type == "ConstantOfShape":
        shape = node.inputs[0].const_value  # type: ignore[union-attr]
        return True if shape is not None and shape.numpy().prod() <= LARGEST else None
    # Exporters put together the weights of recurrent layers, and transpose those of linear ones.
    users = (use.node for value in node.inputs if value is not None for use in value.uses())
    return True if all(user.op_type in MOVES for user in users) else None


def is_known(node: ir.Node) -> bool:
    """Return whether an operator has an equivalent."""
    return node.domain in STANDARD and node.op_type in OPERATORS


def _expand_functions(model: ir.Model) -> None:
    """Replace operators without an equivalent that ONNX itself defines by others, in place."""
    tried = set[tuple[str, str]]()
    while True:
        nodes = (node for node in model.graph.all_nodes() if not is_known(node))
        unknown = {(node.domain, node.op_type) for node in nodes} - tried
        if not unknown:
            return
        tried |= unknown
        passes.AddDefaultAttributesPass()(model)
        proto = ir.to_proto(model)
        proto.graph.value_info.add()  # the type of inputs that are left out, which it asks for
        with suppress(Exception):  # where it does not know a type, the operator is refused
            inlined = inline_selected_functions(proto, [*unknown], inline_schema_functions=True)
            model.graph = ir.from_proto(inlined).graph


def pack(model: ir.Model) -> str:
    """Return a graph without its weights as text, from which `build` makes the module again."""
    proto = ir.to_proto(model)
    weights = weight_names(model.graph)
    for tensor in proto.graph.initializer:
        if tensor.name in weights:
            kept = {"name": tensor.name, "dims": tensor.dims, "data_type": tensor.data_type}
            tensor.CopyFrom(onnx.TensorProto(**kept))
    return base64.b64encode(zlib.compress(proto.SerializeToString(), 9)).decode()


def weights_of(module: OnnxModule, model: ir.Model) -> dict[str, torch.Tensor]:
    """Return a module's state dict from its graph: files beside it mapped, transposed as views."""
    state: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {k: v for g in model.graphs() for k, v in g.initializers.items()}
    own, made = module.state_dict(keep_vars=True), dict[int, torch.Tensor]()
    for key, source in module.sources.items():
        if id(own[key]) not in made:  # not a weight that two layers share
            tensor = _mapped(values[source.initializer].const_value)
            tensor = tensor if source.change is None else source.change(tensor)
            tensor = tensor.reshape(own[key].shape)  # a bias may have further axes of 1
            is_weight = isinstance(own[key], nn.Parameter)
            made[id(own[key])] = nn.Parameter(tensor) if is_weight else tensor
        state[key] = made[id(own[key])]
    return state


def _mapped(tensor: Any) -> torch.Tensor:
    array = tensor.numpy()
    is_packed = array.nbytes != tensor.nbytes  # several numbers in a byte
    if not isinstance(tensor, ir.ExternalTensor) or is_packed or not tensor.nbytes:
        return from_numpy(array)
    raw = np.memmap(tensor.path, np.uint8, "c", tensor.offset or 0, tensor.nbytes)
    found = torch.from_numpy(raw).view(torch_dtype(tensor)).reshape(array.shape)
    return found if found.data_ptr() % found.itemsize == 0 else found.clone()


def load(file: Path) -> OnnxModule:
    """Read an ONNX file as a module in eval mode, with contiguous weights."""
    module = module_of(read_graph(file))
    for weight in module.parameters():
        weight.data = weight.data.contiguous()
    return module


def module_of(model: ir.Model) -> OnnxModule:
    """Build the module of a graph, with the weights of :func:`weights_of`."""
    with torch.device("meta"):
        module = OnnxModule(model)
    unstored = {k: v for k, v in module.state_dict().items() if k not in module.sources}
    batches_seen = {key: torch.zeros_like(count, device="cpu") for key, count in unstored.items()}
    module.load_state_dict(batches_seen | weights_of(module, model), assign=True)
    return module.eval()
