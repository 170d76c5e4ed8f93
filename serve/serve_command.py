"""``compress serve``: serve an artifact over HTTP until a signal, by the server for its kind."""

from __future__ import annotations

import json
import logging
import math
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.export.imported.exported_files import opened_artifact
from compress.serve.http import multiprocess, uvicorn_server
from compress.serve.http.loaded_model import ServedModel, open_model
from compress.serve.packaging.request_forms import forms_of
from compress.serve.torchserve.mar_file import model_name_of
from compress.serve.torchserve.served_archive import check_archive, is_archive, open_archive
from compress.serve.worker.wire import DATATYPES

if TYPE_CHECKING:
    import socket

    from compress.artifacts.artifact import Artifact
    from compress.common.signature import Signature, TensorSpec
    from compress.serve.http.options import Options

    OnReady = Callable[["ServedAt"], None]

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
NO_TLS = (
    "warning: other machines reach this port, and the token travels unencrypted: put a proxy with "
    "TLS before it"
)
MAX_JSON_VALUES = 1024  # more are sent as raw bytes, to keep the command short enough to read
EXAMPLE_LENGTH = 8  # size of named axes other than the batch, within their bounds


@dataclass(frozen=True)
class ServedAt:
    """The address of a served model."""

    artifact: str
    url: str
    """URL of the model: of TorchServe's predictions for a ``.mar``, OpenAI's base URL for a
    decoder."""
    curl: str
    warnings: tuple[str, ...] = ()

    def lines(self) -> tuple[str, ...]:
        """Return the lines for the terminal."""
        where = f"{self.artifact}: served at {self.url} (Ctrl-C stops)"
        return (*self.warnings, where, self.curl)


def serve_artifact(
    path: Path, options: Options, token_file: Path | None, on_ready: OnReady
) -> None:
    """Serve an artifact's directory, its file in it, a ``.mar`` or an exported file until a signal.

    Then finish the requests in progress, and raise the signal again. The token is that of the file,
    else of the environment, else a new one.
    """
    uvicorn_server.refuse_missing()
    serve_model: Callable[..., None] = _serve_model
    with ExitStack() as stack:
        if is_archive(path):
            mar, members, origin = check_archive(path, options.sha256)
            options, kind = replace(options, name=model_name_of(mar)), "torchserve"
            serve_model = partial(_serve_model, partial(open_archive, mar, members, origin))
            example = partial(torchserve_line, name=options.name, signature=origin.signature)
        else:
            artifact = stack.enter_context(opened_artifact(path, options.sha256))
            kind = artifact.kind
            if kind == "genai":  # its modules take most of a second to import
                from compress.serve.openai.decoder import refuse_for_decoders

                refuse_for_decoders(artifact, options)
                serve_model = partial(_serve_decoder, artifact)
                example = partial(_completion_line, name=options.name)
            else:
                opener = partial(open_model, artifact, options.name, report=options.report)
                serve_model = partial(_serve_model, opener)
                example = partial(open_inference_line, name=options.name, artifact=artifact)
        _serve(path, kind, serve_model, example, options, token_file, on_ready)


def _serve(
    path: Path,
    kind: str,
    serve_model: Callable[..., None],
    example: Callable[..., str],
    options: Options,
    token_file: Path | None,
    on_ready: OnReady,
) -> None:
    token, is_new = uvicorn_server.token_from(token_file)
    options = replace(options, token=token)
    with uvicorn_server.listening(options.host, options.port) as listener:
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        header = bearer(token, is_new, token_file, uvicorn_server.TOKEN_VARIABLE)
        warnings = () if options.host in LOOPBACK else (NO_TLS,)
        place = {"genai": "v1", "torchserve": f"predictions/{options.name}"}
        model = f"{url}/{place.get(kind, f'v2/models/{options.name}')}"

        def ready() -> None:
            curl = example(url=url, authorization=header)
            on_ready(ServedAt(str(path), model, curl, warnings))
            sys.stdout.flush()  # a pipe is buffered, and its reader waits for the address
            if options.processes > 1:
                listener.close()  # the children hold it open; it closes when they end

        serve_here = partial(serve_model, listener, options)
        if options.processes == 1:
            serve_here(ready)
        else:
            multiprocess.run(options.processes, serve_here, ready, options.stop_seconds)


def _serve_model(
    opener: Callable[..., AbstractContextManager[ServedModel]],
    listener: socket.socket,
    options: Options,
    ready: Callable[[], None],
) -> None:
    from compress.serve.http.asgi_app import Application
    from compress.serve.http.dynamic_batcher import Batcher

    with opener(threads=options.threads) as model:
        for note in model.notes:
            logger.error("note: %s", note)  # the command shows errors only
        rows = min(options.limits.rows, model.max_rows or options.limits.rows)
        limits = replace(options.limits, rows=rows)

        def create_application() -> Application:
            batcher = Batcher(
                model.call,
                workers=options.width,
                max_rows=limits.rows,
                joins_rows=not model.not_joined,
                delay_seconds=options.delay_seconds,
            )
            return Application(model, batcher, limits, options.token)

        uvicorn_server.serve(create_application, listener, options, ready)


def _serve_decoder(
    artifact: Artifact, listener: socket.socket, options: Options, ready: Callable[[], None]
) -> None:
    from compress.serve.openai.app import OpenAIApplication
    from compress.serve.openai.decoder import GenerationThreads, open_decoder

    decoder = open_decoder(artifact, options.name, options.threads or 1)

    def create_application() -> OpenAIApplication:
        threads = GenerationThreads(decoder, options.width)
        limits = replace(
            options.limits, body_bytes=min(options.limits.body_bytes, decoder.longest_body)
        )
        return OpenAIApplication(decoder, threads, limits, options.token)

    uvicorn_server.serve(create_application, listener, options, ready)


def bearer(token: str, made: bool, file: Path | None, variable: str) -> str:
    """Return curl's option for the token, quoted for a shell."""
    if made:
        return f"-H {shlex.quote(f'Authorization: Bearer {token}')}"
    # A token of the user's is not shown: the command reads it from its file or variable.
    source = f"${variable}" if file is None else f"$(cat {shlex.quote(str(file))})"
    return f'-H "Authorization: Bearer {source}"'


def open_inference_line(url: str, name: str, artifact: Artifact, authorization: str) -> str:
    """Return a command with an Open Inference Protocol request: zeros, and ones for integers."""
    target, signature = f"{url}/v2/models/{name}/infer", artifact.signature
    if forms_of(artifact).text:
        post = f"curl -sS {authorization} -H 'Content-Type: text/plain' -d 'A short text.'"
        return f"{post} {target}"
    tensors: list[dict[str, Any]] = []
    sizes = [_example_sizes(spec, signature) for spec in signature.inputs]
    counts = [math.prod(size) for size in sizes]
    as_bytes = sum(counts) > MAX_JSON_VALUES
    for spec, size, count in zip(signature.inputs, sizes, counts, strict=True):
        tensor = {"name": spec.name, "shape": size, "datatype": DATATYPES[spec.dtype]}
        if as_bytes:
            bytes_ = count * np.dtype(spec.dtype).itemsize
            tensors.append({**tensor, "parameters": {"binary_data_size": bytes_}})
        else:
            tensors.append({**tensor, "data": [_example_value(spec)] * count})
    body = json.dumps({"inputs": tensors}, separators=(",", ":"))
    if not as_bytes:
        return _post_json(authorization, body, target)
    zeros = sum(tensor["parameters"]["binary_data_size"] for tensor in tensors)
    length = f"-H 'Inference-Header-Content-Length: {len(body)}'"
    sent = f"(printf %s {shlex.quote(body)}; head -c {zeros} /dev/zero)"
    return f"{sent} | curl -sS {authorization} {length} --data-binary @- {target}"


def torchserve_line(url: str, name: str, signature: Signature, authorization: str) -> str:
    """Return a command with a request of TorchServe's clients: zeros, and ones for integers."""
    target = f"{url}/predictions/{name}"
    sizes = [_example_sizes(spec, signature) for spec in signature.inputs]
    counts = [math.prod(size) for size in sizes]
    if len(sizes) == 1 and counts[0] > MAX_JSON_VALUES:
        zeros = counts[0] * np.dtype(signature.inputs[0].dtype).itemsize
        shape = ",".join(map(str, sizes[0]))
        headers = f"-H 'Content-Type: application/octet-stream' -H 'X-Shape: {shape}'"
        post = f"curl -sS {authorization} {headers} --data-binary @- {target}"
        return f"head -c {zeros} /dev/zero | {post}"
    inputs = {
        spec.name: np.full(size, _example_value(spec)).tolist()
        for spec, size in zip(signature.inputs, sizes, strict=True)
    }
    body = json.dumps({"inputs": inputs}, separators=(",", ":"))
    return _post_json(authorization, body, target)


def _completion_line(url: str, name: str, authorization: str) -> str:
    body = json.dumps({"model": name, "prompt": "The ", "max_tokens": 32})
    return _post_json(authorization, body, f"{url}/v1/completions")


def _post_json(authorization: str, body: str, target: str) -> str:
    json_type = "-H 'Content-Type: application/json'"
    return f"curl -sS {authorization} {json_type} -d {shlex.quote(body)} {target}"


def _example_sizes(spec: TensorSpec, signature: Signature) -> list[int]:
    axes = {axis: signature.bounds(axis).nearest(EXAMPLE_LENGTH) for axis in signature.dynamic_axes}
    return [*spec.sized(axes | {signature.batch_axis or "": 1})]


def _example_value(spec: TensorSpec) -> int:
    return 0 if spec.dtype.startswith("float") else 1
