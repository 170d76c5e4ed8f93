"""Open a folder of `export_genai` for the server, and generate answers in threads, by token."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from compress.common.errors import PipelineInvalid, located
from compress.common.requirements import require_all
from compress.export.genai.runtime import (
    GENAI,
    GenaiConfig,
    GreedyText,
    next_tokens,
    next_tokens_unlocked,
    open_folder,
)
from compress.export.genai.text import TOKENIZERS, TextStream
from compress.serve.http.dynamic_batcher import WorkerThreads
from compress.serve.http.helper_process import SMALL_BYTES, WRITING, HelperProcess
from compress.serve.http.options import Limits, Options

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.serve.openai.request import GenerationRequest

TOKEN_BYTES = 256  # of a token in JSON, at most; longer ones are rare


@dataclass(frozen=True)
class ServedDecoder:
    """A decoder, opened by onnxruntime-genai."""

    name: str
    digest: str
    context: int
    """Tokens of a prompt and its answer together, at most."""
    end_tokens: frozenset[int]
    folder: Path
    _model: Any
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def longest_body(self) -> int:
        """Bytes beyond which a body cannot hold a prompt that the context has room for."""
        return SMALL_BYTES + TOKEN_BYTES * self.context

    def generate(self, request: GenerationRequest) -> Generator[int, None, None]:
        """Yield the next tokens that are asked for, until one that ends the text."""
        sampling, count = request.sampling, request.most_tokens
        if sampling.seed is None or not sampling.temperature:
            return next_tokens_unlocked(self._model, request.prompt, count, sampling)
        return next_tokens(self._model, request.prompt, count, sampling)


def refuse_for_decoders(artifact: Artifact, options: Options) -> None:
    """Refuse options about rows of tensors, and machines without what opens such a folder."""
    if options.report is not None or options.limits.rows != Limits().rows:
        raise PipelineInvalid(
            f"{artifact.path}: a decoder answers each request alone: leave --report and --max-rows "
            "out; --workers is how many are answered at a time"
        )
    if options.shadow is not None:
        raise PipelineInvalid(f"{artifact.path}: texts of a decoder are not compared: no --shadow")
    require_all([GENAI, TOKENIZERS], str(artifact.path))


def open_decoder(artifact: Artifact, name: str, threads: int) -> ServedDecoder:
    """Open a folder of an artifact that was not changed, and generate the text of its proof."""
    artifact.verify()
    text = GreedyText.read(artifact.path)
    model = open_folder(artifact.path, threads)
    with located(f"{artifact.path}: "):
        text.check(model)
    ends = GenaiConfig.read(artifact.path).model.eos_token_id
    return ServedDecoder(
        name=name,
        digest=artifact.digest,
        context=int(artifact.fact("context")),
        end_tokens=frozenset([ends] if isinstance(ends, int) else ends),
        folder=artifact.path,
        _model=model,
    )


class Part(NamedTuple):
    """A part of an answer."""

    text: str
    tokens: int
    finish_reason: str | None = None
    """`stop` or `length` in the last part."""


@dataclass(slots=True, eq=False)
class GenerationJob:
    """A request, and the tokens of its answer."""

    request: GenerationRequest
    tokens: asyncio.Queue[int | Exception | None] = field(default_factory=asyncio.Queue)
    """No more than the context's: a client that reads slowly holds up nobody. None ends them."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set if nobody waits for the answer: its generation ends with the next token."""


class GenerationThreads(WorkerThreads):
    """Threads that generate one answer each; further requests wait for their turn."""

    _queue: queue.Queue[Any]

    def __init__(self, decoder: ServedDecoder, workers: int) -> None:
        self._decoder = decoder
        super().__init__(workers, queue.Queue())

    async def tokens(self, job: GenerationJob) -> AsyncGenerator[list[int], None]:
        """Yield the tokens of an answer as they come; end the generation where the caller ends."""
        self.depth += 1
        self._queue.put(job)
        try:
            last: int | Exception | None = 0
            while last is not None:
                items = [await job.tokens.get()]
                while not job.tokens.empty():
                    items.append(job.tokens.get_nowait())
                if tokens := [each for each in items if isinstance(each, int)]:
                    yield tokens
                last = items[-1]
                if isinstance(last, Exception):
                    raise last
        finally:
            job.cancelled.set()
            # Out of the queue, if it still waits there: while long answers are generated, clients
            # that ask and leave would fill the memory.
            with self._queue.mutex, suppress(ValueError):
                self._queue.queue.remove(job)
            self.depth -= 1

    async def parts(self, job: GenerationJob, helper: HelperProcess) -> AsyncGenerator[Part, None]:
        """Yield the parts of an answer's text; `helper` decodes tokens, by `DecoderTexts`."""
        stream, stops, count = TextStream(), StopTexts(job.request.stops), 0
        async with aclosing(self.tokens(job)) as some_tokens:
            async for tokens in some_tokens:
                stream, texts = await helper.call("decode", stream, tokens, lane=WRITING)
                for text in texts:
                    count += 1
                    part = stops.add(text)
                    if stops.found:
                        yield Part(part, count, "stop")
                        return
                    if part:
                        yield Part(part, count)
        rest = await helper.call("decode_rest", stream, lane=WRITING)
        part = stops.add(rest)
        reason = "stop" if stops.found or count < job.request.most_tokens else "length"
        yield Part(part + stops.rest(), count, reason)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._generate(job)
                self._deliver(job, None)
            except Exception as error:  # noqa: BLE001 - the request's error; the thread goes on
                self._deliver(job, error)
            self._call_start.pop(threading.get_ident(), None)

    def _generate(self, job: GenerationJob) -> None:
        """Deliver the tokens of an answer, until its end or until nobody waits for it."""
        if job.cancelled.is_set():
            return
        self._call_start[threading.get_ident()] = time.monotonic()
        with closing(self._decoder.generate(job.request)) as tokens:
            for token in tokens:
                self._call_start[threading.get_ident()] = time.monotonic()
                # genai's engine does not return the end token; its texts just end early.
                if job.cancelled.is_set() or token in self._decoder.end_tokens:
                    return
                self._deliver(job, token)

    def _deliver(self, job: GenerationJob, item: int | Exception | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody awaits the answer
            self._loop.call_soon_threadsafe(job.tokens.put_nowait, item)


class StopTexts:
    """Finds texts, none of them empty, that end an answer, however they are split into tokens."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """Return the text that is certain to come before a stop; hold back what may be one."""
        held = self._held + text
        places = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return held[: min(places)]
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        keep = next(
            (
                size
                for size in range(min(longest, len(held)), 0, -1)
                if any(stop.startswith(held[-size:]) for stop in self._stops)
            ),
            0,
        )
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def rest(self) -> str:
        """Return what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
