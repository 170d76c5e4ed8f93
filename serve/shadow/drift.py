"""Whether inputs are like reference rows, such as those of `val`, without an uncompressed model."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compress.common.errors import PipelineInvalid, StageFailed
from compress.core.objectives.task import TASKS
from compress.profiling.batch_dependence import numpy_call
from compress.serve.shadow.state import DriftState, Subject, now
from compress.serve.worker.tensors import check, in_signature_order
from compress.serve.worker.wire import from_npz

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.serve.shadow.options import Judge

FEWEST_ROWS = 100
"""Reference rows, half of which place the bins of scores."""
BINS = 64
CALL_ROWS = 32


@contextmanager
def opened_drift(
    artifact: Artifact, served: str, reference: Path, task: str | None
) -> Iterator[tuple[DriftState, Judge]]:
    """Score the reference rows; yield the state before any request, and what scores requests.

    A row's score is its margin, negated, where answers are labels, else the norm of its outputs.
    PipelineInvalid for rows that the artifact does not take, or too few.
    """
    from compress.export.onnx.cascade_graph import RowScore
    from compress.export.onnx.range_ends import write_range_ends
    from compress.export.onnx.session import session_predictor

    signature, kind = artifact.signature, TASKS[task] if task else None
    specs, names, count = signature.input_descriptions(), tuple[str, ...](), None
    size = max(min(signature.most_rows or CALL_ROWS, CALL_ROWS), signature.smallest_batch)
    try:
        data = reference.read_bytes()
        rows = in_signature_order(from_npz(data), specs)
        check([x[:size] for x in rows], specs, size)
        if (fewest := min(map(len, rows))) < max(FEWEST_ROWS, *map(len, rows)):
            raise ValueError(f"has {fewest} rows, expected {FEWEST_ROWS} or more of each input")
    except (OSError, ValueError, IndexError, zipfile.BadZipFile) as error:
        raise PipelineInvalid(
            f"--shadow-reference {reference}: {error.args[-1]}; expected an .npz of "
            f"{', '.join(spec.name for spec in signature.inputs)}, as numpy.savez writes it"
        ) from None
    parts = [[x[i : i + size] for x in rows] for i in range(0, len(rows[0]) // size * size, size)]
    with artifact.open("cpu", 1) as predict:
        call = numpy_call(predict, signature)
        answers = [call(*part) for part in parts]
    first, scorer = [torch.from_numpy(each) for each in answers[0]], None
    if kind is None or kind.has_labels:
        outputs = [output.name for output in signature.outputs]
        with suppress(StageFailed):  # several labels a row, or boxes
            scorer = RowScore.of(first, outputs, kind, None, "")
    with TemporaryDirectory(prefix="compress-shadow-") as folder:
        counting = Path(folder) / "counting.onnx"
        if artifact.kind == "onnx" and (names := write_range_ends(artifact.payload_path, counting)):
            count = numpy_call(session_predictor(counting, 1), signature)

        def judge(arrays: list[Any], served: list[Any]) -> tuple[Any, Any]:
            tensors = [torch.from_numpy(each) for each in served]
            if scorer is not None:
                scores = -scorer.measure(tensors)
            else:
                parts = [x.reshape(len(x), -1).double().norm(dim=1) for x in tensors]
                scores = torch.stack(parts).norm(dim=0)
            return scores.nan_to_num(torch.inf).numpy(), count(*arrays)[0].tolist() if count else ()

        judged = [judge(part, [*got]) for part, got in zip(parts, answers, strict=True)]
        scores = np.concatenate([each for each, _ in judged])
        percentiles = np.quantile(scores[::2], np.linspace(0, 1, BINS + 1)[1:-1])
        edges = np.unique(percentiles[np.isfinite(percentiles)])
        bins = np.bincount(np.searchsorted(edges, scores[1::2], "right"), minlength=len(edges) + 1)
        hashed = hashlib.sha256(data).hexdigest()
        shares = np.mean([each for _, each in judged], axis=0) if names else ()
        state = DriftState(
            of=Subject(served=served, reference=hashed, task=task),
            since=now(),
            score="the margin of answers" if scorer else "the norm of answers",
            edges=tuple(edges.tolist()),
            bins=tuple(bins.tolist()),
            range_ends={n: (float(share), 0.0) for n, share in zip(names, shares, strict=True)},
        )
        yield state, judge
