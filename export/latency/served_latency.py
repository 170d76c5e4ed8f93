"""Latency of a model as later stages quantize and export it, by its widths."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from compress.common.config import Settings
from compress.export.exporter import EXPORTERS
from compress.export.latency.kernels import Kernel, KernelTable, kernels_of
from compress.export.latency.resizing import MOST_EXPORTS, MixedModel, ResizableModel
from compress.export.onnx.lowering import translate_small
from compress.export.onnx.proto_io import write
from compress.export.onnx.session import opened_session
from compress.profiling.benchmark import (
    MeasuredShare,
    NotMeasurable,
    compare_latencies,
    compare_latency,
    unmeasurable,
)
from compress.profiling.interaction_sum import InteractionSum

if TYPE_CHECKING:
    from random import Random

    import onnx_ir as ir
    import torch

    from compress.artifacts.eager_model import EagerModel
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.core.stage import Stage
    from compress.export.latency.kernels import Arrays
    from compress.profiling.benchmark import Opener
    from compress.profiling.interaction_sum import Choice, Value

    Widths = Mapping[str, int]
    Grid = Mapping[str, Sequence[Value]]
    Values = np.ndarray[tuple[int], np.dtype[np.float64]]

FITTED = 8  # models at widths of the grid whose latencies the kernels' sum is fitted to


def measure_files(
    files: Sequence[Path], batches: Sequence[Sequence[torch.Tensor]], threads: int
) -> list[float]:
    """Return the median seconds of ONNX files, measured in turn; StageFailed if too busy."""
    openers = [partial(opened_session, file, threads) for file in files]
    measured = compare_latencies(openers, batches, threads=threads).latencies
    for latency in measured:
        if doubt := latency.doubt_of("p50"):
            raise NotMeasurable(unmeasurable("the latency of a variant", doubt))
    return [1e-3 * latency.p50 for latency in measured]


class KernelCost(NamedTuple):
    """What the kernels of a model add up to, and its file."""

    seconds: float
    """Of all kernels, each measured alone."""
    weight_bytes: int
    """Bytes of constants that they read."""
    file_bytes: int = 0

    @classmethod
    def of_kernels(cls, kernels: Sequence[Kernel], table: KernelTable, file_bytes: int = 0) -> Self:
        """Add up the kernels of a model; all of them are in the table."""
        weight_bytes = sum(kernel.weight_bytes for kernel in kernels)
        return cls(sum(map(table.seconds, kernels)), weight_bytes, file_bytes)


class LatencyModel(Settings):
    """A model's latency as a sum over its kernels, corrected by the latencies of whole models."""

    per_kernel_second: float
    """Seconds for each second of the kernels alone."""
    per_weight_byte: float
    """Seconds for each byte of weights. A kernel that is called alone again and again finds its
    weights in the processor's nearest cache; in a model whose weights do not fit, the layers
    between have replaced them. On a ResNet-20 of 1.1 M weights this is two thirds of the time."""
    per_call: float
    """Seconds for each call of the model."""

    @classmethod
    def fit(cls, costs: Sequence[KernelCost], seconds: Sequence[float]) -> Self:
        """Fit the three coefficients, none negative, to the least relative errors."""
        from scipy.optimize import nnls

        measured = np.array(seconds)
        features = np.array([[cost.seconds, cost.weight_bytes, 1.0] for cost in costs])
        # Columns of the same magnitude, as bytes are millions and seconds fractions.
        scale = features.max(axis=0)
        scale[scale == 0] = 1.0
        relative = features / scale / measured[:, None]
        coefficients, _ = nnls(relative, np.ones(len(measured)))
        kernels, weights, call = (coefficients / scale).tolist()
        return cls(per_kernel_second=kernels, per_weight_byte=weights, per_call=call)

    def predict(self, cost: KernelCost) -> float:
        """Return the seconds of one call of a model."""
        return (
            self.per_kernel_second * cost.seconds
            + self.per_weight_byte * cost.weight_bytes
            + self.per_call
        )


@dataclass
class WidthCosts:
    """Costs of a model at any widths and formats, from the kernels that onnxruntime runs then.

    Every model is made from one file, not exported, and only kernels that the table lacks are
    measured.
    """

    model: ResizableModel | MixedModel
    whole: Choice
    """The model's own values of all decisions."""
    inputs: Arrays
    table: KernelTable
    _known: dict[tuple[tuple[str, Value], ...], KernelCost] = field(default_factory=dict)

    def at(self, choice: Choice) -> KernelCost:
        """Return the cost at some values; decisions that are left out have the model's own."""
        choice = {**self.whole, **choice}
        key = tuple(sorted(choice.items()))
        if key not in self._known:
            with TemporaryDirectory(prefix="compress-width-") as folder:
                file = Path(folder) / "model.onnx"
                write(self.model.resize(choice), file)
                kernels = kernels_of(file, self.inputs, self.table.threads)
                size = sum(part.stat().st_size for part in Path(folder).iterdir())
            self.table.measure(kernels)
            self._known[key] = KernelCost.of_kernels(kernels, self.table, size)
        return self._known[key]


def measure_grid(
    costs: WidthCosts,
    grid: Grid,
    scopes: Sequence[tuple[str, ...]],
    progress: Callable[[int, int], None] = lambda *_: None,
) -> tuple[InteractionSum, InteractionSum, InteractionSum]:
    """Decompose the costs of a model over a grid of values, that of the model itself first.

    ``scopes`` are the decisions that meet in a kernel. Returns seconds of the kernels, bytes of the
    weights that they read, and bytes of the file.
    """
    base = {decision: values[0] for decision, values in grid.items()}
    # Smaller ones first, as the changes of these are subtracted from those of larger ones.
    parts = {
        part
        for scope in scopes
        for size in range(2, len(scope) + 1)
        for part in combinations(sorted(scope), size)
    }
    ordered = [
        *((decision,) for decision in grid),
        *sorted(parts, key=lambda part: (len(part), part)),
    ]
    models = [
        (scope, values)
        for scope in ordered
        for values in product(*(grid[decision][1:] for decision in scope))
    ]
    whole: Values = np.array(costs.at(base), float)
    terms: dict[tuple[str, ...], dict[tuple[Value, ...], Values]] = {scope: {} for scope in ordered}
    for done, (scope, values) in enumerate(models):
        progress(done, len(models))
        chosen = dict(zip(scope, values, strict=True))
        change = np.array(costs.at(base | chosen), float) - whole
        for size in range(1, len(scope)):
            for part in combinations(scope, size):
                change = change - terms[part][tuple(chosen[decision] for decision in part)]
        terms[scope][values] = change
    progress(len(models), len(models))
    seconds, weight_bytes, file_bytes = (
        InteractionSum(
            float(whole[i]),
            {
                scope: {values: float(change[i]) for values, change in own.items()}
                for scope, own in terms.items()
            },
        )
        for i in range(3)
    )
    return seconds, weight_bytes, file_bytes


def spread_widths(grid: Grid, count: int, generator: Random) -> list[dict[str, Value]]:
    """Return the largest and the smallest widths of a grid, and random ones between."""
    drawn = [
        {group: generator.choice(widths) for group, widths in grid.items()}
        for _ in range(count - 2)
    ]
    largest, smallest = ({group: widths[i] for group, widths in grid.items()} for i in (0, -1))
    return [largest, smallest, *drawn]


@dataclass(frozen=True)
class OnnxLatency:
    """Latency in the runtime that a file is served with, predicted from kernels."""

    runtime: str
    """Kind of its files."""
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
        package = EXPORTERS[self.runtime].runtime.torch_free_package
        return f"{package} {version(package)}"

    @contextmanager
    def tables(
        self,
        model: EagerModel,
        whole: Widths,
        grid: Mapping[str, Sequence[int]],
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
            built = enumerate(variants(MOST_EXPORTS, folder, self.width_multiple))
            resizable = ResizableModel.fit(
                (own, self.graph(one, context, folder / f"as-served{i}")) for i, (own, one) in built
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
                graph = resizable.resize({**whole, **choice})
                file = write_alone(graph, folder / f"fitted{number}")
                shares.append(measured.measure_file(file).share)
            fitted = LatencyModel.fit([costs.at(choice) for choice in chosen], shares)
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
        return translate_small(quantized, "latency")[0]


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

    def measure(self, pruned: EagerModel) -> MeasuredShare:
        """Quantize, export and measure a pruned model in turn with the unpruned one."""
        folder = Path(mkdtemp(dir=self.folder))
        graph = self.served.graph(pruned, self.context, folder / "quantized")
        return self.measure_file(write_alone(graph, folder / "served"))

    def measure_file(self, file: Path) -> MeasuredShare:
        """Measure an ONNX file in turn with the unpruned model's, unless that is in the table.

        So the same tables lead to the same widths, though latencies vary. StageFailed where the
        machine is too busy.
        """
        threads = self.context.threads
        kernels = [kernel.key for kernel in kernels_of(file, self.inputs, threads)]
        content = [self.served.runtime_version, self.unpruned_kernels, kernels]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
        if key not in self.table.models:
            served = open_as_served(file, self.served.runtime, self.model.signature, threads)
            compared = compare_latency(self.unpruned, served.open, self.batches, threads=threads)
            if compared.share is None:
                raise NotMeasurable(unmeasurable("the latency of a cut", compared.speedup_doubt))
            share, unpruned_ms = compared.share, compared.before.p50
            self.table.models[key] = MeasuredShare(
                share=share, unpruned_ms=unpruned_ms, ms=compared.after.p50
            )
            self.table.write()
        return self.table.models[key]


class ServedFile(NamedTuple):
    """A model in the form that its runtime reads."""

    bytes: int
    """Of its files together."""
    open: Opener


def write_alone(graph: ir.Model, folder: Path) -> Path:
    """Write a graph into a new folder of its own, and return the file."""
    folder.mkdir()
    write(graph, folder / "model.onnx")
    return folder / "model.onnx"


def open_as_served(file: Path, runtime: str, signature: Signature, threads: int) -> ServedFile:
    """Return a runtime's file, by the file's kind, for an ONNX file alone in its folder.

    StageFailed where the runtime has no such operators.
    """
    exporter = EXPORTERS[runtime]
    assert exporter.runtime.from_onnx is not None  # the only ones whose latency is predicted
    model = exporter.runtime.from_onnx(file, signature)
    size = sum(part.stat().st_size for part in model.parent.iterdir() if part.is_file())
    open_file: Opener = partial(exporter.writes().open_file, model, signature, {}, "cpu", threads)
    return ServedFile(size, open_file)
