"""Answers requests inside TorchServe.

TorchServe wants exactly one class here, and an exception that leaves ``handle`` fails every request
of its batch with 503: ``handle`` answers each error alone.

X-Batch-Axis: 0 in an answer says that every output has its rows there, so that more of them may be
sent in several requests.
"""

from __future__ import annotations

import hashlib
import json
import os
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve.worker.batching import together
from serve.worker.http_errors import BROKEN, UNREADABLE, blame, what_failed
from serve.worker.loaders import LOADERS, THREADS_VARIABLE, replay
from serve.worker.oip import LABELS, wanted_of
from serve.worker.preprocess import readers_of
from serve.worker.tensors import check
from serve.worker.wire import JSON, NPZ, decode, encode, from_npz, refusal

if TYPE_CHECKING:
    from ts.context import Context

    from serve.worker.tensors import Array, Named, Specs
    from serve.worker.wire import Readers

    Requests = dict[int, list[Array]]

WARMING_RUNS = 3
"""TorchScript profiles its first runs: READY means warm."""


class PackagedModel:
    """The packaged model and what it accepts."""

    def initialize(self, context: Context) -> None:
        """Load the model and replay the probe; a model that answers otherwise is never READY."""
        folder = Path(context.system_properties["model_dir"])
        refuse_damage(folder)
        settings = context.model_yaml_config["handler"]
        self.name: str = context.manifest["model"]["modelName"]
        self.inputs: Specs = settings["inputs"]
        self.outputs: list[str] = settings["outputs"]
        self.classes: Named | None = settings["classes"]
        self.answered = [*self.outputs, *(LABELS if self.classes else ())]
        self.max_rows = int(settings["max_rows"])
        self.rows_stay_first = bool(settings["rows_stay_first"])
        self.joins_rows = bool(settings["joins_rows"])
        self.readers = readers_of(settings, self.inputs, folder)
        payload = folder / context.manifest["model"]["serializedFile"]
        threads = int(os.environ.get(THREADS_VARIABLE) or settings["threads"])
        self.run = LOADERS[settings["kind"]](payload, settings, threads)
        probe = from_npz((folder / "probe.npz").read_bytes())
        self.given = [probe[spec["name"]] for spec in self.inputs]
        self.expected = [probe[name] for name in self.outputs]
        self.atol = float(settings["probe_atol"])  # PyYAML reads 1e-05 as a string
        for _ in range(WARMING_RUNS):
            replay(self.run, self.given, self.expected, self.atol)

    def handle(self, data: list[dict[str, Any]], context: Context) -> list[str | bytes]:
        """Answer a batch of requests, each with its own status; what can be joined runs at once."""
        sent = [context.get_all_request_header(i) for i in range(len(data))]
        headers = [{key.lower(): value for key, value in each.items()} for each in sent]
        answers: dict[int, str | bytes] = {}
        wanted: dict[int, Named] = {}
        groups: dict[Any, Requests] = {}
        for i, row in enumerate(data):
            try:
                arrays, asked = read_request(row, headers[i], self.inputs, self.readers)
                check(arrays, self.inputs, self.max_rows)
                wanted[i] = wanted_of(asked, self.answered) if asked else {}
            except Exception as error:  # noqa: BLE001 - RecursionError too; its neighbours live on
                answers[i] = refuse(context, i, error)
            else:
                alike = tuple(array.shape[1:] for array in arrays) if self.joins_rows else i
                groups.setdefault(alike, {})[i] = arrays
        for group in groups.values():
            answered = together(self.run, [*group.values()])
            for i, outputs in zip(group, answered, strict=True):
                accept = str(headers[i].get("accept", "")).lower()
                answers[i] = self.write_answer(context, i, accept, wanted[i], outputs)
        return [answers[i] for i in range(len(data))]

    def write_answer(
        self,
        context: Context,
        i: int,
        accept: str,
        wanted: Named,
        outputs: Any,
    ) -> str | bytes:
        """Return one response body and set its status and headers."""
        try:
            if what := what_failed(outputs, self.outputs):
                raise blame(what, works=self.works())
            named = dict(zip(self.outputs, outputs, strict=True))
            body, headers = encode(named, accept, wanted, self.name, self.classes)
        except Exception as error:  # noqa: BLE001
            return refuse(context, i, error, status=BROKEN)
        if self.rows_stay_first:
            headers["X-Batch-Axis"] = "0"
        for key, value in headers.items():
            context.set_response_header(i, key, value)
        return body

    def works(self) -> bool:
        """Return whether the model still answers the probe."""
        try:
            replay(self.run, self.given, self.expected, self.atol)
        except Exception:  # noqa: BLE001
            return False
        return True


def refuse_damage(folder: Path) -> None:
    """Raise RuntimeError where a member is not the file that was packed."""
    members = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["members"]
    for name, expected in members.items():
        with (folder / name).open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != expected["sha256"]:
            raise RuntimeError(f"member {name} is not the file that was packed")


def read_request(
    row: Named, headers: Named, specs: Specs, readers: Readers
) -> tuple[list[Array], Named]:
    """Return a request's inputs in the signature's order, and what :func:`decode` says of it."""
    field = "body" if "body" in row else "data"
    if field not in row:
        raise ValueError(UNREADABLE, f"the request has no body; send one as {JSON} or {NPZ}")
    # TorchServe keeps each form field's own Content-Type under the field's name.
    content_type = (headers.get(field) or headers).get("content-type") or ""
    return decode(
        row[field], content_type.partition(";")[0].strip().lower(), headers, specs, readers
    )


def refuse(context: Context, i: int, error: Exception, status: int = UNREADABLE) -> str:
    """Set the status of a refused request and return its body."""
    status, body = refusal(error, status)
    context.set_response_status(status, HTTPStatus(status).phrase, i)
    context.set_response_content_type(i, JSON)
    return body
