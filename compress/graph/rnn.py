"""Recurrent layers in traced graphs, whose sequences keep a length of any size.

PyTorch knows the sizes that ``aten.lstm``, ``aten.gru`` and their kin give only by running the loop
over the steps, which fixes the number of steps. While a graph is traced, whose nodes these layers
stay, their sizes can be told from the states'.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Layer = tuple[torch.Tensor, Any]


@contextmanager
def any_sequence_length() -> Iterator[None]:
    """Let tensors without values go through recurrent layers without a loop over the steps.

    Only for traces that keep these layers as they are: what the layers would be decomposed into has
    the right sizes and no sense.
    """
    known: dict[str, Callable[..., Any]] = {
        name: getattr(decompositions, name)
        for name in ("one_layer_rnn", "select_one_layer_lstm_function")
    }

    def one_layer_rnn(inp: torch.Tensor, hidden: torch.Tensor, *rest: Any, **more: Any) -> Layer:
        if not isinstance(inp, FakeTensor):
            given: Layer = known["one_layer_rnn"](inp, hidden, *rest, **more)
            return given
        return _repeated(hidden, inp), hidden.clone()

    def select(inp: torch.Tensor, hx: Any, params: Any) -> Callable[..., Layer]:
        if not isinstance(inp, FakeTensor):
            chosen: Callable[..., Layer] = known["select_one_layer_lstm_function"](inp, hx, params)
            return chosen
        return _lstm_sizes

    decompositions.one_layer_rnn = one_layer_rnn
    decompositions.select_one_layer_lstm_function = select
    try:
        yield
    finally:
        for name, function in known.items():
            setattr(decompositions, name, function)


def _lstm_sizes(
    inp: torch.Tensor, hidden: tuple[torch.Tensor, torch.Tensor], *_: Any, **__: Any
) -> Layer:
    return _repeated(hidden[0], inp), (hidden[0].clone(), hidden[1].clone())


def _repeated(state_BH: torch.Tensor, inputs_TBI: torch.Tensor) -> torch.Tensor:
    return state_BH.expand(inputs_TBI.shape[0], *state_BH.shape).clone()
