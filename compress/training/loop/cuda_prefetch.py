"""Batches copied to a CUDA device while the step before them is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from compress.data.splits import Batch

    Ready = Callable[[], Batch]


def on_device(batches: Iterable[Batch], device: str) -> Iterator[Batch]:
    """Yield batches on a device; on CUDA the next one is already on its way."""
    if not device.startswith("cuda"):
        yield from batches
        return
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    yield from one_ahead(batches, lambda batch: start_copy(batch, device, copies))


def one_ahead(batches: Iterable[Batch], start: Callable[[Batch], Ready]) -> Iterator[Batch]:
    """Yield what was started for each batch once that of the next one is started too.

    Args:
        batches: the batches.
        start: begins to copy a batch, and returns what gives the copy.
    """
    ready: Ready | None = None
    for batch in batches:
        before, ready = ready, start(batch)
        if before is not None:
            yield before()
    if ready is not None:
        yield ready()


def start_copy(batch: Batch, device: str, copies: torch.cuda.Stream) -> Ready:
    """Begin to copy a batch on a stream of its own; from page-locked memory this takes no time."""
    with torch.cuda.stream(copies):
        moved = batch.to(device)
        copied = copies.record_event()

    def ready() -> Batch:
        # An event, not the whole stream, on which the next batch is already being copied.
        computing = torch.cuda.current_stream(device)
        computing.wait_event(copied)
        for tensor in moved.tensors():
            # The memory came from the other stream, which would else take it back too early.
            tensor.record_stream(computing)
        return moved

    return ready
