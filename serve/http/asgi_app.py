"""The ASGI application of the built-in server: health, metrics, the models and their repository.

It is plain ASGI: a web framework around these few paths took longer than a small model's inference.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST

from compress.common.errors import cause_lines
from compress.serve.http import messages, shared_state, torchserve_api
from compress.serve.http.messages import HttpError, Response, close_if_continue_expected
from compress.serve.worker.tensors import UNREADABLE
from compress.serve.worker.wire import JSON
from compress.version import __version__

if TYPE_CHECKING:
    from compress.serve.http.messages import Headers, Message, Receive, Send
    from compress.serve.http.model_repository import ModelRepository
    from compress.serve.http.shared_state import SharedState
    from compress.serve.worker.tensors import Named

REPOSITORY = "/v2/repository/"
BODY_SECONDS = 10.0  # time limit of the body of a request to it
HEALTH = {"/v2/health/live": {"live": True}, "/v2/health/ready": {"ready": True}}


class Application:
    """Answers requests for all models of a repository."""

    def __init__(
        self, shared: SharedState, repository: ModelRepository, *, takes_changes: bool = False
    ) -> None:
        """Create it; with `takes_changes` who has the token may load and unload models."""
        self.shared, self.repository = shared, repository
        self._takes_changes = takes_changes
        extensions = ["binary_tensor_data", *(["model_repository"] if takes_changes else [])]
        self.server = {"name": "compress", "version": __version__, "extensions": extensions}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers, path = headers_of(scope), scope["path"]
        if (route := self.repository.routes.get(path)) is not None:
            served = route.choose()
            served.in_progress += 1
            try:
                await served.answer(scope, headers, receive, send)
            finally:
                served.in_progress -= 1
            return
        try:
            if path.startswith(torchserve_api.PATHS):
                response = await torchserve_api.answer(self, scope, headers)
            elif path.startswith(REPOSITORY):
                response = await self._manage(scope["method"], path, headers, receive)
            else:
                response = await self._get(scope["method"], path, headers)
        except Exception as error:  # noqa: BLE001 - a bug must not leave the client without one
            response = self.error_response(error, path)
        await messages.send_response(scope, send, response)

    def accept_whole(self, scope: Message, respond: Callable[[Response], None]) -> Any:
        """Return a `WholeRequest` where no task is needed once its body is received, or None."""
        route = self.repository.routes.get(scope["path"])
        if route is None or scope["method"] != "POST":
            return None
        return route.choose().accept_whole(scope["path"], headers_of(scope), respond)

    def error_response(self, error: Exception, path: str = "") -> Response:
        """Return the response to an error, as clients of this path expect it."""
        models = self.repository.loaded()
        fitting = [each for each in models if path.startswith(each.prefix)] or models
        return fitting[0].error_response(error) if fitting else messages.error_response(error)

    def is_ready(self) -> bool:
        """Return whether all models are ready."""
        return all(each.is_ready() for each in self.repository.loaded())

    def close(self) -> None:
        """End all models, and what the requests share."""
        self.repository.close()
        self.shared.close()

    async def _get(self, method: str, path: str, headers: Headers) -> Response:
        """Answer health, metadata and metrics requests."""
        if (health := HEALTH.get(path)) is not None:
            return json_response(health, is_ready="ready" not in health or self.is_ready())
        self.shared.check_token(headers)
        server = self.server if path in ("/v2", "/v2/") else None
        content, served = self.repository.pages.get(path, (server, None))
        if content is None and path != "/metrics":
            expected = next(iter(self.repository.routes), "a model to be loaded")
            message = f"{path[:200]}: not here; expected {expected}"
            raise HttpError(404, message, **close_if_continue_expected(headers))
        require_method(method, headers, "GET", "HEAD")
        if content is None:
            text = await self.shared.run_in_thread(True, self.shared.metrics.text)
            return Response(200, text, {"content-type": CONTENT_TYPE_LATEST})
        is_ready = "ready" not in content or served is None or served.is_ready()
        return json_response(content, is_ready=is_ready)

    async def _manage(self, method: str, path: str, headers: Headers, receive: Receive) -> Response:
        """Answer a request of Triton's repository API."""
        self.shared.check_token(headers)
        parts = path.removeprefix(REPOSITORY).split("/")
        is_change = len(parts) == 3 and parts[0] == "models" and parts[2] in ("load", "unload")
        if parts != ["index"] and not is_change:
            message = f"{path[:200]}: not here; expected {REPOSITORY}index"
            raise HttpError(404, message, **close_if_continue_expected(headers))
        require_method(method, headers, "POST")
        if is_change:
            self.require_changes(headers)
        shared_state.body_size(headers, shared_state.SMALL_BYTES)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await shared_state.read_body(receive, shared_state.SMALL_BYTES)
        except TimeoutError:
            raise HttpError(408, "the body was not received", connection="close") from None
        try:
            asked = json.loads(body or b"{}")
            parameters = {**asked.get("parameters", {})}
            if parts == ["index"]:
                index, only_ready = self.repository.index(), asked.get("ready", False)
                return json_response([e for e in index if not only_ready or e["state"] == "READY"])
            await self.change(parts[1], parts[2], parameters)
        except (ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
            message = f"the body is not a request of the repository API: {str(error)[:200]}"
            raise HttpError(UNREADABLE, message) from error
        return json_response({})

    def require_changes(self, headers: Headers) -> None:
        """Raise HttpError unless clients may load and unload models."""
        if not self._takes_changes:
            message = "this server takes no changes; start it with --repository-api"
            raise HttpError(403, message, **close_if_continue_expected(headers))

    async def change(self, name: str, action: str, parameters: Named) -> None:
        """Load or unload a model; `parameters` are those of Triton's repository API.

        A `config` may name the only versions to load, to return to one before:
        `{"version_policy": {"specific": {"versions": [1]}}}`. HttpError 400 where it fails.
        """
        versions: list[str] = []
        for key, value in parameters.items() if action == "load" else ():
            if key != "config":
                raise ValueError(f"parameters.{key[:80]}: unknown, expected config")
            specific = json.loads(value)["version_policy"]["specific"]
            versions = [str(each) for each in specific["versions"]]
        try:
            if action == "load":
                await self.repository.load_model(name, versions)
            else:
                await self.repository.unload_model(name)
        except Exception as error:  # whatever loading a broken file raises
            raise HttpError(UNREADABLE, "; ".join(cause_lines(error))) from error


def require_method(method: str, headers: Headers, *allowed: str) -> None:
    """Raise HttpError for another method."""
    if method not in allowed:
        closing = close_if_continue_expected(headers)
        message = f"{method[:20]}: expected {allowed[0]}"
        raise HttpError(405, message, allow=", ".join(allowed), **closing)


def json_response(content: Any, *, is_ready: bool = True) -> Response:
    """Return the content; `ready: false` and 503 for what is not ready."""
    body = json.dumps(content if is_ready else {**content, "ready": False}).encode()
    return Response(200 if is_ready else 503, body, {"content-type": JSON})


def headers_of(scope: Message) -> Headers:
    """Return a request's headers, their names in lower case."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
