"""The axis graph: which channels of which tensors can only be removed together.

torch.export's ATen graph is executed on integer labels instead of numbers (see
``compress.pruning.dependency.rules.channel_labels``). The idea of grouping coupled channels is that
of Fang et al.,
"DepGraph: Towards Any Structural Pruning" (2023); here the groups follow from the traced operators,
so that no layer has to be annotated.
"""

from __future__ import annotations

import operator
import warnings
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from compress.common.errors import StageFailed, first_line
from compress.pruning.dependency.channel_groups import AxisGraph, solve
from compress.pruning.dependency.rules import conv_norm, elementwise, layout, matmul, rnn
from compress.pruning.dependency.rules.channel_labels import WILD, LabelBook, Labels, Weight
from compress.pruning.dependency.rules.op_call import Call, Result, Rule, pin_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.export import ExportedProgram

RULES: dict[str, Rule] = {
    **conv_norm.RULES,
    **matmul.RULES,
    **rnn.RULES,
    **elementwise.RULES,
    **layout.RULES,
}


def trace(module: nn.Module, inputs: Sequence[torch.Tensor]) -> AxisGraph:
    """Return the axis graph of a module in eval mode.

    Raises:
        StageFailed: torch.export cannot trace the module.
    """
    book = LabelBook()
    first_names, names = _names(module)
    _propagate_labels(exported(module, inputs), first_names, book)
    return solve(book, names)


def exported(module: nn.Module, inputs: Sequence[torch.Tensor]) -> ExportedProgram:
    """Return a module's ATen graph.

    Raises:
        StageFailed: torch.export cannot trace it.
    """
    # With gradients torch.export refuses in-place operators on views.
    with warnings.catch_warnings(), torch.no_grad():
        # torch 2.13 warns that recurrent layers keep a list of their weights.
        warnings.filterwarnings("ignore", "The tensor attributes? self", UserWarning)
        try:
            _register_output(module, inputs)
            return torch.export.export(module, tuple(inputs), strict=False)
        except Exception as error:
            raise StageFailed(
                f"torch.export cannot trace {type(module).__name__}, so its channels cannot be "
                f"followed: {type(error).__name__}: {first_line(error)}"
            ) from error


def _register_output(module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    """Tell torch.export of a dataclass that a module returns, which it takes only then."""
    kind = type(module(*inputs))
    if is_dataclass(kind) and kind not in pytree.SUPPORTED_NODES:
        torch.export.register_dataclass(kind)


def _names(module: nn.Module) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Return every tensor name → the tensor's first name → its name in each module it is held by.

    Tied weights have one name in each of their modules; a module that is itself held under two
    names gives its tensors two names, of which surgery needs only the first.
    """
    held: dict[int, list[str]] = {}
    for prefix, owner in module.named_modules():
        for short, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                held.setdefault(id(tensor), []).append(f"{prefix}.{short}".lstrip("."))
    every_name = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    first_names = {name: held[id(tensor)][0] for name, tensor in every_name}
    return first_names, {names[0]: tuple(names) for names in held.values()}


def _propagate_labels(
    program: ExportedProgram, first_names: dict[str, str], book: LabelBook
) -> None:
    signature = program.graph_signature
    held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    features = set(signature.user_inputs)
    constants = _constants(program)
    values: dict[fx.Node, Any] = {}
    live = _live(program.graph)
    users = {node: len(node.users) for node in program.graph.nodes}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            name = held.get(node.name)
            name = None if name is None else first_names.get(name, name)
            values[node] = _placeholder(node, name, node.name in features, book)
            if node.name in constants:
                values[node] = _known(node, constants[node.name], values[node])
        elif node.op == "output":
            for result in node.all_input_nodes:
                if isinstance(values[result], torch.Tensor | Weight):
                    book.pin(values[result], "it is an output of the model")
        elif node.target is operator.getitem:
            values[node] = values[node.args[0]][node.args[1]]
        elif node.op == "call_function":
            book.is_moot = node not in live
            values[node] = _execute(_call(node, values), book)
            book.is_moot = False
        else:
            values[node] = None  # a subgraph, whose caller has no rule
        for used in node.all_input_nodes:
            users[used] -= 1
            if not users[used]:
                del values[used]


def _live(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that matter for the outputs; attention weights are often not read."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.is_impure() or any(user in live for user in node.users):
            live.add(node)
    return live


def _placeholder(
    node: fx.Node, weight: str | None, is_user_input: bool, book: LabelBook
) -> Labels | Weight | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    if weight is not None:
        # A vector of flags or integers may have one for each channel; a table of them has none.
        is_vector = sum(size > 1 for size in value.shape) == 1
        is_constant = value.numel() == 1 or not (value.is_floating_point() or is_vector)
        return Weight(weight, tuple(value.shape), tuple(range(value.dim())), is_constant)
    is_features = is_user_input and value.is_floating_point()
    label = book.pinned("it is an input of the model") if is_features else WILD
    return torch.tensor(label).expand(value.shape)


def _constants(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the indices and masks that are known before the model runs, by placeholder."""
    signature = program.graph_signature
    stored = {**program.state_dict, **program.constants}
    names = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    found = ((placeholder, stored.get(name)) for placeholder, name in names.items())
    return {
        placeholder: value
        for placeholder, value in found
        if isinstance(value, torch.Tensor) and not value.is_floating_point()
    }


def _known(node: fx.Node, value: torch.Tensor, found: Labels | Weight | None) -> Weight:
    axes = tuple(range(value.dim()))
    weight = found if isinstance(found, Weight) else Weight(node.name, value.shape, axes, True)
    return replace(weight, value=value)


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Call:
    given = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
    arguments = {str(i): value for i, value in enumerate(given[0])} | dict(given[1])
    name = str(node.target)
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema
        name = schema.name.partition("::")[2]
        arguments = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        arguments |= dict(zip((a.name for a in schema.arguments), given[0], strict=False))
        arguments |= given[1]
    value = node.meta.get("val")
    results = pytree.tree_leaves(value)
    has_tensors = any(isinstance(result, torch.Tensor) for result in results)
    return Call(
        operator=name.rstrip("_"),
        target=node.target,
        arguments=arguments,
        shapes=[tuple(getattr(result, "shape", ())) for result in results] if has_tensors else [],
        gives_list=isinstance(value, list | tuple),
        module=_module(node),
    )


def _module(node: fx.Node) -> str:
    """Return the name of the module that an operator was called in."""
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return str(stack[-1]).partition("@")[0] if stack else ""  # name@1 is its second call


def _execute(call: Call, book: LabelBook) -> Result | Weight | None:
    if not call.shapes:
        return None
    rule = RULES.get(call.operator)
    if rule is not None:
        return rule(call, book)
    if torch.Tag.pointwise in getattr(call.target, "tags", ()):
        return elementwise.pointwise(call, book)
    return pin_all(call, book, f"operator {call.operator!r} is not known")
