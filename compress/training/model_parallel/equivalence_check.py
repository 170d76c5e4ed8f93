"""Check that a model divided over processes has the outputs and gradients of the whole one."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from compress.common.forward import flatten_outputs
from compress.common.tensor_difference import largest_difference, largest_finite

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn

# Relative. Sums in another order agree far better in fp32; a wrong split errs in the first digits.
TOLERANCE = 1e-3
NEGLIGIBLE = 1e-6
"""Differences below this share of the largest gradient's norm are rounding: the gradient of an
attention key's bias, say, is zero but for rounding."""
WAVES = ((0.7, 0.0), (0.3, 1.0))
"""Frequency and phase of the two cosine patterns of a gradient sketch."""


@dataclass(frozen=True)
class ReferenceRun:
    """Outputs and gradients of the whole model for a few samples."""

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    sketches: dict[str, torch.Tensor]
    """Two weighted sums over each gradient, which identify it without storing it."""
    norms: dict[str, float]

    @classmethod
    def record(cls, module: nn.Module, inputs: Sequence[torch.Tensor]) -> ReferenceRun:
        """Run the whole module forward and backward; it is set to eval mode.

        Each gradient is freed as soon as it is known: all of them would take as much memory as the
        weights.
        """
        sketches: dict[str, torch.Tensor] = {}
        norms: dict[str, float] = {}

        def keep_sketch_(name: str, weight: torch.Tensor) -> None:
            assert weight.grad is not None
            sketches[name] = gradient_sketch(weight.grad)
            norms[name] = float(weight.grad.norm())
            weight.grad = None

        with ExitStack() as stack:
            for name, weight in module.named_parameters():
                if weight.requires_grad:
                    hook = partial(keep_sketch_, name)
                    handle = weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)
            outputs = forward_and_backward(module, inputs)
        return cls(tuple(inputs), outputs, sketches, norms)

    def output_mismatch(self, outputs: Sequence[torch.Tensor]) -> str:
        """Describe how outputs differ from the whole model's; empty if they agree."""
        # The number is compared last: the first output that differs says more.
        for number, (own, expected) in enumerate(zip(outputs, self.outputs, strict=False)):
            if own.shape != expected.shape:
                return f"output {number} has shape {list(own.shape)}, not {list(expected.shape)}"
            difference, largest = largest_difference(expected, own), largest_finite(expected)
            if not difference <= TOLERANCE * largest + NEGLIGIBLE:
                return f"output {number} differs by {difference:.2g} of {largest:.2g}"
        if len(outputs) != len(self.outputs):
            return f"{len(outputs)} outputs, not {len(self.outputs)}"
        return ""

    def mismatched_gradients(self, sketches: dict[str, torch.Tensor]) -> list[str]:
        """Return the names of weights whose gradients differ from the whole model's."""
        return [name for name, sketch in sketches.items() if not self.agrees(name, sketch)]

    def agrees(self, name: str, sketch: torch.Tensor) -> bool:
        """Whether a gradient's sketch agrees with the whole model's."""
        expected = self.sketches.get(name, torch.zeros_like(sketch))
        margin = TOLERANCE * self.norms.get(name, 0.0)
        margin += NEGLIGIBLE * max(self.norms.values(), default=0.0)
        return bool(((sketch - expected).abs() <= margin).all())


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute fp32 products without TF32 or bf16 inside the block.

    CUDA rounds the factors of convolutions to ten bits by default, and those of matrices where
    ``torch.set_float32_matmul_precision`` allows it: errors of the size that the check looks for.
    """
    cudnn: Any = torch.backends.cudnn
    onednn: Any = torch.backends.mkldnn
    operators: list[Any] = [
        torch.backends.cuda.matmul,
        *(cudnn.conv, cudnn.rnn),
        *(onednn.matmul, onednn.conv, onednn.rnn),
    ]
    before = [operator.fp32_precision for operator in operators]
    for operator in operators:
        operator.fp32_precision = "ieee"
    try:
        yield
    finally:
        for operator, precision in zip(operators, before, strict=True):
            operator.fp32_precision = precision


def forward_and_backward(
    module: nn.Module, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return a module's outputs and compute gradients in place; it is set to eval mode."""
    module.eval()
    with full_precision():
        outputs = flatten_outputs(module(*inputs))
        torch.autograd.backward(probing_loss(outputs))
    return tuple(output.detach() for output in outputs)


def probing_loss(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute a scalar, a mean over samples, in which every output entry has its own weight."""
    terms = []
    for output in outputs:
        if output.is_floating_point():
            pattern = _pattern(output[0].numel() if output.dim() else 1, output, 0.7, 0.4)
            samples = len(output) if output.dim() else 1
            terms.append((output.reshape(samples, -1).float() * pattern).sum() / samples)
    return torch.stack(terms).sum()


def take_gradient_sketches_(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a sketch of each gradient, and free the gradients, in place."""
    sketches = {}
    for name, weight in module.named_parameters():
        if weight.grad is not None:
            sketches[name] = gradient_sketch(weight.grad)
            weight.grad = None
    return sketches


def gradient_sketch(gradient: torch.Tensor) -> torch.Tensor:
    """Return two weighted sums over a gradient, the full one where this process has a slice."""
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    flat = full.detach().flatten().double()
    return torch.stack([(flat * _pattern(len(flat), flat, *wave)).sum() for wave in WAVES]).cpu()


def true_on_all_ranks(condition: bool) -> bool:
    """Whether a condition holds in every process; all get the same answer."""
    minimum = torch.tensor([int(condition)])
    dist.all_reduce(minimum, op=dist.ReduceOp.MIN)
    return bool(minimum.item())


def first_and_count(names: Iterable[str]) -> str:
    """Format the first of some names, and how many more there are."""
    first, *more = names
    return f"{first!r}{f' and {len(more)} more' if more else ''}"


def _pattern(length: int, like: torch.Tensor, frequency: float, phase: float) -> torch.Tensor:
    dtype = like.dtype if like.dtype == torch.float64 else torch.float32
    # A period of 8191, a prime: no dimension of a model is a multiple of it.
    index = (torch.arange(length, device=like.device) % 8191).to(dtype)
    return torch.cos(index * frequency + phase)
