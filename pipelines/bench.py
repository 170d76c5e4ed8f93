"""`compress bench`: which of several artifacts, or of a model's exports, answers fastest here."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args

from compress.artifacts.artifact import Artifact
from compress.common.atomic_files import write_atomically
from compress.common.errors import PipelineInvalid
from compress.core.context import Context
from compress.functional.datasets import make_splits
from compress.functional.models import as_artifact, forward_names
from compress.profiling.benchmark import MEASURED_SECONDS
from export.fastest.measure import measure_fastest
from export.fastest.runtimes import Runtime, export_to
from export.web.browser import ONNXRUNTIME_WEB
from export.web.page import web_page
from export.web.runtime import WEB
from pipelines.results.bench import Bench, BenchedModel
from pipelines.system.machine_info import machine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from compress.functional.models import Inputs
    from export.fastest.measure import BenchCell


def bench(
    *models: Any,
    runtimes: Sequence[str] = (),
    batch: Sequence[int] = (1, 8, 32),
    threads: Sequence[int] = (1,),
    val: Any = None,
    example_inputs: Inputs | None = None,
    seconds: float = MEASURED_SECONDS,
    web: Path | str | None = None,
) -> Bench:
    """Measure models in turn in this process, and name the fastest.

    Args:
        models: artifacts or their folders, or a module in memory; the first one is what the
            others' speedup is against.
        runtimes: formats that the model, then a single one, is also exported to with default
            settings, checked, and measured in: `onnx`, `torchscript`, `aot`, `openvino`.
        batch: rows of a call.
        threads: CPU threads of a call.
        val: samples to measure with; by default seeded inputs that fit the signature.
        example_inputs: inputs that show what a module takes, where there is no `val`.
        seconds: how long each model is measured at each batch size and number of threads.
        web: HTML file to write: a page with the one ONNX file among the models, or their exports,
            that measures it in the browser that opens it, and compares its answers.

    Raises:
        PipelineInvalid: no model, an unknown runtime, or models whose inputs differ.
        Unavailable: `web` is given, and onnxruntime-web is missing.
        CompressError: a model cannot be opened.
    """
    if web is not None:
        ONNXRUNTIME_WEB.need_folder()
    unknown = [name for name in runtimes if name not in get_args(Runtime)]
    if unknown:
        expected = ", ".join(get_args(Runtime))
        raise PipelineInvalid(f"runtimes: {unknown[0]!r} is unknown; expected some of {expected}")
    if not models:
        raise PipelineInvalid("models: found none, expected an artifact or a module")
    if runtimes and len(models) > 1:
        raise PipelineInvalid(
            f"runtimes: exports one model, and {len(models)} were given; name one, or no runtimes"
        )
    for name, numbers in (("batch", batch), ("threads", threads)):
        if not numbers or min(numbers) < 1:
            raise PipelineInvalid(f"{name}: found {list(numbers)}, expected numbers from 1")
    opened = [Artifact.from_directory(m) if isinstance(m, str | Path) else m for m in models]
    splits = make_splits(None, parameters=forward_names(opened[0]), val=val)
    artifacts = _named([as_artifact(model, splits, example_inputs) for model in opened])
    with TemporaryDirectory(prefix="compress-bench-") as folder:
        context = Context(root=Path(folder), data=splits)
        (name, source), *_ = artifacts.items()
        wanted = tuple(r for r in get_args(Runtime) if r in runtimes and r != source.kind)
        exported, failures = export_to(wanted, source, context)
        artifacts |= {r if r != name else f"{r} export": a for r, a in exported.items()}
        cells = measure_fastest(artifacts, context, batch, threads, seconds)
        if web is not None:
            page = _web_page(artifacts, context, cells, seconds)
            write_atomically(Path(web), page)
        measured = [
            BenchedModel(name=name, kind=a.kind, digest=a.digest, bytes=a.payload_bytes)
            for name, a in artifacts.items()
        ]
    return Bench(
        machine=machine(), models=tuple(measured), cells=tuple(cells), not_exported=failures
    )


def _web_page(
    artifacts: Mapping[str, Artifact], context: Context, cells: Sequence[BenchCell], seconds: float
) -> str:
    """Return the page of the one ONNX file, with its latencies here on one thread."""
    names = [name for name, artifact in artifacts.items() if artifact.kind in WEB.artifact_kinds]
    if len(names) != 1:
        raise PipelineInvalid(
            f"web: expected one ONNX file, found {', '.join(names) or 'none'}; name one artifact "
            "of export_onnx, or add `onnx` to the runtimes"
        )
    (name,) = names
    artifact = artifacts[name]
    baseline = {
        cell.batch: row.latency.p50
        for cell in cells
        for row in cell.rows
        if row.model == name and cell.threads == 1 and not row.unreliable_reason
    }
    sizes = dict.fromkeys(cell.batch for cell in cells)
    batches = {rows: context.measured_batches(artifact.signature, rows) for rows in sizes}
    facts = {"ONNX Runtime": f"{version('onnxruntime')}, {machine()['processor']}"}
    return web_page(name, artifact, batches, seconds=seconds, baseline=baseline, facts=facts)


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """Return the numbers of an option such as `--batch 1,8,32`; raise PipelineInvalid if none."""
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise PipelineInvalid(f"{option} {text}: expected numbers with commas, such as 1,8,32")
    return tuple(int(part) for part in parts)


def _named(artifacts: list[Artifact]) -> dict[str, Artifact]:
    """Return artifacts by the name of their folder, or by its path where the name is not unique."""
    counts = Counter(artifact.path.name for artifact in artifacts)
    named = {str(a.path) if counts[a.path.name] > 1 else a.path.name: a for a in artifacts}
    if len(named) < len(artifacts):
        raise PipelineInvalid("models: an artifact was given twice; name each one once")
    return named
