"""Trace recurrent layers with a dynamic sequence length."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensor

from compress.graph.library_cache import patched_attribute

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


@contextmanager
def any_sequence_length() -> Iterator[None]:
    """Let fake tensors pass recurrent layers without the loop over the steps.

    Only for traces that keep these layers as nodes: decomposed, they would have the right shapes
    and meaningless values.
    """
    # PyTorch infers the output shapes of `aten.lstm`, `aten.gru` and the like by running the loop
    # over the steps, which fixes their number; but the shapes follow from those of the states.
    compute_layer: Any = decompositions.one_layer_rnn
    select_lstm: Any = decompositions.select_one_layer_lstm_function

    def one_layer_rnn(inp: torch.Tensor, hidden: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if isinstance(inp, FakeTensor):
            return _repeat_over_steps(hidden, inp), hidden.clone()
        return compute_layer(inp, hidden, *rest, **more)

    def one_layer_lstm(
        inp: torch.Tensor, hidden: tuple[torch.Tensor, ...], *_: Any, **__: Any
    ) -> Any:
        return _repeat_over_steps(hidden[0], inp), tuple(state.clone() for state in hidden)

    def select(inp: torch.Tensor, hx: Any, params: Any) -> Any:
        return one_layer_lstm if isinstance(inp, FakeTensor) else select_lstm(inp, hx, params)

    with (
        patched_attribute(decompositions, "one_layer_rnn", one_layer_rnn),
        patched_attribute(decompositions, "select_one_layer_lstm_function", select),
    ):
        yield


def _repeat_over_steps(state_BH: torch.Tensor, inputs_TBI: torch.Tensor) -> torch.Tensor:
    return state_BH.expand(inputs_TBI.shape[0], *state_BH.shape).clone()
