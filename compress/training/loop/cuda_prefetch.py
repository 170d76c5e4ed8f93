"""Copy the next batch to the CUDA device while the present step is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from compress.data.batch import Batch

    Ready = Callable[[], Batch]
    """Waits for a copy, and returns it."""


def on_device(batches: Iterable[Batch], device: str) -> Iterator[Batch]:
    """Yield batches on a device; on CUDA the copy of the next one has already started."""
    if not device.startswith("cuda"):
        yield from batches
        return
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    yield from one_ahead(batches, lambda batch: start_copy(batch, device, copies))


def one_ahead(batches: Iterable[Batch], start: Callable[[Batch], Ready]) -> Iterator[Batch]:
    """Yield each copied batch after ``start`` has begun to copy the next one."""
    pending: Ready | None = None
    for batch in batches:
        previous, pending = pending, start(batch)
        if previous is not None:
            yield previous()
    if pending is not None:
        yield pending()


def start_copy(batch: Batch, device: str, copies: torch.cuda.Stream) -> Ready:
    """Start to copy a batch on a separate stream; from pinned memory this does not block."""
    with torch.cuda.stream(copies):
        moved = batch.to(device)
        copied = copies.record_event()

    def ready() -> Batch:
        # Not wait_stream: the copy of the next batch is already queued on that stream.
        computing = torch.cuda.current_stream(device)
        computing.wait_event(copied)
        for tensor in moved.tensors():
            # Allocated on the copying stream: the allocator may otherwise reuse it there while
            # the step still reads it.
            tensor.record_stream(computing)
        return moved

    return ready
