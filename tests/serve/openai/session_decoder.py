"""A decoder that generates by onnxruntime alone, and `compress serve` with it in a process.

It is what a server without onnxruntime-genai can answer with; all else is as users have it.
"""

import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from compress.artifacts.artifact import Artifact
from compress.export.genai.session import CachedSession
from compress.serve.openai.decoder import ServedDecoder
from compress.serve.openai.request import GenerationRequest
from tests.export.tiny_decoder import VOCABULARY
from tests.serve.served_here import Served, serving

TOKEN_SECONDS, STOP_SECONDS = "TEST_TOKEN_SECONDS", "TEST_STOP_SECONDS"


class SessionDecoder(ServedDecoder):
    """Generates by onnxruntime without onnxruntime-genai."""

    def generate(self, request: GenerationRequest) -> Generator[int, None, None]:
        """Yield the likeliest tokens."""
        scores, cache = self._model(torch.tensor([request.prompt]))
        for place in range(request.most_tokens):
            before_token(place)
            token = scores[:, -1:].argmax(-1)
            yield int(token)
            scores, cache = self._model(token, cache)


before_token: Callable[[int], object] = int
"""Called with the number of tokens before each."""


def open_decoder(folder: Artifact, name: str = "model", threads: int = 1) -> ServedDecoder:
    """Open a folder of conftest.py."""
    return SessionDecoder(
        name=name,
        digest=folder.digest,
        context=int(folder.fact("context")),
        end_tokens=frozenset({VOCABULARY - 1}),
        folder=folder.path,
        _model=CachedSession(folder.payload_path, threads),
    )


@contextmanager
def serving_by_session(
    folder: Artifact, *options: str, token_seconds: float = 0.0, stop_seconds: float = 30.0
) -> Iterator[Served]:
    """Start ``compress serve`` without onnxruntime-genai; each token takes so long."""
    code = "from tests.serve.openai.session_decoder import main; main()"
    settings = {TOKEN_SECONDS: str(token_seconds), STOP_SECONDS: str(stop_seconds)}
    with serving(folder.path, *options, command=[sys.executable, "-c", code], **settings) as served:
        yield served


def main() -> None:
    """Be ``compress``, whose decoders generate by onnxruntime alone."""
    global before_token
    from compress import cli
    from compress.serve.http import uvicorn_server
    from compress.serve.openai import decoder

    serve, seconds = uvicorn_server.serve, float(os.environ[TOKEN_SECONDS])

    def wait(_: int) -> None:
        time.sleep(seconds)

    before_token = wait

    def serve_until(create: Any, listener: Any, options: Any, ready: Any) -> None:
        stop = float(os.environ[STOP_SECONDS])
        serve(create, listener, replace(options, stop_seconds=stop), ready)

    changes = {"open_decoder": open_decoder, "refuse_for_decoders": lambda *_: None}
    vars(decoder).update(changes)
    vars(uvicorn_server)["serve"] = serve_until
    cli.main()
