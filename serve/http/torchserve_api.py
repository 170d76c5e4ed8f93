"""TorchServe's inference and management addresses, for its clients, on the built-in server."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from compress.serve.http.messages import HttpError, Response, error_response
from compress.serve.worker.wire import JSON, RAW

if TYPE_CHECKING:
    from compress.serve.http.messages import Headers, Message
    from compress.serve.http.shared_state import Served

PREDICTIONS = "/predictions/"
PATHS = (PREDICTIONS, "/models", "/ping")
"""With which the paths begin that are answered in TorchServe's forms."""
TYPES = {
    401: "InvalidKeyException",
    403: "MethodNotAllowedException",
    404: "ModelNotFoundException",
    405: "MethodNotAllowedException",
    503: "ServiceUnavailableException",
}
"""Errors of TorchServe itself, by status; those of its handlers have no type."""


def prepare_(path: str, headers: Headers) -> bool:
    """Return whether a request is one of TorchServe's; then a body without a type is raw bytes."""
    is_torchserve = path.startswith(PREDICTIONS)
    if is_torchserve:
        headers.setdefault("content-type", RAW)
    return is_torchserve


def as_torchserve(response: Response) -> Response:
    """Return a response with its error, if it is one, as TorchServe or its handler writes it."""
    if response.status < 400:
        return response
    error, kind = json.loads(response.body)["error"], TYPES.get(response.status)
    content = {"code": response.status, **({"type": kind} if kind else {}), "message": error}
    response.body = _as_json(content) if kind else json.dumps(content).encode()
    return response


async def answer(application: Any, scope: Message, headers: Headers) -> Response:
    """Answer a request for health or management, or for a model that is not loaded."""
    try:
        status, content = await _answer(application, scope, headers)
    except Exception as error:  # noqa: BLE001 - a bug must not leave the client without a response
        return as_torchserve(error_response(error))
    return Response(status, _as_json(content), {"content-type": JSON})


async def _answer(
    application: Any, scope: Message, headers: Headers
) -> tuple[int, dict[str, Any] | list[dict[str, Any]]]:
    path, method, repository = scope["path"], scope["method"], application.repository
    if path == "/ping":
        is_ready = application.is_ready()
        return (200, {"status": "Healthy"}) if is_ready else (500, {"status": "Unhealthy"})
    application.shared.check_token(headers)
    _, root, *asked = path.split("/")
    if root == "models" and not asked and method == "GET":
        names = sorted({each.name for each in repository.loaded()})
        return 200, {"models": [{"modelName": name, "modelUrl": name} for name in names]}
    if root == "models" and not asked and method == "POST":
        application.require_changes(headers)
        query = dict(parse_qsl(scope["query_string"].decode()))
        name = query.get("model_name") or PurePosixPath(query.get("url", "")).stem
        await application.change(name, "load", {})
        version = repository.loaded(name)[-1].version
        status = f'Model "{name}" Version: {version}.0 registered with 1 initial workers'
        return 200, {"status": status}
    name, version = [*asked, "", ""][:2]
    loaded = repository.loaded(name)
    found = [e for e in loaded if version in ("", "all", e.version, f"{e.version}.0")]
    if root != "models" or len(asked) > 2 or not found:
        raise HttpError(404, f"Model not found: {'/'.join(asked)[:200]}")
    if method == "GET":
        return 200, [_description(each) for each in (found if version else found[-1:])]
    if method != "DELETE" or found != loaded:
        message = f"{method[:20]}: expected GET, or DELETE of all versions"
        raise HttpError(405, message, allow="GET, DELETE")
    application.require_changes(headers)
    await application.change(name, "unload", {})
    return 200, {"status": f'Model "{name}" unregistered'}


def _description(served: Served) -> dict[str, Any]:
    state = "READY" if served.is_ready() else "UNLOADING"
    return {
        "modelName": served.name,
        "modelVersion": f"{served.version}.0",
        "modelUrl": served.name,
        "runtime": "python",
        "deviceType": "cpu",
        "workers": [{"id": "0", "status": state, "gpu": False}],
        "jobQueueStatus": {
            "remainingCapacity": max(0, served.limits.queue - served.workers.depth),
            "pendingRequests": served.workers.depth,
        },
    }


def _as_json(content: Any) -> bytes:
    """Write JSON as TorchServe does."""
    return f"{json.dumps(content, indent=2)}\n".encode()
