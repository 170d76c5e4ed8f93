"""The Open Inference Protocol over gRPC, by tritonclient's definitions.

Each call becomes the HTTP request that says the same, with its token, limits, checks and errors.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict
from tritonclient.grpc import service_pb2, service_pb2_grpc

from compress.common.errors import PipelineInvalid
from compress.serve.http.asgi_app import REPOSITORY
from compress.serve.http.messages import HttpError, Response
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
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""By HTTP status; INVALID_ARGUMENT for others."""
CALLS: dict[str, Callable[[Any], tuple[str, str, Any]]] = {
    "ServerLive": lambda _: ("GET", "/v2/health/live", None),
    "ServerReady": lambda _: ("GET", "/v2/health/ready", None),
    "ServerMetadata": lambda _: ("GET", "/v2", None),
    "ModelReady": lambda r: ("GET", f"{model_path(r.name, r.version)}/ready", None),
    "ModelMetadata": lambda r: ("GET", model_path(r.name, r.version), None),
    "RepositoryIndex": lambda r: ("POST", f"{REPOSITORY}index", {"ready": r.ready}),
    "RepositoryModelLoad": lambda r: (
        "POST",
        f"{REPOSITORY}models/{r.model_name}/load",
        changes(r),
    ),
    "RepositoryModelUnload": lambda r: ("POST", f"{REPOSITORY}models/{r.model_name}/unload", {}),
}
"""Name → method, path and body over HTTP."""
IDLE_MS = 75_000


async def start_grpc(application: Application, options: Options) -> Any:
    """Start the server, in the event loop; return it. PipelineInvalid where the port is taken."""
    server = grpc.aio.server(
        interceptors=[TokenCheck(application)],
        maximum_concurrent_rpcs=options.limits.queue,
        options=[
            # What a message adds to the tensors of the largest body.
            ("grpc.max_receive_message_length", options.limits.body_bytes + SMALL_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_connection_idle_ms", IDLE_MS),
            ("grpc.so_reuseport", int(options.processes > 1)),
        ],
    )
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Service(application), server)
    host = f"[{options.host}]" if ":" in options.host else options.host
    try:
        server.add_insecure_port(f"{host}:{options.grpc_port}")
    except RuntimeError as error:
        raise PipelineInvalid(
            f"{host}:{options.grpc_port}: cannot listen there ({error})"
        ) from error
    await server.start()
    return server


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no annotations
    """Refuses calls without the token, before their messages are received."""

    def __init__(self, application: Application) -> None:
        self._check_token = application.shared.check_token

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """Return what answers a call, by its name and metadata."""
        if not details.method.endswith(("/ServerLive", "/ServerReady")):
            try:
                self._check_token({key: str(value) for key, value in details.invocation_metadata})
            except HttpError as error:
                response = error.response

                async def refuse(_: Any, context: Any) -> None:
                    await abort(context, response)

                # As a stream: of others the message is received first.
                return grpc.stream_stream_rpc_method_handler(refuse)
        return await continuation(details)


class Service(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers the calls for health, metadata, the repository and inference."""

    def __init__(self, application: Application) -> None:
        self._application = application
        for name in CALLS:
            setattr(self, name, partial(self._call, name))

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's names
        """Return a model's outputs."""
        response = await self._infer(request, context)
        return (
            infer_response(response) if response.status == 200 else await abort(context, response)
        )

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> Any:  # noqa: N802
        """Yield a model's outputs for each request of a stream, or that request's error."""
        async for request in requests:
            response = await self._infer(request, context)
            if response.status == 200:
                reply, error = infer_response(response), ""
            else:
                reply = service_pb2.ModelInferResponse(id=request.id)
                error = json.loads(response.body)["error"]
            yield service_pb2.ModelStreamInferResponse(infer_response=reply, error_message=error)

    async def _infer(self, request: Any, context: Any) -> Response:
        path = f"{model_path(request.model_name, request.model_version)}/infer"
        head, raw = infer_body(request), [*request.raw_input_contents]
        headers = {HEADER_LENGTH: str(len(head))} if raw else {}
        return await self._response("POST", path, context, b"".join([head, *raw]), headers)

    async def _call(self, name: str, request: Any, context: Any) -> Any:
        method, path, asked = CALLS[name](request)
        body = b"" if asked is None else json.dumps(asked).encode()
        response = await self._response(method, path, context, body, {})
        if response.status != 200 and not name.endswith("Ready"):
            return await abort(context, response)
        content = json.loads(response.body)
        content = {"models": content} if isinstance(content, list) else content
        reply = getattr(service_pb2, f"{name}Response")()
        return ParseDict(content, reply, ignore_unknown_fields=True)

    async def _response(
        self, method: str, path: str, context: Any, body: bytes, headers: Named
    ) -> Response:
        """Return the response to an HTTP request with the metadata's token and trace."""
        metadata = {key: str(value) for key, value in context.invocation_metadata()}
        given = {key: metadata[key] for key in ("authorization", "traceparent") if key in metadata}
        given |= {"content-length": str(len(body)), **headers}
        pairs = [(key.encode(), value.encode()) for key, value in given.items()]
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": body}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"method": method, "path": path, "headers": pairs}
        await self._application(scope, receive, send)
        found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        content = b"".join(message["body"] for message in sent[1:])
        return Response(sent[0]["status"], content, found)


async def abort(context: Any, response: Response) -> None:
    """End a call with the error of an HTTP response, by what `context` raises."""
    code = CODES.get(response.status, grpc.StatusCode.INVALID_ARGUMENT)
    await context.abort(code, str(json.loads(response.body)["error"]))


def model_path(name: str, version: str) -> str:
    """Return a model's path over HTTP."""
    return f"/v2/models/{name}" + (f"/versions/{version}" if version else "")


def changes(request: Any) -> Named:
    """Return the body of a request to load a model."""
    some = MessageToDict(request).get("parameters", {})
    return {"parameters": {key: value for key, each in some.items() for value in each.values()}}


def infer_body(request: Any) -> bytes:
    """Return the JSON of the HTTP request that says the same, before its tensors' bytes."""
    sizes = [len(each) for each in request.raw_input_contents]
    inputs: list[dict[str, Any]] = []
    for i, tensor in enumerate(request.inputs):
        inputs.append({"name": tensor.name, "datatype": tensor.datatype, "shape": [*tensor.shape]})
        if sizes:
            inputs[i]["parameters"] = {"binary_data_size": sizes[i] if i < len(sizes) else 0}
            continue
        values: Any = next((values for _, values in tensor.contents.ListFields()), [])
        inputs[i]["data"] = [
            v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in values
        ]
    head: dict[str, Any] = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    head |= {"id": request.id} if request.id else {}
    if request.outputs:
        head["outputs"] = [{"name": each.name} for each in request.outputs]
    return json.dumps(head).encode()


def infer_response(response: Response) -> Any:
    """Return the message that says what an HTTP response does."""
    place = int(response.headers.get(HEADER_LENGTH, len(response.body)))
    content, raw = json.loads(response.body[:place]), []
    for output in content["outputs"]:
        if size := output.pop("parameters", {}).get("binary_data_size"):
            raw.append(response.body[place : place + size])
            place += size
        else:  # texts, each behind its length
            texts = [str(text).encode() for text in output.pop("data", [])]
            raw.append(b"".join(len(text).to_bytes(4, "little") + text for text in texts))
    message = ParseDict(content, service_pb2.ModelInferResponse())
    message.raw_output_contents.extend(raw)
    return message
