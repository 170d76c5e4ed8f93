"""The Open Inference Protocol v2 as an ASGI application: the built-in server's routes.

A request is decoded, the model called, its outputs checked and encoded.

It is plain ASGI: a web framework around these few paths took longer than a small model's inference.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compress import __version__
from compress.profiling.probe_rows import seeded_rows
from compress.serve.http import base_app, messages
from compress.serve.http.base_app import SMALL_BYTES, BaseApplication, SharedState, headers_of
from compress.serve.http.helper_process import HelperProcess
from compress.serve.http.messages import HttpError, Response, error_response, send_response
from compress.serve.worker import wire
from compress.serve.worker.tensors import describe_error, inference_error, output_fault
from compress.serve.worker.wire import DATATYPES, LABELS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compress.serve.http.dynamic_batcher import Batcher, Job
    from compress.serve.http.loaded_model import ServedModel
    from compress.serve.http.messages import Headers, Message, Receive, Send
    from compress.serve.http.options import Limits
    from compress.serve.worker.tensors import Array, Named

SPECIAL_HEADERS = frozenset({"expect", "transfer-encoding", "upgrade"})
"""Of requests that `WholeRequest` does not answer."""


class Inference(SharedState):
    """The steps of all inference requests, and what they share."""

    workers: Batcher

    def __init__(self, model: ServedModel, batcher: Batcher, limits: Limits) -> None:
        super().__init__(model.name, batcher, limits)
        self.model = model
        self.outputs = [output.name for output in model.signature.outputs]
        self._example = seeded_rows(model.signature, 1)
        # The protocol's answer holds what the metadata names, and labels if they are requested.
        labels = LABELS if model.classes else ()
        specs = model.signature.input_descriptions(model.facts)
        self.decoder = messages.RequestDecoder(specs, self.outputs, labels, limits.rows)
        self._helper = None
        if model.forms:
            self._helper = HelperProcess(
                messages.with_readers,
                self.decoder,
                model.forms,
                model.folder,
                what=model.folder,
                seconds=limits.seconds,
                needed_bytes=messages.memory_needed(model.forms, limits),
            )
        self.tasks = set[asyncio.Task[Response]]()

    def close(self) -> None:
        """End the threads, and the helper process."""
        if self._helper:
            self._helper.close()
        super().close()

    async def read(self, headers: Headers, body: bytes | bytearray) -> tuple[list[Array], Named]:
        """Return the inputs in a body, and the outputs that it wants: decoded where it is safe."""
        read: tuple[list[Array], Named]
        if self._helper and self.needs_helper(headers):
            read = await self._helper.call("decode", headers, body=body)
        else:
            large = len(body) > SMALL_BYTES
            read = await self.run_in_thread(large, self.decoder.decode, headers, body)
        return read

    def needs_helper(self, headers: Headers) -> bool:
        """Return whether a body may hold texts or an image."""
        return self._helper is not None and messages.content_type_of(headers) not in wire.TENSORS

    def encode(
        self, headers: Headers, wanted: Named, arrays: list[Array], outputs: list[Array]
    ) -> Response:
        """Return the response: as the protocol or the Accept header says."""
        named = dict(zip(self.outputs, outputs, strict=True))
        accept = headers.get("accept", "").lower()
        try:
            body, written = wire.encode(named, accept, wanted, self.model.name, self.model.classes)
        except ValueError as error:
            raise HttpError(*describe_error(error)) from error
        if self.model.interface.rows_stay_first:
            written["X-Batch-Axis"] = "0"
        return Response(200, body, written, len(arrays[0]) if arrays[0].ndim else 1)

    async def respond(
        self,
        headers: Headers,
        wanted: Named,
        arrays: list[Array],
        outputs: list[Array] | Exception,
    ) -> Response:
        """Return the response with a model's outputs, or the error that its example shows."""
        failure = output_fault(outputs, self.outputs)
        if failure or isinstance(outputs, Exception):
            try:
                async with asyncio.timeout(self.limits.seconds):
                    example = await self.workers.outputs(self._example)
            except TimeoutError:
                raise self.late_error(base_app.NOT_ANSWERED) from None
            works = not output_fault(example, self.outputs)
            raise HttpError(*describe_error(inference_error(failure, works=works)))
        response: Response = await self.run_in_thread(
            not is_small(outputs), self.encode, headers, wanted, arrays, outputs
        )
        return response


@dataclass(slots=True, eq=False)
class WholeRequest:
    """One request, from its head to its response, which `_respond` is called with."""

    _inference: Inference
    _headers: Headers
    _respond: Callable[[Response], None]
    _start: float = field(default_factory=time.perf_counter)
    _finished: bool = False
    _job: Job | None = None
    _late: tuple[int, str] = base_app.NOT_RECEIVED
    _arrays: list[Array] = field(init=False)
    _wanted: Named = field(init=False)

    def __post_init__(self) -> None:
        self._inference.in_progress += 1

    def run(self, body: bytes) -> None:
        """Decode the body and call the model."""
        inference, self._late = self._inference, base_app.NOT_ANSWERED
        try:
            self._arrays, self._wanted = inference.decoder.decode(self._headers, body)
        except Exception as error:  # noqa: BLE001 - the parser called this
            self._finish(error_response(error))
            return
        self._job = inference.workers.submit(self._arrays, self._encode)

    def expire(self) -> None:
        """Answer that the body, or the model's answer, was not there in time."""
        self._drop()
        self._finish(self._inference.late_error(self._late).response)

    def cancel(self) -> None:
        """Drop the request: its client has disconnected."""
        self._drop()
        if not self._finished:
            self._count(base_app.CLIENT_CLOSED, 0)

    def _drop(self) -> None:
        if self._job is not None:
            self._job.cancelled = True

    def _encode(self, outputs: list[Array] | Exception) -> None:
        inference = self._inference
        self._job = None  # it refers to this request, which would wait for the garbage collector
        if (
            not isinstance(outputs, Exception)
            and not output_fault(outputs, inference.outputs)
            and is_small(outputs)
        ):
            try:
                response = inference.encode(self._headers, self._wanted, self._arrays, outputs)
            except Exception as error:  # noqa: BLE001 - others of the batch are yet to come
                response = error_response(error)
            self._finish(response)
            return
        respond = inference.respond(self._headers, self._wanted, self._arrays, outputs)
        task = asyncio.get_running_loop().create_task(messages.response_of(respond))
        inference.tasks.add(task)  # the loop alone would let it be collected
        task.add_done_callback(self._finish_task)

    def _finish_task(self, task: asyncio.Task[Response]) -> None:
        self._inference.tasks.discard(task)
        if not task.cancelled():
            self._finish(task.result())

    def _finish(self, response: Response) -> None:
        if not self._finished:
            self._count(response.status, response.rows)
            self._respond(response)

    def _count(self, status: int, rows: int) -> None:
        self._finished = True
        self._inference.in_progress -= 1
        seconds = time.perf_counter() - self._start
        self._inference.metrics.count(status, rows, seconds)


def is_small(outputs: Sequence[Array]) -> bool:
    """Return whether outputs may be written without a thread."""
    return sum(output.nbytes for output in outputs) <= SMALL_BYTES


class Application(BaseApplication):
    """Answers requests for one model."""

    state: Inference

    def __init__(self, model: ServedModel, batcher: Batcher, limits: Limits, token: str) -> None:
        base = f"/v2/models/{model.name}"
        ready = {"name": model.name, "ready": True}
        inputs, outputs = (
            [
                {"name": each.name, "datatype": DATATYPES[each.dtype], "shape": [*each.shape]}
                for each in tensors
            ]
            for tensors in (model.interface.inputs, model.interface.outputs)
        )
        described = {"name": model.name, "versions": ["1"], "platform": model.kind}
        metadata = described | {"inputs": inputs, "outputs": outputs}
        server: dict[str, Any] = {"name": "compress", "version": __version__}
        server |= {"extensions": ["binary_tensor_data"]}
        content: dict[str, Any] = {"/v2": server, "/v2/": server}
        for path in (base, f"{base}/versions/1"):
            content |= {path: metadata, f"{path}/ready": ready}
        paths = (f"{base}/infer", f"{base}/versions/1/infer")
        super().__init__(Inference(model, batcher, limits), token, paths, content)

    async def _ask_model(
        self, scope: Message, headers: Headers, receive: Receive, send: Send
    ) -> None:
        start, count = time.perf_counter(), self.state.metrics.count
        response = None
        try:
            response = await messages.response_of(self._infer(scope["method"], headers, receive))
            count(response.status, response.rows, time.perf_counter() - start)
            await send_response(scope, send, response)
        except asyncio.CancelledError:
            if response is None:  # else it is counted, and its client left while it was sent
                count(base_app.CLIENT_CLOSED, 0, time.perf_counter() - start)
            raise

    def accept_whole(
        self, scope: Message, respond: Callable[[Response], None]
    ) -> WholeRequest | None:
        """Return a small inference request that may begin once its body is received, else None."""
        if scope["method"] != "POST" or scope["path"] not in self._model_paths:
            return None
        headers, limit = headers_of(scope), self.state.limits.body_bytes
        if (
            not 0 < int(headers.get("content-length", 0)) <= min(SMALL_BYTES, limit)
            or not SPECIAL_HEADERS.isdisjoint(headers)
            or self.state.needs_helper(headers)
        ):
            return None
        try:
            self._admit("POST", headers, self.state.in_progress)
        except HttpError:
            return None  # the error is sent before the body is received
        return WholeRequest(self.state, headers, respond)

    async def _infer(self, method: str, headers: Headers, receive: Receive) -> Response:
        inference = self.state
        # This request is in progress already.
        self._admit(method, headers, inference.in_progress - 1)
        size = inference.body_size(headers)
        late = base_app.NO_MEMORY
        try:
            async with asyncio.timeout(inference.limits.seconds), inference.reserved(size):
                late = base_app.NOT_RECEIVED
                body = await inference.read_body(receive)
                late = base_app.NOT_READ
                arrays, wanted = await inference.read(headers, body)
                late = base_app.NOT_ANSWERED
                outputs = await inference.workers.outputs(arrays)
        except TimeoutError:
            raise inference.late_error(late) from None
        return await inference.respond(headers, wanted, arrays, outputs)
