"""A source's answers, asked once and kept on disk: the source need not stay beside its export."""

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

Outputs = tuple[torch.Tensor, ...]

LARGEST = 2**30
"""Bytes of answers that are kept; what comes after is asked where it is needed."""


@contextmanager
def recorded(source: Artifact, asked: Iterable[Outputs], threads: int) -> Iterator[Predictor]:
    """Give a model's answers as a predictor, and let the model go.

    Args:
        source: the model; it is opened again where another input is asked.
        asked: inputs.
        threads: CPU threads that it answers with.
    """
    with TemporaryDirectory(prefix="compress-answers-") as folder, ExitStack() as stack:
        kept = _Answers(Path(folder))
        with source.open(threads=threads) as predict:
            kept.record(accept_any_batch(kept.keeping(predict), source.signature), asked)
        del predict
        release_memory()
        again: list[Predictor] = []

        def answer(*inputs: torch.Tensor) -> Outputs:
            if not kept.knows(inputs):
                if not again:
                    again.append(stack.enter_context(source.open(threads=threads)))
                return again[0](*inputs)
            return kept.read(inputs)

        yield answer


class _Answers:
    """Answers in a folder, and what inputs were refused with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bytes = 0
        self._refused: dict[str, Exception] = {}

    def record(self, ask: Predictor, asked: Iterable[Outputs]) -> None:
        for inputs in asked:
            if self._bytes > LARGEST:
                break
            try:
                ask(*inputs)
            except Exception as error:  # noqa: BLE001 - raised again where the answer is needed
                error.__traceback__ = None  # its frames would keep the model in memory

    def keeping(self, predict: Predictor) -> Predictor:
        """Return a predictor whose answers are kept."""

        def answer(*inputs: torch.Tensor) -> Outputs:
            if self.knows(inputs):
                return self.read(inputs)
            key = _key(inputs)
            try:
                outputs = predict(*inputs)
            except Exception as error:
                self._refused[key] = error
                raise
            # What an answer is a part of would be written with it.
            torch.save(tuple(t.clone() for t in outputs), self._folder / key)
            self._bytes += sum(t.nbytes for t in outputs)
            return outputs

        return answer

    def knows(self, inputs: Outputs) -> bool:
        key = _key(inputs)
        return key in self._refused or (self._folder / key).exists()

    def read(self, inputs: Outputs) -> Outputs:
        key = _key(inputs)
        if key in self._refused:
            raise self._refused[key]
        found: Outputs = torch.load(self._folder / key, weights_only=True)
        return found


def _key(inputs: Outputs) -> str:
    """Return a name for some inputs that others do not have."""
    found = hashlib.sha256()
    for x in inputs:
        found.update(f"{x.dtype}{tuple(x.shape)}".encode())
        found.update(x.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
