"""Recurrent layers that a compiler writes out step by step, for the length that was traced."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.export import ExportedProgram

RECURRENT = re.compile(r"aten\.(lstm|gru|rnn)(?:_tanh|_relu)?\.input")


def refuse_unrolled_rnn(
    program: ExportedProgram, runtime: str, kernels: Collection[str] = ()
) -> None:
    """Raise StageFailed for a recurrent layer over sequences of any length.

    `kernels` names the layers for which the runtime has one: LSTM, GRU, RNN.
    """
    for node in program.graph.nodes:
        match = RECURRENT.match(str(node.target))
        if match is None or (layer := match[1].upper()) in kernels:
            continue
        batch_first = bool(node.args[-1])
        if not isinstance(node.args[0].meta["val"].shape[1 if batch_first else 0], int):
            other = "".join(f"an {name}, " for name in kernels)
            article = "a" if layer == "GRU" else "an"
            raise StageFailed(
                f"{runtime} writes out the steps of {article} {layer} one by one, and here their "
                "number is a named axis; declare a number instead of the name in model.inputs, or "
                f"use {other}export_onnx or export_torchscript"
            )
