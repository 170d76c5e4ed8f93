"""``compress serve``: serve an artifact over HTTP until a signal, by the server for its kind."""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.artifacts.artifact import MANIFEST, Artifact
from compress.common.errors import PipelineInvalid
from compress.common.signature import EXAMPLE_LENGTH
from compress.export.imported.exported_files import (
    opened_artifact,
    refuse_wrong_artifact_hash,
    signature_of_file,
)
from compress.serve.http import multiprocess, uvicorn_server
from compress.serve.http.loaded_model import ServedModel, open_model
from compress.serve.http.model_repository import NAME, VERSION, ModelRepository
from compress.serve.packaging.request_forms import forms_of
from compress.serve.shadow.options import ShadowOptions
from compress.serve.torchserve.served_archive import (
    check_archive,
    default_name,
    handler_settings,
    is_archive,
    load_archive,
)
from compress.serve.worker.wire import DATATYPES

if TYPE_CHECKING:
    from compress.common.signature import Signature
    from compress.serve.http.asgi_app import Application
    from compress.serve.http.options import Options
    from compress.serve.http.shared_state import Served, SharedState

    OnReady = Callable[["ServedAt"], None]
    Key = tuple[str, str]  # name and version

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
NO_TLS = (
    "warning: other machines reach this port, and the token travels unencrypted: put a proxy with "
    "TLS before it"
)
MAX_JSON_VALUES = 1024  # more are sent as raw bytes, to keep the command short enough to read
GIVEN = re.compile(f"({NAME.pattern})(?:@({VERSION.pattern}))?=(.+)")  # NAME@VERSION=path
PERCENT = re.compile(r"(\d{1,3}(?:\.\d+)?)%")
RAW_BODIES = {
    "text": "-H 'Content-Type: text/plain' -d 'A short text.'",
    "image": "-H 'Content-Type: image/jpeg' --data-binary @photo.jpg",
    "audio": "-H 'Content-Type: audio/wav' --data-binary @sound.wav",
}
"""Form of a request → curl's options for one."""


@dataclass(frozen=True)
class ServedAt:
    """The address of a served model."""

    artifact: str
    url: str
    """URL of the model: of TorchServe's predictions for a ``.mar``, OpenAI's base URL for a
    decoder."""
    curl: str
    warnings: tuple[str, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    """URL → what further is served there."""

    def lines(self) -> tuple[str, ...]:
        """Return the lines for the terminal."""
        where = f"{self.artifact}: served at {self.url} (Ctrl-C stops)"
        others = [f"{what}: served at {url}" for url, what in self.others.items()]
        return (*self.warnings, where, *others, self.curl)


def serve_artifacts(
    given: Sequence[str | Path], options: Options, token_file: Path | None, on_ready: OnReady
) -> None:
    """Serve artifacts until a signal: directories, files in them, a ``.mar``, or exported files.

    Each is a path, `NAME=path` or `NAME@VERSION=path`; without them it is version 1 of `model`, or
    of the name that a ``.mar`` has. Then finish the requests in progress, and raise the signal
    again. The token is that of the file, else of the environment, else a new one.
    """
    uvicorn_server.refuse_missing(options)
    paths = named_paths(given)
    _refuse_unclear(paths, options)
    token, is_new = uvicorn_server.token_from(token_file)
    options = replace(options, token=token)
    with uvicorn_server.listening(options.host, options.port) as listener:
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        header = bearer(token, is_new, token_file, uvicorn_server.TOKEN_VARIABLE)
        places: dict[str, str] = {}
        lines = [f"curl -sS {header} -X POST {url}/v2/repository/index"]
        for (name, version), path in paths.items():
            is_one = sum(name == other for other, _ in paths) == 1
            place, line = _example(path, name, "" if is_one else version, url, header, options)
            places[place] = str(path)
            lines.append(line)
        if options.watch is not None:
            places[f"{url}/v2/repository/index"] = str(options.watch)
        if options.grpc_port is not None:
            places[f"grpc://{host}:{options.grpc_port}"] = "all models"
        (place, first), *others = places.items()
        warnings = () if options.host in LOOPBACK else (NO_TLS,)
        served = ServedAt(first, place, lines[:2][-1], warnings, dict(others))

        def ready() -> None:
            on_ready(served)
            sys.stdout.flush()  # a pipe is buffered, and its reader waits for the address
            if options.processes > 1:
                listener.close()  # the children hold it open; it closes when they end

        by_name: dict[str, dict[str, Path]] = {}
        for (name, version), path in paths.items():
            if path.is_file() and (path.parent / MANIFEST).is_file():
                path = path.parent
            by_name.setdefault(name, {})[version] = path
        create = partial(create_application, by_name, options)
        if options.processes == 1:
            uvicorn_server.serve(create, listener, options, ready)
        else:
            child = partial(uvicorn_server.serve, create, listener, options)
            multiprocess.run(options.processes, child, ready, options.stop_seconds)


def _example(
    path: Path, name: str, version: str, url: str, header: str, options: Options
) -> tuple[str, str]:
    """Return the URL of a model, which is checked, and a command that asks it."""
    place = f"{url}/v2/models/{name}" + (f"/versions/{version}" if version else "")
    if is_archive(path):
        _, members, origin = check_archive(path, options.sha256)
        place = f"{url}/predictions/{name}" + (f"/{version}" if version else "")
        prepared = raw_body_line(handler_settings(members), header, place)
        return place, prepared or open_inference_line(place, origin.signature, header)
    if (signature := signature_of_file(path)) is not None:
        return place, open_inference_line(f"{place}/infer", signature, header)
    with opened_artifact(path, options.sha256) as artifact:
        if artifact.kind == "genai":
            from compress.serve.openai.decoder import refuse_for_decoders

            refuse_for_decoders(artifact, options)
            body = json.dumps({"model": name, "prompt": "The ", "max_tokens": 32})
            return f"{url}/v1", _post_json(header, body, f"{url}/v1/completions")
        target = f"{place}/infer"
        prepared = raw_body_line(forms_of(artifact), header, target)
        return place, prepared or open_inference_line(target, artifact.signature, header)


def named_paths(given: Sequence[str | Path]) -> dict[Key, Path]:
    """Return name and version → path; PipelineInvalid where one is given twice."""
    paths: dict[Key, Path] = {}
    for each in map(str, given):
        named = GIVEN.fullmatch(each)
        name, version, path = named.groups() if named else (None, None, each)
        key = name or default_name(Path(path)), version or "1"
        if not NAME.fullmatch(key[0]):  # of a `.mar`: it would stand in commands and addresses
            raise PipelineInvalid(f"{path}: names its model {key[0]!r}; serve it as NAME={path}")
        if key in paths:
            raise PipelineInvalid(
                f"{each}: version {key[1]} of {key[0]} is {paths[key]}; give each model a name or "
                "version of its own: NAME=DIR, NAME@2=DIR"
            )
        paths[key] = Path(path)
    return paths


def canary_shares(given: Sequence[str]) -> dict[str, tuple[str, float]]:
    """Return name → version and share of `NAME@VERSION=PERCENT%`; PipelineInvalid for others."""
    shares: dict[str, tuple[str, float]] = {}
    for each in given:
        named = GIVEN.fullmatch(each)
        percent = PERCENT.fullmatch(named[3]) if named else None
        if named is None or named[2] is None or percent is None or float(percent[1]) > 100:
            raise PipelineInvalid(
                f"--canary {each}: expected NAME@VERSION=PERCENT%, as in net@2=5%"
            )
        shares[named[1]] = named[2], float(percent[1]) / 100
    return shares


def shadow_options(
    given: Sequence[str | Path], share: str | None, limit: str | None, **others: Any
) -> ShadowOptions | None:
    """Return how answers are compared, None for not; PipelineInvalid for unclear options."""
    if share is None:
        if limit or any(others.values()):
            raise PipelineInvalid("--shadow-… needs the share of requests: --shadow 1%")
        return None
    percents = []
    for name, text in {"--shadow": share, "--shadow-limit": limit or "100%"}.items():
        found = PERCENT.fullmatch(text)
        if not found or not 0 < float(found[1]) <= 100:
            raise PipelineInvalid(f"{name} {text}: expected a percentage above 0, as in 1%")
        percents.append(float(found[1]))
    if others["reference"] and (others["model"] or limit):
        raise PipelineInvalid(
            "--shadow-reference: in place of an uncompressed model, whose answers --shadow-model "
            "and --shadow-limit are of; leave them out"
        )
    path = next(iter(named_paths(given).values()), Path())
    if (path.parent / MANIFEST).is_file():
        path = path.parent
    others["state"] = others["state"] or path.with_name(f"{path.name}.shadow.json")
    percent = percents[1] if limit else None
    return ShadowOptions(artifact=path, share=percents[0] / 100, percent=percent, **others)


def _refuse_unclear(paths: Mapping[Key, Path], options: Options) -> None:
    """Raise PipelineInvalid for options that would not do what they say."""
    if not paths and options.watch is None:
        raise PipelineInvalid("nothing to serve: give an artifact's directory, or --watch DIR")
    if options.watch is not None and not options.watch.is_dir():
        raise PipelineInvalid(f"--watch {options.watch}: no such directory")
    if (len(paths) != 1 or options.watch) and (options.sha256 or options.report):
        raise PipelineInvalid("--sha256 and --report are of one artifact: serve it alone")
    if options.shadow and (
        len(paths) != 1
        or options.watch
        or options.processes > 1
        or any(map(is_archive, paths.values()))
    ):
        raise PipelineInvalid(
            "--shadow compares one artifact's answers in one process: serve it alone, without "
            "--processes and --watch, and for an archive the artifact in its run's folder"
        )
    if options.processes > 1 and options.repository_api:
        raise PipelineInvalid(
            "--repository-api would change one of the --processes: replace models by --watch or "
            "SIGHUP, which reach all"
        )
    for name, (version, _) in options.canaries.items():
        if options.watch is None and ((name, version) not in paths or len(paths) < 2):
            served = ", ".join("@".join(key) for key in paths)
            raise PipelineInvalid(
                f"--canary {name}@{version}: expected a version that is served beside another; "
                f"found {served}"
            )


async def create_application(
    folders: Mapping[str, Mapping[str, Path]], options: Options
) -> Application:
    """Load models by name and version, and those of a watched folder, in the event loop.

    Raises what loading the former does; a model of the watched folder may fail.
    """
    from compress.serve.http.asgi_app import Application
    from compress.serve.http.shared_state import SharedState

    tracing = None
    if options.traces:
        from compress.serve.http.tracing import Tracing

        tracing = Tracing(options.traces)
    shared = SharedState(options.limits, options.token, tracing)
    load = partial(load_served, options, shared)
    repository = ModelRepository(load, folders, options.watch, options.canaries)
    failures = await repository.refresh()
    for (name, _), error in failures.items():
        if name in folders:
            raise error
    repository.log_failures(failures)
    return Application(shared, repository, takes_changes=options.repository_api)


def load_served(
    options: Options, shared: SharedState, path: Path, name: str, version: str
) -> Callable[[], Served]:
    """Load an artifact's model, in a thread; return what starts to answer, in the event loop."""
    from compress.serve.http.inference import load_inference

    report = path.with_name(f"{version}.report.json")  # beside a version of a watched folder
    if options.watch in path.parents and report.is_file():
        options = replace(options, report=report)
    if not is_archive(path) and (path / MANIFEST).is_file():
        artifact = Artifact.from_directory(path)
        if artifact.kind == "genai":  # its modules take most of a second to import
            from compress.serve.openai.app import load_decoder
            from compress.serve.openai.decoder import refuse_for_decoders

            refuse_wrong_artifact_hash(artifact, options.sha256)
            refuse_for_decoders(artifact, options)
            return load_decoder(artifact, name, version, options, shared)
    return load_inference(open_path(path, name, options), version, options, shared)


@contextmanager
def open_path(path: Path, name: str, options: Options) -> Iterator[ServedModel]:
    """Load the model of an artifact, a ``.mar`` or an exported file; all are checked before."""
    threads = options.threads
    if is_archive(path):
        with load_archive(*check_archive(path, options.sha256), name, threads) as model:
            yield model
        return
    with (
        opened_artifact(path, options.sha256) as artifact,
        open_model(artifact, name, threads or 1, options.report) as model,
    ):
        yield model


def bearer(token: str, made: bool, file: Path | None, variable: str) -> str:
    """Return curl's option for the token, quoted for a shell."""
    if made:
        return f"-H {shlex.quote(f'Authorization: Bearer {token}')}"
    # A token of the user's is not shown: the command reads it from its file or variable.
    source = f"${variable}" if file is None else f"$(cat {shlex.quote(str(file))})"
    return f'-H "Authorization: Bearer {source}"'


def raw_body_line(forms: Mapping[str, Any], authorization: str, target: str) -> str:
    """Return a command that sends what a model's server prepares; empty if it takes tensors."""
    body = next((body for form, body in RAW_BODIES.items() if forms.get(form)), "")
    return f"curl -sS {authorization} {body} {target}" if body else ""


def open_inference_line(target: str, signature: Signature, authorization: str) -> str:
    """Return a command with an Open Inference Protocol request: zeros, and ones for integers."""
    tensors: list[dict[str, Any]] = []
    axes = {axis: signature.bounds(axis).nearest(EXAMPLE_LENGTH) for axis in signature.dynamic_axes}
    axes |= {signature.batch_axis or "": 1}
    sizes = [[*spec.sized(axes)] for spec in signature.inputs]
    counts = [math.prod(size) for size in sizes]
    as_bytes = sum(counts) > MAX_JSON_VALUES
    for spec, size, count in zip(signature.inputs, sizes, counts, strict=True):
        tensor = {"name": spec.name, "shape": size, "datatype": DATATYPES[spec.dtype]}
        if as_bytes:
            bytes_ = count * np.dtype(spec.dtype).itemsize
            tensors.append({**tensor, "parameters": {"binary_data_size": bytes_}})
        else:
            value = 0 if spec.dtype.startswith("float") else 1
            tensors.append({**tensor, "data": [value] * count})
    body = json.dumps({"inputs": tensors}, separators=(",", ":"))
    if not as_bytes:
        return _post_json(authorization, body, target)
    zeros = sum(tensor["parameters"]["binary_data_size"] for tensor in tensors)
    length = f"-H 'Inference-Header-Content-Length: {len(body)}'"
    sent = f"(printf %s {shlex.quote(body)}; head -c {zeros} /dev/zero)"
    return f"{sent} | curl -sS {authorization} {length} --data-binary @- {target}"


def _post_json(authorization: str, body: str, target: str) -> str:
    json_type = "-H 'Content-Type: application/json'"
    return f"curl -sS {authorization} {json_type} -d {shlex.quote(body)} {target}"
