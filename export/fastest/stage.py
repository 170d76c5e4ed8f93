"""The stage `export_fastest`: exports to several runtimes, measures and keeps the fastest file."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, Field

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.config import Count, Settings
from compress.common.errors import PipelineInvalid, StageFailed, Unavailable
from compress.core.stage import members_of
from compress.export.aotinductor.stage import AotModel
from compress.export.common.compiled_code import built_for
from compress.export.exporter import EXPORTERS, Exporter
from compress.export.onnx.stage import OnnxModel
from compress.export.openvino.stage import OpenVINOModel
from compress.export.torchscript.stage import TorchScriptModel
from compress.profiling.benchmark import MEASURED_SECONDS, Latency, compare_latencies
from compress.profiling.quantiles import Interval

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.common.signature import Signature
    from compress.core.context import Context
logger = logging.getLogger(__name__)


class BenchRow(Settings):
    """One model's figures at a batch size and a number of threads."""

    model: str
    latency: Latency
    rows_per_second: float
    """Rows of the batch over the median latency."""
    speedup: float
    """How many times faster than the first model: the median over blocks of calls."""
    speedup_interval: Interval
    """95 % confidence interval of the speedup."""
    unreliable_reason: str = ""
    """Why the figures are too uncertain to be shown; empty where they are not."""


class BenchCell(Settings):
    """All models at one batch size and number of threads."""

    batch: int
    threads: int
    rows: tuple[BenchRow, ...]
    fastest: tuple[str, ...]
    """The model of the least median latency, then those level with it; empty where the machine was
    too busy to tell."""

    @property
    def verdict(self) -> str:
        """Which model is fastest, in words."""
        where = f"batch {self.batch}, {self.threads} thread{'s' * (self.threads > 1)}"
        if not self.fastest:
            return f"{where}: not measurable on this machine now"
        if len(self.fastest) > 1:
            return f"{where}: {' and '.join(self.fastest)} are level"
        return f"{where}: {self.fastest[0]} is fastest"


def measure_fastest(
    models: Mapping[str, Artifact],
    context: Context,
    batches: Sequence[int],
    threads: Sequence[int],
    seconds: float = MEASURED_SECONDS,
) -> list[BenchCell]:
    """Measure models on rows of `val`, or seeded ones, for each number of threads and batch size.

    Each is measured for some seconds in turn. Raise PipelineInvalid where the models' inputs
    differ, StageFailed where a model's batch is fixed at another size.
    """
    names = list(models)
    signature = models[names[0]].signature
    inputs = _described(signature)
    for name, model in models.items():
        own = _described(model.signature)
        if own != inputs:
            raise PipelineInvalid(
                f"{name} takes {own}, and {names[0]} takes {inputs}; expected artifacts of one "
                "model, whose inputs are the same"
            )
    cells, mixed = [], any(model.is_cascade for model in models.values())
    for count in threads:
        openers = [partial(model.open_anew, context.device, count) for model in models.values()]
        for batch in batches:
            tensors = context.measured_batches(signature, batch, mixed=mixed)
            measured = compare_latencies(openers, tensors, seconds, threads=count, mixed=mixed)
            rows = []
            for i, name in enumerate(names):
                comparison = measured.comparison(0, i)
                row = BenchRow(
                    model=name,
                    latency=comparison.after,
                    rows_per_second=1e3 * batch / measured.typical_ms(i),
                    speedup=comparison.speedup,
                    speedup_interval=comparison.interval,
                    unreliable_reason=comparison.after.doubt_of("p50") or comparison.speedup_doubt,
                )
                rows.append(row)
            doubtful = any(row.unreliable_reason for row in rows)
            fastest = () if doubtful else tuple(names[i] for i in measured.fastest())
            cell = BenchCell(batch=batch, threads=count, rows=tuple(rows), fastest=fastest)
            cells.append(cell)
    return cells


def _described(signature: Signature) -> str:
    """Describe inputs by type and shape, for two exports of a model alike."""

    def sizes(shape: Sequence[int | str]) -> str:
        return ", ".join("*" if isinstance(axis, str) else str(axis) for axis in shape)

    return " and ".join(f"{spec.dtype} [{sizes(spec.shape)}]" for spec in signature.inputs)


Runtime = Literal["onnx", "torchscript", "aot", "openvino"]
Exported: TypeAlias = OnnxModel | TorchScriptModel | AotModel | OpenVINOModel


def _no_repetition(runtimes: tuple[Runtime, ...]) -> tuple[Runtime, ...]:
    if len(set(runtimes)) < len(runtimes):
        raise ValueError(f"found {list(runtimes)}, expected each runtime once")
    return runtimes


class ExportFastest(Exporter[EagerModel | GraphModel, Exported]):
    """Export to several runtimes, each checked as its own stage does, and keep the fastest file.

    Use it where the server takes any of these formats and speed alone decides.

        - stage: export_fastest
          runtimes: [onnx, openvino]
          batch: 8

    Runtimes that are not installed, or cannot take the model, are left out with a warning.
    """

    stage: Literal["export_fastest"] = "export_fastest"
    runtimes: Annotated[
        tuple[Runtime, ...], Field(min_length=1), AfterValidator(_no_repetition)
    ] = ("onnx", "openvino", "aot")
    """What to export to, with default settings. Of files that are level the first one is kept."""
    batch: Count = 1
    """Rows of a measured call."""
    threads: Count | None = None
    """CPU threads of a measured call; those of the pipeline when left out."""

    undisturbed: ClassVar[bool] = True

    @property
    def machine_parts(self) -> dict[str, Any]:
        """The processor and system that are measured, and that code is compiled for."""
        return {"built_for": built_for("cpu")}

    def run(self, model: EagerModel | GraphModel, context: Context) -> Exported:
        """Export, measure the files in turn, seal the fastest with the figures of all."""
        with TemporaryDirectory(prefix="compress-fastest-") as folder:
            exported, failures = export_to(
                self.runtimes, model, context.with_root(Path(folder) / "exported")
            )
            if not exported:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
                raise StageFailed(f"{self.title}: no runtime takes the model; {reasons}")
            threads = self.threads or context.threads
            (cell,) = measure_fastest(exported, context, [self.batch], [threads])
            kept = next(name for name in exported if name in (cell.fastest or exported))
            warnings = [f"{name} was not measured: {why}" for name, why in failures.items()]
            if not cell.fastest:
                warnings.append(f"{cell.verdict}; {kept} is kept as the first")
            for warning in warnings:
                logger.warning("%s: %s", self.title, warning)
            logger.info("%s: %s; %s is kept", self.title, cell.verdict, kept)
            facts: Any = dict(exported[kept].manifest.facts)
            facts["warnings"] = [*facts.get("warnings", ()), *warnings]
            facts["fastest"] = {"kept": kept, "verdict": _verdict(kept, cell)} | cell.model_dump(
                mode="json"
            )
            winner: Any = exported[kept]
            lineage = self.lineage(model)
            with winner.atomic_write(
                context.root, winner.signature, lineage=lineage, facts=facts
            ) as sealed:
                winner.copy_files(winner.manifest.files, sealed)
            return winner.from_directory(context.root)  # type: ignore[no-any-return]


def _verdict(kept: str, cell: BenchCell) -> str:
    others = [row.model for row in cell.rows if row.model != kept]
    if not cell.fastest or not others:
        return f"in {kept}"
    level = [name for name in others if name in cell.fastest]
    slower = [name for name in others if name not in cell.fastest]
    parts = [f"level with {' and '.join(level)}"] if level else []
    parts += [f"faster than {' and '.join(slower)}"] if slower else []
    return f"in {kept} ({', '.join(parts)})"


def export_to(
    runtimes: tuple[Runtime, ...], model: Artifact, context: Context
) -> tuple[dict[str, Artifact], dict[str, str]]:
    """Export a model to runtimes, each into a folder of the context's; each file is checked.

    Returns the artifacts by runtime, and why others could not be written, such as a missing
    compiler.
    """
    exported: dict[str, Artifact] = {}
    failures: dict[str, str] = {}
    for runtime in runtimes:
        stage = EXPORTERS[runtime].model_validate({})
        reads = members_of(stage.reads())
        if not isinstance(model, reads):
            kinds = " or ".join(kind.kind for kind in reads)
            failures[runtime] = f"{stage.stage} reads {kinds}, and the model is {model.kind}"
            continue
        try:
            exported[runtime] = stage.run_checked(model, context.with_root(context.root / runtime))
        except (StageFailed, Unavailable) as error:
            failures[runtime] = str(error)
    return exported, failures
