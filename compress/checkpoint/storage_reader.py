"""Reads tensors that torch.save wrote, from any place in a file straight into their destination."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BYTES_AT_ONCE = 2**20
"""Largest temporary buffer, for regions whose bytes do not lie in the file's order."""


class Window(io.RawIOBase):
    """A byte range of a file, as a read-only file of its own."""

    def __init__(self, file: io.FileIO, start: int, length: int) -> None:
        """Show a range of an open file, which the caller keeps open and closes."""
        self.file, self.start, self.length, self.position = file, start, length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move as in any file."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        self.position = max(0, origin + offset)
        return self.position

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer, at most up to the end of the range."""
        wanted = memoryview(buffer).cast("B")[: max(0, self.length - self.position)]
        self.file.seek(self.start + self.position)
        count = self.file.readinto(wanted) or 0
        self.position += count
        return count


def load_on_meta(stream: io.BufferedReader[Window]) -> torch.Tensor:
    """Return a saved tensor without its data; torch records the offset at which they begin."""
    saved: torch.Tensor = torch.load(stream, map_location="meta", weights_only=True)
    return saved


def read_tensor_(window: Window, region: torch.Tensor) -> None:
    """Read the tensor that a range of a file holds into another tensor, in place.

    Raises:
        ValueError: it has another shape.
        EOFError: the range ends before the tensor does.
    """
    stream = io.BufferedReader(window)  # closes the window when it is not referenced any more
    saved = load_on_meta(stream)
    if saved.shape != region.shape:
        raise ValueError(f"{tuple(saved.shape)} instead of {tuple(region.shape)}")
    start = getattr(saved.untyped_storage(), "_checkpoint_offset", None)
    axes = None
    if saved.layout == torch.strided and not (saved.is_conj() or saved.is_neg()):
        strides = saved.stride()
        by_stride = sorted(range(saved.dim()), key=lambda axis: -strides[axis])
        # None where the memory has gaps, as in a slice of a larger tensor.
        axes = by_stride if saved.permute(by_stride).is_contiguous() else None
    if start is None or axes is None or saved.dtype != region.dtype:
        # Loaded fully and then copied: the file's bytes are not the region's in its own order.
        stream.seek(0)
        region.copy_(torch.load(stream, weights_only=True))
    elif saved.numel():
        window.seek(start + saved.storage_offset() * saved.element_size())
        _fill_(region.permute(axes), window)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's arrays are buffers


def read_exactly(stream: io.RawIOBase | io.BufferedReader, buffer: memoryview) -> None:
    """Fill a buffer from a stream; raise EOFError if that ends before."""
    while buffer:
        count = stream.readinto(buffer)
        if not count:
            raise EOFError(f"{len(buffer)} bytes are missing")
        buffer = buffer[count:]


def _fill_(region: torch.Tensor, window: Window) -> None:
    if region.is_contiguous():
        read_exactly(window, bytes_of(region))
    elif region.nbytes <= BYTES_AT_ONCE:
        buffer = torch.empty(region.shape, dtype=region.dtype)
        read_exactly(window, bytes_of(buffer))
        region.copy_(buffer)
    elif len(region) == 1:
        _fill_(region[0], window)
    else:
        for rows in torch.split(region, max(1, BYTES_AT_ONCE // region[0].nbytes)):
            _fill_(rows, window)
