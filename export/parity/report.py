"""Report an export whose outputs are wrong: errors, first wrong layer, script that shows it.

The refused file is kept beside the report, so that the layer can be searched for afterwards.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from compress.artifacts.artifact import Artifact, files_below
from compress.artifacts.graph_model import program_of
from compress.common.atomic_files import partial_folder, remove_leftovers, sha256_of
from compress.common.errors import ArtifactInvalid, CompressError, StageFailed, first_line
from compress.common.forward import Predictor, accept_any_batch, flatten_outputs
from compress.common.sealed_json import read_sealed, write_sealed
from compress.common.tensor_difference import largest, largest_difference
from compress.core.metrics import evaluate
from compress.core.metrics.builtin import predicted_labels
from compress.export.common.int8_sums import has_16_bit_sums
from compress.export.parity.bisect import LayerSearch, Reexport, Tensors, WrongLayer, retrace
from compress.export.parity.compare import (
    ParityMismatch,
    largest_relative_error,
    outputs_by_kind,
    parity_inputs,
)
from compress.export.parity.sample_parity import QUANTIZED, SAMPLES, tolerance_for, val_inputs
from compress.graph.torch_export import save_program

if TYPE_CHECKING:
    from compress.core.context import Context
    from compress.export.common.runtime import Runtime
    from compress.export.parity.compare import KindOutputs

logger = logging.getLogger(__name__)
CUT_OFF = (
    "; this processor has no VNNI, so that sums of 8-bit products may be cut off to 16 bits: "
    "weight_bits: 7 of quantize_static keeps them within"
)
FOLDER = "parity"
REPORT = "parity.json"
REFUSED = "refused"  # folder of the refused file, within that of the report
# The search exports parts of the graph anew: for a ResNet-50 it took longer than the stage. Who
# wants to know asks `compress explain`; a small model's layer is found before anybody could.
SHARE_OF_STAGE = 0.1  # of the time that the stage took until it failed, how much a report may take
LEAST_SECONDS = 5.0  # how long a report may take at least
SOURCE = "source.pt2"
INPUTS = "inputs.npz"
SCRIPT = "reproduce.py"
TEMPLATE = Path(__file__).with_name("reproduce.py.template")


@dataclass(frozen=True)
class ParityContext:
    """What a report on a mismatch is made from."""

    title: str
    source: Artifact
    expected: Predictor
    exported: Predictor
    file: Path
    facts: Mapping[str, Any]
    copy_export: Callable[[Path], None]
    """Writes the exported file, as the runtime's reproducer reads it."""
    reexport: Reexport
    runtime: Runtime
    context: Context
    began: float = 0.0
    """When the stage began, on the clock of :func:`time.monotonic`."""
    written: float = 0.0
    """When it had written the file."""


def report_folder(context: Context, title: str) -> Path:
    """Return the folder of the report on a stage, beside the artifacts: a wrong export is none."""
    return (context.results or context.root.parent).absolute() / FOLDER / title


@contextmanager
def report_on_mismatch(parity: ParityContext) -> Iterator[None]:
    """Write a report, and keep the file, where the body finds that an export's outputs are wrong.

    Its StageFailed is raised anew, with the wrong layer and the folder in the message. No report is
    written for a runtime without a reproducer.
    """
    report = report_folder(parity.context, parity.title)
    # The report of an earlier attempt, and what of one was half written.
    shutil.rmtree(report, ignore_errors=True)
    remove_leftovers(report.parent, report.name)
    try:
        yield
    except StageFailed as error:
        if parity.runtime.reproducer is None:
            raise
        has_integers = tolerance_for(parity.source) is QUANTIZED
        hint = CUT_OFF if has_integers and has_16_bit_sums() else ""
        try:
            # Written aside and renamed: a folder that is there holds a complete report.
            with partial_folder(report) as partial:
                summary = f"{_write_report(parity, error, partial)}; see {report / REPORT}"
                partial.rename(report)
        except Exception as fault:  # noqa: BLE001 - the first error is what matters
            logger.warning("%s: no parity report: %s", parity.title, first_line(fault))
            raise StageFailed(f"{error}{hint}") from None
        raise StageFailed(f"{error}; {summary}{hint}") from error


def _write_report(parity: ParityContext, error: StageFailed, folder: Path) -> str:
    """Measure, search for the layer, write the folder; return what is added to the message."""
    now = time.monotonic()
    deadline = now + max(LEAST_SECONDS, SHARE_OF_STAGE * (now - parity.began))
    rows, kind, total = [], "", -1.0
    inputs: Tensors = ()
    source, context = parity.source, parity.context
    for compared in outputs_by_kind(parity.expected, parity.exported, source, context):
        error_here = -1.0 if compared.refusal else compared.error
        rows.append(_row(compared, error_here))
        if error_here > total:
            kind, inputs, total = compared.kind, compared.inputs, error_here
    if total < 0:
        raise StageFailed("the source answers to no input")
    if isinstance(error, ParityMismatch):
        kind, inputs, total = error.kind, error.inputs, math.inf
        with torch.no_grad(), suppress(Exception):  # each runtime raises its own
            total = largest_relative_error(parity.expected(*inputs), parity.exported(*inputs))
    # Hidden files are those that a runtime has open while it is compared.
    hidden = shutil.ignore_patterns(".*")
    shutil.copytree(parity.file.parent, folder / REFUSED, ignore=hidden, copy_function=_link)
    report = {
        "version": 1,
        "stage": parity.title,
        "runtime": parity.runtime.title,
        "problem": str(error),
        "source": parity.source.digest,
        "file": parity.file.name,
        "files": _digests(folder / REFUSED),
        "facts": dict(parity.facts),
        "kinds": rows,
        "metric": _metric(parity, now - parity.written, deadline),
        "searched_on": kind,
        # An error that is large only beside the samples' spread may be within the tolerance here.
        "limit": min(tolerance_for(parity.source).relative, total / 2),
    }
    # As long as writing the whole file took: a part at the end of the graph is nearly all of it.
    first_seconds = parity.written - parity.began
    found, search = _search(parity, report, inputs, deadline, folder, first_seconds)
    write_sealed(folder / REPORT, report | found)
    return _where(search, parity.context.results)


@dataclass(frozen=True)
class RefusedFile:
    """An exported file that was kept when it was refused, and the report on it."""

    file: Path
    report: Mapping[str, Any]

    @property
    def facts(self) -> Mapping[str, Any]:
        """What its manifest would say."""
        facts: dict[str, Any] = self.report["facts"]
        return facts

    @classmethod
    def read(cls, folder: Path, source: Artifact) -> Self:
        """Return the file that a stage's report is on.

        Raise ArtifactInvalid where it is not as it was or of another source, OSError without a
        report.
        """
        report = read_sealed(folder / REPORT, dict[str, Any])
        if report.get("source") != source.digest:
            raise ArtifactInvalid(f"{folder}: is of a file that was made from another model")
        if report["files"] != _digests(folder / REFUSED):
            raise ArtifactInvalid(f"{folder / REFUSED}: is not what was refused")
        return cls(folder / REFUSED / report["file"], report)


def search_refused(parity: ParityContext, kept: RefusedFile, deadline: float) -> WrongLayer | None:
    """Search for the first wrong layer of a refused file; report and script are written anew."""
    report, limits = kept.report, kept.facts.get("axis_limits")
    kinds = parity_inputs(
        parity.source.signature, [*val_inputs(parity.context, parity.source)], limits
    )
    inputs = next((x for kind, x in kinds if kind == report["searched_on"]), None)
    if inputs is None:
        raise ArtifactInvalid(
            f"{kept.file}: the data has no {report['searched_on']!r} any more; run the stage again"
        )
    found, search = _search(parity, report, inputs, deadline, kept.file.parents[1])
    write_sealed(kept.file.parents[1] / REPORT, {**report, **found})
    return search.layer


def _search(
    parity: ParityContext,
    report: Mapping[str, Any],
    inputs: Tensors,
    deadline: float,
    folder: Path,
    first_seconds: float = 0.0,
) -> tuple[dict[str, Any], LayerSearch]:
    """Search for the first wrong layer, write the script; return the report's entries."""
    reproducer = parity.runtime.reproducer
    assert reproducer is not None  # no report is written without one
    with TemporaryDirectory() as scratch:
        program, signature = program_of(parity.source), parity.source.signature
        file = Path(scratch) / reproducer.file
        search = LayerSearch(
            program, signature, inputs, parity.reexport, file, report["limit"], deadline
        )
        search.longest = first_seconds
        layer = search.run()
        summary = f"{parity.runtime.title} and PyTorch differ" + (f" at {layer}." if layer else ".")
        reproduce = None
        if layer is not None or not search.out_of_time:
            try:
                error = _write_script(folder, search, parity, summary)
                reproduce = {"script": SCRIPT, "error": error}
            except CompressError as fault:
                logger.warning("%s: no %s: %s", parity.title, SCRIPT, fault)
    first = None if layer is None else asdict(layer) | {"error": _number(layer.error)}
    return {
        "first_layer": first,
        "exports": search.exports,
        "out_of_time": search.out_of_time,
        "reproduce": reproduce,
    }, search


def _write_script(
    folder: Path, search: LayerSearch, parity: ParityContext, summary: str
) -> float | str:
    """Write script, program, exported file and inputs; return the error that they show.

    Where the search found no layer, the whole exported model is shown. Raise StageFailed where the
    part cannot be exported on its own.
    """
    reproducer = parity.runtime.reproducer
    assert reproducer is not None  # no report is written without one
    file = folder / reproducer.file
    if search.node is None:
        part, signature, inputs = search.module, search.signature, search.inputs
        parity.copy_export(file)
        with torch.no_grad():
            outputs = flatten_outputs(part(*inputs))
        error = largest_relative_error(outputs, parity.exported(*inputs))
    else:
        part, signature, inputs, error = search.export_smallest(search.node, file)
    if not file.exists():
        raise StageFailed("the part cannot be exported on its own")
    save_program(retrace(part, signature), folder / SOURCE)
    arrays = {
        # numpy has no bfloat16; the script turns it back.
        spec.name: (x.float() if x.dtype == torch.bfloat16 else x).detach().cpu().numpy()
        for spec, x in zip(signature.inputs, inputs, strict=True)
    }
    np.savez(folder / INPUTS, allow_pickle=False, **arrays)
    text = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        what=summary,
        source=SOURCE,
        exported=reproducer.file,
        script=SCRIPT,
        inputs=INPUTS,
        needs=f" and {reproducer.library}" if reproducer.library else "",
        imports=reproducer.imports,
        limit=repr(search.limit),
        dtypes={spec.name: spec.dtype for spec in signature.inputs},
        answers="\n".join(f"    {line}" for line in (*reproducer.run_lines, "")),
    )
    (folder / SCRIPT).write_text(text, encoding="utf-8")
    return _number(error)


def _where(search: LayerSearch, run: Path | None) -> str:
    layer = search.layer
    ask = f"which layer: compress explain {shlex.quote(str(run))}" if run else ""
    if search.refused:
        return f"where is not known, as its graph cannot be exported again ({search.refusal})"
    if layer is not None and layer.verified:
        return f"the first layer out of tolerance is {layer}"
    if layer is not None:
        where = f"a layer (perhaps not the first) out of tolerance is {layer}"
        return f"{where}; {ask}" if ask and search.out_of_time else where
    if search.out_of_time:
        return ask or "its first wrong layer was not found in a tenth of the stage's time"
    return "no part of the graph that is exported alone differs"


def _digests(folder: Path) -> dict[str, str]:
    return {name: sha256_of(folder / name) for name in sorted(files_below(folder))}


def _link(source: str, target: str) -> None:
    # The folder that it is in is removed: a link costs nothing, and survives.
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _row(compared: KindOutputs, error: float) -> dict[str, Any]:
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


def _metric(parity: ParityContext, seconds: float, deadline: float) -> dict[str, Any] | None:
    """Return the task's metric on ``val`` of both, where there is time, data and a metric."""
    data, signature = parity.context.data, parity.source.signature
    metric = parity.context.metric.for_model(signature)
    if data is None or "val" not in data.datasets or not metric.is_measured:
        return None
    rows = len(data.split("val"))  # type: ignore[arg-type]  # Splits admits none without
    expected_seconds = seconds * max(0.0, rows / SAMPLES - 1)
    if time.monotonic() + expected_seconds > deadline:
        return {"name": metric.name, "note": f"not measured on {rows} rows, to save time"}
    source, exported = (accept_any_batch(p, signature) for p in (parity.expected, parity.exported))
    try:
        values = [evaluate(predict, data, "val", metric, source) for predict in (source, exported)]
    except Exception as error:  # noqa: BLE001 - a metric of the user's may raise any
        return {"name": metric.name, "note": first_line(error)}
    return {"name": metric.name, "source": values[0].value, "exported": values[1].value}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "not finite"
