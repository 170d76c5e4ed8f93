"""`compress latency`: where a model's time goes in onnxruntime, and how well it is predicted."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.table import Table

from compress.common.atomic_files import write_atomically
from compress.common.config import Settings
from compress.core.progress import Progress, silent
from compress.export.latency import served_latency
from compress.export.latency.kernels import TABLES, Kernel, KernelTable, kernels_of
from compress.export.latency.resizing import MOST_EXPORTS, ResizableModel
from compress.export.onnx.lowering import translate_small
from compress.export.onnx.proto_io import write
from compress.pipelines.commands.sensitivity import model_to_prune
from compress.pipelines.system.machine_info import machine
from compress.pruning.latency.widths import WidthVariants

if TYPE_CHECKING:
    from compress.pipelines.config.pipeline import PipelineConfig

LATENCY_FILE = "latency.json"
FITTED_VARIANTS = 8  # variants whose measured latencies the prediction is fitted to
TESTED_VARIANTS = 8  # further variants, on which the prediction is judged
KERNELS_SHOWN = 10
CLOSE_ERROR = 0.1  # largest error of a prediction that counts as close, as a share of the latency


class KernelShare(Settings):
    """A kernel of the model, and all calls of it."""

    operator: str
    sizes: str
    """Sizes of its inputs and outputs."""
    calls: int
    """In one call of the model."""
    ms: float
    """Milliseconds of all its calls."""


class Variant(Settings):
    """A model with other widths."""

    widths: dict[str, int]
    """Group of channels → how many are left."""
    fitted: bool
    """Whether the prediction was fitted to its latency."""
    kernels_ms: float
    """Milliseconds of its kernels, each alone."""
    weight_bytes: int
    predicted_ms: float
    measured_ms: float
    """Median, in milliseconds, measured in turn with the other variants."""

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_ms / self.measured_ms - 1


class PredictedLatency(Settings):
    """A model's kernels, and predictions for its variants beside measurements."""

    machine: dict[str, Any]
    batch: int
    model: served_latency.LatencyModel
    """How latency follows from kernels."""
    kernels: tuple[KernelShare, ...]
    """Of the whole model, those that take longest first."""
    variants: tuple[Variant, ...]
    """The whole model first."""

    @property
    def errors(self) -> list[float]:
        """Sizes of the relative errors of predictions that were not fitted."""
        return [abs(v.error) for v in self.variants if not v.fitted]


def measure_and_write(
    pipeline: PipelineConfig, out: Path, batch: int = 1, progress: Progress = silent
) -> PredictedLatency:
    """Measure a model's kernels, predict the latency of variants, and measure these.

    The model is the input of the first `prune_channels`, or the imported one if there is no such
    stage. Variants have random widths; their files are made from few exports. `latency.json` goes
    to the results' directory, and measured kernels to its store.
    """
    with (
        model_to_prune(pipeline, out, progress) as (source, stage, context),
        TemporaryDirectory(prefix="compress-latency-") as name,
    ):
        folder = Path(name)
        round_to = stage.round_to if stage else 16
        variants = WidthVariants(source, stage, context.seed, progress)
        progress("latency", 0, 1, "export")
        built = variants.build_some(MOST_EXPORTS, folder)
        graphs = ((own, translate_small(one, "latency")[0]) for own, one in built)
        model = ResizableModel.fit(graphs)
        specs, inputs = source.signature.inputs, context.measured_batches(source.signature, batch)
        arrays = {s.name: x.numpy() for s, x in zip(specs, inputs[0], strict=True)}
        kernel_table = KernelTable(out / TABLES, machine(), context.threads)
        widths = [variants.whole, *variants.draw(FITTED_VARIANTS + TESTED_VARIANTS - 1, round_to)]
        files: list[Path] = []
        kernels: list[list[Kernel]] = []
        for number, chosen in enumerate(widths):
            progress("latency", number, len(widths), "measure kernels")
            files.append(folder / f"resized{number}.onnx")
            if number == 0 and variants.rewrites:
                write(translate_small(source, "latency")[0], files[0])
            else:
                write(model.resize(chosen), files[-1])
            kernels.append(kernels_of(files[-1], arrays, context.threads))
            kernel_table.measure(kernels[-1])
        progress("latency", len(widths), len(widths), "measure whole models")
        measured = served_latency.measure_files(files, inputs, context.threads)
    costs = [served_latency.KernelCost.of_kernels(own, kernel_table) for own in kernels]
    # The whole model and the seven after it; widths are random, so these are like the others.
    fitted = served_latency.LatencyModel.fit(costs[:FITTED_VARIANTS], measured[:FITTED_VARIANTS])
    by_key, calls = {k.key: k for k in kernels[0]}, Counter(k.key for k in kernels[0])
    shares = [
        KernelShare(
            operator=kernel.operator,
            sizes=kernel.sizes,
            calls=calls[key],
            ms=1e3 * kernel_table.seconds(kernel) * calls[key],
        )
        for key, kernel in by_key.items()
    ]
    found = PredictedLatency(
        machine=kernel_table.setup,
        batch=batch,
        model=fitted,
        kernels=tuple(sorted(shares, key=lambda kernel: -kernel.ms)),
        variants=tuple(
            Variant(
                widths=widths[i],
                fitted=i < FITTED_VARIANTS,
                kernels_ms=1e3 * cost.seconds,
                weight_bytes=cost.weight_bytes,
                predicted_ms=1e3 * fitted.predict(cost),
                measured_ms=1e3 * measured[i],
            )
            for i, cost in enumerate(costs)
        ),
    )
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / LATENCY_FILE, found.model_dump_json(indent=1) + "\n")
    return found


def table(found: PredictedLatency) -> Table:
    """Build a table of the kernels that take longest."""
    total = sum(kernel.ms for kernel in found.kernels)
    rows = Table(title=f"kernels of the whole model, each alone, batch {found.batch}")
    rows.add_column("operator")
    rows.add_column("sizes", overflow="fold")
    for name in ("calls", "µs", "share"):
        rows.add_column(name, justify="right", no_wrap=True)
    for kernel in found.kernels[:KERNELS_SHOWN]:
        share = f"{100 * kernel.ms / total:.1f} %"
        rows.add_row(
            kernel.operator, kernel.sizes, str(kernel.calls), f"{1e3 * kernel.ms:.1f}", share
        )
    return rows


def lines_below(found: PredictedLatency, out: Path) -> Iterator[str]:
    """Yield how good the prediction is, and where it is written."""
    errors, whole = found.errors, found.variants[0]
    close = sum(error <= CLOSE_ERROR for error in errors)
    yield (
        f"fitted to {len(found.variants) - len(errors)} models; on {len(errors)} others the mean "
        f"error is {100 * statistics.fmean(errors):.1f} %, the largest {100 * max(errors):.1f} %, "
        f"and {close} are within {100 * CLOSE_ERROR:g} %"
    )
    weights = 1e3 * found.model.per_weight_byte * whole.weight_bytes
    yield (
        f"the whole model: {whole.measured_ms:.3f} ms; its kernels alone {whole.kernels_ms:.3f} "
        f"ms; reading weights from farther caches {weights:.3f} ms"
    )
    yield f"figures: {out / LATENCY_FILE}"
