"""Proof that a model spread over processes answers, and learns, as the whole one does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from compress.common.forward import flatten_outputs
from compress.common.tensor_difference import largest_difference, largest_finite

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

# fp32 sums in another order; what is cut wrongly is wrong in the first digits.
TOLERANCE = 1e-3
NEGLIGIBLE = 1e-6
"""Share of the largest gradient's norm that may be rounding alone (a key's bias, say)."""
WAVES = ((0.7, 0.0), (0.3, 1.0))
"""Frequency and phase of the patterns that gradients are multiplied with in a sketch."""


@dataclass(frozen=True)
class Proof:
    """What the whole model answers to a few samples, and what it would learn from them."""

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    sketches: dict[str, torch.Tensor]
    """A few sums over each gradient: as good as the gradient, and small."""
    norms: dict[str, float]

    @classmethod
    def of(cls, module: nn.Module, inputs: Sequence[torch.Tensor]) -> Proof:
        """Run the whole module forward and backward; it is left in eval mode."""
        outputs = forward_and_backward(module, inputs)
        gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        norms = {name: float(gradient.norm()) for name, gradient in gradients.items()}
        sketches = take_sketches_(module)
        return cls(tuple(inputs), outputs, sketches, norms)

    def wrong_output(self, outputs: Sequence[torch.Tensor]) -> str:
        """Return in words how outputs differ from the whole model's; empty where they do not."""
        for number, (own, whole) in enumerate(zip(outputs, self.outputs, strict=False)):
            if own.shape != whole.shape:
                return f"output {number} has shape {list(own.shape)}, not {list(whole.shape)}"
            difference, largest = largest_difference(whole, own), largest_finite(whole)
            if not difference <= TOLERANCE * largest + NEGLIGIBLE:
                return f"output {number} differs by {difference:.2g} of {largest:.2g}"
        missing = len(outputs) != len(self.outputs)
        return f"{len(outputs)} outputs, not {len(self.outputs)}" if missing else ""

    def wrong_gradients(self, sketches: dict[str, torch.Tensor]) -> list[str]:
        """Return the names of the weights whose gradients differ from the whole model's."""
        return [name for name, sketch in sketches.items() if not self.agrees(name, sketch)]

    def agrees(self, name: str, sketch: torch.Tensor) -> bool:
        """Whether a gradient's sketch is that of the whole model."""
        expected = self.sketches.get(name, torch.zeros_like(sketch))
        margin = TOLERANCE * self.norms.get(name, 0.0)
        margin += NEGLIGIBLE * max(self.norms.values(), default=0.0)
        return bool(((sketch - expected).abs() <= margin).all())


def forward_and_backward(
    module: nn.Module, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return a module's outputs, and leave gradients in it, in place; it is set to eval mode."""
    module.eval()
    outputs = flatten_outputs(module(*inputs))
    torch.autograd.backward(probing_loss(outputs))
    return tuple(output.detach() for output in outputs)


def probing_loss(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a scalar, a mean over samples, that tells all outputs of a sample apart."""
    terms = []
    for output in outputs:
        if output.is_floating_point():
            pattern = _pattern(output[0].numel() if output.dim() else 1, output, 0.7, 0.4)
            samples = len(output) if output.dim() else 1
            terms.append((output.reshape(samples, -1).float() * pattern).sum() / samples)
    return torch.stack(terms).sum()


def take_sketches_(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a sketch of each gradient, and let go of the gradients, in place."""
    sketches = {}
    for name, weight in module.named_parameters():
        if weight.grad is not None:
            whole = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
            flat = whole.detach().flatten().double()
            sums = [(flat * _pattern(len(flat), flat, *wave)).sum() for wave in WAVES]
            sketches[name] = torch.stack(sums).cpu()
            weight.grad = None
    return sketches


def everywhere(fact: bool) -> bool:
    """Whether something is so in every process."""
    answer = torch.tensor([int(fact)])
    dist.all_reduce(answer, op=dist.ReduceOp.MIN)
    return bool(answer.item())


def named(names: Iterable[str]) -> str:
    """Return the first of some names, and how many more there are."""
    first, *more = names
    return f"{first!r}{f' and {len(more)} more' if more else ''}"


def _pattern(length: int, like: torch.Tensor, frequency: float, phase: float) -> torch.Tensor:
    dtype = like.dtype if like.dtype == torch.float64 else torch.float32
    # A prime period: nothing in a model repeats with it.
    index = (torch.arange(length, device=like.device) % 8191).to(dtype)
    return torch.cos(index * frequency + phase)
