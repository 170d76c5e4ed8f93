"""Runs a decoder with its cache in onnxruntime, without onnxruntime-genai."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compress.core.gates.quality import token_input
from compress.export.genai.decoder import INPUT_IDS, MASK
from compress.export.onnx.session import exact_session

if TYPE_CHECKING:
    from pathlib import Path

    from compress.common.forward import Predictor
    from compress.common.signature import Signature

    Cache = list[np.ndarray[Any, Any]]


class CachedSession:
    """A session of onnxruntime, whose calls get and return the cache."""

    def __init__(self, file: Path, threads: int) -> None:
        self.session = exact_session(file, threads)
        self.cache_inputs = [
            i for i in self.session.get_inputs() if i.name not in (INPUT_IDS, MASK)
        ]

    def empty(self, batch: int) -> Cache:
        """Return the cache before the first token."""
        shapes = ((batch, i.shape[1], 0, i.shape[3]) for i in self.cache_inputs)
        return [np.zeros(shape, np.float32) for shape in shapes]

    def __call__(self, ids_BT: torch.Tensor, cache: Cache | None = None) -> tuple[Any, Cache]:
        """Return scores `(batch, length, vocabulary)` after a cache, and the next cache."""
        cache = self.empty(len(ids_BT)) if cache is None else cache
        total = cache[0].shape[2] + ids_BT.shape[1]
        feed = {
            INPUT_IDS: ids_BT.numpy(),
            MASK: np.ones((len(ids_BT), total), np.int64),
            **{i.name: x for i, x in zip(self.cache_inputs, cache, strict=True)},
        }
        scores, *grown = self.session.run(None, feed)
        return torch.from_numpy(scores), grown

    def continue_greedily(self, prompt_BT: torch.Tensor, count: int) -> tuple[Any, Any]:
        """Return the likeliest next tokens `(batch, count)`, and the scores that chose them."""
        scores, cache = self(prompt_BT)
        tokens, chosen_by = [], []
        for place in range(count):
            chosen_by.append(scores[:, -1])
            tokens.append(scores[:, -1].argmax(-1, keepdim=True))
            if place < count - 1:
                scores, cache = self(tokens[-1], cache)
        return torch.cat(tokens, 1), torch.stack(chosen_by, 1)


def prefill_predictor(file: Path, threads: int, signature: Signature) -> Predictor:
    """Return a predictor of the scores of whole inputs, as the model without a cache gives them.

    It refuses masks that leave out anything but the end, whose scores mean nothing.
    """
    session, place = CachedSession(file, threads), token_input(signature)

    def predict(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for spec, x in zip(signature.inputs, inputs, strict=True):
            is_mask = spec.unmasked_value is not None
            if is_mask and bool((x.eq(spec.unmasked_value or 0).int().diff(dim=1) > 0).any()):
                raise ValueError("the mask leaves out tokens at the beginning; pad at the end")
        return (session(inputs[place].cpu())[0],)

    return predict
