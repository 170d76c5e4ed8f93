"""A source's outputs, computed before its export is loaded, so that it can leave memory."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from compress.common.forward import accept_any_batch
from compress.profiling.rss import release_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    import torch

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.core.context import Context

    Tensors = tuple[torch.Tensor, ...]


def source_predictor(source: Artifact, context: Context) -> AbstractContextManager[Predictor]:
    """Provide a source on the CPU; rows of `val` that were evaluated there are not called again."""
    by_row = context.answers_by_row(source)
    return context.answers.predictor(
        source, "cpu", context.threads, by_row=by_row, keep_errors=True
    )


@contextmanager
def recorded_outputs(
    source: Artifact, inputs: Iterable[Tensors], context: Context
) -> Iterator[Predictor]:
    """Run a model on inputs, close it, and give its kept outputs as a predictor.

    It is opened again for an input whose output is not kept.
    """
    with source_predictor(source, context) as predict:
        answer = accept_any_batch(predict, source.signature)
        for batch in inputs:
            if not context.answers.has_room(source, "cpu", context.threads):
                break
            with suppress(Exception):  # raised again where it is needed
                answer(*batch)
        del predict, answer
    release_memory()
    with source_predictor(source, context) as predict:
        yield predict
