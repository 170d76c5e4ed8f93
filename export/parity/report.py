"""What a user finds after an export that answers otherwise: where, and how to see it."""

from __future__ import annotations

import json
import logging
import math
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from compress.artifacts.graph_model import GraphModel, program_of
from compress.common.atomic_files import partial_path, remove_leftovers
from compress.common.errors import CompressError, StageFailed, first_line
from compress.common.forward import accept_any_batch
from compress.common.tensor_difference import largest, largest_difference, relative_error
from compress.core.metrics import evaluate, predicted_labels
from export.parity import repro_script
from export.parity.bisect import Layer, Search
from export.parity.compare import FLOAT_ERROR, ROUNDED_ERROR, Disagreement, cases
from export.parity.sample_parity import val_inputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.export import ExportedProgram

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.core.context import Context
    from export.parity.bisect import Exporting
    from export.parity.repro_script import Runtime

logger = logging.getLogger(__name__)

FOLDER = "parity"
REPORT = "parity.json"

Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class ParityContext:
    """What is needed to find out where an export left its source."""

    title: str
    """Name of the stage."""
    source: Artifact
    got: Predictor
    file: Path
    """What answers so."""
    program: ExportedProgram | None
    """Its graph; traced where it is needed and was not."""
    exporting: Exporting
    runtime: Runtime
    context: Context

    @property
    def folder(self) -> Path:
        """Where the report goes, beside the artifacts: what is not equal is not kept as one."""
        return (self.context.results or self.context.root.parent).absolute() / FOLDER / self.title


@contextmanager
def report_on_mismatch(account: ParityContext) -> Iterator[None]:
    """Name the first layer out of tolerance where an export is found to answer otherwise.

    The folder ``parity`` of an earlier attempt goes, and what of one was half written.

    Raises:
        StageFailed: the body raised it; the layer and the folder are added to the message.
    """
    shutil.rmtree(account.folder, ignore_errors=True)
    remove_leftovers(account.folder.parent, account.folder.name)
    try:
        yield
    except StageFailed as error:
        try:
            told = _write_report(account, error)
        except Exception as fault:  # noqa: BLE001 - the first error is what matters
            logger.warning("%s: no parity report: %s", account.title, first_line(fault))
            raise error from None
        raise StageFailed(f"{error}; {told}") from error


def _write_report(account: ParityContext, error: StageFailed) -> str:
    """Search, write the folder, and return what the message is to end with."""
    limit = ROUNDED_ERROR if isinstance(account.source, GraphModel) else FLOAT_ERROR
    with account.source.open(threads=account.context.threads) as expected:
        rows, worst = _compare(account, expected)
        kind, inputs = (error.kind, error.inputs) if isinstance(error, Disagreement) else worst
        metric = _metric(account, expected)
        with torch.no_grad():
            limit = min(limit, _error(expected, account.got, inputs) / 2)
    folder = account.folder
    partial = partial_path(folder)
    partial.mkdir(parents=True)
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / account.runtime.file
        signature = account.source.signature
        program = account.program or program_of(account.source)
        search = Search(program, signature, inputs, account.exporting, file, limit)
        layer = search.run()
        shown = _reproduce(account, search, layer, partial)
    report = {
        "version": 1,
        "stage": account.title,
        "runtime": account.runtime.name,
        "problem": str(error),
        "kinds": rows,
        "metric": metric,
        "searched_on": kind,
        "limit": limit,
        "first_layer": None if layer is None else asdict(layer) | {"error": _number(layer.error)},
        "exports": search.exports,
        "out_of_time": search.out_of_time,
        "reproduce": shown,
    }
    text = json.dumps(report, indent=1, allow_nan=False)
    (partial / REPORT).write_text(text + "\n", encoding="utf-8")
    partial.rename(folder)
    return f"{_sentence(layer, search)}; see {folder / REPORT}"


def _sentence(layer: Layer | None, search: Search) -> str:
    if search.refused:
        return f"where is not known, as its graph cannot be exported again ({search.refusal})"
    if layer is None:
        return "no part of the graph that is exported alone differs"
    first = "the first layer" if layer.verified else "a layer (perhaps not the first)"
    return f"{first} out of tolerance is {layer}"


def _compare(
    account: ParityContext, expected: Predictor
) -> tuple[list[dict[str, Any]], tuple[str, Outputs]]:
    """Return a row for each kind of input, and the inputs of the worst."""
    rows, worst, largest = [], None, -1.0
    got = accept_any_batch(account.got, account.source.signature)
    seen = list(val_inputs(account.context))
    for kind, inputs in cases(account.source.signature, seen):
        row, error = _row(kind, inputs, accept_any_batch(expected, account.source.signature), got)
        rows.append(row)
        if error > largest:
            worst, largest = (kind, inputs), error
    if worst is None:
        raise StageFailed("the source answers to no input")
    return rows, worst


def _row(
    kind: str, inputs: Outputs, expected: Predictor, got: Predictor
) -> tuple[dict[str, Any], float]:
    row: dict[str, Any] = {"kind": kind, "samples": len(inputs[0]) if inputs[0].dim() else 1}
    try:
        answers = expected(*inputs)
    except Exception as error:  # noqa: BLE001 - whatever the user's own code raises
        return row | {"note": f"the source refuses it: {first_line(error)}"}, -1.0
    try:
        theirs = got(*inputs)
    except Exception as error:  # noqa: BLE001 - each runtime raises its own
        return row | {"note": f"the exported model fails: {first_line(error)}"}, math.inf
    pairs = list(zip(answers, theirs, strict=True))
    relative = largest(relative_error(a, b) for a, b in pairs)
    absolute = largest(largest_difference(a, b) for a, b in pairs)
    row |= {"absolute": _number(absolute), "relative": _number(relative)}
    if answers[0].dim() == 2 and answers[0].shape == theirs[0].shape and answers[0].shape[1] > 1:
        row |= _equal_labels(answers[0].cpu(), theirs[0].cpu())
    return row, relative


def _equal_labels(expected: torch.Tensor, got: torch.Tensor) -> dict[str, Any]:
    """Return the share of equal labels; a note where one side has none."""
    try:
        same = predicted_labels(expected) == predicted_labels(got)
    except StageFailed as error:
        return {"note": f"no labels: {error}"}
    return {"equal_labels": float(same.double().mean())} if len(same) else {}


def _error(expected: Predictor, got: Predictor, inputs: Outputs) -> float:
    try:
        pairs = zip(expected(*inputs), got(*inputs), strict=True)
        return largest(relative_error(a, b) for a, b in pairs)
    except Exception:  # noqa: BLE001 - each runtime raises its own
        return math.inf


def _metric(account: ParityContext, expected: Predictor) -> dict[str, Any] | None:
    """Return the task's metric on ``val`` of both, where there is data and a metric for it."""
    context, signature = account.context, account.source.signature
    if context.data is None or "val" not in context.data.datasets:
        return None
    metric = context.metric
    try:
        values = [
            evaluate(
                accept_any_batch(p, signature),
                context.data,
                "val",
                metric,
                accept_any_batch(expected, signature),
            )
            for p in (expected, account.got)
        ]
    except Exception as error:  # noqa: BLE001 - a metric of the user's may raise any
        return {"name": metric.name, "note": first_line(error)}
    return {"name": metric.name, "source": values[0], "exported": values[1]}


def _reproduce(
    account: ParityContext, search: Search, layer: Layer | None, folder: Path
) -> dict[str, Any] | None:
    what = f"{account.runtime.name} and PyTorch differ" + (f" at {layer}." if layer else ".")
    try:
        error = repro_script.write(folder, search, account, what)
    except CompressError as fault:
        logger.warning("%s: no %s: %s", account.title, repro_script.SCRIPT, fault)
        return None
    return {"script": repro_script.SCRIPT, "error": _number(error)}


def _number(value: float) -> float | str:
    """Return a number that JSON has."""
    return value if math.isfinite(value) else "not finite"
