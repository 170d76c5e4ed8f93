"""Trace a module's axis graph: which channels of which tensors can only be removed together.

torch.export's ATen graph is executed on integer labels instead of numbers (see
``compress.pruning.dependency.rules.channel_labels``). Grouping coupled channels is the idea of Fang
et al., "DepGraph: Towards Any Structural Pruning" (2023); here the groups follow from the traced
operators, so that no layer has to be annotated.
"""

from __future__ import annotations

import operator
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from compress.common.counts import count
from compress.common.errors import StageFailed, first_line
from compress.common.forward import plain_attention
from compress.graph.torch_export import flat_outputs
from compress.pruning.dependency.channel_groups import AxisGraph, build_axis_graph
from compress.pruning.dependency.rules import elementwise
from compress.pruning.dependency.rules.channel_labels import (
    WILD,
    LabelBook,
    Labels,
    SizeLabels,
    Weight,
    channels_first,
    varies,
)
from compress.pruning.dependency.rules.op_call import Call, pin_all
from compress.pruning.dependency.rules.registry import RULES, rule_key
from compress.pruning.dependency.sized_calls import CALL_KEY, SizedCallRecorder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.export import ExportedProgram

    from compress.pruning.dependency.sized_calls import SizedCall

TENSORS = (torch.Tensor, Weight)
"""What stands for a tensor while the graph runs on labels."""


def trace(
    module: nn.Module, inputs: Sequence[torch.Tensor], *, across_norms: bool = False
) -> AxisGraph:
    """Trace the axis graph of a module in eval mode.

    Channels over which normalisations take statistics are pinned without ``across_norms``.

    Raises:
        StageFailed: torch.export cannot trace the module.
    """
    recorder = SizedCallRecorder(module)
    with fx.traceback.preserve_node_meta(), recorder:
        program = export_graph(module, inputs)
    return label_axes(program, module, recorder.calls, across_norms=across_norms)


def label_axes(
    program: ExportedProgram,
    module: nn.Module,
    calls: Sequence[SizedCall] = (),
    *,
    across_norms: bool = False,
) -> AxisGraph:
    """Derive the axis graph of a module from its exported graph.

    ``calls`` are those that its nodes are marked with, see :class:`SizedCallRecorder`.
    """
    # Tied weights have one name in each of their modules. A module that is itself registered under
    # two names counts once, because slicing changes the module, not its registration.
    names: dict[int, tuple[str, ...]] = {}
    for prefix, owner in module.named_modules():
        for short, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                own = names.get(id(tensor), ())
                names[id(tensor)] = (*own, f"{prefix}.{short}".lstrip("."))
    book = LabelBook(across_norms=across_norms)
    _propagate_labels(program, module, names, book, calls)
    labels_to_class, reasons = book.resolve()
    first_to_all = {own[0]: own for own in names.values()}
    return build_axis_graph(book, labels_to_class, reasons, first_to_all, calls)


def export_graph(module: nn.Module, inputs: Sequence[torch.Tensor]) -> ExportedProgram:
    """Export a module's ATen graph.

    Raises:
        StageFailed: torch.export cannot trace it.
    """
    # With gradients enabled, torch.export refuses in-place operators on views.
    with warnings.catch_warnings(), torch.no_grad(), plain_attention():
        # torch 2.13 warns that recurrent layers keep a list of their weights.
        warnings.filterwarnings("ignore", "The tensor attributes? self", UserWarning)
        try:
            # Not strict: Python runs the module, so that more models can be traced than by Dynamo.
            with flat_outputs(module):
                count("traces")
                return torch.export.export(module, tuple(inputs), strict=False)
        except Exception as error:
            raise StageFailed(
                f"torch.export cannot trace {type(module).__name__}, so its channels cannot be "
                f"followed: {type(error).__name__}: {first_line(error)}"
            ) from error


def _propagate_labels(
    program: ExportedProgram,
    module: nn.Module,
    names: dict[int, tuple[str, ...]],
    book: LabelBook,
    calls: Sequence[SizedCall],
) -> None:
    """Run the exported graph on labels, operator by operator, which state what is equal."""
    values = _placeholder_values(program, module, names, book)
    # Nodes that the outputs depend on; attention weights, for one, are often computed and dropped.
    live: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if node.is_impure() or any(user in live for user in node.users):
            live.add(node)
    users = {node: len(node.users) for node in program.graph.nodes}
    for node in program.graph.nodes:
        if node.op == "output":
            for result in node.all_input_nodes:
                if isinstance(values[result], TENSORS):
                    book.pin(values[result], "it is an output of the model")
        elif node.target is operator.getitem:
            values[node] = values[node.args[0]][node.args[1]]
        elif node.op == "call_function":
            call = _call(node, values)
            book.is_dead_code = node not in live
            if not call.shapes:
                values[node] = None
            elif call.operator in RULES:
                values[node] = RULES[call.operator](call, book)
            elif torch.Tag.pointwise in getattr(call.target, "tags", ()):
                values[node] = elementwise.pointwise(call, book)
            else:
                # Pinned: less is pruned, but never wrongly.
                values[node] = pin_all(call, book, f"operator {call.operator!r} is not known")
            book.is_dead_code = False
            number = node.meta.get("custom", {}).get(CALL_KEY)
            if calls and number is not None and isinstance(call.target, torch._ops.OpOverload):
                book.sizes += [
                    SizeLabels(number, index, value, channels_first(labels, axis))
                    for index, value, labels, axis in _sizes(call, values[node], calls[number])
                    if varies(labels, axis)
                ]
        elif node.op != "placeholder":
            values[node] = None  # a subgraph, whose caller has no rule
        # Labels are as large as activations: free them after their last use.
        for used in node.all_input_nodes:
            users[used] -= 1
            if not users[used]:
                del values[used]


def _sizes(
    call: Call, result: Any, sized: SizedCall
) -> Iterator[tuple[int, int | tuple[int, ...], Labels, int]]:
    """Yield each size that a call writes: its index and value, and the labels and axis it is of."""
    if call.operator in ("view", "reshape", "_unsafe_view", "unflatten", "expand"):
        if isinstance(result, torch.Tensor):
            first = call["dim"] % call["self"].dim() if call.operator == "unflatten" else 0
            rank = len(call["sizes"]) if call.operator == "unflatten" else result.dim()
            for axis, index in sized.sizes(rank).items():
                yield index, result.shape[first + axis], result, first + axis
    elif call.operator in ("split", "split_with_sizes", "chunk"):
        labels = call.tensors[0]
        if isinstance(labels, torch.Tensor):
            axis = call["dim"] % labels.dim()
            yield 0, tuple(shape[axis] for shape in call.shapes), labels, axis
    elif call.operator == "slice" and call["step"] == 1:
        labels = call.tensors[0]
        if isinstance(labels, torch.Tensor):
            axis = call["dim"] % labels.dim()
            for index, name in sized.bounds(axis, labels.dim()):
                bound: int = call[name]
                if 0 < bound <= labels.shape[axis]:
                    yield index, bound, labels.narrow(axis, 0, bound), axis


def _placeholder_values(
    program: ExportedProgram,
    module: nn.Module,
    names: dict[int, tuple[str, ...]],
    book: LabelBook,
) -> dict[fx.Node, Any]:
    """Return a ``Weight`` or labels for each input of the graph, None for those without shape."""
    every_name = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    first_names = {name: names[id(tensor)][0] for name, tensor in every_name}
    signature = program.graph_signature
    weights = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    stored = {**program.state_dict, **program.constants}
    constants = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    values: dict[fx.Node, Any] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        fake, name = node.meta.get("val"), weights.get(node.name)
        value: Weight | Labels | None = None
        if isinstance(fake, torch.Tensor) and name is not None:
            # A vector of flags or integers may have one entry per channel; a table has no channels.
            is_vector = sum(size > 1 for size in fake.shape) == 1
            is_constant = fake.numel() == 1 or not (fake.is_floating_point() or is_vector)
            axes = tuple(range(fake.dim()))
            value = Weight(first_names.get(name, name), tuple(fake.shape), axes, is_constant)
        elif isinstance(fake, torch.Tensor):
            is_features = node.name in signature.user_inputs and fake.is_floating_point()
            label = book.pinned_label("it is an input of the model") if is_features else WILD
            value = torch.tensor(label).expand(fake.shape)
        # Indices and masks that do not depend on the input keep their numbers.
        constant = stored.get(constants.get(node.name, ""))
        if isinstance(constant, torch.Tensor) and not constant.is_floating_point():
            if not isinstance(value, Weight):
                value = Weight(node.name, constant.shape, tuple(range(constant.dim())), True)
            value = replace(value, value=constant)
        values[node] = value
    return values


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Call:
    """Collect a node's arguments by name, with labels in place of tensors."""
    given = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
    arguments = {str(i): value for i, value in enumerate(given[0])} | dict(given[1])
    name = str(node.target)
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema
        name = schema.name
        arguments = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        arguments |= dict(zip((a.name for a in schema.arguments), given[0], strict=False))
        arguments |= given[1]
    value = node.meta.get("val")
    results = pytree.tree_leaves(value)
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    has_tensors = any(isinstance(result, torch.Tensor) for result in results)
    return Call(
        operator=rule_key(name),
        target=node.target,
        arguments=arguments,
        tensors=[x for x in pytree.tree_leaves(list(arguments.values())) if isinstance(x, TENSORS)],
        shapes=[tuple(getattr(result, "shape", ())) for result in results] if has_tensors else [],
        gives_list=isinstance(value, list | tuple),
        module=str(stack[-1]).partition("@")[0] if stack else "",  # name@1 is its second call
        node=node.name,
    )
