"""Report an export whose outputs are wrong: errors, first wrong layer, script that shows it."""

from __future__ import annotations

import logging
import math
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from compress.artifacts.graph_model import program_of
from compress.common.atomic_files import partial_folder, remove_leftovers
from compress.common.errors import CompressError, StageFailed, first_line
from compress.common.forward import accept_any_batch
from compress.common.sealed_json import write_sealed
from compress.common.tensor_difference import largest, largest_difference, relative_error
from compress.core.metrics import evaluate
from compress.core.metrics.labels import predicted_labels
from compress.export.common.int8_sums import has_16_bit_sums
from compress.export.parity import repro_script
from compress.export.parity.bisect import LayerSearch
from compress.export.parity.compare import ParityMismatch, parity_inputs
from compress.export.parity.sample_parity import QUANTIZED, tolerance_for, val_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.core.context import Context
    from compress.export.common.runtime import Reproducer, Runtime
    from compress.export.parity.bisect import Reexport

    Tensors = tuple[torch.Tensor, ...]

logger = logging.getLogger(__name__)

CUT_OFF = (
    "; this processor has no VNNI, so that sums of 8-bit products may be cut off to 16 bits: "
    "weight_bits: 7 of quantize_static keeps them within"
)
FOLDER = "parity"
REPORT = "parity.json"


@dataclass(frozen=True)
class ParityContext:
    """What a report on a mismatch is made from."""

    title: str
    """Name of the stage."""
    source: Artifact
    exported: Predictor
    copy_export: Callable[[Path], None]
    """Writes the exported file, as the runtime's reproducer reads it."""
    reexport: Reexport
    """Exports a part of the graph."""
    runtime: Runtime
    context: Context

    @property
    def folder(self) -> Path:
        """Where the report goes: beside the artifacts, as a wrong export becomes none."""
        return (self.context.results or self.context.root.parent).absolute() / FOLDER / self.title


@contextmanager
def report_on_mismatch(parity: ParityContext) -> Iterator[None]:
    """Write a report where the body finds that an export's outputs are wrong.

    None is written for a runtime without a reproducer.

    Raises:
        StageFailed: the body raised it; the wrong layer and the folder are added to the message.
    """
    # The report of an earlier attempt, and what of one was half written.
    shutil.rmtree(parity.folder, ignore_errors=True)
    remove_leftovers(parity.folder.parent, parity.folder.name)
    reproducer = parity.runtime.reproducer
    try:
        yield
    except StageFailed as error:
        if reproducer is None:
            raise
        has_integers = tolerance_for(parity.source) is QUANTIZED
        hint = CUT_OFF if has_integers and has_16_bit_sums() else ""
        try:
            # Written aside and renamed: a folder that is there holds a complete report.
            with partial_folder(parity.folder) as partial:
                summary = _write_report(parity, reproducer, error, partial)
                partial.rename(parity.folder)
        except Exception as fault:  # noqa: BLE001 - the first error is what matters
            logger.warning("%s: no parity report: %s", parity.title, first_line(fault))
            raise StageFailed(f"{error}{hint}") from None
        raise StageFailed(f"{error}; {summary}{hint}") from error


def _write_report(
    parity: ParityContext, reproducer: Reproducer, error: StageFailed, folder: Path
) -> str:
    """Measure, search for the layer, write the folder; return what is added to the message."""
    with parity.source.open(threads=parity.context.threads) as expected:
        rows, worst = _compare_inputs(parity, expected)
        kind, inputs = (error.kind, error.inputs) if isinstance(error, ParityMismatch) else worst
        metric = _metric(parity, expected)
        with torch.no_grad():
            total = _relative_error(expected, parity.exported, inputs)
    # An error that is large only beside the samples' spread may be within the tolerance here.
    limit = min(tolerance_for(parity.source).relative, total / 2)
    with TemporaryDirectory() as scratch:
        program, signature = program_of(parity.source), parity.source.signature
        file = Path(scratch) / reproducer.file
        search = LayerSearch(program, signature, inputs, parity.reexport, file, limit)
        layer = search.run()
        summary = f"{parity.runtime.title} and PyTorch differ" + (f" at {layer}." if layer else ".")
        reproduce = None
        try:
            shown = repro_script.write(
                folder, search, reproducer, parity.copy_export, parity.exported, summary
            )
            reproduce = {"script": repro_script.SCRIPT, "error": _number(shown)}
        except CompressError as fault:
            logger.warning("%s: no %s: %s", parity.title, repro_script.SCRIPT, fault)
    report = {
        "version": 1,
        "stage": parity.title,
        "runtime": parity.runtime.title,
        "problem": str(error),
        "kinds": rows,
        "metric": metric,
        "searched_on": kind,
        "limit": limit,
        "first_layer": None if layer is None else asdict(layer) | {"error": _number(layer.error)},
        "exports": search.exports,
        "out_of_time": search.out_of_time,
        "reproduce": reproduce,
    }
    write_sealed(folder / REPORT, report)
    if search.refused:
        where = f"where is not known, as its graph cannot be exported again ({search.refusal})"
    elif layer is None:
        where = "no part of the graph that is exported alone differs"
    else:
        certain = "the first layer" if layer.verified else "a layer (perhaps not the first)"
        where = f"{certain} out of tolerance is {layer}"
    return f"{where}; see {parity.folder / REPORT}"


def _compare_inputs(
    parity: ParityContext, expected: Predictor
) -> tuple[list[dict[str, Any]], tuple[str, Tensors]]:
    """Return a row for each kind of input, and the kind with the largest error."""
    rows, worst, worst_error = [], None, -1.0
    signature = parity.source.signature
    pair = accept_any_batch(expected, signature), accept_any_batch(parity.exported, signature)
    for kind, inputs in parity_inputs(signature, list(val_inputs(parity.context))):
        row, error = _compare_one(kind, inputs, *pair)
        rows.append(row)
        if error > worst_error:
            worst, worst_error = (kind, inputs), error
    if worst is None:
        raise StageFailed("the source answers to no input")
    return rows, worst


def _compare_one(
    kind: str, inputs: Tensors, expected: Predictor, exported: Predictor
) -> tuple[dict[str, Any], float]:
    """Return a row of the report and the error; -1 where the source refuses the inputs."""
    row: dict[str, Any] = {"kind": kind, "samples": len(inputs[0]) if inputs[0].dim() else 1}
    try:
        source_outputs = expected(*inputs)
    except Exception as error:  # noqa: BLE001 - whatever the user's own code raises
        return row | {"note": f"the source refuses it: {first_line(error)}"}, -1.0
    try:
        outputs = exported(*inputs)
    except Exception as error:  # noqa: BLE001 - each runtime raises its own
        return row | {"note": f"the exported model fails: {first_line(error)}"}, math.inf
    pairs = list(zip(source_outputs, outputs, strict=True))
    relative = largest(relative_error(a, b) for a, b in pairs)
    absolute = largest(largest_difference(a, b) for a, b in pairs)
    row |= {"absolute": _number(absolute), "relative": _number(relative)}
    scores = source_outputs[0]
    if scores.dim() == 2 and scores.shape == outputs[0].shape and scores.shape[1] > 1:
        try:
            equal = predicted_labels(scores.cpu()) == predicted_labels(outputs[0].cpu())
        except StageFailed as error:
            row["note"] = f"no labels: {error}"
        else:
            if len(equal):
                row["equal_labels"] = float(equal.double().mean())
    return row, relative


def _relative_error(expected: Predictor, exported: Predictor, inputs: Tensors) -> float:
    try:
        pairs = zip(expected(*inputs), exported(*inputs), strict=True)
        return largest(relative_error(a, b) for a, b in pairs)
    except Exception:  # noqa: BLE001 - each runtime raises its own
        return math.inf


def _metric(parity: ParityContext, expected: Predictor) -> dict[str, Any] | None:
    """Return the task's metric on ``val`` of both, where there is data and a metric for it."""
    data = parity.context.data
    metric = parity.context.metric.for_model(parity.source.signature)
    if data is None or "val" not in data.datasets or not metric.is_measured:
        return None
    source, exported = (
        accept_any_batch(p, parity.source.signature) for p in (expected, parity.exported)
    )
    try:
        values = [evaluate(predict, data, "val", metric, source) for predict in (source, exported)]
    except Exception as error:  # noqa: BLE001 - a metric of the user's may raise any
        return {"name": metric.name, "note": first_line(error)}
    return {"name": metric.name, "source": values[0].value, "exported": values[1].value}


def _number(value: float) -> float | str:
    """Return a number that JSON can hold."""
    return value if math.isfinite(value) else "not finite"
