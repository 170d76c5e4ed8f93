"""Find a model's input and output tensors by calling it, including what its signature lacks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed
from compress.profiling.probe_rows import seeded_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.profiling.batch_dependence import Call
    from compress.serve.worker.tensors import Array

ANY = -1
"""Size of an axis that varies."""
PROBE_SIZES = (2, 3)
"""Rows of the two calls; other named axes are EXTRA_LENGTH longer, to differ from the rows."""
EXTRA_LENGTH = 6


@dataclass(frozen=True)
class Tensor:
    """An input or output in a server's metadata."""

    name: str
    dtype: str
    """numpy's name."""
    shape: tuple[int, ...]
    """Sizes; ANY for an axis that varies."""


@dataclass(frozen=True)
class Interface:
    """A model's tensors."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    rows_stay_first: bool
    """Whether axis 0 of every tensor counts the same rows."""


def infer_interface(call: Call, signature: Signature) -> Interface:
    """Call a model with two sizes of every named axis; return its inputs and outputs.

    An output's axis is fixed if its size is the same in both calls; if the second call fails, every
    axis counts as varying.

    Raises:
        StageFailed: the model does not answer its own signature, or a tensor is bfloat16.
    """
    refuse_bfloat16(signature)
    arrays: Any = [seeded_rows(signature, n, length=n + EXTRA_LENGTH) for n in PROBE_SIZES]
    first, other = arrays
    answers: Any = _call_model(call, first, signature)
    second: list[Array | None] = [None] * len(signature.outputs)
    with suppress(Exception):  # a model may refuse other sizes in any way
        second = [*_call_model(call, other, signature)]
    outputs = tuple(
        Tensor(spec.name, str(a.dtype), _varying(a.shape, b))
        for spec, a, b in zip(signature.outputs, answers, second, strict=True)
    )

    def predict(*arrays: Any) -> Any:
        return tuple(call(*arrays))

    # numpy's arrays have all that rows_stay_first uses of tensors.
    stays = rows_stay_first(predict, signature, first, answers)
    inputs = tuple(
        Tensor(spec.name, spec.dtype, tuple(d if isinstance(d, int) else ANY for d in spec.shape))
        for spec in signature.inputs
    )
    return Interface(inputs, outputs, stays)


def rows_stay_first(
    predict: Predictor,
    signature: Signature,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> bool:
    """Return whether axis 0 of every output counts the same rows as axis 0 of every input."""
    # The model is called with another number of rows, because an axis of the same size may be
    # another one, like the layers of a recurrent state.
    first_axes = {next(iter(spec.shape), None) for spec in signature.inputs}
    if first_axes != {signature.batch_axis} or first_axes == {None}:
        return False
    rows = len(inputs[0])
    other = rows - 1 or 2
    indices = [i % rows for i in range(other)]
    try:
        others = predict(*(tensor[indices] for tensor in inputs))
    except Exception:  # noqa: BLE001 - a model may refuse other sizes in any way
        return False
    sizes = {(tuple(a.shape[:1]), tuple(b.shape[:1])) for a, b in zip(outputs, others, strict=True)}
    return sizes == {((rows,), (other,))}


def refuse_bfloat16(signature: Signature) -> None:
    """Raise StageFailed for a bfloat16 input, which no client could send."""
    for spec in signature.inputs:
        if spec.dtype == "bfloat16":
            raise StageFailed(
                f"{spec.name} is bfloat16, which requests cannot carry; "
                "expected a model with float32 inputs and outputs"
            )


def _call_model(call: Call, arrays: list[Array], signature: Signature) -> list[Array]:
    answers = list(call(*arrays))
    if len(answers) != len(signature.outputs):
        names = [output.name for output in signature.outputs]
        raise StageFailed(f"the model gives {len(answers)} outputs, its signature names {names}")
    return answers


def _varying(shape: tuple[int, ...], other: Array | None) -> tuple[int, ...]:
    if other is None or len(other.shape) != len(shape):
        return (ANY,) * len(shape)
    return tuple(a if a == b else ANY for a, b in zip(shape, other.shape, strict=True))
