"""Latency of a model as later stages quantize and export it, by its widths."""

from __future__ import annotations

import hashlib
import json
import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from compress.common.errors import StageFailed
from compress.export.latency.kernels import KernelTable, kernels_of
from compress.export.latency.resizing import MOST_EXPORTS, ResizableModel
from compress.export.latency.served_latency import graph_to_serve, open_as_served, write_alone
from compress.export.latency.width_costs import (
    LatencyModel,
    WidthCosts,
    measure_grid,
    spread_widths,
)
from compress.profiling.benchmark import MeasuredShare, compare_latency, unmeasurable
from compress.profiling.interaction_sum import InteractionSum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import onnx_ir as ir
    import torch

    from compress.artifacts.eager_model import EagerModel
    from compress.core.context import Context
    from compress.core.stage import Stage
    from compress.export.latency.kernels import Arrays
    from compress.profiling.benchmark import Opener

    Widths = Mapping[str, int]
    Grid = Mapping[str, Sequence[int]]

FITTED = 8
"""Models at widths of the grid whose latencies the kernels' sum is fitted to."""


@dataclass(frozen=True)
class OnnxLatency:
    """Latency in ONNX Runtime, or in OpenVINO from the same file, predicted from kernels."""

    runtime: Literal["onnx", "openvino"]
    stages: tuple[Stage[Any, Any], ...]
    """What quantizes the model between, if anything."""
    folder: Path
    """Of the tables of measured kernels."""
    machine: Mapping[str, Any]
    width_multiple: int = 1
    """What all widths are multiples of at which the stages can quantize."""

    @property
    def name(self) -> str:
        """The runtime with its version, and the stages before it."""
        return " → ".join([*(stage.stage for stage in self.stages), self.runtime_version])

    @property
    def runtime_version(self) -> str:
        """The runtime and its version."""
        from importlib.metadata import version

        package = {"onnx": "onnxruntime"}.get(self.runtime, self.runtime)
        return f"{package} {version(package)}"

    @contextmanager
    def tables(
        self,
        model: EagerModel,
        whole: Widths,
        grid: Grid,
        variants: Callable[[int, Path, int], Iterable[tuple[Widths, EagerModel]]],
        context: Context,
        batch: int,
    ) -> Iterator[LatencyByWidths]:
        """Measure what a model's latency is over a grid of widths, as shares of its own.

        Args:
            model: the unpruned model.
            whole: group → the model's own width, of all groups that variants cut.
            grid: group → its widths, the model's own first.
            variants: a number, a folder and what widths are multiples of → that many models of
                random widths, each made when it is asked for, in folders of the folder.
            context: data, threads, seed and progress.
            batch: samples of a call.

        Raises:
            StageFailed: the model cannot be quantized, exported or resized, or the machine is too
                busy.
        """
        with TemporaryDirectory(prefix="compress-latency-") as name:
            folder = Path(name)
            title = f"latency in {self.runtime}"
            context.progress(title, 0, 1, "export")
            base = write_alone(self.graph(model, context, folder / "base"), folder / "unpruned")
            built = variants(MOST_EXPORTS, folder, self.width_multiple)
            resizable = ResizableModel.fit(
                (own, self.graph(one, context, folder / f"as-served{number}"))
                for number, (own, one) in enumerate(built)
            )
            batches = context.measured_batches(model.signature, batch)
            specs = model.signature.inputs
            arrays = {s.name: x.numpy() for s, x in zip(specs, batches[0], strict=True)}
            table = KernelTable(self.folder, self.machine, context.threads)
            costs = WidthCosts(resizable, whole, arrays, table)
            scopes = [pair for pair in resizable.groups_together() if {*pair} <= grid.keys()]
            seconds, weight_bytes, _ = measure_grid(
                costs,
                grid,
                sorted(scopes),
                lambda done, total: context.progress(title, done, total, "kernels"),
            )
            served = open_as_served(base, self.runtime, model.signature, context.threads)
            kernels = kernels_of(base, arrays, context.threads)
            measured = LatencyByWidths(
                *(self, model, context, batches, arrays, table, folder),
                *(served.open, [kernel.key for kernel in kernels]),
            )
            chosen = spread_widths(grid, FITTED, random.Random(context.seed))
            shares = []
            for number, choice in enumerate(chosen):
                context.progress(title, number, len(chosen), "whole models")
                file = write_alone(
                    resizable.resize({**whole, **choice}), folder / f"fitted{number}"
                )
                shares.append(measured.measure_file(file).share)
            fitted = LatencyModel.fit([costs.at(choice).kernels for choice in chosen], shares)
            measured.predicted = InteractionSum.combine(
                [(fitted.per_kernel_second, seconds), (fitted.per_weight_byte, weight_bytes)],
                fitted.per_call,
            )
            yield measured

    def graph(self, model: EagerModel, context: Context, folder: Path) -> ir.Model:
        """Quantize and translate a model as the later stages do."""
        quantized: Any = model
        for number, stage in enumerate(self.stages):
            quantized = stage.run(quantized, context.with_root(folder / str(number)))
        return graph_to_serve(quantized, "latency")


@dataclass
class LatencyByWidths:
    """Latency of a model at other widths, as shares of its own: predicted and measured."""

    _served: OnnxLatency
    _model: EagerModel
    _context: Context
    _batches: Sequence[tuple[torch.Tensor, ...]]
    _inputs: Arrays
    _table: KernelTable
    _folder: Path
    _unpruned: Opener
    _unpruned_kernels: list[str]
    predicted: InteractionSum = field(default_factory=lambda: InteractionSum(1.0, {}))
    """The share of the unpruned model's latency, by the widths of the grid."""
    _number: int = 0

    def measure(self, pruned: EagerModel) -> MeasuredShare:
        """Quantize, export and measure a pruned model in turn with the unpruned one.

        Raises:
            StageFailed: it cannot be exported, or the machine is too busy.
        """
        self._number += 1
        folder = self._folder / f"checked{self._number}"
        graph = self._served.graph(pruned, self._context, self._folder / f"cut{self._number}")
        return self.measure_file(write_alone(graph, folder))

    def measure_file(self, file: Path) -> MeasuredShare:
        """Measure an ONNX file in turn with the unpruned model's, unless that is in the table.

        So the same tables lead to the same widths, though latencies vary.

        Raises:
            StageFailed: the machine is too busy.
        """
        threads = self._context.threads
        kernels = [kernel.key for kernel in kernels_of(file, self._inputs, threads)]
        content = [self._served.runtime_version, self._unpruned_kernels, kernels]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
        if key not in self._table.models:
            served = open_as_served(file, self._served.runtime, self._model.signature, threads)
            compared = compare_latency(self._unpruned, served.open, self._batches, threads=threads)
            if compared.share is None:
                raise StageFailed(unmeasurable("the latency of a cut", compared.speedup_doubt))
            share, unpruned_ms = compared.share, compared.before.p50
            self._table.add_model(
                key, MeasuredShare(share=share, unpruned_ms=unpruned_ms, ms=compared.after.p50)
            )
        return self._table.models[key]
