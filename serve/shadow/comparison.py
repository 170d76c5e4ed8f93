"""The process that looks at requests again: it compares the uncompressed model's answers to them.

It runs at the lowest priority, on one thread: what it takes of the machine, no request could use.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from filelock import FileLock, Timeout

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import ArtifactInvalid, CompressError, PipelineInvalid, first_line
from compress.common.sealed_json import read_report, write_sealed
from compress.core.context import Context
from compress.core.gates.disagreement import MaxDisagreement
from compress.core.metrics.metric import Metric
from compress.core.objectives.loss import Loss
from compress.core.objectives.task import TASKS
from compress.export.imported.exported_files import opened_artifact
from compress.export.onnx.stage import ExportOnnx
from compress.profiling.batch_dependence import numpy_call, seeded_rows
from compress.serve.packaging.model_interface import REPORT
from compress.serve.shadow.drift import opened_drift
from compress.serve.shadow.state import DriftState, ShadowState, Subject, now, read_state

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.serve.shadow.options import Drawn, Judge, ShadowOptions

EXPORTED_BYTES = 128 * 2**20  # of a model at most, as the server waits for the export
LOCK_SECONDS = 10.0  # time for the process of a server that was stopped to let go of the state


def recorded_in(
    file: Path, digest: str
) -> tuple[Path | None, MaxDisagreement | None, str | None, Metric]:
    """Return what a run's report says of an artifact, as far as it is there and says anything.

    The directory of the model that it was compared with, the gate, the task and the metric.
    """
    try:
        report, lock = read_report(file)
    except (OSError, ArtifactInvalid):  # perhaps another program's, where none was named
        return None, None, None, Metric()
    settings, gates, model = lock.get("settings", {}), list[Any](), None
    for stage in report["stages"]:
        if stage["artifact"] and stage["artifact"]["digest"] == digest:
            found = [v for v in stage["verdicts"] if v["gate"] == "max_disagreement"]
            against = found[0]["against"] if found else report["baseline_name"]
            model = file.parent / "artifacts" / against
            gates = [
                gate
                for each in settings.get("stages", [])
                if (each["name"] or each["stage"]) == stage["name"]
                for gate in each["gates"]
                if gate["gate"] == "max_disagreement"
            ] or [{"percent": verdict["limit"]} for verdict in found]
    gate = MaxDisagreement.model_validate(gates[0]) if gates else None
    named = settings.get("metric") or {"name": "accuracy", "arguments": {}}
    metric = Metric(named["name"], tuple(named["arguments"].items()))
    return model, gate, lock.get("task"), metric


@dataclass
class Comparison:
    """Looks at requests again, and keeps what that has shown."""

    file: Path
    state: ShadowState | DriftState
    judge: Judge
    most_rows: int | None = None
    """Of a call; None for any number."""
    compared_with: str = ""
    """What the answers are compared with, in words."""
    error: str = ""
    """The first failure of this process."""

    def compare(self, drawn: Sequence[Drawn], *, joins_rows: bool) -> None:
        """Judge requests: with `joins_rows` each has one row, and those of one shape are joined."""
        groups: dict[Any, list[Drawn]] = {}
        for number, each in enumerate(drawn):
            shapes = tuple(np.shape(array) for some in each[:2] for array in some)
            groups.setdefault(shapes if joins_rows else number, []).append(each)
        for group in groups.values():
            size = self.most_rows or len(group)
            for start in range(0, len(group), size):
                self._judge(group[start : start + size])

    def _judge(self, requests: Sequence[Drawn]) -> None:
        try:
            # What was sent is read-only, which torch warns of.
            arrays, served = (
                [
                    np.concatenate(x) if len(x) > 1 else np.array(x[0])
                    for x in zip(*side, strict=True)
                ]
                for side in ([r[0] for r in requests], [r[1] for r in requests])
            )
            found, shared = self.judge(arrays, served)
            if len(requests) == 1:  # a row of it, or the worst one
                row = requests[0][2]
                if row is None and self.state.of.reference:
                    raise ValueError("axis 0 of its outputs counts no rows, as reference rows need")
                found = [max(found) if row is None else found[row]]
            states = self.state
            for _, value in zip(requests, found, strict=True):
                states = states.after(float(value), shared)
            self.state = states
        except Exception as error:  # noqa: BLE001 - whatever a model raises for an input
            if len(requests) > 1:  # perhaps for one of them alone
                for request in requests:
                    self._judge([request])
                return
            self.error = self.error or f"{type(error).__name__}: {first_line(error)}"
            self.state = self.state.model_copy(update={"failed": self.state.failed + 1})

    def publish(self, connection: Connection[Any, Any], since: float) -> None:
        """Write the state, and send what the server shows of it, and CPU seconds since a moment."""
        write_sealed(self.file, self.state)
        content = self.state.figures() | {"error": self.error, "alarm": self.state.alarm}
        seconds = time.process_time() - since
        content |= {"compared_with": self.compared_with, "seconds": seconds}
        os.write(connection.fileno(), json.dumps(content).encode() + b"\n")

    def run(self, connection: Connection[Any, Any]) -> None:
        """Look at what a server sends, until its end."""
        while True:
            try:
                requests, dropped, joins_rows, count = connection.recv()
                since = time.process_time()
                drawn = [connection.recv() for _ in range(count)]
            except EOFError:
                return
            counts = {"requests": requests, "dropped": dropped}
            self.state = self.state.model_copy(update=counts)
            self.compare(drawn, joins_rows=joins_rows)
            self.publish(connection, since)


@contextmanager
def opened(
    options: ShadowOptions, report: Path | None, digest: str, signature: Signature
) -> Iterator[Comparison]:
    """Open the uncompressed model, and the state of what an artifact of this digest answers.

    With reference rows, open those in its place. ArtifactInvalid, PipelineInvalid where something
    is missing, or does not fit.
    """
    where = options.artifact
    report = report or where.resolve().parent.parent / REPORT
    model, gate, task, metric = recorded_in(report, digest)
    if options.reference is not None:
        with (
            _locked(options.state),
            opened_artifact(where) as artifact,
            opened_drift(artifact, digest, options.reference, task) as (fresh, judge),
        ):
            watched = read_state(options.state, fresh.of) or fresh
            yield Comparison(options.state, watched, judge, artifact.signature.most_rows)
        return
    if (path := options.model or model) is None or not path.exists():
        raise PipelineInvalid(
            f"{where}: the uncompressed model is needed to compare with, and "
            + (f"{path} is not there" if path else f"no report of a run ({report}) names one")
            + "; name it with --shadow-model. Without one, --shadow-reference rows.npz, such as "
            "those of `val`, lets inputs unlike them be found"
        )
    if options.percent is not None:
        gate = gate or MaxDisagreement(percent=1)
        gate = gate.model_copy(update={"percent": options.percent})
    if gate is None:
        raise PipelineInvalid(
            f"{where}: no gate max_disagreement of its run says how many answers may differ; add "
            "one to the pipeline file, or give --shadow-limit 1%"
        )
    loss = Loss("cross_entropy", task=TASKS[task] if task else None)
    if loss.task is not None and (problem := gate.unsuitable_task(loss.task)):
        raise PipelineInvalid(f"{where}: gate max_disagreement of its run: {problem}")
    with (
        _locked(options.state),
        opened_artifact(path) as uncompressed,
        _opened_fast(uncompressed) as (predict, compared_with),
    ):
        own = uncompressed.signature
        sides = [
            ([(i.name, i.dtype, len(i.shape)) for i in s.inputs], len(s.outputs))
            for s in (signature, own)
        ]
        if sides[0] != sides[1]:
            raise ArtifactInvalid(
                f"{where}: takes {sides[0][0]} and gives {sides[0][1]} outputs, and the model to "
                f"compare it with takes {sides[1][0]} and gives {sides[1][1]}"
            )
        call = numpy_call(predict, own)
        call(*seeded_rows(own, own.smallest_batch))  # warms it up
        of = Subject(served=digest, uncompressed=uncompressed.digest, gate=gate, task=task)
        state = read_state(options.state, of) or ShadowState(of=of, since=now(), other=0)
        names = [output.name for output in own.outputs]
        context = Context(Path(), loss=loss, metric=metric)

        def judge(arrays: list[Any], served: list[Any]) -> tuple[Any, tuple[()]]:
            expected, got = (
                dict(zip(names, map(torch.from_numpy, each), strict=True))
                for each in (call(*arrays), served)
            )
            return gate.errors(expected, got, context), ()

        yield Comparison(options.state, state, judge, own.most_rows, compared_with)


@contextmanager
def _opened_fast(model: Artifact) -> Iterator[tuple[Predictor, str]]:
    """Verify and open a model, one of PyTorch in ONNX Runtime; yield it, and what it is in words.

    There a call takes a fifth to two thirds of the time. An export has the same answers, or it
    fails, and the model is called as it is.
    """
    model.verify()
    called, how = model, f"as it is ({model.kind})"
    with TemporaryDirectory(prefix="compress-shadow-") as folder:
        if isinstance(model, EagerModel | GraphModel) and model.payload_bytes <= EXPORTED_BYTES:
            try:
                called = ExportOnnx().run_checked(model, Context(Path(folder, "exported")))
                how = "in ONNX Runtime, exported and checked against it"
            except CompressError as error:
                how += f": it is not exported, as {error}"
        with called.open("cpu", 1) as predict:
            yield predict, f"{model.path.name} {how}"


@contextmanager
def _locked(state: Path) -> Iterator[None]:
    """Lock a state for a block, waiting for who has it; PipelineInvalid where that takes long."""
    lock = FileLock(state.with_name(f".{state.name}.lock"), LOCK_SECONDS, fallback_to_soft=False)
    try:
        acquired = lock.acquire()
    except OSError as error:
        why = "another server writes it" if isinstance(error, Timeout) else error.strerror
        raise PipelineInvalid(f"{state}: {why}; name another file with --shadow-state") from error
    with acquired:
        yield


def main() -> None:
    """Open what the first message asks for, then compare requests until the server has ended."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all of a terminal
        signal.signal(each, signal.SIG_IGN)
    logging.disable()  # the server has noted what it opens
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    try:
        with opened(*connection.recv()) as comparison:
            # Where that fails, no request was answered yet.
            comparison.publish(connection, time.process_time())
            # Not before, as the server waits for what is above.
            os.nice(19)
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            comparison.run(connection)
    except CompressError as error:
        content = {"kind": type(error).__name__, "message": str(error)}
        os.write(connection.fileno(), json.dumps(content).encode() + b"\n")


if __name__ == "__main__":
    main()
