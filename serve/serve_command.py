"""``compress serve``: serve an artifact over HTTP until a signal, by the server for its kind."""

from __future__ import annotations

import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.artifacts.artifact import MANIFEST, Artifact
from compress.common.errors import ArtifactInvalid, PipelineInvalid, StageFailed
from compress.serve.http import multiprocess, uvicorn_server
from compress.serve.http.options import Options
from compress.serve.packaging.request_forms import forms_of
from compress.serve.torchserve.artifact import (
    TorchServeArchive,
    check_bare_mar,
    refuse_wrong_artifact_hash,
)
from compress.serve.worker.wire import DATATYPES

if TYPE_CHECKING:
    import socket

    from compress.common.signature import Signature, TensorSpec

    OnReady = Callable[["ServedAt"], None]

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
POLL_SECONDS = 0.2
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
    """URL of the model; for TorchServe, of its inference API; for a decoder, OpenAI's base URL."""
    server: str
    """`built-in` or `torchserve`."""
    curl: str
    warnings: tuple[str, ...] = ()

    def lines(self) -> tuple[str, ...]:
        """Return the lines for the terminal."""
        by = "" if self.server == "built-in" else "by TorchServe "
        where = f"{self.artifact}: served {by}at {self.url} (Ctrl-C stops)"
        return (*self.warnings, where, self.curl)


def serve_artifact(
    path: Path, options: Options, token_file: Path | None, on_ready: OnReady
) -> None:
    """Serve an artifact's directory, its file in it, or a bare ``.mar`` until a signal.

    Then finish the requests in progress, and raise the signal again. The token is that of the file,
    else of the environment, else a new one. TorchServe is killed at once, as it would drop the
    requests in progress in any case.
    """
    if path.is_file() and not (path.parent / MANIFEST).is_file():
        _, origin = check_bare_mar(path, options.sha256, "serve")
        if origin.artifact.kind == "aot" and options.sha256 is None:
            raise ArtifactInvalid(
                f"{path}: its model is native code, which cannot be inspected: give the archive's "
                "sha256, from a source that you trust, with --sha256"
            )
        _serve_torchserve(path, origin.signature, options, token_file, on_ready)
        return
    artifact = Artifact.from_directory(path.parent if path.is_file() else path)
    if path.is_file() and path.name != artifact.payload_name:
        raise ArtifactInvalid(f"{path}: expected the directory, or its {artifact.payload_name}")
    refuse_wrong_artifact_hash(artifact, options.sha256)
    if isinstance(artifact, TorchServeArchive):
        artifact.check()
        _serve_torchserve(artifact.payload_path, artifact.signature, options, token_file, on_ready)
    else:
        _serve_built_in(artifact, options, token_file, on_ready)


def _serve_built_in(
    artifact: Artifact, options: Options, token_file: Path | None, on_ready: OnReady
) -> None:
    uvicorn_server.refuse_missing()
    is_decoder = artifact.kind == "genai"
    if is_decoder:  # its modules take most of a second to import
        from compress.serve.openai.decoder import refuse_for_decoders

        refuse_for_decoders(artifact, options)
    token, is_new = uvicorn_server.token_from(token_file)
    options = replace(options, token=token)
    with uvicorn_server.listening(options.host, options.port) as listener:
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        header = bearer(token, is_new, token_file, uvicorn_server.TOKEN_VARIABLE)
        if is_decoder:
            body = json.dumps({"model": options.name, "prompt": "The ", "max_tokens": 32})
            curl = _post_json(header, body, f"{url}/v1/completions")
        else:
            target = f"{url}/v2/models/{options.name}/infer"
            curl = raw_body_line(artifact, header, target) or open_inference_line(
                url, options.name, artifact.signature, header
            )
        warnings = () if options.host in LOOPBACK else (NO_TLS,)
        model = f"{url}/v1" if is_decoder else f"{url}/v2/models/{options.name}"

        def ready() -> None:
            on_ready(ServedAt(str(artifact.path), model, "built-in", curl, warnings))
            sys.stdout.flush()  # a pipe is buffered, and its reader waits for the address
            if options.processes > 1:
                listener.close()  # the children hold it open; it closes when they end

        serve_model = partial(
            _serve_decoder if is_decoder else _serve_model, artifact, listener, options
        )
        if options.processes == 1:
            serve_model(ready)
        else:
            multiprocess.run(options.processes, serve_model, ready, options.stop_seconds)


def _serve_model(
    artifact: Artifact, listener: socket.socket, options: Options, ready: Callable[[], None]
) -> None:
    from compress.serve.http.asgi_app import Application
    from compress.serve.http.dynamic_batcher import Batcher
    from compress.serve.http.loaded_model import open_model

    with open_model(artifact, options.name, options.threads or 1, options.report) as model:
        for note in model.notes:
            logger.error("note: %s", note)  # the command shows errors only

        def create_application() -> Application:
            batcher = Batcher(
                model.call,
                workers=options.width,
                max_rows=options.limits.rows,
                joins_rows=not model.not_joined,
                delay_seconds=options.delay_seconds,
            )
            return Application(model, batcher, options.limits, options.token)

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


def _serve_torchserve(
    mar: Path, signature: Signature, options: Options, token_file: Path | None, on_ready: OnReady
) -> None:
    from compress.serve.torchserve import process

    supported = Options(options.host, options.port, threads=options.threads, sha256=options.sha256)
    if options != supported or options.host not in LOOPBACK or token_file is not None:
        raise PipelineInvalid(
            f"{mar}: a .mar is served by TorchServe, on loopback alone, and with a token, workers "
            "and limits of its own: leave all options but --port, --threads and --sha256 out"
        )
    with process.TorchServe(mar, threads=options.threads, port=options.port) as server:
        curl = torchserve_line(server.url, server.model_name, signature, server.token)
        on_ready(ServedAt(str(mar), server.url, "torchserve", curl))
        sys.stdout.flush()
        while not server.has_ended():
            time.sleep(POLL_SECONDS)
    raise StageFailed(f"{mar}: TorchServe has ended by itself")


def bearer(token: str, made: bool, file: Path | None, variable: str) -> str:
    """Return curl's option for the token, quoted for a shell."""
    if made:
        return f"-H {shlex.quote(f'Authorization: Bearer {token}')}"
    # A token of the user's is not shown: the command reads it from its file or variable.
    source = f"${variable}" if file is None else f"$(cat {shlex.quote(str(file))})"
    return f'-H "Authorization: Bearer {source}"'


def raw_body_line(artifact: Artifact, authorization: str, target: str) -> str:
    """Return a command that sends what the artifact prepares itself; empty if it takes tensors."""
    forms = forms_of(artifact)
    if forms.text:
        body = "-H 'Content-Type: text/plain' -d 'A short text.'"
    elif forms.image:
        body = "-H 'Content-Type: image/jpeg' --data-binary @photo.jpg"
    elif forms.audio:
        body = "-H 'Content-Type: audio/wav' --data-binary @sound.wav"
    else:
        return ""
    return f"curl -sS {authorization} {body} {target}"


def open_inference_line(url: str, name: str, signature: Signature, authorization: str) -> str:
    """Return a command with an Open Inference Protocol request: zeros, and ones for integers."""
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
    target = f"{url}/v2/models/{name}/infer"
    if not as_bytes:
        return _post_json(authorization, body, target)
    zeros = sum(tensor["parameters"]["binary_data_size"] for tensor in tensors)
    length = f"-H 'Inference-Header-Content-Length: {len(body)}'"
    sent = f"(printf %s {shlex.quote(body)}; head -c {zeros} /dev/zero)"
    return f"{sent} | curl -sS {authorization} {length} --data-binary @- {target}"


def torchserve_line(url: str, name: str, signature: Signature, token: str) -> str:
    """Return a command with a request to TorchServe: zeros, and ones for integers."""
    authorization = bearer(token, True, None, "")
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


def _post_json(authorization: str, body: str, target: str) -> str:
    json_type = "-H 'Content-Type: application/json'"
    return f"curl -sS {authorization} {json_type} -d {shlex.quote(body)} {target}"


def _example_sizes(spec: TensorSpec, signature: Signature) -> list[int]:
    axes = {axis: signature.bounds(axis).nearest(EXAMPLE_LENGTH) for axis in signature.dynamic_axes}
    return [*spec.sized(axes | {signature.batch_axis or "": 1})]


def _example_value(spec: TensorSpec) -> int:
    return 0 if spec.dtype.startswith("float") else 1
