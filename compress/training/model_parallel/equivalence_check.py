"""Check that a model divided over processes has the outputs and gradients of the whole one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from compress.common.errors import first_line
from compress.common.forward import flatten_outputs
from compress.common.tensor_difference import largest_difference, largest_finite

if TYPE_CHECKING:
    from torch import nn

# Relative. Sums in another order agree far better in fp32; a wrong split errs in the first digits.
TOLERANCE = 1e-3
NEGLIGIBLE = 1e-6
"""Differences below this share of the largest gradient's norm are rounding: the gradient of an
attention key's bias, say, is zero but for rounding."""
WAVES = ((0.7, 0.0), (0.3, 1.0))
"""Frequency and phase of the two cosine patterns of a gradient sketch."""
NO_GRADIENT = torch.zeros(len(WAVES), dtype=torch.float64)
"""The sketch of a gradient that is zero, or None."""
PERIOD = 8191
"""Entries after which a pattern repeats: a prime, so that no dimension of a model is a multiple."""


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
        """Run the whole module forward and backward; it is set to eval mode. The result pickles.

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
                    stack.enter_context(weight.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            outputs = forward_and_backward(module, inputs)
        on_cpu = tuple(output.cpu() for output in outputs)
        return cls(tuple(x.cpu() for x in inputs), on_cpu, sketches, norms)

    def on(self, device: torch.device) -> ReferenceRun:
        """Return the same with the inputs on a device."""
        return replace(self, inputs=tuple(x.to(device) for x in self.inputs))

    def output_mismatch(self, outputs: Sequence[torch.Tensor]) -> str:
        """Describe how outputs differ from the whole model's; empty if they agree."""
        # The number is compared last: the first output that differs says more.
        pairs = zip((output.cpu() for output in outputs), self.outputs, strict=False)
        for number, (own, expected) in enumerate(pairs):
            if own.shape != expected.shape:
                return f"output {number} has shape {list(own.shape)}, not {list(expected.shape)}"
            difference, largest = largest_difference(expected, own), largest_finite(expected)
            if not difference <= TOLERANCE * largest + NEGLIGIBLE:
                return f"output {number} differs by {difference:.2g} of {largest:.2g}"
        if len(outputs) != len(self.outputs):
            return f"{len(outputs)} outputs, not {len(self.outputs)}"
        return ""

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
    with ExitStack() as stack:
        for operator in operators:
            stack.callback(setattr, operator, "fp32_precision", operator.fp32_precision)
            operator.fp32_precision = "ieee"
        yield


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
    """Return a sketch of each trained weight's gradient, and free the gradients, in place."""
    sketches = {}
    for name, weight in module.named_parameters():
        if weight.requires_grad:
            # None is compared, too: the whole model may have a gradient where this one has none.
            gradient = weight.grad
            sketches[name] = NO_GRADIENT if gradient is None else gradient_sketch(gradient)
            weight.grad = None
    return sketches


def gradient_sketch(gradient: torch.Tensor) -> torch.Tensor:
    """Return two weighted sums over a gradient, the full one where this process has a slice."""
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    # Some entries at a time: in float64, and with their pattern, all would take four times as much.
    sums = []
    for entries in torch.split(full.detach().flatten(), 128 * PERIOD):
        exact = entries.double()
        sums.append(torch.stack([exact @ _pattern(len(exact), exact, *wave) for wave in WAVES]))
    return torch.stack(sums).sum(0).cpu()


def true_on_all_ranks(condition: bool) -> bool:
    """Whether a condition holds in every process; all get the same answer."""
    minimum = torch.tensor([int(condition)])
    dist.all_reduce(minimum, op=dist.ReduceOp.MIN)
    return bool(minimum.item())


def compare(
    module: nn.Module,
    reference: ReferenceRun,
    tensor_group: dist.ProcessGroup,
    compute_gradients_: Callable[[Sequence[torch.Tensor]], object],
) -> tuple[list[str], str]:
    """Compare a divided module with the whole one, in all processes.

    ``compute_gradients_`` computes those of :func:`probing_loss` for some inputs, in place. Returns
    the weights whose gradients must be summed over a group, and any other mismatch.
    """
    wrong = ""
    try:
        with torch.no_grad(), full_precision():
            outputs = flatten_outputs(module.eval()(*reference.inputs))
        wrong = reference.output_mismatch(outputs)
    except (RuntimeError, ValueError, TypeError) as error:
        wrong = first_line(error)
    if not true_on_all_ranks(not wrong):
        return [], wrong or "reported by another process"
    compute_gradients_(reference.inputs)
    split = {n for n, weight in module.named_parameters() if isinstance(weight, DTensor)}
    sketches = take_gradient_sketches_(module)
    # Processes of other pipeline stages have other weights.
    suspects: list[Any] = [None] * dist.get_world_size()
    own_suspects = [n for n, sketch in sketches.items() if not reference.agrees(n, sketch)]
    dist.all_gather_object(suspects, own_suspects)
    partial_sums: list[str] = []
    wrong_names: list[str] = []
    for name in sorted(set(chain.from_iterable(suspects))):
        total = sketches.get(name, NO_GRADIENT).clone()
        dist.all_reduce(total, group=tensor_group)
        # An unsplit weight that each process uses only for its own heads or neurons.
        adds_up = name not in sketches or (name not in split and reference.agrees(name, total))
        (partial_sums if true_on_all_ranks(adds_up) else wrong_names).append(name)
    wrong = f"the gradient of {first_and_count(wrong_names)} differs" if wrong_names else ""
    return partial_sums, wrong


def first_and_count(names: Iterable[str]) -> str:
    """Format the first of some names, and how many more there are."""
    first, *more = names
    return f"{first!r}{f' and {len(more)} more' if more else ''}"


def _pattern(length: int, like: torch.Tensor, frequency: float, phase: float) -> torch.Tensor:
    dtype = like.dtype if like.dtype == torch.float64 else torch.float32
    index = (torch.arange(length, device=like.device) % PERIOD).to(dtype)
    return torch.cos(index * frequency + phase)
