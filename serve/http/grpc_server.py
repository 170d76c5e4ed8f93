"""The Open Inference Protocol over gRPC: tritonclient's definitions, answered as over HTTP.

Each call becomes the HTTP request that says the same, with its token, limits, checks and errors.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.json_format import ParseDict
from tritonclient.grpc import service_pb2, service_pb2_grpc

from compress.common.errors import PipelineInvalid
from compress.serve.http.asgi_app import REPOSITORY
from compress.serve.http.messages import HttpError, Response, error_response
from compress.serve.http.shared_state import SMALL_BYTES
from compress.serve.worker.wire import HEADER_LENGTH

if TYPE_CHECKING:
    from compress.serve.http.asgi_app import Application
    from compress.serve.http.messages import Message
    from compress.serve.http.options import Options
    from compress.serve.worker.tensors import Named

CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""By HTTP status; INVALID_ARGUMENT for others."""
PUBLIC = ("ServerLive", "ServerReady")
IDLE_MS = 75_000


async def start_grpc(application: Application, options: Options) -> Any:
    """Start the server, in the event loop; return it. PipelineInvalid where the port is taken."""
    limits = options.limits
    host = f"[{options.host}]" if ":" in options.host else options.host
    server = grpc.aio.server(
        interceptors=[TokenCheck(application)],
        maximum_concurrent_rpcs=limits.queue,
        options=[
            # What a message adds to the tensors of the largest body.
            ("grpc.max_receive_message_length", limits.body_bytes + SMALL_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_connection_idle_ms", IDLE_MS),
            ("grpc.so_reuseport", int(options.processes > 1)),
        ],
    )
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Service(application), server)
    try:
        server.add_insecure_port(f"{host}:{options.grpc_port}")
    except RuntimeError as error:
        place = f"--grpc-port {options.grpc_port}"
        raise PipelineInvalid(f"{place}: cannot listen there ({error})") from error
    await server.start()
    return server


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no annotations
    """Refuses calls without the token, before their messages are received."""

    def __init__(self, application: Application) -> None:
        self._check = application.shared.check_token

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """Return what answers a call, by its name and metadata."""
        if details.method.rpartition("/")[2] not in PUBLIC:
            try:
                self._check({key: str(value) for key, value in details.invocation_metadata})
            except HttpError as error:
                message = json.loads(error.response.body)["error"]

                async def refuse(_: Any, context: Any) -> None:
                    await context.abort(CODES[401], message)

                # As a stream: of others the message is received first.
                return grpc.stream_stream_rpc_method_handler(refuse)
        return await continuation(details)


class Service(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers the calls for health, metadata, the repository and inference."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's names
        """Answer that the server lives."""
        del request, context
        return service_pb2.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Answer whether no model hangs."""
        del request, context
        return service_pb2.ServerReadyResponse(ready=self._application.is_ready())

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Answer whether a model is loaded and does not hang."""
        path = f"{model_path(request.name, request.version)}/ready"
        response = await self._response("GET", path, context)
        return service_pb2.ModelReadyResponse(ready=response.status == 200)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return the server's name, version and extensions."""
        del request
        content = await self._content("GET", "/v2", context)
        return ParseDict(content, service_pb2.ServerMetadataResponse())

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return a model's inputs and outputs."""
        path = model_path(request.name, request.version)
        content = await self._content("GET", path, context)
        return ParseDict(content, service_pb2.ModelMetadataResponse())

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return names, versions and states of the models."""
        asked = {"ready": request.ready}
        content = await self._content("POST", f"{REPOSITORY}index", context, asked)
        return ParseDict({"models": content}, service_pb2.RepositoryIndexResponse())

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Load a model, or load it anew."""
        await self._change("load", request, context)
        return service_pb2.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Unload a model."""
        await self._change("unload", request, context)
        return service_pb2.RepositoryModelUnloadResponse()

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return a model's outputs."""
        response = await self._infer(request, context)
        if response.status != 200:
            await abort(context, response)
        return infer_response(response)

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> Any:  # noqa: N802
        """Yield a model's outputs for each request of a stream, or that request's error."""
        async for request in requests:
            response, reply = await self._infer(request, context), {}
            if response.status == 200:
                reply["infer_response"] = infer_response(response)
            else:
                reply["error_message"] = json.loads(response.body)["error"]
                reply["infer_response"] = service_pb2.ModelInferResponse(id=request.id)
            yield service_pb2.ModelStreamInferResponse(**reply)

    async def _infer(self, request: Any, context: Any) -> Response:
        path = f"{model_path(request.model_name, request.model_version)}/infer"
        try:
            head, tensors = infer_body(request)
        except (KeyError, UnicodeDecodeError) as error:
            return HttpError(400, f"the request cannot be read: {error}").response
        body = b"".join([head, *tensors])
        headers = {HEADER_LENGTH: str(len(head))} if tensors else {}
        return await self._response("POST", path, context, body, headers)

    async def _change(self, action: str, request: Any, context: Any) -> None:
        parameters = {
            key: getattr(value, value.WhichOneof("parameter_choice"))
            for key, value in request.parameters.items()
            if not key.startswith("file:") and value.WhichOneof("parameter_choice")
        }
        path = f"{REPOSITORY}models/{request.model_name}/{action}"
        await self._content("POST", path, context, {"parameters": parameters})

    async def _content(self, method: str, path: str, context: Any, asked: Any = None) -> Any:
        """Return what an HTTP request is answered with, or end the call with its error."""
        body = b"" if asked is None else json.dumps(asked).encode()
        response = await self._response(method, path, context, body)
        if response.status != 200:
            await abort(context, response)
        return json.loads(response.body)

    async def _response(
        self,
        method: str,
        path: str,
        context: Any,
        body: bytes = b"",
        headers: Named | None = None,
    ) -> Response:
        metadata = {key: str(value) for key, value in context.invocation_metadata()}
        # Others, such as `expect`, would be of HTTP's messages.
        sent = {key: metadata[key] for key in ("authorization", "traceparent") if key in metadata}
        sent |= {"content-length": str(len(body)), **(headers or {})}

        async def receive() -> Message:
            return {"type": "http.request", "body": body}

        try:
            return await self._application.respond(method, path, sent, receive)
        except Exception as error:  # noqa: BLE001 - a bug must not leave the client without one
            return error_response(error)


async def abort(context: Any, response: Response) -> None:
    """End a call with the error of an HTTP response; raises."""
    message = json.loads(response.body).get("error", "not ready")
    await context.abort(CODES.get(response.status, grpc.StatusCode.INVALID_ARGUMENT), message)


def model_path(name: str, version: str) -> str:
    """Return a model's path over HTTP."""
    return f"/v2/models/{name}" + (f"/versions/{version}" if version else "")


def infer_body(request: Any) -> tuple[bytes, list[bytes]]:
    """Return the JSON header of the HTTP request that says the same, and its tensors' bytes."""
    raw = [*request.raw_input_contents]
    inputs = []
    for i, tensor in enumerate(request.inputs):
        each = {"name": tensor.name, "datatype": tensor.datatype, "shape": [*tensor.shape]}
        if raw:
            each["parameters"] = {"binary_data_size": len(raw[i]) if i < len(raw) else 0}
        else:
            ((_, values),) = tensor.contents.ListFields() or [(None, [])]
            each["data"] = [v.decode() if isinstance(v, bytes) else v for v in values]
        inputs.append(each)
    head: dict[str, Any] = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    if request.id:
        head["id"] = request.id
    if request.outputs:
        head["outputs"] = [{"name": each.name} for each in request.outputs]
    return json.dumps(head).encode(), raw


def infer_response(response: Response) -> Any:
    """Return the message that says what an HTTP response does."""
    size = int(response.headers.get(HEADER_LENGTH, len(response.body)))
    content, place, raw = json.loads(response.body[:size]), size, []
    for output in content["outputs"]:
        if length := output.pop("parameters", {}).get("binary_data_size", 0):
            raw.append(response.body[place : place + length])
            place += length
        else:  # texts, each behind its length
            texts = [str(text).encode() for text in output.pop("data", [])]
            raw.append(b"".join(len(text).to_bytes(4, "little") + text for text in texts))
    message = ParseDict(content, service_pb2.ModelInferResponse())
    message.raw_output_contents.extend(raw)
    return message
