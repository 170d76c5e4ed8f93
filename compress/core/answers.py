"""Models' outputs, computed once: metric, gates and parity read the same answers.

A model is called once for each batch of a split, whatever compares its outputs: another metric,
other targets or one more gate read what is kept.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections import OrderedDict
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from compress.common.dependency_recorder import Recording, add_to_recordings, recording

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor, Tensors

    StoredTensor = tuple[int, torch.dtype, tuple[int, ...]]
    """Offset in a file, dtype and shape."""

# A classifier's 50,000 samples of 1,000 classes take 0.2 GB; a decoder that scores 150,000 tokens
# takes 0.6 GB for 16 texts of 64 tokens, and computes those of more texts again where they are
# needed twice.
MAX_BYTES = 2**30
"""Bytes of outputs kept of one artifact."""
MAX_TOTAL_BYTES = 2**32
"""Bytes kept of all artifacts: those of the one that was not read for the longest time go first."""
MAX_MODELS = 64
"""Artifacts of which outputs are kept; each has a file open."""


class KeptAnswers:
    """Outputs of artifacts by the inputs that they were called with, until this process ends.

    They are in unnamed files, so that nobody else reads or changes them. Inputs are known by their
    content: data that differ each time they are read are never answered from here. Other processes
    begin with none.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Keep them on the disk of a folder, by default that of temporary files."""
        self._folder = folder
        self._by_model: OrderedDict[tuple[str, str, int], _Answers] = OrderedDict()

    def __reduce__(self) -> tuple[type[KeptAnswers], tuple[()]]:
        return KeptAnswers, ()

    @contextmanager
    def predictor(
        self,
        artifact: Artifact,
        device: str,
        threads: int,
        *,
        by_row: bool = False,
        keep_errors: bool = False,
    ) -> Iterator[Predictor]:
        """Provide an artifact's predictor, which calls it for new inputs alone.

        The artifact is opened for the first of them. With `by_row`, rows are also taken from other
        batches, for models whose outputs do not depend on the rest of a batch. With `keep_errors`,
        inputs that were refused are refused again without a call.
        """
        answers = self._answers_of(artifact, device, threads)
        with ExitStack() as stack:
            load = cache(lambda: stack.enter_context(artifact.open(device, threads)))

            def answer(*inputs: torch.Tensor) -> Tensors:
                return answers.get_or_compute(inputs, load, by_row=by_row, keep_errors=keep_errors)

            try:
                yield answer
            finally:
                for error in answers.errors.values():
                    error.__traceback__ = None  # its frames would keep the model in memory
        total = sum(answers.bytes for answers in self._by_model.values())
        while len(self._by_model) > 1 and (
            total > MAX_TOTAL_BYTES or len(self._by_model) > MAX_MODELS
        ):
            total -= self._by_model.popitem(last=False)[1].bytes

    def has_room(self, artifact: Artifact, device: str, threads: int) -> bool:
        """Whether more outputs of an artifact would be kept."""
        return not self._answers_of(artifact, device, threads).is_full

    def _answers_of(self, artifact: Artifact, device: str, threads: int) -> _Answers:
        key = artifact.digest, device, threads
        if key not in self._by_model:
            self._by_model[key] = _Answers(self._folder)
        self._by_model.move_to_end(key)
        return self._by_model[key]


class _Answers:
    """One artifact's outputs in a file, by the hashes of batches and of their rows."""

    def __init__(self, folder: Path | None) -> None:
        self.bytes = 0
        self.is_full = False
        """Whether outputs were left out for want of room."""
        self._folder = folder
        self._file = -1
        self._lock = threading.Lock()
        self._batches: dict[bytes, tuple[StoredTensor, ...]] = {}
        self._rows: dict[bytes, tuple[tuple[StoredTensor, ...], int]] = {}
        """Of a row: its batch's outputs, and its number in the batch."""
        self.errors: dict[bytes, Exception] = {}
        self._recorded = Recording()
        """What user code read while the model was opened and called."""

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def get_or_compute(
        self, inputs: Tensors, load: Callable[[], Predictor], *, by_row: bool, keep_errors: bool
    ) -> Tensors:
        """Return the outputs that are kept for inputs, else those that the loaded model returns."""
        rows = _row_hashes(inputs)
        batch = hashlib.sha256(b"".join(rows))
        batch.update("".join(f"{x.dtype}{tuple(x.shape)}" for x in inputs).encode())
        for x in () if rows else inputs:
            batch.update(_as_bytes(x).numpy().data)
        key = batch.digest()
        if keep_errors and key in self.errors:
            raise self.errors[key]
        outputs = None
        if key in self._batches:
            outputs = tuple(self._read(*tensor) for tensor in self._batches[key])
        elif by_row:
            outputs = self._read_rows(rows)
        if outputs is not None:
            # The measurement depends on what the model's code read, as if it had called it itself.
            add_to_recordings(self._recorded)
            return outputs
        with recording() as recorded:
            predict = load()
            try:
                outputs = predict(*inputs)
            except Exception as error:
                if keep_errors:
                    self.errors[key] = error
                raise
        self._recorded.add(recorded)
        try:
            # Parity asks at sizes that a model may refuse: its calls answer whole batches alone.
            self._keep(key, [] if by_row else rows, outputs)
        except OSError:  # no room on the disk
            self.is_full = True
        return outputs

    def _keep(self, key: bytes, rows: list[bytes], outputs: Tensors) -> None:
        import torch

        contents = [t.detach().cpu() for t in outputs if t.layout == torch.strided]
        size = sum(t.nbytes for t in contents)
        if self.bytes + size > MAX_BYTES or len(contents) < len(outputs):
            self.is_full = True
            return
        with self._lock:
            if self._file < 0:
                if self._folder is not None:
                    self._folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self._folder) as file:
                    self._file = os.dup(file.fileno())
            offset, stored = self.bytes, []
            for t in contents:
                stored.append((offset, t.dtype, tuple(t.shape)))
                written = _as_bytes(t).numpy().data
                while written:
                    done = os.pwrite(self._file, written, offset)
                    written, offset = written[done:], offset + done
            self.bytes = offset
            self._batches[key] = place = tuple(stored)
        if rows and all(t.dim() and len(t) == len(rows) for t in contents):
            self._rows |= {row: (place, i) for i, row in enumerate(rows)}

    def _read_rows(self, rows: list[bytes]) -> Tensors | None:
        import torch

        if any(row not in self._rows for row in rows):
            return None
        outputs: list[list[torch.Tensor]] = []
        for tensors, i in map(self._rows.__getitem__, rows):
            outputs.append([])
            for offset, dtype, (_, *shape) in tensors:
                size = torch.Size(shape).numel() * dtype.itemsize
                outputs[-1].append(self._read(offset + i * size, dtype, tuple(shape)))
        columns = [*zip(*outputs, strict=True)]
        if any(a.shape != b.shape for column in columns for a, b in pairwise(column)):
            return None  # padded to other lengths
        return tuple(map(torch.stack, columns)) or None

    def _read(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        size = torch.Size(shape).numel() * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        content, done = bytearray(size), 0
        while done < size:  # Linux reads at most 2 GiB at once
            done += os.preadv(self._file, [memoryview(content)[done:]], offset + done)
        return torch.frombuffer(content, dtype=dtype).reshape(shape)


def _row_hashes(inputs: Tensors) -> list[bytes]:
    """Hash each row's values, types and shapes; none where the inputs have no rows in common."""
    if len({len(x) if x.dim() else 0 for x in inputs}) != 1 or not inputs[0].numel():
        return []
    form = "".join(f"{x.dtype}{tuple(x.shape[1:])}" for x in inputs).encode()
    columns = [_as_bytes(x).reshape(len(x), x.nbytes // len(x)) for x in inputs]
    hashes = []
    for parts in zip(*columns, strict=True):
        digest = hashlib.sha256(form)
        for part in parts:
            digest.update(part.numpy().data)
        hashes.append(digest.digest())
    return hashes


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    import torch

    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
