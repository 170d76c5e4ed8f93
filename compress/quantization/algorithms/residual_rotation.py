"""Rotations of a decoder's residual stream, folded into the weights around it.

The offline part of Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs" (2024).
RMSNorm(x Q) = RMSNorm(x) Q for an orthogonal Q, once the norm's weight is folded into the linear
layers that read it. What writes the residual stream is multiplied by Q, and what reads it by its
inverse, so that outputs stay the same. Outputs, inputs and channels are O and I.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from compress.artifacts.streaming.packed_model import shared_parameters
from compress.checkpoint.state_dict import StoredTensor, Weights, in_memory
from compress.common.errors import StageFailed

AT_ONCE = 2**22  # numbers that are multiplied at a time, in float64: 32 MiB


@dataclass(frozen=True)
class Rotation:
    """The orthogonal matrix Q = D (F₁ ⊗ F₂ ⊗ …): signs and a Kronecker product."""

    diagonal: torch.Tensor
    """The diagonal of D: 1 and -1, float64, `(channels,)`."""
    factors: tuple[torch.Tensor, ...]
    """Orthogonal matrices, float64, whose sizes multiply to the number of channels."""

    def after_scaling(self, scale_I: torch.Tensor) -> Rotation:
        """Return what multiplies channels by a scale first, and is orthogonal no more."""
        return replace(self, diagonal=self.diagonal * scale_I)

    def apply(self, values: torch.Tensor, axis: int = -1) -> torch.Tensor:
        """Return x Q for each row x along an axis: computed in float64, in the values' dtype."""
        moved = values.movedim(axis, -1)
        rows_NI = moved.reshape(-1, moved.shape[-1])
        rotated_NI = torch.empty_like(rows_NI)
        count = max(1, AT_ONCE // rows_NI.shape[1])
        for rows, rotated in zip(
            *(torch.split(x, count) for x in (rows_NI, rotated_NI)), strict=True
        ):
            parts = (rows.double() * self.diagonal).unflatten(-1, [*map(len, self.factors)])
            for place, factor in enumerate(self.factors, 1):
                parts = (parts.movedim(place, -1) @ factor).movedim(-1, place)
            rotated.copy_(parts.flatten(1))
        return rotated_NI.view(moved.shape).movedim(-1, axis).contiguous()


def randomized_hadamard(size: int, generator: torch.Generator) -> Rotation:
    """Draw a randomized Hadamard matrix.

    For a size of 2ᵏ·m with an odd m it is the Kronecker product of Sylvester's matrix of 2ᵏ and a
    random orthogonal matrix of m, whose entries differ in magnitude.
    """
    from scipy.linalg import hadamard

    signs_I = 1.0 - 2.0 * torch.randint(0, 2, (size,), generator=generator).double()
    exponent = (size & -size).bit_length() - 1
    # Sylvester's matrix is itself a product; two factors of about its root take the least time.
    powers = (2 ** (exponent // 2), 2 ** (exponent - exponent // 2))
    factors = [torch.tensor(hadamard(power)).double() / math.sqrt(power) for power in powers]
    odd = size >> exponent
    drawn = torch.randn(odd, odd, generator=generator, dtype=torch.float64)
    return Rotation(signs_I, (*factors, torch.linalg.qr(drawn).Q))


VALUES, OUTPUT = "v_proj", "o_proj"
"""Names of an attention's layers that compute its values, and read their weighted sums."""


class ResidualStream(NamedTuple):
    """The modules that write and read a decoder's residual stream, by name."""

    width: int
    tables: tuple[str, ...]
    """Embeddings, whose rows enter it."""
    readers: Mapping[str, str]
    """Linear layer → the RMSNorm that it reads."""
    writers: tuple[str, ...]
    """Linear layers whose outputs are added to it."""
    norms: Mapping[str, float]
    """RMSNorm → what it adds to its weight before it multiplies: 1 in Gemma, elsewhere 0."""
    heads: tuple[tuple[str, str, int], ...]
    """Layers of an attention, which compute and read its values, and channels of a head: between
    them a rotation of each head's values cancels out."""
    tied: tuple[str, ...]
    """Weights of readers that are those of a table, too."""


def residual_stream(
    module: nn.Module, weights: Weights, inputs: Sequence[torch.Tensor]
) -> ResidualStream:
    """Find a decoder's residual stream in a forward pass; StageFailed if it cannot be rotated."""
    called: dict[str, Any] = {}
    norm_of_output: dict[int, str] = {}
    kept_alive: list[Any] = []  # or another tensor could get the memory of one that was freed
    readers: dict[str, str] = {}

    def record(name: str, part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        called[name] = part
        if isinstance(part, nn.Linear):
            # By memory: heads read a view, of the last positions.
            memory = args[0].untyped_storage().data_ptr()
            if memory in norm_of_output:
                readers[name] = norm_of_output[memory]
        elif _is_norm(part):
            norm_of_output[output.untyped_storage().data_ptr()] = name
            kept_alive.append(output)

    hooks = [
        part.register_forward_hook(partial(record, name))
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear | nn.Embedding) or _is_norm(part)
    ]
    try:
        with torch.inference_mode():
            module(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    tables = {name: part for name, part in called.items() if isinstance(part, nn.Embedding)}
    if not tables:
        raise StageFailed("rotates decoders, found a model without a table of embeddings")
    width = next(iter(tables.values())).embedding_dim
    norms = {
        name: _offset(name, part, weights)
        for name, part in called.items()
        if _is_norm(part) and width in part.weight.shape
    }
    unread = next((name for name in norms if name not in readers.values()), None)
    if unread is not None:
        raise StageFailed(
            f"{unread} is an RMSNorm that no linear layer reads, so that its weight stays between "
            "the rotations; expected norms before linear layers alone"
        )
    linears = {name: part for name, part in called.items() if isinstance(part, nn.Linear)}
    writers = [name for name in linears if name not in readers]
    for name in writers:
        if linears[name].out_features != width:
            raise StageFailed(
                f"{name} reads no RMSNorm and writes {linears[name].out_features} channels; "
                f"expected layers that read a norm of the residual stream, or write its {width}"
            )
    shared = [name for names, _ in shared_parameters(module) if len(names) > 1 for name in names]
    stream = ResidualStream(
        width,
        tuple(name for name, part in tables.items() if part.embedding_dim == width),
        readers,
        tuple(writers),
        norms,
        tuple(_value_heads(module, readers, writers)),
        tuple(name for name in shared if name.removesuffix(".weight") in readers),
    )
    _refuse_other_weights(module, stream)
    return stream


def rotated_weights(
    stream: ResidualStream, weights: Weights, rotation: Rotation, of_values: Sequence[Rotation] = ()
) -> dict[str, torch.Tensor | StoredTensor]:
    """Return all weights, rotated when they are read, one tensor in memory at a time.

    `weights`, the model's state dict, may be on disk. `of_values` are the rotations of the values
    of every head, for each attention; or none.
    """
    changes: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {}

    def change(module: str, kind: str, apply: Callable[[torch.Tensor], torch.Tensor]) -> None:
        changes.setdefault(f"{module}.{kind}", []).append(apply)

    def fold_and_rotate(norm: str, weight_OI: torch.Tensor) -> torch.Tensor:
        gain_I = in_memory(weights[f"{norm}.weight"]).double() + stream.norms[norm]
        return rotation.after_scaling(gain_I).apply(weight_OI)

    for name in stream.tables:
        change(name, "weight", rotation.apply)
    for name, norm in stream.readers.items():
        change(name, "weight", partial(fold_and_rotate, norm))
    for name in stream.writers:
        change(name, "weight", partial(rotation.apply, axis=0))
        change(name, "bias", rotation.apply)
    for name, offset in stream.norms.items():
        change(name, "weight", partial(torch.full_like, fill_value=1 - offset))
    for (values, output, size), own in zip(stream.heads, of_values, strict=False):
        change(values, "weight", partial(_rotate_heads, own, size, 0))
        change(values, "bias", partial(_rotate_heads, own, size, 0))
        change(output, "weight", partial(_rotate_heads, own, size, 1))

    def read(name: str) -> torch.Tensor:
        value = in_memory(weights[name])
        for apply in changes[name]:
            value = apply(value)
        return value

    return {
        name: StoredTensor(tuple(x.shape), x.dtype, partial(read, name)) if name in changes else x
        for name, x in weights.items()
    }


def _rotate_heads(rotation: Rotation, size: int, axis: int, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight whose axis of heads, each of `size` channels, is rotated head by head."""
    heads = torch.unflatten(weight, axis, (-1, size))
    return rotation.apply(heads, axis + 1).view(weight.shape)


def _is_norm(part: nn.Module) -> bool:
    """Whether a module has a weight for each channel, as norms have."""
    weight = part._parameters.get("weight")
    return weight is not None and weight.dim() == 1 and not any(part.children())


def _offset(name: str, norm: Any, weights: Weights) -> float:
    """Return what an RMSNorm adds to its weight; raise StageFailed where it is another norm."""
    gain_I = in_memory(weights[f"{name}.weight"]).double()
    generator = torch.Generator().manual_seed(0)
    drawn_NI = torch.rand(2, len(gain_I), generator=generator) + 0.5
    with torch.inference_mode():
        found_NI = norm(drawn_NI).double()
    scaled_NI = drawn_NI.double() / drawn_NI.double().square().mean(-1, keepdim=True).sqrt()
    for offset in (0.0, 1.0):
        # 1e-3: what is added to the mean square, 1e-5 or less, is left out here
        if torch.allclose(found_NI, scaled_NI * (gain_I + offset), 1e-3, 1e-3):
            return offset
    raise StageFailed(
        f"rotates decoders whose norms are RMSNorm, found {type(norm).__name__} ({name})"
    )


def _value_heads(
    module: nn.Module, readers: Mapping[str, str], writers: Sequence[str]
) -> list[tuple[str, str, int]]:
    """Return the attentions whose values can be rotated, head by head."""
    found = []
    for name, part in module.named_modules():
        values, output = f"{name}.{VALUES}", f"{name}.{OUTPUT}"
        size = getattr(part, "head_dim", None)
        if values in readers and output in writers and isinstance(size, int):
            layers = (module.get_submodule(values), module.get_submodule(output))
            sizes = (layers[0].out_features, layers[1].in_features)
            if not any(number % size for number in sizes):  # type: ignore[operator]
                found.append((values, output, size))
    return found


def _refuse_other_weights(module: nn.Module, stream: ResidualStream) -> None:
    """Raise StageFailed for a matrix as wide as the residual stream that is no part of it."""
    known = {*stream.tables, *stream.readers, *stream.writers}
    for name, parameter in module.named_parameters():
        owner = name.rpartition(".")[0]
        if parameter.dim() > 1 and stream.width in parameter.shape and owner not in known:
            raise StageFailed(
                f"{name} {list(parameter.shape)} is a weight of "
                f"{type(module.get_submodule(owner)).__name__}, expected linear layers and tables "
                "of embeddings that a forward pass calls"
            )
