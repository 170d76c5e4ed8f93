"""What was measured on a machine, in a file: kernels, which models share, and whole models."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.common.config import Settings
from compress.common.sealed_json import canonical_json, read_state, write_state
from compress.profiling.benchmark import MeasuredShare
from export.latency.kernels import AT_ONCE, measure_kernels
from export.onnx.session import onnxruntime

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from export.latency.kernels import Kernel


TABLES = Path(".store", "latency")
"""Folder of measured kernels, in the results' directory."""


class MeasuredKernel(Settings):
    """The latency of one kernel."""

    operator: str
    sizes: str
    """Sizes of its inputs and outputs."""
    seconds: float
    """Of one call, the tenth percentile."""


class MeasuredTable(Settings):
    """What was measured on one machine: the content of a table's file."""

    kernels: dict[str, MeasuredKernel] = {}
    models: dict[str, MeasuredShare] = {}
    """By a hash of their kernels, and of those of the model that they were measured beside."""


class KernelTable:
    """Latencies of kernels on one machine, with one release of onnxruntime and some threads."""

    def __init__(self, folder: Path, machine: Mapping[str, Any], threads: int) -> None:
        """Read the table of a machine, or begin one where there is none that can be read."""
        versions = {"onnxruntime": onnxruntime.__version__, "threads": threads}
        self.setup: dict[str, Any] = {**machine, **versions}
        self.key = canonical_json(self.setup)
        name = hashlib.sha256(self.key.encode()).hexdigest()[:16]
        self.file = folder / f"kernels-{name}.json"
        self.threads = threads
        known = read_state(self.file, self.key, MeasuredTable) or MeasuredTable()
        self.kernels, self.models = known.kernels, known.models

    def measure(
        self, kernels: Sequence[Kernel], progress: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        """Measure the kernels that the table lacks; it is written after every few of them."""
        missing = list({k.key: k for k in kernels if k.key not in self.kernels}.values())
        for start in range(0, len(missing), AT_ONCE):
            some = missing[start : start + AT_ONCE]
            progress(start, len(missing))
            for kernel, seconds in zip(some, measure_kernels(some, self.threads), strict=True):
                self.kernels[kernel.key] = MeasuredKernel(
                    operator=kernel.operator, sizes=kernel.sizes, seconds=seconds
                )
            self._write()

    def seconds(self, kernel: Kernel) -> float:
        """Return the latency of a measured kernel."""
        return self.kernels[kernel.key].seconds

    def add_model(self, key: str, measured: MeasuredShare) -> None:
        """Add the latency of a whole model, and write the table."""
        self.models[key] = measured
        self._write()

    def _write(self) -> None:
        kernels, models = (dict(sorted(known.items())) for known in (self.kernels, self.models))
        write_state(self.file, self.key, MeasuredTable(kernels=kernels, models=models))
