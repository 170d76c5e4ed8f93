"""Errors that say nothing of the model: a full disk, and memory that ran out."""

import errno
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from compress.common.errors import StageFailed, raise_if_resources_ran_out, raised_as
from compress.pruning.depth import block_search
from compress.pruning.verification.masked_equivalence import (
    MaskedEquivalence,
    VerificationInputs,
    shapes_in_training,
)

FULL = OSError(errno.ENOSPC, "No space left on device", "/results/model.onnx")
ALLOCATOR = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"
RAN_OUT = [
    MemoryError(),
    FULL,
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError(ALLOCATOR),
]


@pytest.mark.parametrize("cause", RAN_OUT, ids=lambda error: type(error).__name__)
def test_a_lack_of_memory_or_disk_is_found_below_the_error_that_tells_of_it(
    cause: Exception,
) -> None:
    with pytest.raises(
        StageFailed, match=f"{type(cause).__name__}: (memory|.*(space|allocate|of))"
    ):
        raise_if_resources_ran_out(cause)
    with pytest.raises(StageFailed) as wrapped, raised_as(StageFailed, "it cannot be traced"):
        raise cause
    with pytest.raises(StageFailed) as found:
        raise_if_resources_ran_out(wrapped.value)
    assert found.value is wrapped.value
    raise_if_resources_ran_out(StageFailed("the model answers otherwise"))
    raise_if_resources_ran_out(FileNotFoundError(errno.ENOENT, "No such file", "weights"))


class _Fails(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.linear = error, nn.Linear(2, 2)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise self.error
        return self.linear(x)


def mismatch(module: _Fails) -> object:
    equivalence = MaskedEquivalence(module, VerificationInputs([torch.ones(1, 2)]))
    return equivalence.find_change_mismatch(lambda smaller: setattr(smaller, "fails", True))


def training(module: _Fails) -> object:
    module.fails = True
    return shapes_in_training(module, [torch.ones(1, 2)])


def without_block(module: _Fails) -> object:
    def measure(trial: nn.Module) -> None:
        raise module.error

    meter: Any = SimpleNamespace(measure=measure)
    return block_search._error_without(module, [], meter)


@pytest.mark.parametrize("check", [mismatch, training, without_block])
def test_what_cannot_be_tried_for_want_of_memory_is_not_taken_for_the_models_own_fault(
    check: Callable[[_Fails], object],
) -> None:
    assert "a width of 3" in str(check(_Fails(ValueError("a width of 3"))))
    with pytest.raises(StageFailed, match="MemoryError: memory ran out"):
        check(_Fails(MemoryError()))
