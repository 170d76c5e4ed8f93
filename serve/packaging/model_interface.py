"""What goes into a model and what comes out, found by asking it: also what no signature tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from compress.common.forward import Predictor
    from compress.common.signature import Signature, TensorSpec
    from compress.profiling.batch_dependence import Call
    from serve.worker.tensors import Array

ANY = -1
"""Size of an axis that varies."""
SIZES = (2, 3)
"""Rows with which a model is asked; its other named axes are SOME_LENGTH longer."""
SOME_LENGTH = 6


@dataclass(frozen=True)
class Tensor:
    """An input or output as a server announces it."""

    name: str
    dtype: str
    """As numpy calls it."""
    shape: tuple[int, ...]
    """Sizes; ANY where an axis varies."""


@dataclass(frozen=True)
class Interface:
    """A model's tensors."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    rows_stay_first: bool
    """Whether axis 0 of every tensor counts the same rows."""


def interface_of(call: Call, signature: Signature) -> Interface:
    """Return what a model takes and gives; it is asked at two sizes of every named axis.

    An output's axis counts as fixed if it kept its size while every named axis changed; where the
    model refuses the second size, none does.

    Args:
        call: the model as a function of arrays.
        signature: its interface, as far as it was known.

    Raises:
        StageFailed: the model does not answer its own signature, or a tensor is bfloat16.
    """
    refuse_bfloat16(signature)
    first: Any = example(signature, SIZES[0])
    answers: Any = _ask(call, first, signature)
    others = _other_answers(call, signature)
    outputs = tuple(
        Tensor(spec.name, str(a.dtype), _varying(a.shape, b))
        for spec, a, b in zip(signature.outputs, answers, others, strict=True)
    )
    shown: Any = (first, answers)  # arrays have what is asked of tensors
    stays = rows_stay_first(_as_predictor(call), signature, *shown)
    return Interface(tuple(map(_announced, signature.inputs)), outputs, stays)


def rows_stay_first(
    predict: Predictor,
    signature: Signature,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> bool:
    """Return whether axis 0 of every output counts the same rows as axis 0 of every input.

    The model is asked for another number of rows: an axis of one size could be any other axis, like
    the layers of a recurrent state.
    """
    heads = {next(iter(spec.shape), None) for spec in signature.inputs}
    if heads != {signature.batch_axis} or heads == {None}:
        return False
    rows = len(inputs[0])
    other = rows - 1 or 2
    places = [i % rows for i in range(other)]
    try:
        others = predict(*(tensor[places] for tensor in inputs))
    except Exception:  # noqa: BLE001 - a model may refuse other sizes in any way
        return False
    found = {(tuple(a.shape[:1]), tuple(b.shape[:1])) for a, b in zip(outputs, others, strict=True)}
    return found == {((rows,), (other,))}


def example(signature: Signature, rows: int, seed: int = 0) -> list[Array]:
    """Return inputs without torch: normal floats, ones for integers, which masks let through."""
    generator = np.random.default_rng(seed)
    longer = rows + SOME_LENGTH
    axes = {axis: signature.bounds(axis).nearest(longer) for axis in signature.dynamic_axes}
    axes |= {signature.batch_axis or "": rows}
    signature.refuse_too_large(axes)
    arrays: list[Array] = []
    for spec in signature.inputs:
        shape, dtype = spec.sized(axes), np.dtype(spec.dtype)
        if dtype.kind == "f":
            arrays.append(generator.standard_normal(shape).astype(dtype))
        else:
            arrays.append(np.ones(shape, dtype))
    return arrays


def refuse_bfloat16(signature: Signature) -> None:
    """Refuse what no client could send.

    Raises:
        StageFailed: an input is bfloat16.
    """
    for spec in signature.inputs:
        if spec.dtype == "bfloat16":
            raise StageFailed(
                f"{spec.name} is bfloat16, which requests cannot carry; "
                "expected a model with float32 inputs and outputs"
            )


def _ask(call: Call, arrays: list[Array], signature: Signature) -> list[Array]:
    answers = list(call(*arrays))
    if len(answers) != len(signature.outputs):
        names = [output.name for output in signature.outputs]
        raise StageFailed(f"the model gives {len(answers)} outputs, its signature names {names}")
    return answers


def _other_answers(call: Call, signature: Signature) -> list[Array | None]:
    try:
        return [*_ask(call, example(signature, SIZES[1]), signature)]
    except Exception:  # noqa: BLE001 - a model may refuse other sizes in any way
        return [None] * len(signature.outputs)


def _varying(shape: tuple[int, ...], other: Array | None) -> tuple[int, ...]:
    if other is None or len(other.shape) != len(shape):
        return (ANY,) * len(shape)
    return tuple(a if a == b else ANY for a, b in zip(shape, other.shape, strict=True))


def _announced(spec: TensorSpec) -> Tensor:
    shape = tuple(d if isinstance(d, int) else ANY for d in spec.shape)
    return Tensor(spec.name, spec.dtype, shape)


def _as_predictor(call: Call) -> Callable[..., Any]:
    return lambda *arrays: tuple(call(*arrays))
