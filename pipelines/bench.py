"""`compress bench`: which of several artifacts, or of a model's exports, answers fastest here."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args

from compress.artifacts.artifact import Artifact
from compress.common.errors import PipelineInvalid
from compress.core.context import Context
from compress.functional.datasets import make_splits
from compress.functional.models import as_artifact, forward_names
from compress.profiling.benchmark import MEASURED_SECONDS
from export.fastest.measure import measure_fastest
from export.fastest.runtimes import Runtime, export_to
from pipelines.results.bench import Bench, BenchedModel
from pipelines.system.machine_info import machine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.functional.models import Inputs


def bench(
    *models: Any,
    runtimes: Sequence[str] = (),
    batch: Sequence[int] = (1, 8, 32),
    threads: Sequence[int] = (1,),
    val: Any = None,
    example_inputs: Inputs | None = None,
    seconds: float = MEASURED_SECONDS,
) -> Bench:
    """Measure models call by call in turn in this process, and name the fastest.

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

    Raises:
        PipelineInvalid: no model, an unknown runtime, or models whose inputs differ.
        CompressError: a model cannot be opened.
    """
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
        measured = [
            BenchedModel(name=name, kind=a.kind, digest=a.digest, bytes=a.payload_bytes)
            for name, a in artifacts.items()
        ]
    return Bench(
        machine=machine(), models=tuple(measured), cells=tuple(cells), not_exported=failures
    )


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
