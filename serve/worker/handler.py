"""TorchServe's handler class.

TorchServe expects exactly one class here. An exception that leaves ``handle`` fails every request
of its batch with 503, so ``handle`` answers each error separately.

The header ``X-Batch-Axis: 0`` of a response says that axis 0 of every output counts the request's
rows, so that a client may split many rows into several requests.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.serve.worker.loaders import LOADERS, THREADS_VARIABLE, replay
from compress.serve.worker.tensors import (
    BROKEN,
    UNREADABLE,
    check,
    describe_error,
    inference_error,
    output_fault,
    run_batched,
    unreadable,
)
from compress.serve.worker.wire import (
    JSON,
    LABELS,
    NO_BODY,
    create_readers,
    decode,
    encode,
    from_npz,
    requested_outputs,
)

if TYPE_CHECKING:
    from ts.context import Context

    from compress.serve.worker.tensors import Array, Named, Specs
    from compress.serve.worker.wire import Readers

    Requests = dict[int, list[Array]]

WARMUP_RUNS = 3  # TorchScript profiles its first runs and compiles after them


class PackagedModel:
    """The packaged model, and the requests that it accepts."""

    def initialize(self, context: Context) -> None:
        """Load the model and replay the probe; the worker is READY only if the outputs match."""
        folder = Path(context.system_properties["model_dir"])
        check_members(folder)
        settings = context.model_yaml_config["handler"]
        self.name: str = context.manifest["model"]["modelName"]
        self.inputs: Specs = settings["inputs"]
        self.outputs: list[str] = settings["outputs"]
        self.classes: Named | None = settings["classes"]
        self.output_names = [*self.outputs, *(LABELS if self.classes else ())]
        self.max_rows = int(settings["max_rows"])
        self.rows_stay_first = bool(settings["rows_stay_first"])
        self.joins_rows = bool(settings["joins_rows"])
        self.readers = create_readers(settings, self.inputs, folder)
        payload = folder / context.manifest["model"]["serializedFile"]
        threads = int(os.environ.get(THREADS_VARIABLE) or settings["threads"])
        self.run = LOADERS[settings["kind"]](payload, settings, threads)
        probe = from_npz((folder / "probe.npz").read_bytes())
        self.probe_inputs = [probe[spec["name"]] for spec in self.inputs]
        self.probe_outputs = [probe[name] for name in self.outputs]
        self.atol = float(settings["probe_atol"])  # PyYAML reads 1e-05 as a string
        for _ in range(WARMUP_RUNS):
            replay(self.run, self.probe_inputs, self.probe_outputs, self.atol)

    def handle(self, data: list[dict[str, Any]], context: Context) -> list[str | bytes]:
        """Answer requests, each with its own status; run those of equal row shapes as one batch."""
        all_headers = [context.get_all_request_header(i) for i in range(len(data))]
        headers = [{key.lower(): value for key, value in each.items()} for each in all_headers]
        answers: dict[int, str | bytes] = {}
        wanted: dict[int, Named] = {}
        groups: dict[Any, Requests] = {}
        for i, row in enumerate(data):
            try:
                arrays, asked = read_request(row, headers[i], self.inputs, self.readers)
                check(arrays, self.inputs, self.max_rows)
                wanted[i] = requested_outputs(asked, self.output_names) if asked else {}
            except Exception as error:  # noqa: BLE001 - RecursionError too; the rest is answered
                answers[i] = respond_error(context, i, error)
            else:
                key = tuple(array.shape[1:] for array in arrays) if self.joins_rows else i
                groups.setdefault(key, {})[i] = arrays
        for group in groups.values():
            results = run_batched(self.run, [*group.values()])
            for i, outputs in zip(group, results, strict=True):
                accept = str(headers[i].get("accept", "")).lower()
                answers[i] = self.write_response(context, i, accept, wanted[i], outputs)
        return [answers[i] for i in range(len(data))]

    def write_response(
        self, context: Context, i: int, accept: str, wanted: Named, outputs: Any
    ) -> str | bytes:
        """Return one response body and set its status and headers."""
        try:
            if fault := output_fault(outputs, self.outputs):
                works = False
                with suppress(Exception):  # the request is at fault if the probe is still answered
                    replay(self.run, self.probe_inputs, self.probe_outputs, self.atol)
                    works = True
                raise inference_error(fault, works=works)
            named = dict(zip(self.outputs, outputs, strict=True))
            body, headers = encode(named, accept, wanted, self.name, self.classes)
        except Exception as error:  # noqa: BLE001
            return respond_error(context, i, error, status=BROKEN)
        if self.rows_stay_first:
            headers["X-Batch-Axis"] = "0"
        for key, value in headers.items():
            context.set_response_header(i, key, value)
        return body


def check_members(folder: Path) -> None:
    """Raise RuntimeError if a member's hash is not the one recorded in provenance.json."""
    members = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["members"]
    for name, expected in members.items():
        with (folder / name).open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != expected["sha256"]:
            raise RuntimeError(f"member {name} is not the file that was packed")


def read_request(
    row: Named, headers: Named, specs: Specs, readers: Readers
) -> tuple[list[Array], Named]:
    """Return a request's inputs in the signature's order, and :func:`decode`'s second result."""
    field = "body" if "body" in row else "data"
    if field not in row:
        raise unreadable(NO_BODY)
    # TorchServe keeps each form field's own Content-Type under the field's name.
    content_type = (headers.get(field) or headers).get("content-type") or ""
    return decode(
        row[field], content_type.partition(";")[0].strip().lower(), headers, specs, readers
    )


def respond_error(context: Context, i: int, error: Exception, status: int = UNREADABLE) -> str:
    """Set the status of an error response and return its body."""
    status, message = describe_error(error, status)
    context.set_response_status(status, HTTPStatus(status).phrase, i)
    context.set_response_content_type(i, JSON)
    return json.dumps({"code": status, "message": message})
