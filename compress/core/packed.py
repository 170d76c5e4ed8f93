"""What torch's integer layers hold, as plain tensors and back; nothing is pickled.

A quantized tensor becomes its integers, scales and zero points, and what a kernel has packed for
itself the tensors that it was packed from. What these are is read from a module of the same kind,
so that a file says nothing but numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compress.core.errors import ArtifactInvalid, StageFailed
from compress.core.weights import differences

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

INTEGERS, SCALES, ZEROS = "integers", "scales", "zero_points"
QUANTIZED_CELL = "quantized_dynamic"
"""How torch names recurrent layers of 8-bit weights, among other kinds."""

State = dict[str, torch.Tensor]


def unpacked(module: nn.Module) -> State:
    """Return what a quantized module holds.

    Raises:
        StageFailed: something of it has no plain form.
    """
    state: State = {}
    for name, value in module.state_dict().items():
        _take_apart(name, value, state)
    return state


def pack_(module: nn.Module, state: Mapping[str, torch.Tensor], source: str) -> None:
    """Put tensors into a quantized module of the kind they come from, in place.

    Args:
        module: the module; the engine in use is the one it is packed for.
        state: what :func:`unpacked` gave.
        source: where the tensors are from, for messages.

    Raises:
        ArtifactInvalid: they are not those of such a module; the message names one.
    """
    problems = differences(unpacked(module), state)
    if problems:
        raise ArtifactInvalid(
            f"{source} does not hold the integers of the model: {'; '.join(problems)}"
        )
    own = module.state_dict()  # filled, and not made anew: layers read the versions beside it
    for name, value in own.items():
        own[name] = _put_together(name, value, state)
    module.load_state_dict(own)


def count_weights(state: Mapping[str, torch.Tensor]) -> int:
    """Count the elements of weights and biases; scales and zero points are not weights."""
    held = (t for name, t in state.items() if t.dim() and not name.endswith((SCALES, ZEROS)))
    return sum(t.numel() for t in held)


def _take_apart(name: str, value: Any, state: State) -> None:
    """Add the plain tensors that a value is made of, by names that begin with its own."""
    if isinstance(value, torch.Tensor) and value.is_quantized:
        each = value.qscheme() == torch.per_channel_affine
        scales = value.q_per_channel_scales() if each else torch.tensor(value.q_scale()).double()
        zeros = value.q_per_channel_zero_points() if each else torch.tensor(value.q_zero_point())
        state |= {
            f"{name}.{INTEGERS}": value.int_repr().contiguous(),
            f"{name}.{SCALES}": scales,
            f"{name}.{ZEROS}": zeros,
        }
    elif isinstance(value, torch.Tensor):
        state[name] = value.detach().clone(memory_format=torch.contiguous_format)
    elif isinstance(value, tuple | list):
        for i, part in enumerate(value):
            _take_apart(f"{name}.{i}", part, state)
    elif isinstance(value, torch.ScriptObject):
        _take_apart(name, _parts(name, value), state)
    elif value is not None and not isinstance(value, torch.dtype):
        raise _no_plain_form(name, value)


def _put_together(name: str, own: Any, state: Mapping[str, torch.Tensor]) -> Any:
    """Return a value of the kind of a module's own, made of plain tensors."""
    if isinstance(own, torch.Tensor) and own.is_quantized:
        integers = state[f"{name}.{INTEGERS}"]
        scales, zeros = state[f"{name}.{SCALES}"], state[f"{name}.{ZEROS}"]
        if own.qscheme() == torch.per_channel_affine:
            axis = own.q_per_channel_axis()
            return torch._make_per_channel_quantized_tensor(integers, scales, zeros, axis)
        return torch._make_per_tensor_quantized_tensor(integers, float(scales), int(zeros))
    if isinstance(own, torch.Tensor):
        return state[name]
    if isinstance(own, tuple | list):
        return type(own)(_put_together(f"{name}.{i}", part, state) for i, part in enumerate(own))
    if isinstance(own, torch.ScriptObject):
        parts = _parts(name, own)
        return _packed(own, _put_together(name, parts, state))
    return own


def _parts(name: str, packed: torch.ScriptObject) -> tuple[Any, ...]:
    """Return what a kernel packed: weight and bias, or both biases and weights of a cell."""
    kind = _kind(packed)
    if kind == "LinearPackedParamsBase":
        return tuple(torch.ops.quantized.linear_unpack(packed))
    if kind == "CellParamsBase":
        (cell, biases, _, _, weights), _ = _state_of(packed)
        if cell == QUANTIZED_CELL:
            # Packed weights hold the biases once more.
            return (*biases, *(torch.ops.quantized.linear_unpack(w)[0] for w in weights))
    raise _no_plain_form(name, packed)


def _packed(own: torch.ScriptObject, parts: tuple[Any, ...]) -> Any:
    if _kind(own) == "LinearPackedParamsBase":
        return torch.ops.quantized.linear_prepack(*parts)
    (_, _, _, (reduce_range,), _), _ = _state_of(own)
    biases, weights = parts[:2], parts[2:]
    packed = [
        torch.ops.quantized.linear_prepack(w, b) for w, b in zip(weights, biases, strict=True)
    ]
    return torch.ops.quantized.make_quantized_cell_params_dynamic(
        *packed, *biases, bool(reduce_range)
    )


def _state_of(packed: Any) -> Any:
    return packed.__getstate__()


def _kind(packed: torch.ScriptObject) -> str:
    return packed._type().qualified_name().rpartition(".")[2]


def _no_plain_form(name: str, value: Any) -> StageFailed:
    kind = _kind(value) if isinstance(value, torch.ScriptObject) else type(value).__name__
    return StageFailed(
        f"{name} of the quantized model is a {kind}, which has no form as plain tensors; make "
        "what it belongs to a layer of torch.nn, or leave it in float with `exclude`"
    )
