"""An ONNX model at any widths, and with any layers of a quantized one in float.

Exporting a model takes seconds. Between exports of one network at several widths only integers
differ: the sizes of weights, numbers of groups, and constants that are shapes. Each is a sum over
the widths, found here from a few exports, so that further widths need no export at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, count
from math import ceil, gcd
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import onnx_ir as ir

from compress.common.errors import StageFailed
from compress.export.onnx.graph import (
    PACKED_MATMUL,
    add_tensor,
    become_,
    consumers,
    forget_shapes_,
    inputs_of,
    producer,
    remove_unread_,
    sizes,
    stored,
)
from compress.export.onnx.passes.float_layers import separate_float_layers_

if TYPE_CHECKING:
    from compress.profiling.interaction_sum import Choice

    Array = np.ndarray[Any, Any]
    Widths = Mapping[str, int]

MOST_EXPORTS = 4
"""Models at random widths that :meth:`ResizableModel.fit` needs at most, and mostly two of them."""
MOST_VALUES = 16
"""Values of an integer constant that may be a shape; longer ones are tables of indices."""
LARGEST_DENOMINATOR = 64  # of a coefficient: of several heads of a group may share a key
LAYERS = {"Conv", "Gemm", "MatMul", "MatMulInteger", PACKED_MATMUL}
CLAMPS = {"Relu", "Clip"}  # operators after a layer that its kernel computes too
MOVES = {"MaxPool", "AveragePool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"}
"""Operators that are computed in integers where what they read is some layer's integers."""
EXPORTS_OF_BRANCHES = 4  # that show which widths are added: of 90, two sums of four rarely agree
FLOAT = "float"  # value of the decision about a layer that is put back


@dataclass(frozen=True)
class Sum:
    """A number as a sum over widths."""

    coefficients: tuple[tuple[str, Fraction], ...]
    """Group of channels → the number's change with each of its channels."""
    constant: Fraction

    def __call__(self, widths: Widths) -> int:
        """Return the number at some widths, at least 1 as sizes are."""
        value = self.constant + sum(c * widths[group] for group, c in self.coefficients)
        return max(1, ceil(value))  # two zero points of 4 bits are in a byte


@dataclass(frozen=True)
class ResizableModel:
    """A model whose weights can have other sizes; their values mean nothing then."""

    model: ir.Model
    sums: Mapping[int, Sum]
    """Place of an integer, as :func:`_change_integers_` meets them → how it follows from widths."""

    @classmethod
    def fit(cls, exports: Iterable[tuple[Widths, ir.Model]]) -> Self:
        """Find how the integers of a model follow from its widths.

        `exports` are widths by group of channels, and the model that was exported at these; the
        first is the one that is resized. The third and later ones are only asked for where an
        integer follows from several groups, or two leave a doubt. StageFailed where they differ in
        more than integers, or these are no sums of widths.
        """
        left = iter(exports)
        widths, models, columns = _compared([next(left), next(left)])
        two = {numbers for numbers in zip(*columns, strict=True) if len({*numbers}) > 1}
        is_unclear = any(a == b for a, b in zip(*(each.values() for each in widths), strict=True))
        if is_unclear or any(_as_multiple(numbers, widths) is None for numbers in two):
            further = [(each, model) for each, model in left]
            widths, models, columns = _compared([*zip(widths, models, strict=True), *further])
        known: dict[tuple[int, ...], Sum | None] = {}
        sums: dict[int, Sum] = {}
        for place, numbers in enumerate(zip(*columns, strict=True)):
            if len({*numbers}) == 1:
                continue
            if numbers not in known:
                known[numbers] = _as_multiple(numbers, widths) or _as_sum(numbers, widths)
            found = known[numbers]
            if found is None:
                raise StageFailed(
                    f"a size of {[*numbers]} at {len(widths)} settings of {len(widths[0])} widths "
                    "is no sum over widths that these show"
                )
            sums[place] = found
        return cls(models[0], sums)

    @classmethod
    def of_one_size(cls, model: ir.Model) -> Self:
        """Return a model whose widths stay."""
        return cls(_canonical(model), {})

    def resize(self, widths: Mapping[str, Any]) -> ir.Model:
        """Return the model at other widths; weights repeat those of the model."""
        resized = self.model.clone()
        forget_shapes_(resized.graph)  # those of the model that is resized
        places = count()

        def changed(number: int) -> int:
            found = self.sums.get(next(places))
            return number if found is None else found(widths)

        _change_integers_(resized, changed)
        return resized

    def groups_together(self) -> set[tuple[str, str]]:
        """Return the pairs of groups on which the sizes of one weight depend."""
        groups = self.groups_by_weight().values()
        return {pair for own in groups for pair in combinations(sorted(own), 2)}

    def groups_by_weight(self) -> dict[str, set[str]]:
        """Return each weight's name → the groups on which its sizes depend."""
        places = count()
        groups = {}
        for name, tensor in self.model.graph.initializers.tensor_items():
            numbers = len(sizes(tensor)) + (tensor.size if _may_be_shape(tensor) else 0)
            sums = [self.sums.get(next(places)) for _ in range(numbers)]
            groups[name] = {g for one in sums if one for g, _ in one.coefficients}
        return groups


def _compared(
    exports: Sequence[tuple[Widths, ir.Model]],
) -> tuple[list[Widths], list[ir.Model], list[list[int]]]:
    """Return widths, models with canonical names, and the integers of each."""
    models = [_canonical(model) for _, model in exports]
    columns = [_integers(model) for model in models]
    if len({*map(_structure, models)}) > 1 or len({*map(len, columns)}) > 1:
        raise StageFailed("exports at other widths have other operators")
    return [widths for widths, _ in exports], models, columns


def _as_multiple(numbers: Sequence[int], widths: Sequence[Widths]) -> Sum | None:
    """Return the width of which some numbers are a multiple or a part, if it is one alone."""
    found = []
    for group, width in widths[0].items():
        factor = Fraction(numbers[0], width)
        is_whole = 1 in (factor.numerator, factor.denominator)
        if is_whole and all(factor * w[group] == n for w, n in zip(widths, numbers, strict=True)):
            found.append(Sum(((group, factor),), Fraction(0)))
    return found[0] if len(found) == 1 else None


def _as_sum(numbers: Sequence[int], widths: Sequence[Widths]) -> Sum | None:
    """Return the simplest sum over widths that gives some numbers; None where there is none.

    There are more numbers than coefficients, so that a sum is not found by chance.
    """
    groups = [*widths[0]]

    def fits(found: Sum) -> bool:
        return all(found(each) == n for n, each in zip(numbers, widths, strict=True))

    for group in groups:  # in proportion to one
        proportional = Sum(((group, Fraction(numbers[0], widths[0][group])),), Fraction(0))
        if fits(proportional):
            return proportional

    def fitted(chosen: Sequence[str]) -> Sum | None:
        from scipy.optimize import nnls

        columns = [[each[group] for group in chosen] + [1] for each in widths]
        # Sizes never shrink where a width grows.
        found, _ = nnls(np.array(columns, float), np.array(numbers, float))
        *slopes, constant = (Fraction(x).limit_denominator(LARGEST_DENOMINATOR) for x in found)
        pairs = tuple((g, c) for g, c in zip(chosen, slopes, strict=True) if c)
        is_shown = len(pairs) + bool(constant) < len(numbers)
        return sum_ if is_shown and fits(sum_ := Sum(pairs, constant)) else None

    # Pairs and all groups last: as a size is rounded up, their free coefficients may fit by chance.
    one = next(filter(None, (fitted((group,)) for group in groups)), None)
    found = one or _as_branches(numbers, widths)
    return found or next(filter(None, map(fitted, (*combinations(groups, 2), groups))), None)


def _as_branches(numbers: Sequence[int], widths: Sequence[Widths]) -> Sum | None:
    """Return the multiple of a sum of two to four widths, as of branches, if it is one alone.

    Too few numbers for as many free coefficients determine which widths are added.
    """
    if len(numbers) < EXPORTS_OF_BRANCHES:
        return None
    rows = {group: np.array([each[group] for each in widths]) for group in widths[0]}
    pairs: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for one, other in combinations(rows, 2):
        pairs.setdefault(tuple((rows[one] + rows[other]).tolist()), []).append((one, other))
    factor = gcd(*numbers)
    found = set()
    for scale in {1, factor}:
        for part in ((), *((group,) for group in rows), *combinations(rows, 2)):
            rest = np.array(numbers) // scale - sum(rows[group] for group in part)
            for pair in pairs.get(tuple(rest.tolist()), ()):
                if not {*part} & {*pair}:
                    found.add((scale, frozenset((*part, *pair))))
    fewest = min((len(groups) for _, groups in found), default=0)
    simplest = [each for each in found if len(each[1]) == fewest]
    if len(simplest) != 1:
        return None
    ((scale, groups),) = simplest
    return Sum(tuple((g, Fraction(scale)) for g in rows if g in groups), Fraction(0))


def _canonical(model: ir.Model) -> ir.Model:
    """Return a model with names by the order of use, and vectors and scalars for each reader alone.

    Equal ones are shared in a file, such as zero points, and which are equal depends on the widths.
    Scales of groups get an axis of their own, as the size of a flat tensor is no sum over widths.
    """
    if [*model.graph.subgraphs()]:
        return model  # bodies read values of the graph around them by name
    canonical = model.clone()
    graph = canonical.graph
    weights = {value: value.const_value for value in graph.initializers.values()}
    for node in graph:
        if node.op_type == PACKED_MATMUL:
            outputs = node.attributes["N"].as_int()
            for value in node.inputs[2:4]:
                if value is not None and (flat := weights[value]) is not None:
                    weights[value] = ir.tensor(flat.numpy().reshape(outputs, -1))
    graph.initializers.clear()
    for number, node in enumerate(graph):
        node.name = f"n{number}"
        for i, value in enumerate(node.inputs):
            tensor = None if value is None else weights.get(value)
            if value is None or tensor is None:
                continue
            if len(tensor.shape) < 2:
                own = ir.Value(name=f"c{number}.{i}", const_value=tensor)
                node.replace_input_with(i, own)
            elif value.is_initializer():
                continue
            else:
                own = value
                own.name, own.const_value = f"w{number}.{i}", tensor
            graph.initializers.add(own)
        for i, value in enumerate(node.outputs):
            if value.name and not value.is_graph_output():
                value.name = f"v{number}.{i}"
    return canonical


def _structure(model: ir.Model) -> bytes:
    """Return all of a model's operators, without integers and weights."""
    nodes = [
        (
            *(n.domain, n.op_type, *("" if v is None else v.name for v in n.inputs)),
            *("→", *(v.name for v in n.outputs), *n.attributes),
        )
        for n in model.graph
    ]
    tensors = [
        (name, t.dtype.value, len(t.shape)) for name, t in model.graph.initializers.tensor_items()
    ]
    return repr((nodes, tensors)).encode()


def _change_integers_(model: ir.Model, changed: Callable[[int], int]) -> None:
    """Change each integer that may differ between exports at other widths, always in one order."""
    graph = model.graph
    for name, tensor in graph.initializers.tensor_items():
        graph.initializers[name].const_value = _resized(tensor, changed)
    for node in graph:
        for name, attribute in node.attributes.items():
            if attribute.type == ir.AttributeType.INT:
                node.attributes[name] = ir.AttrInt64(name, changed(attribute.as_int()))
            elif attribute.type == ir.AttributeType.INTS:
                numbers = [*map(changed, attribute.as_ints())]
                node.attributes[name] = ir.AttrInt64s(name, numbers)
            elif attribute.type == ir.AttributeType.TENSOR:
                tensor = _resized(attribute.as_tensor(), changed)
                node.attributes[name] = ir.AttrTensor(name, tensor)


def _integers(model: ir.Model) -> list[int]:
    integers: list[int] = []

    def record(number: int) -> int:
        integers.append(number)
        return number

    _change_integers_(model.clone(), record)
    return integers


def _may_be_shape(tensor: ir.TensorProtocol) -> bool:
    # Shapes have 64 bits; 32 bits have the biases of integer layers.
    return tensor.dtype == ir.DataType.INT64 and tensor.size <= MOST_VALUES


def _resized(tensor: ir.TensorProtocol, changed: Callable[[int], int]) -> ir.TensorProtocol:
    shape, is_shape = [*map(changed, sizes(tensor))], _may_be_shape(tensor)
    before = tensor.numpy().flatten().tolist() if is_shape else []
    numbers = [*map(changed, before)]
    if shape == [*sizes(tensor)] and numbers == before:
        return tensor
    values = tensor.numpy()
    # Repeated rather than random: scales stay positive, and integers in their type's range.
    array = np.resize(np.array(numbers, values.dtype) if is_shape else values, shape)
    return ir.tensor(array, dtype=tensor.dtype, name=tensor.name)


def weighted_layers(model: ir.Model) -> list[ir.Node]:
    """Return the layers with weights of two axes and more, in graph order, float ones too."""
    return [node for node in model.graph if node.op_type in LAYERS and weight_of(node) is not None]


def weight_of(layer: ir.Node) -> ir.Value | None:
    """Return the stored weight that a layer multiplies with; None where it has none."""
    value = layer.inputs[1]
    while (node := producer(value, "DequantizeLinear", "Transpose", "Cast")) is not None:
        value = node.inputs[0]
    weight = stored(value)
    return value if weight is not None and len(weight.shape) > 1 else None


def is_float(layer: ir.Node) -> bool:
    """Whether a layer with weights multiplies floats."""
    plain = layer.op_type not in ("MatMulInteger", PACKED_MATMUL)
    return plain and stored(layer.inputs[1]) is not None


def leave_float(
    model: ir.Model, layers: Collection[int], weights: Mapping[int, Array] | None = None
) -> ir.Model:
    """Return a quantized model with some layers in float.

    The operators are those that the stage writes with these layers in `exclude`: what loses its
    last integer neighbour, such as an addition, becomes float with them. `layers` are numbers among
    :func:`weighted_layers` of a model that `quantize_static`, `quantize_dynamic` or
    `quantize_weights` made, `weights` float ones by number, outputs first; without them values of
    the right magnitude are taken, with which the model has its latency but not its answers.
    StageFailed where a layer has a form that is not known, or a weight another size.
    """
    changed = model.clone()
    nodes = weighted_layers(changed)
    chosen = {number: nodes[number] for number in sorted(layers)}
    _detach_(changed.graph, chosen.values())
    for number, node in chosen.items():
        _use_floats_(changed.graph, node, None if weights is None else weights[number])
    remove_unread_(changed)
    separate_float_layers_(changed)
    return changed


@dataclass(frozen=True)
class MixedModel:
    """A quantized model of any widths, with any of some layers in float."""

    model: ResizableModel
    layers: Mapping[str, Sequence[int]]
    """Decision → numbers of its layers, among :func:`weighted_layers`; several where a module is
    called several times."""

    def resize(self, choice: Choice) -> ir.Model:
        """Return the model at other widths, and with those layers in float that are chosen so."""
        floats = [decision for decision in self.layers if choice.get(decision) == FLOAT]
        return self._with_floats(self.model.resize(choice), floats)

    def groups_of(self, decision: str) -> set[str]:
        """Return the groups of channels on which the weight of a decision's layer depends."""
        layers = weighted_layers(self.model.model)
        weights = [weight_of(layers[number]) for number in self.layers[decision]]
        groups = self.model.groups_by_weight()
        return {g for w in weights if w is not None for g in groups[str(w.name)]}

    def meet(self, a: str, b: str) -> bool:
        """Whether two layers in float change more than each of them alone.

        So do neighbours, between which nothing is converted, and the terms of an addition.
        """
        none, first, second, both = (
            _operators(self._with_floats(self.model.model, names))
            for names in ((), (a,), (b,), (a, b))
        )
        kinds = none | first | second | both
        return any(none[kind] + both[kind] != first[kind] + second[kind] for kind in kinds)

    def _with_floats(self, model: ir.Model, decisions: Sequence[str]) -> ir.Model:
        numbers = [number for decision in decisions for number in self.layers[decision]]
        return leave_float(model, numbers) if numbers else model


def _operators(model: ir.Model) -> Counter[tuple[str, ...]]:
    """Count the operators by their type and those of their neighbours."""
    return Counter(
        (
            node.op_type,
            *(source.op_type for v in node.inputs if (source := producer(v)) is not None),
            "→",
            *sorted(use.node.op_type for value in node.outputs for use in value.uses()),
        )
        for node in model.graph
    )


def _detach_(graph: ir.Graph, layers: Collection[ir.Node]) -> None:
    """Let layers, and operators that lose their integers with them, read and give floats."""
    integers: set[ir.Node] = set()  # operators that stay integer
    for node in graph:
        if _was_integer(node) and node not in layers:
            source = _source(node.inputs[0])
            if node.op_type == "Add":
                is_integer = all(_is_rounded_anyway(_source(t), integers) for t in node.inputs)
            elif node.op_type in MOVES:
                is_integer = _is_integer_output(source, integers)
            else:
                is_integer = True
            if is_integer:
                integers.add(node)
    # Found first, then replaced: what reads a value says whether it is an integer one.
    changes = [
        (node, place, source)
        for node in graph
        if node.op_type != "QuantizeLinear" and node not in integers
        for place, value in enumerate(node.inputs)
        if (source := _source(value)) is not value and not _is_integer_output(source, integers)
    ]
    for node, place, source in changes:
        node.replace_input_with(place, source)


def _use_floats_(graph: ir.Graph, node: ir.Node, weight: Array | None) -> None:
    """Let a layer multiply with a float weight."""
    if node.op_type == "MatMulInteger":
        _use_product_(graph, node, weight)
        return
    name = node.outputs[0].name
    if node.op_type == PACKED_MATMUL:
        wide = (node.attributes["N"].as_int(), node.attributes["K"].as_int())
        array = _fitting(weight, wide, _numbers(node.inputs[2])).T
        become_(node, "MatMul", [node.inputs[0], _add_weight(graph, node, array)])
        return
    dequantize = producer(node.inputs[1])
    transposed = dequantize is not None and dequantize.op_type == "Transpose"
    if dequantize is not None and transposed:
        dequantize = producer(dequantize.inputs[0])
    integers = stored(dequantize.inputs[0]) if dequantize is not None else None
    if dequantize is None or dequantize.op_type != "DequantizeLinear" or integers is None:
        names = [value.name for value in inputs_of(node)]
        raise StageFailed(f"a layer that reads {names} has no dequantized weight")
    array = _fitting(weight, sizes(integers), _numbers(dequantize.inputs[1]))
    node.replace_input_with(1, _add_weight(graph, node, array.T if transposed else array))
    bias = producer(node.inputs[2], "DequantizeLinear") if len(node.inputs) > 2 else None
    if bias is not None:
        numbers, scale = map(_numbers, bias.inputs[:2])
        floats = numbers.astype(np.float32) * scale
        node.replace_input_with(2, add_tensor(graph, f"{name}_bias", floats))


def _use_product_(graph: ir.Graph, node: ir.Node, weight: Array | None) -> None:
    """Replace MatMulInteger, and the Cast and the Mul after it, by a float product."""
    names = [value.name for value in inputs_of(node)]
    ranges = producer(node.inputs[0], "DynamicQuantizeLinear")
    casts = consumers(node.outputs[0])
    products = consumers(casts[0].outputs[0]) if len(casts) == 1 else []
    if ranges is None or len(products) != 1:
        raise StageFailed(f"a layer that reads {names} has no range of the call's")
    (product,) = products
    scale = producer(product.inputs[1])
    scales = [value for value in (inputs_of(scale) if scale else ()) if stored(value) is not None]
    if product.op_type != "Mul" or len(scales) != 1:
        raise StageFailed(f"a layer that reads {names} has no scales of its own")
    columns, rows = _numbers(node.inputs[1]).shape
    array = _fitting(weight, (rows, columns), _numbers(scales[0])).T
    become_(product, "MatMul", [ranges.inputs[0], _add_weight(graph, node, array)])


def _add_weight(graph: ir.Graph, node: ir.Node, array: Array) -> ir.Value:
    floats = np.ascontiguousarray(array, np.float32)
    return add_tensor(graph, f"{node.outputs[0].name}_weight", floats)


def _numbers(value: ir.Value | None) -> Array:
    tensor = stored(value)
    if tensor is None:
        raise StageFailed(f"{value} is computed, expected a stored tensor")
    return tensor.numpy()


def _source(value: ir.Value | None) -> ir.Value | None:
    """Return the value of which another one is the rounded form; others are their own."""
    dequantize = producer(value, "DequantizeLinear")
    quantize = producer(dequantize.inputs[0], "QuantizeLinear") if dequantize else None
    return quantize.inputs[0] if quantize else value


def _was_integer(node: ir.Node) -> bool:
    """Whether an operator of the whole quantized model is computed in integers."""
    if node.op_type in LAYERS:
        is_layer = weight_of(node) is not None and stored(node.inputs[1]) is None
        return is_layer and _source(node.inputs[0]) is not node.inputs[0]
    if node.op_type != "Add" and node.op_type not in MOVES:
        return False
    values = node.inputs if node.op_type == "Add" else node.inputs[:1]
    return all(_source(value) is not value for value in values) and _is_rounded(_tail(node))


def _is_rounded(value: ir.Value) -> bool:
    return bool(consumers(value, "QuantizeLinear"))


def _tail(node: ir.Node) -> ir.Value:
    """Return what an operator gives, after a clamp that alone reads it."""
    value = node.outputs[0]
    readers = [use.node for use in value.uses()]
    return readers[0].outputs[0] if len(readers) == 1 and readers[0].op_type in CLAMPS else value


def _is_integer_output(value: ir.Value | None, integers: Collection[ir.Node]) -> bool:
    """Whether an operator that stays integer rounds a value by itself."""
    node = producer(value)
    if node is not None and node.op_type in CLAMPS:
        before = producer(node.inputs[0])
        node = before if before is not None and _tail(before) is value else node
    # A product of sequences gives floats, and what reads them in integers rounds them.
    is_integer = node in integers and node is not None and node.op_type != "MatMul"
    return is_integer and value is not None and _is_rounded(value)


def _is_rounded_anyway(value: ir.Value | None, integers: Collection[ir.Node]) -> bool:
    """Whether an integer operator gives a value, or another one before reads it."""
    if value is None or _is_integer_output(value, integers):
        return value is not None
    return any(
        reader in integers
        for quantize in consumers(value, "QuantizeLinear")
        for dequantize in consumers(quantize.outputs[0], "DequantizeLinear")
        for reader in consumers(dequantize.outputs[0])
    )


def _fitting(weight: Array | None, shape: Sequence[int], scales: Array) -> Array:
    """Return a float weight, or one of scales as values; StageFailed if it has other sizes."""
    if weight is None:
        return np.resize(scales, tuple(shape))
    if weight.shape != tuple(shape):
        raise StageFailed(f"a float weight has sizes {[*weight.shape]}, expected {[*shape]}")
    return weight
