"""Comparison of a divided model with the whole one."""

import math

import torch
from torch import nn

from compress.training.model_parallel.equivalence_check import (
    ReferenceRun,
    forward_and_backward,
    take_gradient_sketches_,
)


def test_tolerance_of_outputs_is_relative_to_their_finite_values() -> None:
    """An infinite masked score must not become the scale of the tolerance."""
    masked = torch.tensor([[1.0, -math.inf], [2.0, -math.inf]])
    reference = ReferenceRun((), (masked,), {}, {})
    assert reference.output_mismatch((masked,)) == ""
    for wrong in (masked + 0.1, masked.nan_to_num(neginf=-1e9), masked * math.nan):
        assert "output 0 differs" in reference.output_mismatch((wrong,))


def test_gradients_of_the_whole_model_are_never_all_in_memory() -> None:
    torch.manual_seed(0)
    first, second, last = (nn.Linear(6, 6) for _ in range(3))
    module = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)
    last.bias.requires_grad_(False)
    inputs = (torch.randn(4, 6),)
    held = []

    def observe(_: nn.Module, args: object, hidden: torch.Tensor) -> None:
        hidden.register_hook(lambda grad: held.append(last.weight.grad))

    handle = first.register_forward_hook(observe)
    reference = ReferenceRun.record(module, inputs)
    handle.remove()
    assert held == [None]  # in the backward pass of the first layer
    assert all(weight.grad is None for weight in module.parameters())

    forward_and_backward(module, inputs)
    norms = {n: float(w.grad.norm()) for n, w in module.named_parameters() if w.grad is not None}
    assert reference.norms == norms
    sketches = take_gradient_sketches_(module)
    assert sketches.keys() == reference.sketches.keys()
    assert all(torch.equal(sketches[name], reference.sketches[name]) for name in sketches)
    assert all(reference.agrees(name, sketch) for name, sketch in sketches.items())
    # No gradient at all is a difference.
    missing = take_gradient_sketches_(module)
    assert {n for n, sketch in missing.items() if not reference.agrees(n, sketch)} == set(norms)


def test_the_check_computes_without_tf32():
    torch.backends.cuda.matmul.fp32_precision, before = (
        "tf32",
        torch.backends.cuda.matmul.fp32_precision,
    )
    seen = []

    class Net(nn.Module):
        def forward(self, x):
            seen.append(torch.backends.cuda.matmul.fp32_precision)
            seen.append(torch.backends.cudnn.conv.fp32_precision)
            return x * 2

    try:
        ReferenceRun.record(Net(), (torch.ones(2, 3, requires_grad=True),))
        assert seen == ["ieee", "ieee"]
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
