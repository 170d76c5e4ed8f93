"""The stage that rotates a decoder's weights before they are quantized; settings only, no torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.artifacts.artifact import STREAMED
from compress.artifacts.carried_files import CONFIG, TIED
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe import UntieWeights
from compress.common.errors import StageFailed, located
from compress.common.lazy_modules import torch
from compress.core.stage import Stage

if TYPE_CHECKING:
    from compress.checkpoint.state_dict import Weights
    from compress.core.context import Context

logger = logging.getLogger(__name__)
LARGEST_ERROR = 1e-4
"""Largest share of the outputs' norm by which a rotated model may differ: float32 rounds products
in another order. A matrix folded in at a wrong place changes most of the norm."""
COMPARED_ROWS = 4


class RotateWeights(Stage[EagerModel, EagerModel]):
    """Rotate a decoder's residual stream by a random Hadamard matrix (QuaRot), before quantization.

    The weights of its RMSNorms are folded into the linear layers behind them, and the matrix into
    tables of embeddings and linear layers, which spreads outliers over all channels. Outputs stay
    the same, and are compared. A head that is the table of embeddings becomes a weight of its own.
    Use it before `quantize_weights` where few bits cost a language model too much.

        - stage: rotate_weights
          heads: true
    """

    stage: Literal["rotate_weights"] = "rotate_weights"
    streams: ClassVar[bool] = True
    uses_data: ClassVar[bool] = True
    """Always: the outputs are compared on it, if there is any."""
    heads: bool = False
    """Whether the values of each attention head are rotated too, in `v_proj` and `o_proj`."""

    def run(self, model: EagerModel, context: Context) -> EagerModel:
        """Fold the matrices into the weights, compare the outputs, and write the model."""
        from compress.artifacts.meta_init import stream_weights_
        from compress.quantization.algorithms.residual_rotation import (
            randomized_hadamard,
            residual_stream,
            rotated_weights,
        )

        weights: Weights
        if model.is_streamed:
            module, weights = model.stored_weights()
            stream_weights_(module, weights)
        else:
            module = model.load()
            weights = module.state_dict()
        with located(f"{self.title}: "):
            stream = residual_stream(module, weights, model.signature.example(seed=context.seed))
        if self.heads and not stream.heads:
            raise StageFailed(
                f"{self.title}: heads: true rotates values between linear layers named v_proj and "
                "o_proj, found none; leave it out"
            )
        edits = [UntieWeights(parameters=stream.tied)] if stream.tied else []
        generator = torch.Generator().manual_seed(context.seed)
        rotation = randomized_hadamard(stream.width, generator)
        attentions = stream.heads if self.heads else ()
        of_values = [randomized_hadamard(size, generator) for *_, size in attentions]
        rotated = rotated_weights(stream, weights, rotation, of_values)
        difference = self._compare(model, edits, rotated, context)
        facts: dict[str, Any] = {
            "width": stream.width,
            "rotated_layers": len(stream.readers) + len(stream.writers),
            "rotated_values": len(of_values),
            "untied": {name: list(rotated[name].shape) for name in stream.tied},
            "outputs_error": difference,
            **({STREAMED: True} if model.is_streamed else {}),
        }
        logger.info(
            "%s: %d linear layers around %d channels, outputs differ by %.2g of their norm",
            self.title,
            facts["rotated_layers"],
            stream.width,
            difference,
        )
        for name, shape in facts["untied"].items():
            logger.info(
                "%s: %s %s is no longer the table of embeddings: its norm's weight is folded into "
                "it, and the model has as many weights more",
                self.title,
                name,
                shape,
            )
        carried = model.carried_files()
        if stream.tied and CONFIG in carried:
            config = {**json.loads(carried[CONFIG]), TIED: False}
            carried[CONFIG] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
        return model.derive(
            context.root,
            rotated,
            edits=edits,
            lineage=self.lineage(model),
            facts=facts,
            carried=carried,
        )

    def _compare(
        self, model: EagerModel, edits: Sequence[UntieWeights], rotated: Weights, context: Context
    ) -> float:
        """Return how far the rotated outputs differ; StageFailed where it is more than rounding."""
        from compress.artifacts.meta_init import stream_weights_
        from compress.checkpoint.state_dict import in_memory, load_state_
        from compress.common.forward import accept_any_batch, torch_predictor
        from compress.common.tensor_difference import relative_error_of_batches

        module = model.stored_weights()[0] if model.is_streamed else model.load()
        for edit in edits:
            edit.apply_(module)
        if model.is_streamed:
            stream_weights_(module, rotated)
        else:
            load_state_(module, {k: in_memory(x) for k, x in rotated.items()}, self.title)
        with (
            model.open(threads=context.threads) as expected,
            torch_predictor(module, "cpu", context.threads) as found,
        ):
            pair = [accept_any_batch(predict, model.signature) for predict in (expected, found)]
            rows = 1 if model.is_streamed else COMPARED_ROWS  # each call reads all weights
            compared = islice(context.comparison_inputs(model.signature, rows), 1)
            error = max(
                relative_error_of_batches(zip(*(predict(*batch) for predict in pair), strict=True))
                for batch in (model.signature.example(seed=context.seed), *compared)
            )
        if not error <= LARGEST_ERROR:
            hint = ", or its attention changes single values: try heads: false"
            raise StageFailed(
                f"{self.title}: the rotated model answers otherwise, by {error:.2g} of the norm, "
                f"expected at most {LARGEST_ERROR:g}: a part of {type(module).__name__} reads "
                f"single channels of the residual stream{hint if self.heads else ''}"
            )
        return error
