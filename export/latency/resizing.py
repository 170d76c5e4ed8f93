"""An ONNX model at any widths, made from a few exports of it at other widths.

Exporting a model takes seconds. Between exports of one network at several widths only integers
differ: the sizes of weights, numbers of groups, and constants that are shapes. Each is a sum over
the widths, found here from a few exports, so that further widths need no export at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, count
from math import ceil
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import onnx_ir as ir
from scipy.optimize import nnls

from compress.common.errors import StageFailed
from compress.export.onnx.graph import PACKED_MATMUL, forget_shapes_, sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    Widths = Mapping[str, int]

MOST_EXPORTS = 4
"""Models at random widths that :meth:`ResizableModel.fit` needs at most, and mostly two of them."""
MOST_VALUES = 16
"""Values of an integer constant that may be a shape; longer ones are tables of indices."""
LARGEST_DENOMINATOR = 64
"""Of a coefficient: of several heads of a group may share a key."""


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
    """Place of an integer, in the order of :func:`_integers` → how it follows from widths."""

    @classmethod
    def fit(cls, exports: Iterable[tuple[Widths, ir.Model]]) -> Self:
        """Find how the integers of a model follow from its widths.

        Args:
            exports: widths by group of channels, and the model that was exported at these; the
                first is the one that is resized. The third and later ones are only asked for where
                an integer follows from several groups, or two leave a doubt.

        Raises:
            StageFailed: the exports differ in more than integers, or these are no sums of widths.
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
                    f"a size of {[*numbers]} at widths of {[dict(each) for each in widths]} is no "
                    "sum over widths"
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

        for name, tensor in resized.graph.initializers.tensor_items():
            resized.graph.initializers[name].const_value = _resized(tensor, changed)
        for node in resized.graph:
            for name, attribute in node.attributes.items():
                if attribute.type == ir.AttributeType.INT:
                    node.attributes[name] = ir.AttrInt64(name, changed(attribute.as_int()))
                elif attribute.type == ir.AttributeType.INTS:
                    numbers = [*map(changed, attribute.as_ints())]
                    node.attributes[name] = ir.AttrInt64s(name, numbers)
                elif attribute.type == ir.AttributeType.TENSOR:
                    tensor = _resized(attribute.as_tensor(), changed)
                    node.attributes[name] = ir.AttrTensor(name, tensor)
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
            sums = [self.sums.get(next(places)) for _ in _numbers_of(tensor)]
            groups[name] = {g for one in sums if one for g, _ in one.coefficients}
        return groups


def _compared(
    exports: Sequence[tuple[Widths, ir.Model]],
) -> tuple[list[Widths], list[ir.Model], list[list[int]]]:
    """Return widths, models with canonical names, and the integers of each."""
    models = [_canonical(model) for _, model in exports]
    columns = [[*_integers(model)] for model in models]
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
    for chosen in (*((g,) for g in groups), *combinations(groups, 2), tuple(groups)):
        columns = [[each[group] for group in chosen] + [1] for each in widths]
        # Sizes never shrink where a width grows.
        found, _ = nnls(np.array(columns, float), np.array(numbers, float))
        *slopes, constant = (Fraction(x).limit_denominator(LARGEST_DENOMINATOR) for x in found)
        pairs = tuple((g, c) for g, c in zip(chosen, slopes, strict=True) if c)
        if len(pairs) + bool(constant) < len(numbers) and fits(candidate := Sum(pairs, constant)):
            return candidate
    return None


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


def _integers(model: ir.Model) -> Iterator[int]:
    """Yield each integer that may differ between exports at other widths."""
    for tensor in model.graph.initializers.tensors():
        yield from _numbers_of(tensor)
    for node in model.graph:
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.INT:
                yield attribute.as_int()
            elif attribute.type == ir.AttributeType.INTS:
                yield from attribute.as_ints()
            elif attribute.type == ir.AttributeType.TENSOR:
                yield from _numbers_of(attribute.as_tensor())


def _numbers_of(tensor: ir.TensorProtocol) -> Iterator[int]:
    """Yield a tensor's sizes, and its values where it may be a shape."""
    yield from sizes(tensor)
    if _may_be_shape(tensor):
        yield from tensor.numpy().flatten().tolist()


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
