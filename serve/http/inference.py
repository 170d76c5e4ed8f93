"""Inference requests (Open Inference Protocol v2, TorchServe), and the model that they ask."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from compress.profiling.batch_dependence import seeded_rows
from compress.serve.http import messages, shared_state, torchserve_api
from compress.serve.http.dynamic_batcher import Batcher, Job
from compress.serve.http.helper_process import HelperProcess
from compress.serve.http.messages import HttpError, Response
from compress.serve.http.shared_state import (
    CLIENT_CLOSED,
    NOT_ANSWERED,
    NOT_RECEIVED,
    SMALL_BYTES,
    Served,
)
from compress.serve.shadow.sampler import Sampler
from compress.serve.worker import wire
from compress.serve.worker.tensors import describe_error, inference_error, output_fault
from compress.serve.worker.wire import DATATYPES, LABELS

if TYPE_CHECKING:
    from compress.serve.http.dynamic_batcher import Answer
    from compress.serve.http.loaded_model import ServedModel
    from compress.serve.http.messages import Headers, Message, Receive, Send
    from compress.serve.http.options import Limits, Options
    from compress.serve.http.shared_state import SharedState
    from compress.serve.worker.tensors import Array, Named

logger = logging.getLogger(__name__)

SPECIAL_HEADERS = frozenset({"expect", "transfer-encoding", "upgrade"})
"""Of requests that `WholeRequest` does not answer."""


def load_inference(
    opened: AbstractContextManager[ServedModel], version: str, options: Options, shared: SharedState
) -> Callable[[], Inference]:
    """Load a model, in a thread; return what starts to answer requests, in the event loop.

    Raises what opening it does, and ArtifactInvalid where a tokenizer cannot be loaded.
    """
    with ExitStack() as resources:
        model = resources.enter_context(opened)
        for note in model.notes:
            logger.error("note: %s", note)  # the command shows errors only
        rows = min(options.limits.rows, model.max_rows or options.limits.rows)
        limits = replace(options.limits, rows=rows)
        decoder, helper = request_decoder(model, limits), None
        if model.forms:
            helper = HelperProcess(
                messages.with_readers,
                decoder,
                model.forms,
                model.folder,
                what=model.folder,
                seconds=limits.seconds,
                needed_bytes=messages.memory_needed(model.forms, limits),
            )
            resources.callback(helper.close)
        sampler = None
        if options.shadow is not None:
            sampler = Sampler(options.shadow, options.report, model.digest, model.signature)
            resources.callback(sampler.close)
        kept = resources.pop_all()

    def start() -> Inference:
        batcher = Batcher(
            model.call,
            workers=options.width,
            max_rows=limits.rows,
            joins_rows=not model.not_joined,
            delay_seconds=options.delay_seconds,
        )
        inference = Inference(model, batcher, limits, shared, version, helper, sampler)
        inference.resources = kept
        return inference

    return start


def request_decoder(model: ServedModel, limits: Limits) -> messages.RequestDecoder:
    """Return what reads the bodies of requests to a model."""
    # The protocol's answer holds what the metadata names, and labels if they are requested.
    labels = LABELS if model.classes else ()
    specs = model.specs or model.signature.input_descriptions()
    outputs = [output.name for output in model.signature.outputs]
    return messages.RequestDecoder(specs, outputs, labels, limits.rows)


class Inference(Served):
    """The steps of all inference requests to a model."""

    workers: Batcher
    prefix = "/v2/"

    def __init__(
        self,
        model: ServedModel,
        batcher: Batcher,
        limits: Limits,
        shared: SharedState,
        version: str = "1",
        helper: HelperProcess | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        """Create it; `helper` reads texts and images, `sampler` has some answers compared."""
        super().__init__(model.name, version, batcher, limits, shared)
        self.model = model
        self.outputs = [output.name for output in model.signature.outputs]
        self._example = seeded_rows(model.signature, 1)
        self.decoder = request_decoder(model, limits)
        self._helper, self.sampler = helper, sampler
        if sampler is not None:
            sampler.start(
                {"model": model.name, "version": version},
                shared.metrics.registry,
                has_rows=model.interface.rows_stay_first,
                joins_rows=not model.not_joined and model.signature.smallest_batch == 1,
                is_busy=lambda: self.in_progress > 0,
            )
        self.tasks = set[asyncio.Task[Response]]()

    def addresses(self, *, of_version: bool) -> list[str]:
        """Return the paths of inference requests: the protocol's, and TorchServe's."""
        versions = (f"/{self.version}", f"/{self.version}.0") if of_version else ("",)
        torchserve = [f"{torchserve_api.PREDICTIONS}{self.name}{each}" for each in versions]
        return [f"{self._base(of_version)}/infer", *torchserve]

    def pages(self, versions: list[str], *, of_version: bool) -> dict[str, Named]:
        """Return the model's metadata, and that it is ready."""
        inputs, outputs = (
            [
                {"name": each.name, "datatype": DATATYPES[each.dtype], "shape": [*each.shape]}
                for each in tensors
            ]
            for tensors in (self.model.interface.inputs, self.model.interface.outputs)
        )
        described = {"name": self.name, "versions": versions, "platform": self.model.kind}
        base = self._base(of_version)
        return {
            base: described | {"inputs": inputs, "outputs": outputs},
            f"{base}/ready": {"name": self.name, "ready": True},
        }

    def _base(self, of_version: bool) -> str:
        return f"/v2/models/{self.name}" + (f"/versions/{self.version}" if of_version else "")

    async def answer(self, scope: Message, headers: Headers, receive: Receive, send: Send) -> None:
        """Answer an inference request."""
        start, response = time.perf_counter(), None
        is_torchserve = torchserve_api.prepare_(scope["path"], headers)
        method = "POST" if is_torchserve and scope["method"] == "PUT" else scope["method"]
        try:
            response = await messages.response_of(self.infer(method, headers, receive))
            if is_torchserve:
                response = torchserve_api.as_torchserve(response)
            self.record(headers, response.status, response.rows, start)
            await messages.send_response(scope, send, response)
        except asyncio.CancelledError:
            if response is None:  # else it is counted, and its client left while it was sent
                self.record(headers, CLIENT_CLOSED, 0, start)
            raise

    def accept_whole(
        self, path: str, headers: Headers, respond: Callable[[Response], None]
    ) -> WholeRequest | None:
        """Return a small inference request that may begin once its body is received, else None."""
        send = respond
        if torchserve_api.prepare_(path, headers):
            respond = lambda response: send(torchserve_api.as_torchserve(response))  # noqa: E731
        size = int(headers.get("content-length", 0))
        is_small_body = 0 < size <= min(SMALL_BYTES, self.limits.body_bytes)
        is_special = not SPECIAL_HEADERS.isdisjoint(headers) or self.needs_helper(headers)
        if is_special or not is_small_body:
            return None
        try:
            self.admit("POST", headers, self.in_progress)
        except HttpError:
            return None  # the error is sent before the body is received
        return WholeRequest(self, headers, respond)

    async def infer(self, method: str, headers: Headers, receive: Receive) -> Response:
        """Return the response to a request, which is in progress already."""
        self.admit(method, headers, self.in_progress - 1)
        size = shared_state.body_size(headers, self.limits.body_bytes)
        late = shared_state.NO_MEMORY
        try:
            async with asyncio.timeout(self.limits.seconds), self.shared.reserved(size):
                late = NOT_RECEIVED
                body = await shared_state.read_body(receive, self.limits.body_bytes)
                late = shared_state.NOT_READ
                arrays, wanted = await self.read(headers, body)
                late = NOT_ANSWERED
                outputs = await self.workers.outputs(arrays)
        except TimeoutError:
            raise self.late_error(late) from None
        return await self.respond(headers, wanted, arrays, outputs)

    async def read(self, headers: Headers, body: bytes | bytearray) -> tuple[list[Array], Named]:
        """Return the inputs in a body, and the outputs that it wants: decoded where it is safe."""
        read: tuple[list[Array], Named]
        if self._helper and self.needs_helper(headers):
            read = await self._helper.call("decode", headers, body=body)
        else:
            large = len(body) > SMALL_BYTES
            read = await self.shared.run_in_thread(large, self.decoder.decode, headers, body)
        return read

    def is_ready(self) -> bool:
        """Return whether the model answers, and as the limit of other answers asks for."""
        return super().is_ready() and not (self.sampler and self.sampler.refuses)

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
            body, written = wire.encode(
                named, accept, wanted, self.name, self.model.classes, self.version
            )
        except ValueError as error:
            raise HttpError(*describe_error(error)) from error
        if self.model.interface.rows_stay_first:
            written["X-Batch-Axis"] = "0"
        return Response(200, body, written, len(arrays[0]) if arrays[0].ndim else 1)

    async def respond(
        self, headers: Headers, wanted: Named, arrays: list[Array], outputs: Answer
    ) -> Response:
        """Return the response with a model's outputs, or the error that its example shows."""
        failure = output_fault(outputs, self.outputs)
        if failure or isinstance(outputs, Exception):
            try:
                async with asyncio.timeout(self.limits.seconds):
                    example = await self.workers.outputs(self._example)
            except TimeoutError:
                raise self.late_error(NOT_ANSWERED) from None
            works = not output_fault(example, self.outputs)
            raise HttpError(*describe_error(inference_error(failure, works=works)))
        response: Response = await self.shared.run_in_thread(
            not is_small(outputs), self.encode, headers, wanted, arrays, outputs
        )
        if self.sampler is not None:  # once the response is sent
            asyncio.get_running_loop().call_soon(self.sampler.observe, arrays, outputs)
        return response


@dataclass(slots=True, eq=False, repr=False)  # a log must not show the token in its headers
class WholeRequest:
    """One request, from its head to its response, which `_respond` is called with."""

    _inference: Inference
    _headers: Headers
    _respond: Callable[[Response], None]
    _start: float = field(default_factory=time.perf_counter)
    _finished: bool = False
    _job: Job | None = None
    _late: tuple[int, str] = NOT_RECEIVED
    _arrays: list[Array] = field(init=False)
    _wanted: Named = field(init=False)

    def __post_init__(self) -> None:
        self._inference.in_progress += 1

    @property
    def seconds(self) -> float:
        """Time limit of the body, and again of the answer."""
        return self._inference.limits.seconds

    def run(self, body: bytes) -> None:
        """Decode the body and call the model."""
        inference, self._late = self._inference, NOT_ANSWERED
        try:
            self._arrays, self._wanted = inference.decoder.decode(self._headers, body)
        except Exception as error:  # noqa: BLE001 - the parser called this
            self._finish(messages.error_response(error))
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
            self._count(CLIENT_CLOSED, 0)

    def _drop(self) -> None:
        if self._job is not None:
            self._job.cancelled = True

    def _encode(self, outputs: Answer) -> None:
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
                response = messages.error_response(error)
            self._finish(response)
            if inference.sampler is not None and response.status == 200:
                inference.sampler.observe(self._arrays, outputs)
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
        self._inference.record(self._headers, status, rows, self._start)


def is_small(outputs: Sequence[Array]) -> bool:
    """Return whether outputs may be written without a thread."""
    return sum(output.nbytes for output in outputs) <= SMALL_BYTES
