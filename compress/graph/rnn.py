"""Trace recurrent layers with a dynamic sequence length.

PyTorch infers the output shapes of ``aten.lstm``, ``aten.gru`` and the like by running the loop
over the steps, which fixes the number of steps. Where a traced graph keeps these layers as nodes,
their output shapes follow from the shapes of the states.
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
    """Let fake tensors pass recurrent layers without the loop over the steps.

    Only for traces that keep these layers as nodes: decomposed, they would have the right shapes
    and meaningless values.
    """
    originals: dict[str, Callable[..., Any]] = {
        name: getattr(decompositions, name)
        for name in ("one_layer_rnn", "select_one_layer_lstm_function")
    }

    def one_layer_rnn(inp: torch.Tensor, hidden: torch.Tensor, *rest: Any, **more: Any) -> Layer:
        if not isinstance(inp, FakeTensor):
            computed: Layer = originals["one_layer_rnn"](inp, hidden, *rest, **more)
            return computed
        return _repeat_over_steps(hidden, inp), hidden.clone()

    def select(inp: torch.Tensor, hx: Any, params: Any) -> Callable[..., Layer]:
        if not isinstance(inp, FakeTensor):
            function: Callable[..., Layer] = originals["select_one_layer_lstm_function"](
                inp, hx, params
            )
            return function
        return _lstm_shapes

    decompositions.one_layer_rnn = one_layer_rnn
    decompositions.select_one_layer_lstm_function = select
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(decompositions, name, original)


def _lstm_shapes(
    inp: torch.Tensor, hidden: tuple[torch.Tensor, torch.Tensor], *_: Any, **__: Any
) -> Layer:
    return _repeat_over_steps(hidden[0], inp), (hidden[0].clone(), hidden[1].clone())


def _repeat_over_steps(state_BH: torch.Tensor, inputs_TBI: torch.Tensor) -> torch.Tensor:
    return state_BH.expand(inputs_TBI.shape[0], *state_BH.shape).clone()
