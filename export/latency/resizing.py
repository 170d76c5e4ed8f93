"""An ONNX model at any widths, made from a few exports of it at other widths.

Exporting a model takes seconds. Between exports of one network at several widths only integers
differ: the sizes of weights, numbers of groups, and constants that are shapes. Each is a sum over
the widths, found here from a few exports, so that further widths need no export at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, count
from math import ceil, prod
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import onnx
from onnx import numpy_helper
from scipy.optimize import nnls

from compress.common.errors import StageFailed
from compress.export.onnx.graph import PACKED_MATMUL

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

    model: onnx.ModelProto
    sums: Mapping[int, Sum]
    """Place of an integer, in the order of :func:`_integers` → how it follows from widths."""

    @classmethod
    def fit(cls, exports: Iterable[tuple[Widths, onnx.ModelProto]]) -> Self:
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
    def of_one_size(cls, model: onnx.ModelProto) -> Self:
        """Return a model whose widths stay."""
        return cls(_canonical(model), {})

    def resize(self, widths: Mapping[str, Any]) -> onnx.ModelProto:
        """Return the model at other widths; weights repeat those of the model."""
        resized = onnx.ModelProto()
        resized.CopyFrom(self.model)
        places = count()

        def changed(number: int) -> int:
            found = self.sums.get(next(places))
            return number if found is None else found(widths)

        for tensor in resized.graph.initializer:
            _resize_(tensor, changed)
        for node in resized.graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.INT:
                    attribute.i = changed(attribute.i)
                elif attribute.type == onnx.AttributeProto.INTS:
                    attribute.ints[:] = [*map(changed, attribute.ints)]
                elif attribute.type == onnx.AttributeProto.TENSOR:
                    _resize_(attribute.t, changed)
        # Shapes of values in between are those of the model that was resized.
        del resized.graph.value_info[:]
        return resized

    def groups_together(self) -> set[tuple[str, str]]:
        """Return the pairs of groups on which the sizes of one weight depend."""
        together = (combinations(sorted(own), 2) for own in self._groups().values())
        return {pair for pairs in together for pair in pairs}

    def groups_of(self, weight: str) -> set[str]:
        """Return the groups on which the sizes of a weight depend, by its name."""
        return self._groups()[weight]

    def _groups(self) -> dict[str, set[str]]:
        places = count()
        groups = {}
        for tensor in self.model.graph.initializer:
            sums = [self.sums.get(next(places)) for _ in _numbers_of(tensor)]
            groups[tensor.name] = {g for one in sums if one for g, _ in one.coefficients}
        return groups


def _compared(
    exports: Sequence[tuple[Widths, onnx.ModelProto]],
) -> tuple[list[Widths], list[onnx.ModelProto], list[list[int]]]:
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


def _canonical(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with names by the order of use, and vectors and scalars for each reader alone.

    Equal ones are shared in a file, such as zero points, and which are equal depends on the widths.
    Scales of groups get an axis of their own, as the size of a flat tensor is no sum over widths.
    """
    if any(a.type == onnx.AttributeProto.GRAPH for n in model.graph.node for a in n.attribute):
        return model  # bodies read values of the graph around them by name
    canonical = onnx.ModelProto()
    canonical.CopyFrom(model)
    graph = canonical.graph
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in graph.node:
        if node.op_type == PACKED_MATMUL:
            (outputs,) = (attribute.i for attribute in node.attribute if attribute.name == "N")
            for name in node.input[2:4]:
                grouped = onnx.TensorProto()
                grouped.CopyFrom(weights[name])
                grouped.dims[:] = [outputs, prod(grouped.dims) // outputs]
                weights[name] = grouped
    names = {value.name: value.name for value in (*graph.input, *graph.output)}
    names[""] = ""  # an input that is left out
    del graph.initializer[:]
    for number, node in enumerate(graph.node):
        node.name = f"n{number}"
        for i, name in enumerate(node.input):
            tensor = weights.get(name)
            if tensor is not None and len(tensor.dims) < 2:
                node.input[i] = f"c{number}.{i}"
            elif tensor is not None and name not in names:
                node.input[i] = names[name] = f"w{number}.{i}"
            else:
                node.input[i] = names[name]
                continue
            graph.initializer.add().CopyFrom(tensor)
            graph.initializer[-1].name = node.input[i]
        for i, name in enumerate(node.output):
            node.output[i] = names.setdefault(name, f"v{number}.{i}")
    return canonical


def _structure(model: onnx.ModelProto) -> bytes:
    """Return all of a model's operators, without integers and weights."""
    nodes = [
        (n.domain, n.op_type, *n.input, "→", *n.output, *(a.name for a in n.attribute))
        for n in model.graph.node
    ]
    tensors = [(t.name, t.data_type, len(t.dims)) for t in model.graph.initializer]
    return repr((nodes, tensors)).encode()


def _integers(model: onnx.ModelProto) -> Iterator[int]:
    """Yield each integer that may differ between exports at other widths."""
    for tensor in model.graph.initializer:
        yield from _numbers_of(tensor)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.INT:
                yield attribute.i
            elif attribute.type == onnx.AttributeProto.INTS:
                yield from attribute.ints
            elif attribute.type == onnx.AttributeProto.TENSOR:
                yield from _numbers_of(attribute.t)


def _numbers_of(tensor: onnx.TensorProto) -> Iterator[int]:
    """Yield a tensor's sizes, and its values where it may be a shape."""
    yield from tensor.dims
    if _may_be_shape(tensor):
        yield from numpy_helper.to_array(tensor).flatten().tolist()


def _may_be_shape(tensor: onnx.TensorProto) -> bool:
    # Shapes have 64 bits; 32 bits have the biases of integer layers.
    is_integer = tensor.data_type == onnx.TensorProto.INT64
    return is_integer and int(np.prod(tensor.dims)) <= MOST_VALUES


def _resize_(tensor: onnx.TensorProto, changed: Callable[[int], int]) -> None:
    sizes, is_shape = [*map(changed, tensor.dims)], _may_be_shape(tensor)
    before = numpy_helper.to_array(tensor).flatten().tolist() if is_shape else []
    numbers = [*map(changed, before)]
    if sizes == [*tensor.dims] and numbers == before:
        return
    values = numpy_helper.to_array(tensor)
    # Repeated rather than random: scales stay positive, and integers in their type's range.
    array = np.resize(np.array(numbers, values.dtype) if is_shape else values, sizes)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
