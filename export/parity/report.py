"""Report an export whose outputs are wrong: errors, first wrong layer, script that shows it."""

from __future__ import annotations

import logging
import math
import shutil
from contextlib import contextmanager, suppress
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
from compress.common.tensor_difference import largest, largest_difference
from compress.core.metrics import evaluate
from compress.core.metrics.labels import predicted_labels
from compress.export.common.int8_sums import has_16_bit_sums
from compress.export.parity import repro_script
from compress.export.parity.bisect import LayerSearch
from compress.export.parity.compare import ParityMismatch, largest_relative_error, outputs_by_kind
from compress.export.parity.sample_parity import QUANTIZED, tolerance_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.core.context import Context
    from compress.export.common.runtime import Reproducer, Runtime
    from compress.export.parity.bisect import Reexport, Tensors
    from compress.export.parity.compare import KindOutputs

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
        rows, kind, total = [], "", -1.0
        inputs: Tensors = ()
        for compared in outputs_by_kind(
            expected, parity.exported, parity.source.signature, parity.context
        ):
            error_here = -1.0 if compared.refusal else compared.error
            rows.append(_row(compared, error_here))
            if error_here > total:
                kind, inputs, total = compared.kind, compared.inputs, error_here
        if total < 0:
            raise StageFailed("the source answers to no input")
        metric = _metric(parity, expected)
        if isinstance(error, ParityMismatch):
            kind, inputs, total = error.kind, error.inputs, math.inf
        with torch.no_grad(), suppress(Exception):  # each runtime raises its own
            total = largest_relative_error(expected(*inputs), parity.exported(*inputs))
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


def _row(compared: KindOutputs, error: float) -> dict[str, Any]:
    """Return a row of the report."""
    inputs = compared.inputs
    row = {"kind": compared.kind, "samples": len(inputs[0]) if inputs[0].dim() else 1}
    if compared.refusal:
        return row | {"note": f"the source refuses it: {first_line(compared.refusal)}"}
    if compared.failure:
        return row | {"note": f"the exported model fails: {first_line(compared.failure)}"}
    pairs = zip(compared.expected, compared.exported, strict=True)
    absolute = largest(largest_difference(a, b) for a, b in pairs)
    row |= {"absolute": _number(absolute), "relative": _number(error)}
    scores, answers = compared.expected[0], compared.exported[0]
    if scores.dim() == 2 and scores.shape == answers.shape and scores.shape[1] > 1:
        try:
            equal = predicted_labels(scores.cpu()) == predicted_labels(answers.cpu())
        except StageFailed as refusal:
            return row | {"note": f"no labels: {refusal}"}
        if len(equal):
            row["equal_labels"] = float(equal.double().mean())
    return row


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
