"""What goes into a model and what comes out: names, dtypes and shapes with named dynamic axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from compress.core.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

Dtype = Literal[
    "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"
]


def _dimension(value: int | str) -> int | str:
    if value.isidentifier() if isinstance(value, str) else value > 0:
        return value
    raise ValueError(f"a dimension is a size above 0 or a name such as batch, found {value!r}")


Dimension = Annotated[int | str, AfterValidator(_dimension)]


class TensorSpec(Settings):
    """Name, shape and dtype of one tensor."""

    name: str
    """Name of the tensor in every exported format."""
    shape: tuple[Dimension, ...] = ()
    """Sizes; a name instead of a number makes that axis dynamic. The first axis is the batch."""
    dtype: Dtype = "float32"
    """Element type."""

    def sized(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """Return the shape with each named axis replaced by its size (2 where none is given)."""
        return tuple(d if isinstance(d, int) else sizes.get(d, 2) for d in self.shape)

    @property
    def is_mask(self) -> bool:
        """Whether it says which elements of a row count, as its name and dtype tell."""
        whole = self.dtype == "bool" or "int" in self.dtype
        return whole and "mask" in self.name.lower() and len(self.shape) > 1


class OutputSpec(Settings):
    """Name of one output; its shape follows from the model."""

    name: str
    """Name of the output in every exported format."""


class Signature(Settings):
    """The interface of a model, the same in every format it takes on the road."""

    inputs: Annotated[tuple[TensorSpec, ...], Field(min_length=1)]
    """Inputs in the order in which the model's forward takes them."""
    outputs: tuple[OutputSpec, ...] = (OutputSpec(name="output"),)
    """Outputs, flattened, in order."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [*(t.name for t in self.inputs), *(t.name for t in self.outputs)]
        doubles = sorted({n for n in names if names.count(n) > 1})
        if doubles:
            raise ValueError(f"input and output names must differ; found twice: {doubles}")
        return self

    @property
    def batch_axis(self) -> str | None:
        """Name of the dynamic batch axis, or None when the batch size is fixed."""
        first = self.inputs[0].shape[0] if self.inputs[0].shape else None
        return first if isinstance(first, str) else None

    @property
    def dynamic_axes(self) -> tuple[str, ...]:
        """Names of all dynamic axes, each once, in order of appearance."""
        axes = (d for spec in self.inputs for d in spec.shape if isinstance(d, str))
        return tuple(dict.fromkeys(axes))

    def example(
        self,
        batch: int = 2,
        seed: int = 0,
        device: str = "cpu",
        sizes: Mapping[str, int] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return seeded inputs: standard normal for floats, 0 or 1 for integers.

        Masks let through one element at least of each row, from the left: a row of which nothing
        counts has no meaning, and models answer anything to it.

        Args:
            batch: size of the batch axis; other named axes get 8 elements.
            seed: seed of the generator.
            device: where the tensors live.
            sizes: sizes of named axes, in place of the above.
        """
        import torch

        generator = torch.Generator().manual_seed(seed)
        axes = dict.fromkeys(self.dynamic_axes, 8) | {self.batch_axis or "": batch}
        axes |= sizes or {}
        tensors = []
        for spec in self.inputs:
            dtype, shape = getattr(torch, spec.dtype), spec.sized(axes)
            if spec.is_mask and shape[-1]:
                lengths = torch.randint(1, shape[-1] + 1, (*shape[:-1], 1), generator=generator)
                value = (torch.arange(shape[-1]) < lengths).to(dtype)
            elif dtype.is_floating_point:
                value = torch.randn(shape, generator=generator).to(dtype)
            else:
                value = torch.randint(0, 2, shape, generator=generator).to(dtype)
            tensors.append(value.to(device))
        return tuple(tensors)

    @classmethod
    def of(
        cls,
        inputs: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
        batch_axis: str | None = "batch",
    ) -> Signature:
        """Infer a signature from example inputs, named or not; the first axis becomes dynamic."""
        specs = []
        if isinstance(inputs, Mapping):
            names, inputs = [*inputs], [*inputs.values()]
        else:
            names = [f"input_{i}" for i in range(len(inputs))] if len(inputs) > 1 else ["input"]
        for name, tensor in zip(names, inputs, strict=True):
            rest = tuple(tensor.shape[1:])
            head = (batch_axis or tensor.shape[0],) if tensor.dim() else ()
            dtype = str(tensor.dtype).removeprefix("torch.")
            specs.append(
                TensorSpec.model_validate({"name": name, "shape": (*head, *rest), "dtype": dtype})
            )
        return cls(inputs=tuple(specs))
