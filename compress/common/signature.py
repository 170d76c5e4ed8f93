"""Signature: a model's inputs and outputs, as names, dtypes and shapes with named dynamic axes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from compress.common.config import Count, Settings
from compress.common.errors import ArtifactInvalid
from compress.common.lazy_modules import torch

Dtype = Literal[
    "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"
]
TABLE_ROWS = "table_rows"
"""Fact of an artifact: input of ids → rows of the embedding table that they look up. PyTorch
refuses others; ONNX counts negative ones from the end, and AOTInductor's code ends the process."""


def _dimension(value: int | str) -> int | str:
    if value.isidentifier() if isinstance(value, str) else value > 0:
        return value
    raise ValueError(f"a dimension is a size above 0 or a name such as batch, found {value!r}")


Dimension = Annotated[int | str, AfterValidator(_dimension)]
# Left out of manifests, so that those from before these fields keep their digests.
OMITTED = Field(exclude_if=lambda value: value in (None, {}))


class TensorSpec(Settings):
    """Name, shape and dtype of one tensor."""

    name: str
    """Name of the tensor in every exported format."""
    shape: tuple[Dimension, ...] = ()
    """Sizes; a name instead of a number makes that axis dynamic. The first axis is the batch."""
    dtype: Dtype = "float32"
    """Element type."""
    values: Annotated[tuple[int, int] | None, OMITTED] = None
    """Smallest and largest integer of the input, where 0 is not one, as in lengths: inputs that are
    made up to trace and to compare models stay within it."""
    unmasked: Annotated[Literal[0, 1] | None, OMITTED] = None
    """Of a mask, its value where elements count: 1 in an attention mask, 0 where true is padding.
    Samples of the data show it."""
    not_finite: Annotated[tuple[Literal["nan", "infinities"], ...] | None, OMITTED] = None
    """Which of `nan` and `infinities` requests to a server may hold, as attention masks of floats
    hold infinities; when left out, those that samples of the data hold."""

    @model_validator(mode="after")
    def _can_be_mask(self) -> Self:
        if self.unmasked is not None and not (self.holds_integers and len(self.shape) > 1):
            raise ValueError(
                f"unmasked: {self.name!r} is no mask, which has integers or booleans and two axes "
                f"or more, found {self.dtype} {list(self.shape)}"
            )
        return self

    @property
    def invented_integers(self) -> tuple[int, int]:
        """Integers of made-up inputs: the smallest, and one more than the largest."""
        least, most = self.values or (0, 1)
        return least, min(least + 1, most) + 1

    def sized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape with each named axis replaced by its size (2 where none is given)."""
        return tuple(d if isinstance(d, int) else sizes.get(d, 2) for d in self.shape)

    def nbytes(self, sizes: Mapping[str, int]) -> int:
        """Return the tensor's size in bytes for given sizes of named axes."""
        bits = re.search(r"\d+$", self.dtype)  # `bool` has no number, and one byte
        return prod(self.sized(sizes)) * (int(bits[0]) // 8 if bits else 1)

    @property
    def holds_integers(self) -> bool:
        """Whether its elements are integers or booleans."""
        return self.dtype == "bool" or "int" in self.dtype

    @property
    def unmasked_value(self) -> int | None:
        """Value of a mask where elements count; None for an input that is no mask.

        Where no sample was seen its name is the last resort: that of integers with two axes or more
        holds "mask", and "padding" if it is 0 where elements count, as in PyTorch.
        """
        name = self.name.lower()
        is_known = self.unmasked is not None or (self.values or (0, 1))[1] > 1
        if is_known or not self.holds_integers or "mask" not in name or len(self.shape) < 2:
            return self.unmasked
        return 0 if "padding" in name else 1

    def as_mask(self, is_unmasked: Any) -> Any:
        """Return a mask for booleans, an array or a tensor, that are true where elements count."""
        return is_unmasked == bool(self.unmasked_value)

    def with_seen(self, batches: Sequence[torch.Tensor]) -> TensorSpec:
        """Return the input with what batches show: a range of integers, a mask, NaN or infinities.

        A mask holds 0 and 1 alone. The first element of a sample counts, so that its value is the
        unmasked one; or the last, where samples differ in the first, which is padding on the left.
        """
        if "float" in self.dtype:
            return self.with_not_finite(batches)
        seen = [x for x in batches if x.numel() and not (x.is_floating_point() or x.is_complex())]
        if not (seen and self.holds_integers) or self.values or self.unmasked is not None:
            return self
        least, most = min(int(x.min()) for x in seen), max(int(x.max()) for x in seen)
        if len(self.shape) > 1 and least >= 0 and (most == 1 or self.dtype == "bool"):
            rows = [x.reshape(len(x), -1) for x in seen]
            first, last = ({int(v) for x in rows for v in x[:, i]} for i in (0, -1))
            found = first if len(first) == 1 else last
            if first | last == {0, 1} and len(first) == len(last) and "attention_mask" in self.name:
                found = {1}  # transformers' name: all are padded, and on either side
            if len(found) == 1:
                return self.model_copy(update={"unmasked": found.pop()})
        is_usual = least <= 0 and most >= 1 and (most == 1 or self.unmasked_value is None)
        return self if is_usual else self.model_copy(update={"values": (least, most)})

    def with_not_finite(self, batches: Sequence[torch.Tensor]) -> TensorSpec:
        """Return an input of floats with which of NaN and infinities batches of samples hold."""
        if self.not_finite is not None:
            return self
        tests = {"nan": "isnan", "infinities": "isinf"}
        held = (k for k, test in tests.items() if any(getattr(x, test)().any() for x in batches))
        return self.model_copy(update={"not_finite": tuple(held) or None})


class AxisBounds(Settings):
    """The sizes that a named axis may have."""

    min: Count = 1
    """The smallest; the first multiple where left out."""
    max: Count | None = None
    """The largest; any where left out."""
    multiple: Annotated[Count, Field(exclude_if=lambda value: value == 1)] = 1
    """Sizes are multiples of this: 32 for networks that halve an image five times."""

    @model_validator(mode="before")
    @classmethod
    def _begin_at_a_multiple(cls, content: Any) -> Any:
        is_mapping = isinstance(content, Mapping)
        return {"min": content.get("multiple", 1), **content} if is_mapping else content

    @model_validator(mode="after")
    def _are_several(self) -> Self:
        for name, size in (("min", self.min), ("max", self.max or 0)):
            if size % self.multiple:
                raise ValueError(f"{name} {size} is not a multiple of {self.multiple}")
        if self.max is not None and self.max <= self.min:
            raise ValueError(
                f"max {self.max} is not above min {self.min}; of an axis that has one size, "
                "declare the number instead of the name"
            )
        return self

    def __str__(self) -> str:
        sizes = f"{self.min} or more" if self.max is None else f"{self.min} to {self.max}"
        return f"{sizes}, in multiples of {self.multiple}" if self.multiple > 1 else sizes

    def __contains__(self, size: int) -> bool:
        """Whether a size is allowed."""
        return self.nearest(size) == size

    def nearest(self, size: int) -> int:
        """Return an allowed size near to one: the next smaller one, if there is one."""
        return max(self.min, min(size, self.max or size) // self.multiple * self.multiple)


ANY_SIZE = AxisBounds()
EXAMPLE_LENGTH = 8
"""Elements of made-up inputs along named axes but the batch, where that size is allowed."""


class OutputSpec(Settings):
    """Name of one output; its shape follows from the model."""

    name: str
    """Name of the output in every exported format."""


class CallState(Settings):
    """What calls of a model as it was given change in it."""

    names: tuple[str, ...]
    """Buffers and attributes, by their dotted names."""
    is_read: bool
    """Whether outputs of later calls depend on them."""

    def line(self) -> str:
        """Return what becomes of the state, as a warning."""
        names = f"{', '.join(self.names[:3])}{' …' if len(self.names) > 3 else ''}"
        if not self.is_read:
            return (
                f"model: a call changes {names}, on which no output depends; these keep the values "
                "that the model came with, here and in exported files"
            )
        return (
            f"model: keeps state between calls in {names}; here and in exported files every call "
            "starts from the state that the model came with. For a stream, make the state an input "
            "and an output of forward"
        )


class Signature(Settings):
    """A model's interface, the same in every format that it is converted to."""

    inputs: Annotated[tuple[TensorSpec, ...], Field(min_length=1)]
    """Inputs in the order in which the model's forward takes them."""
    outputs: tuple[OutputSpec, ...] = (OutputSpec(name="output"),)
    """Outputs, flattened, in order."""
    axes: Annotated[dict[str, AxisBounds], OMITTED] = {}
    """Named axis → smallest and largest size, where not every size is allowed."""
    state: Annotated[CallState | None, OMITTED] = None
    """What calls of the model as it was given change in it; an artifact's calls change nothing."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        refuse_other_axes(self.inputs, self.axes)
        refuse_double_names(self.inputs, self.outputs)
        return self

    @property
    def batch_axis(self) -> str | None:
        """Name of the dynamic batch axis, or None when the batch size is fixed."""
        return next((axis for axis in self.inputs[0].shape[:1] if isinstance(axis, str)), None)

    @property
    def smallest_batch(self) -> int:
        """Smallest batch size of a call: 1, or the fixed batch size."""
        return next((size for size in self.inputs[0].shape[:1] if isinstance(size, int)), 1)

    @property
    def most_rows(self) -> int | None:
        """Most rows of a call; None for any number."""
        first = next(iter(self.inputs[0].shape), 1)
        return first if isinstance(first, int) else self.bounds(first).max

    @property
    def dynamic_axes(self) -> tuple[str, ...]:
        """Names of all dynamic axes, each once, in order of appearance."""
        axes = (d for spec in self.inputs for d in spec.shape if isinstance(d, str))
        return tuple(dict.fromkeys(axes))

    def bounds(self, axis: str) -> AxisBounds:
        """Return the sizes that a named axis may have."""
        return self.axes.get(axis, ANY_SIZE)

    def refuse_too_large(self, sizes: Mapping[str, int]) -> None:
        """Raise ArtifactInvalid if example inputs need over half of this machine's memory."""
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if sum(spec.nbytes(sizes) for spec in self.inputs) > memory / 2:
            spec = max(self.inputs, key=lambda spec: spec.nbytes(sizes))
            gibibytes = min(spec.nbytes(sizes), 10**30) / 2**30  # a float has no larger ones
            raise ArtifactInvalid(
                f"model.inputs: {spec.name} of {list(spec.sized(sizes))} {spec.dtype} takes "
                f"{gibibytes:.3g} GiB, expected at most half of this machine's "
                f"{memory / 2**30:.3g} GiB; declare smaller sizes"
            )

    def input_descriptions(self, facts: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return the inputs as JSON, bounds included, against which servers check requests.

        The rows of the tables that ids look up are one of the artifact's `facts`.
        """
        table_rows, descriptions = (facts or {}).get(TABLE_ROWS, {}), []
        for spec in self.inputs:
            own = {d: self.axes[d] for d in spec.shape if isinstance(d, str) and d in self.axes}
            bounds = {axis: [bound.min, bound.max] for axis, bound in own.items()}
            more: dict[str, Any] = {"bounds": bounds} if bounds else {}
            if spec.name in table_rows:
                more["rows"] = table_rows[spec.name]
            descriptions.append({**spec.model_dump(mode="json"), **more})
        return descriptions

    def example(
        self,
        batch: int = 2,
        seed: int = 0,
        device: str = "cpu",
        sizes: Mapping[str, int] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return seeded inputs: standard normal for floats, 0 or 1 for integers, or seen ones.

        Rows of masks end in masked elements. Named axes get their number in ``sizes``, the batch
        axis ``batch`` and others 8 elements, or the nearest number that is allowed; ArtifactInvalid
        is raised where they would not fit into memory.
        """
        axes = {axis: self.bounds(axis).nearest(EXAMPLE_LENGTH) for axis in self.dynamic_axes}
        axes |= {self.batch_axis or "": batch, **(sizes or {})}
        self.refuse_too_large(axes)
        generator = torch.Generator().manual_seed(seed)
        tensors = []
        for spec in self.inputs:
            dtype, shape = getattr(torch, spec.dtype), spec.sized(axes)
            if spec.unmasked_value is not None and shape[-1]:
                # Of each row the end is masked, and not all: that output may be undefined.
                most = max(shape[-1], 2)
                lengths = torch.randint(1, most, (*shape[:-1], 1), generator=generator)
                value = spec.as_mask(torch.arange(shape[-1]) < lengths).to(dtype)
            elif dtype.is_floating_point:
                value = torch.randn(shape, generator=generator).to(dtype)
            else:
                value = torch.randint(*spec.invented_integers, shape, generator=generator).to(dtype)
            tensors.append(value.to(device))
        return tuple(tensors)

    @classmethod
    def from_examples(
        cls,
        inputs: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
        batch_axis: str | None = "batch",
    ) -> Signature:
        """Infer a signature from example inputs, by name or in order; the first axis is dynamic."""
        specs = []
        if isinstance(inputs, Mapping):
            names, inputs = [*inputs], [*inputs.values()]
        else:
            names = [f"input_{i}" for i in range(len(inputs))] if len(inputs) > 1 else ["input"]
        for name, tensor in zip(names, inputs, strict=True):
            rest = tuple(tensor.shape[1:])
            head = (batch_axis or tensor.shape[0],) if tensor.dim() else ()
            dtype = str(tensor.dtype).removeprefix("torch.")
            spec = TensorSpec(name=name, shape=(*head, *rest), dtype=dtype)
            specs.append(spec.with_seen([tensor if tensor.dim() else tensor[None]]))
        return cls(inputs=tuple(specs))


def refuse_double_names(inputs: Sequence[TensorSpec], outputs: Sequence[OutputSpec]) -> None:
    """Raise ValueError where two tensors have the same name."""
    names = [*(spec.name for spec in inputs), *(spec.name for spec in outputs)]
    doubles = sorted({n for n in names if names.count(n) > 1})
    if doubles:
        raise ValueError(f"input and output names must differ; found twice: {doubles}")


def refuse_other_axes(inputs: Sequence[TensorSpec], bounded: Mapping[str, AxisBounds]) -> None:
    """Raise ValueError for bounds of the batch axis, or of an axis that no input names."""
    batches = {spec.shape[0] for spec in inputs[:1] if spec.shape}
    named = {d: 0 for spec in inputs for d in spec.shape if isinstance(d, str) and d not in batches}
    for axis in bounded:
        if axis in batches:
            raise ValueError(f"axes: {axis!r} is the batch, of which any size is answered")
        if axis not in named:
            raise ValueError(
                f"axes: {axis!r} is not a named axis of the inputs; they have "
                f"{', '.join(named) or 'none'} beside the batch"
            )
