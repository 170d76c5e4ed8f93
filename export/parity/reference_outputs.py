"""A source's outputs, computed once and stored on disk, so that it can leave memory."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from compress.common.forward import accept_any_batch
from compress.profiling.rss import release_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor

    Tensors = tuple[torch.Tensor, ...]

LARGEST = 2**30
"""Bytes of outputs that are stored; further ones are computed where they are needed."""


@contextmanager
def recorded_outputs(
    source: Artifact, inputs: Iterable[Tensors], threads: int
) -> Iterator[Predictor]:
    """Run a model on inputs, close it, and give its stored outputs as a predictor.

    It is opened again for an input whose output is not stored.
    """
    with TemporaryDirectory(prefix="compress-answers-") as folder, ExitStack() as stack:
        stored = OutputFolder(Path(folder))
        with source.open(threads=threads) as predict:
            recording = accept_any_batch(stored.recording(predict), source.signature)
            for batch in inputs:
                if stored.bytes > LARGEST:
                    break
                try:
                    recording(*batch)
                except Exception as error:  # noqa: BLE001 - raised again where it is needed
                    error.__traceback__ = None  # its frames would keep the model in memory
        del predict, recording
        release_memory()
        reopened: list[Predictor] = []

        def read_or_predict(*asked: torch.Tensor) -> Tensors:
            if asked in stored:
                return stored.read(asked)
            if not reopened:
                reopened.append(stack.enter_context(source.open(threads=threads)))
            return reopened[0](*asked)

        yield read_or_predict


class OutputFolder:
    """A model's outputs in a folder, one file for each input, and the errors that inputs raised."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.bytes = 0
        self._errors: dict[str, Exception] = {}

    def recording(self, predict: Predictor) -> Predictor:
        """Return a predictor whose outputs are stored."""

        def predict_and_store(*inputs: torch.Tensor) -> Tensors:
            if inputs in self:
                return self.read(inputs)
            key = _key(inputs)
            try:
                outputs = predict(*inputs)
            except Exception as error:
                self._errors[key] = error
                raise
            # A view would be written with all of the tensor that it is a part of.
            torch.save(tuple(t.clone() for t in outputs), self._folder / key)
            self.bytes += sum(t.nbytes for t in outputs)
            return outputs

        return predict_and_store

    def __contains__(self, inputs: Tensors) -> bool:
        key = _key(inputs)
        return key in self._errors or (self._folder / key).exists()

    def read(self, inputs: Tensors) -> Tensors:
        """Return the stored outputs, or raise the model's error again."""
        key = _key(inputs)
        if key in self._errors:
            raise self._errors[key]
        outputs: Tensors = torch.load(self._folder / key, weights_only=True)
        return outputs


def _key(inputs: Tensors) -> str:
    """Hash types, shapes and values."""
    digest = hashlib.sha256()
    for x in inputs:
        digest.update(f"{x.dtype}{tuple(x.shape)}".encode())
        digest.update(x.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
