"""Trace which channels of which tensors can only be removed together, and slices of such groups.

torch.export's ATen graph is executed on integer labels instead of numbers (see
``compress.pruning.dependency.rules.channel_labels``). Entries of weights with equal labels belong
to one *channel class*: they can only be removed together. Channels whose entries lie in the same
tensors along the same axes form a group. Grouping coupled channels is the idea of Fang et al.,
"DepGraph: Towards Any Structural Pruning" (2023); here the groups follow from the traced operators,
so that no layer has to be annotated.
"""

from __future__ import annotations

import ast
import operator
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from compress.artifacts.edits.named_sizes import (
    INDEX,
    PARTED,
    SHAPED,
    calls_in,
    method_source,
    sizes_of,
)
from compress.common.counts import count
from compress.common.errors import StageFailed, raised_as
from compress.common.forward import batched_experts, plain_attention
from compress.graph.library_cache import cheap_shape_cache, without_stack_traces
from compress.graph.torch_export import flat_outputs
from compress.pruning.dependency.rules import elementwise
from compress.pruning.dependency.rules.channel_labels import (
    WILD,
    LabelBook,
    Labels,
    Weight,
    channels_first,
    varies,
)
from compress.pruning.dependency.rules.op_call import Call, pin_all
from compress.pruning.dependency.rules.registry import RULES, rule_key

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from compress.artifacts.edits.named_sizes import SizedExpression
    from compress.pruning.dependency.rules.channel_labels import Slot

TORCH = f"{Path(torch.__file__).parent}{os.sep}"
CALL_KEY = "sized_call"  # where a node of the graph has the index of its call among those recorded
Kept = dict[str, dict[int, tuple[int, ...]]]  # tensor name → axis → indices that stay, ascending
Value = int | list[int]
"""Value of an attribute: a number of channels or of blocks of channels, or the sizes of parts."""
TENSORS = (torch.Tensor, Weight)  # what stands for a tensor while the graph runs on labels


@dataclass(frozen=True)
class SizedCall:
    """A call, or an index, in a method of a module that takes sizes, and can be replaced."""

    module: str
    kind: type
    """The module's class."""
    method: str
    call: SizedExpression
    tree: ast.FunctionDef
    """The method in which the call lies."""

    def sizes(self, rank: int) -> dict[int, int]:
        """Return axis of a result with ``rank`` axes → index of its size among those of the call.

        Sizes that lie in an unpacked sequence, and one that torch computes (-1), are left out.
        """
        sizes = sizes_of(self.call) or []
        unpacked = [i for i, size in enumerate(sizes) if isinstance(size, ast.Starred)]
        # Behind an unpacked sequence axes are counted from the end.
        from_end = rank - len(sizes)
        first = unpacked[0] if unpacked else len(sizes)
        last = unpacked[-1] if unpacked else -1
        return {
            (i if i < first else i + from_end): i
            for i, size in enumerate(sizes)
            if (i < first or i > last) and ast.unparse(size) != "-1"
        }

    def bounds(self, axis: int, rank: int) -> Iterator[tuple[int, str]]:
        """Yield the bounds of the slice of an axis: index among all bounds, "start" or "end"."""
        if not isinstance(self.call, ast.Subscript):
            return
        index = self.call.slice
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        place = 0
        for i, part in enumerate(parts):
            if isinstance(part, ast.Slice):
                is_after = any(not isinstance(before, ast.Slice) for before in parts[:i])
                for bound, name in ((part.lower, "start"), (part.upper, "end")):
                    if bound is not None:
                        if axis == (i + rank - len(parts) if is_after else i):
                            yield place, name
                        place += 1

    def attribute(self, index: int) -> str | None:
        """Return the name of the module's attribute that a size is, or None for other code."""
        size = (sizes_of(self.call) or [])[index]
        own = self.tree.args.args[0].arg
        is_own = isinstance(size, ast.Attribute) and isinstance(size.value, ast.Name)
        return size.attr if is_own and size.value.id == own else None  # type: ignore[attr-defined]


class SizedCallRecorder(TorchFunctionMode):
    """Marks the nodes of a graph, while torch.export makes it, with the calls that led to them."""

    def __init__(self, module: nn.Module) -> None:
        """Record the calls of a module and of those in it."""
        super().__init__()
        self.calls: list[SizedCall] = []
        self._names = {id(part): name for name, part in reversed([*module.named_modules()])}
        self._known: dict[tuple[object, ...], int | None] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch; a call that takes sizes marks the nodes that it makes."""
        index = None
        if getattr(func, "__name__", "") in (*SHAPED, *PARTED, INDEX):
            index = self._index(sys._getframe(1))
        if index is None:
            return func(*args, **(kwargs or {}))
        with fx.traceback.annotate({CALL_KEY: index}):
            return func(*args, **(kwargs or {}))

    def _index(self, frame: FrameType | None) -> int | None:
        """Return the index of the call that runs in the innermost frame that is not torch's."""
        while frame is not None and frame.f_code.co_filename.startswith(TORCH):
            frame = frame.f_back
        if frame is None:
            return None
        # Lines and columns of the expression that the frame runs, start and end in turn.
        _, end_line, _, end_column = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        # A comprehension has a frame of its own within that of its method.
        inner = frame
        while frame is not None and not self._is_method(frame):
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename != inner.f_code.co_filename:
            return None
        owner = frame.f_locals[frame.f_code.co_varnames[0]]
        key = (id(owner), frame.f_code, end_line, end_column)
        if key not in self._known:
            kind, name = type(owner), frame.f_code.co_name
            tree = method_source(kind, name, frame.f_code)
            self._known[key] = None
            for call in calls_in(tree) if tree is not None else ():
                # The end, as the start of a call in a chain over several lines is not the tree's.
                if (call.end_lineno, call.end_col_offset) == (end_line, end_column):
                    assert tree is not None
                    self._known[key] = len(self.calls)
                    self.calls.append(SizedCall(self._names[id(owner)], kind, name, call, tree))
                    break
        return self._known[key]

    def _is_method(self, frame: FrameType) -> bool:
        code = frame.f_code
        if not code.co_argcount or not code.co_varnames:
            return False
        return id(frame.f_locals.get(code.co_varnames[0])) in self._names


@dataclass(frozen=True)
class ChannelGroup:
    """Interchangeable channels: each has entries in the same tensors along the same axes."""

    slots: tuple[Slot, ...]
    """The tensors and axes that hold the channels."""
    channels: tuple[int, ...]
    """Class of each channel, in the order of the first slot's indices."""
    produced_slots: tuple[Slot, ...]
    """The slots along which a layer outputs the channels, such as a convolution's axis 0."""
    consumed_slots: tuple[Slot, ...]
    """The slots along which the next layers only read the channels."""

    producers: tuple[str, ...]
    """What outputs the channels: names of modules, or of the outermost module's own weights."""
    entries: tuple[int, ...]
    """Indices that one channel takes in each slot, such as a head's width."""
    number: int = 1
    """Which one it is of its first producer's groups: parts into which it is split are several."""

    @property
    def producer_modules(self) -> tuple[str, ...]:
        """Modules that output the channels; the outermost one's name is empty."""
        return _modules(self.produced_slots)

    @property
    def owners(self) -> tuple[str, ...]:
        """Modules that output, normalise, scale or shift the channels, not those that read them."""
        return _modules(slot for slot in self.slots if slot not in self.consumed_slots)

    @property
    def name(self) -> str:
        """The first producer of the channels, or the tensor that holds them: `conv`, `conv#2`."""
        first = next(iter(self.producers), self.slots[0][0])
        return first if self.number == 1 else f"{first}#{self.number}"


@dataclass(frozen=True)
class AxisGraph:
    """Which channels of a module can be removed together, and which not at all and why."""

    groups: tuple[ChannelGroup, ...]
    classes: Mapping[Slot, torch.Tensor]
    """Tensor and axis → the class of each index, `(axis size,)`."""
    pinned: Mapping[str, str]
    """Module → why some or all of its channels cannot be removed."""
    names: Mapping[str, tuple[str, ...]]
    """Tensor → all names it is registered under (tied weights have several), its own first."""
    counted: Mapping[str, torch.Tensor]
    """Layer whose attributes count the channels of its input → the class of each channel."""
    statistics: Mapping[str, tuple[int, torch.Tensor]]
    """Node that takes statistics over channels → the axis of its input, and each index's class."""
    sized: tuple[SizedAxis, ...]
    """Sizes of axes with channels that the module's code writes in calls."""
    class_count: int
    """Number of classes, pinned ones included."""

    def kept(self, removed: Iterable[int]) -> Kept:
        """Compute the indices that stay when classes are removed, for every tensor that shrinks."""
        stays = torch.ones(self.class_count, dtype=torch.bool)
        stays[torch.tensor([*removed], dtype=torch.int64)] = False
        kept: Kept = {}
        for (tensor, axis), classes in self.classes.items():
            if not (left := stays[classes]).all():
                indices = tuple(left.nonzero().flatten().tolist())
                for name in self.names[tensor]:
                    kept.setdefault(name, {})[axis] = indices
        return kept


@dataclass(frozen=True, eq=False)
class SizedAxis:
    """A size that the module's code writes in a call, and the channels of that axis."""

    call: SizedCall
    index: int
    """Index of the size among those of the call."""
    value: int | tuple[int, ...]
    """The size, or those of the parts of the axis."""
    counted: torch.Tensor | None
    """Class of each index of the axis; None where the axis lies within channels or across."""

    def change(self) -> Change | None:
        """Return how the size changes with a slice, if it is an attribute made for it."""
        attribute = self.call.attribute(self.index)
        if self.counted is None or attribute not in getattr(self.call.kind, "named_sizes", ()):
            return None
        unit = 1 if isinstance(self.value, int) else self.value
        return Change(f"{self.call.module}.{attribute}".lstrip("."), self.counted, unit)


# eq=False, because tensors compare element by element.
@dataclass(frozen=True, eq=False)
class Change:
    """An attribute that counts channels, such as a number of heads, and so changes with a slice."""

    attribute: str
    """Dotted name in the module."""
    counted: torch.Tensor
    """Classes of the channels that it counts."""
    unit: int | tuple[int, ...] = 1
    """Channels counted as one, or the sizes of the parts into which they are split."""

    def value(self, removed: torch.Tensor) -> Value:
        """Compute the attribute's value after some classes were removed."""
        stays = ~torch.isin(self.counted, removed)
        if isinstance(self.unit, int):
            return int(stays.sum()) // self.unit
        return [int(part.sum()) for part in torch.split(stays, list(self.unit))]


@dataclass(frozen=True)
class GroupSlice:
    """The channels to remove from one group."""

    group: ChannelGroup
    removed: tuple[int, ...]
    """Classes of the channels to remove."""
    changes: tuple[Change, ...] = field(default=(), compare=False)
    """Attributes that change with it."""

    @property
    def before(self) -> int:
        """Channels of the group before slicing."""
        return len(self.group.channels)

    @property
    def after(self) -> int:
        """Channels of the group after slicing."""
        return self.before - len(self.removed)


@dataclass(frozen=True)
class SlicePlan:
    """Slices of several groups of a module together, and why other channels stay."""

    kept: Kept
    attributes: dict[str, Value]
    """Dotted attribute → value after slicing."""
    groups: tuple[GroupSlice, ...]
    pinned: dict[str, str]
    """Module whose channels stay → why."""

    @classmethod
    def combine(
        cls, slices: Sequence[GroupSlice], pinned: dict[str, str], graph: AxisGraph
    ) -> SlicePlan:
        """Combine slices of several groups into one plan for the whole module."""
        removed = [channel for one in slices for channel in one.removed]
        removed_classes = torch.tensor(sorted(removed), dtype=torch.int64)
        attributes = {
            change.attribute: change.value(removed_classes)
            for one in slices
            for change in one.changes
        }
        return cls(graph.kept(removed), attributes, tuple(slices), pinned)


def build_axis_graph(
    book: LabelBook, names: Mapping[str, tuple[str, ...]], calls: Sequence[SizedCall] = ()
) -> AxisGraph:
    """Derive channel groups from the labels that the operators' rules assigned and equated."""
    labels_to_class, reasons = book.resolve()  # why classes are pinned; some more are found here
    classes: dict[Slot, torch.Tensor] = {}
    for (tensor, axes), labels in book.parts.items():
        part_classes = labels_to_class[labels]
        along_an_axis: set[int] = set()
        for i, axis in enumerate(axes):
            # Axes along which classes change while every slice is of one class.
            slices = part_classes.movedim(i, 0).reshape(part_classes.size(i), -1)
            is_along = (slices == slices[:, :1]).all() and (slices[:, 0] != slices[0, 0]).any()
            if is_along or len(axes) == 1:
                classes[tensor, axis] = slices[:, 0].contiguous()
                along_an_axis.update(slices[:, 0].tolist())
        for stray in set(part_classes.flatten().tolist()) - along_an_axis:
            reasons.setdefault(stray, f"{tensor} holds it along no single axis")
    # Classes that layers only read, and no tensor of the module produces or holds.
    only_read = book.consumed - book.produced
    read: set[int] = set()
    held: set[int] = set()
    for slot, column in classes.items():
        (read if slot in only_read else held).update(column.tolist())
    for stray in read - held:
        reasons.setdefault(stray, "it reads constants or integers")
    groups = _group_channels(classes, set(reasons), book)
    free = {channel for group in groups for channel in group.channels}
    pinned: dict[str, str] = {}
    for slot, column in classes.items():
        if slot in book.produced:
            for channel in dict.fromkeys(column.tolist()):
                if channel not in free:
                    reason = reasons.get(channel, "its channels can only leave all together")
                    pinned.setdefault(_owner_name(slot), reason)
    return AxisGraph(
        groups=groups,
        classes=classes,
        pinned={**book.opaque_layers, **pinned},
        names=names,
        counted={name: labels_to_class[labels] for name, labels in book.counted.items()},
        statistics={
            node: (axis, labels_to_class[labels])
            for node, (axis, labels) in book.statistics.items()
        },
        sized=tuple(_sized_axes(book, labels_to_class, calls)),
        class_count=1 + max((int(column.max()) for column in classes.values()), default=-1),
    )


def _sized_axes(
    book: LabelBook, labels_to_class: torch.Tensor, calls: Sequence[SizedCall]
) -> Iterator[SizedAxis]:
    """Yield the sizes that calls write, once each, though a call may run several times."""
    with_wild = torch.cat([labels_to_class, torch.tensor([WILD])])
    for (call, index), written in book.sizes.items():
        value, labels = written[0]
        classes = with_wild[labels]
        is_whole = bool((classes == classes[:, :1]).all())
        if all(other == value for other, _ in written):
            counted = classes[:, 0].contiguous() if is_whole else None
            yield SizedAxis(calls[call], index, value, counted)


def _group_channels(
    classes: Mapping[Slot, torch.Tensor], pinned: set[int], book: LabelBook
) -> tuple[ChannelGroup, ...]:
    slots_of: dict[int, list[Slot]] = {}
    for slot, column in classes.items():
        for channel in dict.fromkeys(column.tolist()):
            slots_of.setdefault(channel, []).append(slot)
    channels_of: dict[tuple[Slot, ...], list[int]] = {}
    for channel, slots in slots_of.items():
        if channel not in pinned:
            channels_of.setdefault(tuple(slots), []).append(channel)
    groups, seen = [], Counter[str]()
    for key, channels in channels_of.items():
        produced = tuple(slot for slot in key if slot in book.produced)
        # Entries that no layer outputs were left out of this run, like positions past its length.
        if len(channels) > 1 and produced:
            read = tuple(slot for slot in key if slot in book.consumed and slot not in produced)
            producers = tuple(dict.fromkeys(map(_owner_name, produced)))
            entries = tuple(int((classes[slot] == channels[0]).sum()) for slot in key)
            first = next(iter(producers), key[0][0])
            seen[first] += 1
            groups.append(
                ChannelGroup(key, tuple(channels), produced, read, producers, entries, seen[first])
            )
    return tuple(groups)


def _modules(slots: Iterable[Slot]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name, _ in slots))


def _owner_name(slot: Slot) -> str:
    """Return the module that holds a tensor, or the tensor if that is the outermost module."""
    return slot[0].rpartition(".")[0] or slot[0]


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
    every_name = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    first_names = {name: names[id(tensor)][0] for name, tensor in every_name}
    _propagate_labels(program, first_names, book, calls)
    return build_axis_graph(book, {own[0]: own for own in names.values()}, calls)


def export_graph(module: nn.Module, inputs: Sequence[torch.Tensor]) -> ExportedProgram:
    """Export a module's ATen graph.

    Raises:
        StageFailed: torch.export cannot trace it.
    """
    # With gradients enabled, torch.export refuses in-place operators on views.
    what = f"torch.export cannot trace {type(module).__name__}, so its channels cannot be followed"
    with warnings.catch_warnings(), torch.no_grad(), plain_attention(), batched_experts():
        # torch 2.13 warns that recurrent layers keep a list of their weights.
        warnings.filterwarnings("ignore", "The tensor attributes? self", UserWarning)
        # Not strict: Python runs the module, so that more models can be traced than by Dynamo.
        with (
            raised_as(StageFailed, what),
            flat_outputs(module),
            without_stack_traces(),
            cheap_shape_cache(),
        ):
            count("traces")
            return torch.export.export(module, tuple(inputs), strict=False)


def _propagate_labels(
    program: ExportedProgram,
    first_names: Mapping[str, str],
    book: LabelBook,
    calls: Sequence[SizedCall],
) -> None:
    """Run the exported graph on labels, operator by operator, which state what is equal."""
    values = _placeholder_values(program, first_names, book)
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
                for index, value, labels, axis in _sizes(call, values[node], calls[number]):
                    if varies(labels, axis):
                        written = value, channels_first(labels, axis)
                        book.sizes.setdefault((number, index), []).append(written)
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
        return
    labels = call.tensors[0] if call.tensors else None
    if not isinstance(labels, torch.Tensor):
        return
    if call.operator in ("split", "split_with_sizes", "chunk"):
        axis = call["dim"] % labels.dim()
        yield 0, tuple(shape[axis] for shape in call.shapes), labels, axis
    elif call.operator == "slice" and call["step"] == 1:
        axis = call["dim"] % labels.dim()
        for index, name in sized.bounds(axis, labels.dim()):
            bound: int = call[name]
            if 0 < bound <= labels.shape[axis]:
                yield index, bound, labels.narrow(axis, 0, bound), axis


def _placeholder_values(
    program: ExportedProgram, first_names: Mapping[str, str], book: LabelBook
) -> dict[fx.Node, Any]:
    """Return a ``Weight`` or labels for each input of the graph, None for those without shape."""
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
