"""The process that answers requests again with the uncompressed model, and compares the answers.

It runs at the lowest priority, on one thread: what it takes of the machine, no request could use.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from compress.common.errors import (
    ArtifactInvalid,
    CompressError,
    PipelineInvalid,
    cause_lines,
    first_line,
)
from compress.common.sealed_json import read_report, write_sealed
from compress.core.context import Context
from compress.core.gates.disagreement import MaxDisagreement
from compress.core.metrics.metric import Metric
from compress.core.objectives.loss import Loss
from compress.core.objectives.task import TASKS
from compress.export.imported.exported_files import opened_artifact
from compress.profiling.batch_dependence import numpy_call, seeded_rows
from compress.serve.packaging.model_interface import REPORT
from compress.serve.shadow.options import WRITE_SECONDS
from compress.serve.shadow.state import ShadowState, Subject, now, read_state

if TYPE_CHECKING:
    from compress.common.signature import Signature
    from compress.serve.shadow.options import Asked

LOCK_SECONDS = 10.0  # time for the process of a server that was stopped to let go of the state


class Recorded(NamedTuple):
    """What a run's report says of the comparison of an artifact."""

    model: Path | None = None
    """Directory of what it was compared with."""
    digest: str | None = None
    """Digest of that."""
    gate: MaxDisagreement | None = None
    task: str | None = None
    metric: Metric = Metric()


def recorded_in(file: Path, digest: str) -> Recorded:
    """Read how a run compared an artifact; nothing where there is no report, or none of it."""
    try:
        report, lock = read_report(file)
    except FileNotFoundError:
        return Recorded()
    stage = next(
        (s for s in report["stages"] if (s["artifact"] or {}).get("digest") == digest), None
    )
    if stage is None:
        return Recorded()
    gates = [v for v in stage["verdicts"] if v["gate"] == "max_disagreement" and not v["on"]]
    against = gates[0]["against"] if gates else report["baseline_name"]
    settings, found = lock.get("settings", {}), []
    for each in settings.get("stages", []):
        if stage["name"] == (each["name"] or each["stage"]):
            found = [gate for gate in each["gates"] if gate["gate"] == "max_disagreement"]
    if gates and not found:
        found = [{"percent": gates[0]["limit"], "confidence": gates[0]["bound"]["confidence"]}]
    metric = settings.get("metric") or {}
    return Recorded(
        file.parent / "artifacts" / against,
        lock.get("artifacts", {}).get(against),
        MaxDisagreement.model_validate(found[0]) if found else None,
        lock.get("task"),
        Metric(metric.get("name", "accuracy"), tuple(metric.get("arguments", {}).items())),
    )


class Comparison:
    """Answers requests again, and keeps what comparing the answers has shown."""

    def __init__(self, asked: Asked, recorded: Recorded, model: Any, predict: Any) -> None:
        """Create it; the `model` is open. ArtifactInvalid, PipelineInvalid where nothing fits."""
        self._refuse_other_signature(asked, model.signature)
        gate, task = recorded.gate, TASKS[recorded.task] if recorded.task else None
        percent, where = asked.options.percent, asked.options.artifact
        if percent is not None:
            gate = (gate or MaxDisagreement(percent=1)).model_copy(update={"percent": percent})
        if gate is None:
            raise PipelineInvalid(
                f"{where}: no gate max_disagreement of its run says how many answers may differ; "
                "add one to the pipeline file, or give --shadow-limit 1%"
            )
        if task is not None and (problem := gate.unsuitable_task(task)):
            raise PipelineInvalid(
                f"{asked.options.artifact}: {problem}, in the run's gate max_disagreement"
            )
        self.gate, self._call = gate, numpy_call(predict, model.signature)
        self._names = [output.name for output in model.signature.outputs]
        self._context = Context(
            Path(), loss=Loss("cross_entropy", task=task), metric=recorded.metric
        )
        self._call(*seeded_rows(model.signature, model.signature.smallest_batch))  # warms it up
        subject = Subject(
            served=asked.digest, uncompressed=model.digest, gate=gate, task=recorded.task
        )
        self.file = asked.options.state
        self.state = read_state(asked.options.state, subject) or ShadowState(
            of=subject, since=now()
        )
        self.error = ""
        """The first failure of this process."""

    @staticmethod
    def _refuse_other_signature(asked: Asked, found: Signature) -> None:
        sides = [
            ([(i.name, i.dtype, len(i.shape)) for i in s.inputs], len(s.outputs))
            for s in (asked.signature, found)
        ]
        if sides[0] != sides[1]:
            raise ArtifactInvalid(
                f"{asked.options.artifact}: takes {sides[0][0]} and gives {sides[0][1]} outputs, "
                f"and the model to compare it with takes {sides[1][0]} and gives {sides[1][1]}"
            )

    def compare(self, arrays: Sequence[Any], served: Sequence[Any], row: int | None) -> None:
        """Answer a request again, and compare a row of the answers, or the worst one."""
        try:
            # What was sent is read-only, which torch warns of.
            expected, got = [
                dict(zip(self._names, map(torch.from_numpy, map(np.array, each)), strict=True))
                for each in (self._call(*map(np.array, arrays)), served)
            ]
            errors = self.gate.errors(expected, got, self._context)
            worst = float(errors.max() if row is None else errors[row])
        except Exception as error:  # noqa: BLE001 - whatever a model raises for an input
            self.error = self.error or f"{type(error).__name__}: {first_line(error)}"
            self.state = self.state.model_copy(update={"failed": self.state.failed + 1})
        else:
            self.state = self.state.after(worst > (self.gate.error or 0))

    def write(self) -> None:
        """Write the state to its file."""
        write_sealed(self.file, self.state)

    def summary(self) -> dict[str, Any]:
        """Return what the server shows."""
        state, (low, high) = self.state, self.state.bounds
        names = ("requests", "dropped", "failed", "compared", "other", "evidence", "broken_at")
        shown = {name: getattr(state, name) for name in names}
        limit = self.gate.percent
        return shown | {"lower": low, "upper": high, "limit": limit, "error": self.error}


@contextmanager
def opened(asked: Asked) -> Iterator[Comparison]:
    """Open the uncompressed model, and the state; lock the latter until the end."""
    report = asked.report or asked.options.artifact.resolve().parent.parent / REPORT
    recorded = recorded_in(report, asked.digest)
    path, where = asked.options.model or recorded.model, asked.options.artifact
    if path is None or not path.exists():
        why = f"{path} is not there" if path else f"no report of a run ({report}) names one"
        raise PipelineInvalid(
            f"{where}: the uncompressed model is needed to compare with, and {why}; name it with "
            "--shadow-model"
        )
    with _locked(asked.options.state), opened_artifact(path) as model:
        model.verify()
        if asked.options.model is None and model.digest != (recorded.digest or model.digest):
            raise ArtifactInvalid(
                f"{path}: has digest {model.digest}, and the run compared {where} with "
                f"{recorded.digest}; run the pipeline again, or name the model with --shadow-model"
            )
        with model.open("cpu", 1) as predict:
            yield Comparison(asked, recorded, model, predict)


@contextmanager
def _locked(state: Path) -> Iterator[None]:
    try:
        with state.with_name(f".{state.name}.lock").open("w") as lock:
            deadline = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise PipelineInvalid(
                            f"{state}: another server writes it; name another file with "
                            "--shadow-state"
                        ) from None
                    time.sleep(0.05)
            yield
    except OSError as error:
        raise PipelineInvalid(
            f"{state}: cannot be written ({error.strerror}); name another file with --shadow-state"
        ) from error


def main() -> None:
    """Open what the first message asks for, then compare requests until the server has ended."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all of a terminal
        signal.signal(each, signal.SIG_IGN)
    os.nice(19)
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    asked: Asked = connection.recv()

    def send(content: Any) -> None:
        os.write(connection.fileno(), json.dumps(content).encode() + b"\n")

    try:
        with opened(asked) as comparison:
            comparison.write()  # where that fails, it does so before the first request
            send(comparison.summary())
            # Not before, as the server waits for what is above.
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            serve(connection, comparison, send)
    except CompressError as error:
        send({"kind": type(error).__name__, "lines": cause_lines(error)})


def serve(connection: Any, comparison: Comparison, send: Any) -> None:
    """Compare what a server sends; write and send the state each second, and once it is broken."""
    written = time.monotonic()
    while True:
        try:
            requests, dropped, request = connection.recv()
        except EOFError:
            comparison.write()
            return
        was_broken = comparison.state.broken_at
        counts = {"requests": requests, "dropped": dropped}
        comparison.state = comparison.state.model_copy(update=counts)
        if request is not None:
            comparison.compare(*request)
        is_late = time.monotonic() - written >= WRITE_SECONDS
        if request is None or is_late or comparison.state.broken_at != was_broken:
            comparison.write()
            send(comparison.summary())
            written = time.monotonic()


if __name__ == "__main__":
    main()
