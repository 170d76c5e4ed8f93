"""What an inference request goes through: decode, call the model, check its outputs, encode."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from compress.profiling.probe_rows import seeded_rows
from serve.http.base_app import CLIENT_CLOSED, NOT_ANSWERED, NOT_RECEIVED, SMALL_BYTES, SharedState
from serve.http.helper_process import HelperProcess
from serve.http.request_decoder import RequestDecoder, content_type_of, memory_needed, with_readers
from serve.http.responses import HttpError, Response, error_response, response_of
from serve.worker import wire
from serve.worker.http_errors import inference_error, output_fault
from serve.worker.oip import LABELS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from serve.http.dynamic_batcher import Batcher, Job
    from serve.http.loaded_model import ServedModel
    from serve.http.options import Limits
    from serve.http.responses import Headers
    from serve.worker.tensors import Array, Named


class Inference(SharedState):
    """The steps of all inference requests, and what they share."""

    workers: Batcher

    def __init__(self, model: ServedModel, batcher: Batcher, limits: Limits) -> None:
        """Create the steps, inside a running event loop."""
        super().__init__(model.name, batcher, limits)
        self.model = model
        self.outputs = [output.name for output in model.signature.outputs]
        self.deadlines = Deadlines(limits.seconds)
        self._example = seeded_rows(model.signature, 1)
        # The protocol's answer holds what the metadata names, and labels if they are requested.
        labels = LABELS if model.classes else ()
        specs = model.signature.input_descriptions(model.facts)
        self.decoder = RequestDecoder(specs, self.outputs, labels, limits.rows)
        self._helper = None
        if model.forms:
            self._helper = HelperProcess(
                with_readers,
                self.decoder,
                model.forms,
                model.folder,
                what=model.folder,
                seconds=limits.seconds,
                needed_bytes=memory_needed(model.forms, limits),
            )
        self._tasks = set[asyncio.Task[Response]]()

    def close(self) -> None:
        """End the threads, and the timer."""
        self.deadlines.close()
        if self._helper:
            self._helper.close()
        super().close()

    async def read(self, headers: Headers, body: bytes | bytearray) -> tuple[list[Array], Named]:
        """Return the inputs in a body, and the outputs that it wants: decoded where it is safe."""
        if self._helper and self.needs_helper(headers):
            reading = self._helper.call("decode", headers, body=body)
        else:
            large = len(body) > SMALL_BYTES
            reading = self.run_in_thread(large, self.decoder.decode, headers, body)
        read: tuple[list[Array], Named] = await reading
        return read

    def needs_helper(self, headers: Headers) -> bool:
        """Return whether a body may hold texts or an image."""
        return self._helper is not None and content_type_of(headers) not in wire.TENSORS

    async def _check_outputs(self, outputs: list[Array] | Exception) -> list[Array]:
        """Return the outputs; blame a failure on the request if the model answers its example."""
        failure = output_fault(outputs, self.outputs)
        if not failure and not isinstance(outputs, Exception):
            return outputs
        works = not output_fault(await self.workers.outputs(self._example), self.outputs)
        raise HttpError.from_exception(inference_error(failure, works=works))

    def encode(
        self, headers: Headers, wanted: Named, arrays: list[Array], outputs: list[Array]
    ) -> Response:
        """Return the response: as the protocol or the Accept header says."""
        named = dict(zip(self.outputs, outputs, strict=True))
        accept = headers.get("accept", "").lower()
        try:
            body, written = wire.encode(named, accept, wanted, self.model.name, self.model.classes)
        except ValueError as error:
            raise HttpError.from_exception(error) from error
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
        """Return the response with a model's outputs, or the error that they show."""
        try:
            async with asyncio.timeout(self.limits.seconds):
                outputs = await self._check_outputs(outputs)
        except TimeoutError:
            raise self.late_error(NOT_ANSWERED) from None
        in_thread = not is_small(outputs)
        response: Response = await self.run_in_thread(
            in_thread, self.encode, headers, wanted, arrays, outputs
        )
        return response

    def start_task(
        self, response: Coroutine[Any, Any, Response], on_done: Callable[[Response], None]
    ) -> None:
        """Run a coroutine in a task of its own, and pass its response on."""

        def done(task: asyncio.Task[Response]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                on_done(task.result())

        task = asyncio.get_running_loop().create_task(response)
        self._tasks.add(task)
        task.add_done_callback(done)


class WholeRequest:
    """One request, from its head to its response."""

    __slots__ = (
        "_arrays",
        "_finished",
        "_headers",
        "_inference",
        "_job",
        "_respond",
        "_start",
        "_wanted",
    )

    _job: Job | None
    _arrays: list[Array]
    _wanted: Named

    def __init__(
        self, inference: Inference, headers: Headers, respond: Callable[[Response], None]
    ) -> None:
        """Count the request as in progress; `respond` is called with its response."""
        self._inference, self._headers, self._respond = inference, headers, respond
        self._start = time.perf_counter()
        self._finished = False
        self._job = None
        inference.in_progress += 1

    @property
    def seconds(self) -> float:
        """Time limit of the body, and of the response."""
        return self._inference.limits.seconds

    def run(self, body: bytes) -> None:
        """Decode the body and call the model."""
        inference = self._inference
        try:
            self._arrays, self._wanted = inference.decoder.decode(self._headers, body)
        except Exception as error:  # noqa: BLE001 - the parser called this
            self._finish(error_response(error))
            return
        self._job = inference.workers.submit(self._arrays, self._encode)
        inference.deadlines.add(self, self._start)

    def expire(self) -> None:
        """Answer that the body, or the model's answer, was not there in time."""
        self._drop()
        self._finish(
            self._inference.late_error(NOT_RECEIVED if self._job is None else NOT_ANSWERED).response
        )

    def cancel(self) -> None:
        """Drop the request: its client has disconnected."""
        self._drop()
        if not self._finished:
            self._count(CLIENT_CLOSED, 0)

    def _drop(self) -> None:
        if self._job is not None:
            self._job.cancelled = True
            self._inference.deadlines.discard(self)

    def _encode(self, outputs: list[Array] | Exception) -> None:
        inference = self._inference
        inference.deadlines.discard(self)
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
        inference.start_task(response_of(respond), self._finish)

    def _finish(self, response: Response) -> None:
        if not self._finished:
            self._count(response.status, response.rows)
            self._respond(response)

    def _count(self, status: int, rows: int) -> None:
        self._finished = True
        self._inference.in_progress -= 1
        seconds = time.perf_counter() - self._start
        self._inference.metrics.count(status, rows, seconds)


class Deadlines:
    """Ends requests that take longer than a time, the same for all, with one timer."""

    def __init__(self, seconds: float) -> None:
        """Create an empty table, inside a running event loop."""
        self._loop, self._seconds = asyncio.get_running_loop(), seconds
        self._start_times: dict[WholeRequest, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, request: WholeRequest, start: float) -> None:
        """Expire a request that was not removed after the time."""
        self._start_times[request] = start
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._expire)

    def discard(self, request: WholeRequest) -> None:
        """Remove a request that has its answer."""
        self._start_times.pop(request, None)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self._timer = None
        now = time.perf_counter()
        # Almost in the order of their start times: a body may have taken long.
        while self._start_times:
            request, start = next(iter(self._start_times.items()))
            if (left := start + self._seconds - now) > 0:
                self._timer = self._loop.call_later(left, self._expire)
                return
            del self._start_times[request]
            request.expire()


def is_small(outputs: Sequence[Array]) -> bool:
    """Return whether outputs may be written without a thread."""
    return sum(output.nbytes for output in outputs) <= SMALL_BYTES
