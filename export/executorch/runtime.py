"""Load and run ExecuTorch programs with the runtime of the `executorch` wheel."""

from __future__ import annotations

import logging
import os
import re
import struct
import tempfile
import warnings
from contextlib import contextmanager, redirect_stderr, suppress
from mmap import ACCESS_READ, mmap
from typing import TYPE_CHECKING, Any

import torch

from compress.common.errors import ArtifactInvalid, StageFailed, first_line
from compress.common.signature import AxisBounds
from compress.export.common.compiled_code import in_parts, refuse_misfit
from compress.graph.axis_bounds import axis_limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import IO

    from torch.export import ExportedProgram

    from compress.common.signature import Signature


@contextmanager
def quiet_library() -> Iterator[None]:
    """Drop warnings about executorch's own code in a block, and keep the log's handlers."""
    # Its XNNPACK partitioner (1.5.1) calls logging.basicConfig when it is imported.
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            root.setLevel(level)
            for handler in [h for h in root.handlers if h not in handlers]:
                root.removeHandler(handler)


def planned_sizes(
    program: ExportedProgram, signature: Signature, largest_batch: int
) -> dict[str, list[int]]:
    """Return the smallest and largest size of each axis; StageFailed where nothing bounds one."""
    limits, sizes = axis_limits(program, signature), {}
    for name in signature.dynamic_axes:
        bounds = signature.bounds(name)
        known = [size for size in (bounds.max, limits.get(name)) if size is not None]
        if name == signature.batch_axis:
            known = [largest_batch]
        if not known:
            raise StageFailed(
                f"axis {name!r} has no largest size, for which ExecuTorch plans memory; declare "
                f"it, for example model.axes: {{{name}: {{max: 128}}}}"
            )
        sizes[name] = [bounds.min, min(known)]
    return sizes


def bounded_signature(signature: Signature, sizes: Mapping[str, Sequence[int]]) -> Signature:
    """Return a signature with bounds for every named axis; one that has a single size is fixed."""
    fixed = {name: least for name, (least, most) in sizes.items() if least == most}
    axes = {
        n: AxisBounds(min=least, max=most) for n, (least, most) in sizes.items() if n not in fixed
    }
    inputs = tuple(
        spec.model_copy(update={"shape": tuple(fixed.get(str(axis), axis) for axis in spec.shape)})
        for spec in signature.inputs
    )
    return signature.model_copy(update={"inputs": inputs, "axes": axes})


Tensors = tuple[torch.Tensor, ...]

EXECUTION_PLANS, DELEGATES = 1, 7
"""Numbers of fields in the tables of a program and of a plan (schema/program.fbs of 1.5)."""
BACKEND = b"XnnpackBackend"
NO_KERNEL = re.compile(r"kernel '([\w:.]+)' not found")
"""Printed by the runtime for an operator of a program that it cannot run."""


def load(
    file: Path, signature: Signature, sizes: Mapping[str, Sequence[int]], threads: int
) -> Callable[..., Tensors]:
    """Return a function that runs a file made for some smallest and largest `sizes` of named axes.

    Larger batches are answered in parts, and other sizes refused.
    """
    program, bounded = ExecuTorchProgram(file, threads), bounded_signature(signature, sizes)

    def run(*inputs: torch.Tensor) -> Tensors:
        # The runtime takes any sizes with as many elements as were planned, and reads the memory of
        # inputs of other types.
        refuse_misfit(bounded, inputs, bounded=True)
        return program(*inputs)

    batch = signature.batch_axis
    return run if batch is None else in_parts(run, signature, sizes[batch][1])


def refuse_other_backends(file: Path) -> None:
    """Raise ArtifactInvalid for a program whose parts another backend than XNNPACK would compute.

    The wheel has more: Qualcomm's loads the library of which the program gives the path.
    """
    from flatbuffers.encode import Get
    from flatbuffers.number_types import UOffsetTFlags
    from flatbuffers.table import Table

    def inner(table: Any, field: int) -> Iterator[Any]:
        offset = table.Offset(4 + 2 * field)
        for i in range(table.VectorLen(offset) if offset else 0):
            yield Table(content, table.Indirect(table.Vector(offset) + 4 * i))

    try:
        with file.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as content:
            program = Table(content, Get(UOffsetTFlags.packer_type, content, 0))
            backends = [
                bytes(delegate.String(delegate.Pos + delegate.Offset(4)))
                for plan in inner(program, EXECUTION_PLANS)
                for delegate in inner(plan, DELEGATES)
            ]
    except (OSError, ValueError, struct.error) as error:
        raise ArtifactInvalid(f"{file}: not an ExecuTorch program ({first_line(error)})") from error
    for backend in backends:
        if backend != BACKEND:
            raise ArtifactInvalid(
                f"{file}: has parts for {backend.decode(errors='replace')}, which may load other "
                "libraries; only XNNPACK is run"
            )


class ExecuTorchProgram:
    """A loaded `.pte` file, which runs with a number of threads."""

    def __init__(self, file: Path, threads: int) -> None:
        self.file = file
        self.threads = threads
        self._method: Any = None
        self._pool = 0
        self._load()

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Return the outputs, in memory of their own."""
        if self._pool != ThreadPool.generation:
            self._load()
        tensors = [x.contiguous() for x in inputs]
        try:
            return tuple(self._method.execute(tensors))
        except RuntimeError as error:
            # The reason is printed, not raised: run once more to catch it.
            with _captured_stderr() as printed:
                with suppress(RuntimeError):
                    self._method.execute(tensors)
                reason = _last_line(printed)
            raise RuntimeError(f"{first_line(error)}: {reason}") from error

    def _load(self) -> None:
        refuse_other_backends(self.file)
        with quiet_library(), _captured_stderr() as printed:
            from executorch.runtime import Runtime

            ThreadPool.resize(self.threads)
            self._pool = ThreadPool.generation
            try:
                self._program = Runtime.get().load_program(self.file)
                self._method = self._program.load_method("forward")
            except RuntimeError as error:
                if missing := sorted({*NO_KERNEL.findall(_read(printed))}):
                    raise ArtifactInvalid(
                        f"{self.file}: ExecuTorch's runtime has no kernel for "
                        f"{', '.join(missing)}; use export_onnx"
                    ) from error
                raise ArtifactInvalid(
                    f"{self.file}: not an ExecuTorch program that this runtime can load, or "
                    f"truncated ({first_line(error)}; {_last_line(printed)})"
                ) from error


class ThreadPool:
    """The runtime's threads, which all programs of the process share."""

    generation: int = 0
    """How often the pool was replaced. Programs loaded before still point to the old one."""

    @classmethod
    def resize(cls, threads: int) -> None:
        """Replace the pool by one of so many threads; nothing where it has them."""
        from executorch.extension.pybindings import portable_lib

        if portable_lib._threadpool_get_thread_count() != threads:
            portable_lib._unsafe_reset_threadpool(threads)
            cls.generation += 1


@contextmanager
def _captured_stderr() -> Iterator[IO[str]]:
    """Send what is printed in a block to a file: the runtime prints its reasons.

    It prints while it loads, and gives what it prints in a call to Python's `sys.stderr`.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        saved = os.dup(2)
        os.dup2(printed.fileno(), 2)
        try:
            with redirect_stderr(printed):
                yield printed
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _read(printed: IO[str]) -> str:
    printed.seek(0)
    return printed.read()


def _last_line(printed: IO[str]) -> str:
    return _read(printed).rstrip().rpartition("\n")[2].strip()
