"""Latency of a model as later stages quantize and export it, by its widths."""

from __future__ import annotations

import hashlib
import json
import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from compress.common.errors import StageFailed
from compress.export.latency.kernels import KernelTable, kernels_of
from compress.export.latency.resizing import MOST_EXPORTS, ResizableModel
from compress.export.latency.width_costs import (
    LatencyModel,
    WidthCosts,
    measure_grid,
    spread_widths,
)
from compress.export.onnx.graph import strip_
from compress.export.onnx.lowering import translate
from compress.export.onnx.passes.stored_integers import compact_
from compress.export.onnx.proto_io import write
from compress.export.onnx.session import opened_session
from compress.profiling.benchmark import MeasuredShare, compare_latency, unmeasurable
from compress.profiling.interaction_sum import InteractionSum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import onnx_ir as ir
    import torch

    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.core.stage import Stage
    from compress.export.common.runtime import PredictedRuntime
    from compress.export.latency.kernels import Arrays
    from compress.profiling.benchmark import Opener

    Widths = Mapping[str, int]
    Grid = Mapping[str, Sequence[int]]


FITTED = 8
"""Models at widths of the grid whose latencies the kernels' sum is fitted to."""


@dataclass(frozen=True)
class OnnxLatency:
    """Latency in the runtime that a file is served with, predicted from kernels."""

    runtime: PredictedRuntime
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
    ) -> Iterator[MeasuredLatencies]:
        """Measure what a model's latency is over a grid of widths, as shares of its own."""
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
            measured = MeasuredLatencies(
                self,
                model=model,
                context=context,
                batches=batches,
                inputs=arrays,
                table=table,
                folder=folder,
                unpruned=served.open,
                unpruned_kernels=[kernel.key for kernel in kernels],
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
class MeasuredLatencies:
    """Latency of a model at other widths, as shares of its own: predicted and measured."""

    served: OnnxLatency
    model: EagerModel
    context: Context
    batches: Sequence[tuple[torch.Tensor, ...]]
    inputs: Arrays
    table: KernelTable
    folder: Path
    unpruned: Opener
    unpruned_kernels: list[str]
    predicted: InteractionSum = field(default_factory=lambda: InteractionSum(1.0, {}))
    """The share of the unpruned model's latency, by the widths of the grid."""
    _number: int = 0

    def measure(self, pruned: EagerModel) -> MeasuredShare:
        """Quantize, export and measure a pruned model in turn with the unpruned one."""
        self._number += 1
        folder = self.folder / f"checked{self._number}"
        graph = self.served.graph(pruned, self.context, self.folder / f"cut{self._number}")
        return self.measure_file(write_alone(graph, folder))

    def measure_file(self, file: Path) -> MeasuredShare:
        """Measure an ONNX file in turn with the unpruned model's, unless that is in the table.

        So the same tables lead to the same widths, though latencies vary.

        Raises:
            StageFailed: the machine is too busy.
        """
        threads = self.context.threads
        kernels = [kernel.key for kernel in kernels_of(file, self.inputs, threads)]
        content = [self.served.runtime_version, self.unpruned_kernels, kernels]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
        if key not in self.table.models:
            served = open_as_served(file, self.served.runtime, self.model.signature, threads)
            compared = compare_latency(self.unpruned, served.open, self.batches, threads=threads)
            if compared.share is None:
                raise StageFailed(unmeasurable("the latency of a cut", compared.speedup_doubt))
            share, unpruned_ms = compared.share, compared.before.p50
            self.table.add_model(
                key, MeasuredShare(share=share, unpruned_ms=unpruned_ms, ms=compared.after.p50)
            )
        return self.table.models[key]


class ServedFile(NamedTuple):
    """A model in the form that its runtime reads."""

    bytes: int
    """Of its files together."""
    open: Opener


def graph_to_serve(model: EagerModel | GraphModel, title: str) -> ir.Model:
    """Return the graph that `export_onnx` writes, which is not compared with the model here."""
    graph, _ = translate(model, None, title)
    compact_(graph)
    strip_(graph)
    return graph


def write_alone(graph: ir.Model, folder: Path) -> Path:
    """Write a graph into a new folder of its own, and return the file."""
    folder.mkdir()
    write(graph, folder / "model.onnx")
    return folder / "model.onnx"


def open_as_served(
    file: Path, runtime: PredictedRuntime, signature: Signature, threads: int
) -> ServedFile:
    """Return the file of `export_onnx` or `export_openvino` for an ONNX file alone in its folder.

    Raises:
        StageFailed: OpenVINO has no such operators.
    """
    if runtime == "onnx":
        size = sum(part.stat().st_size for part in file.parent.iterdir() if part.is_file())
        return ServedFile(size, partial(opened_session, file, threads))
    from compress.export.openvino import stage as openvino

    model = file.parent / "openvino" / "model.xml"
    model.parent.mkdir()
    openvino.write(file, model, signature)
    size = sum(part.stat().st_size for part in model.parent.iterdir())
    return ServedFile(size, partial(openvino.opened, model, threads))
