"""The Open Inference Protocol over gRPC, by tritonclient's definitions.

Each call becomes the HTTP request that says the same, with its token, limits, checks and errors.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from google.protobuf.json_format import MessageToDict, ParseDict
from tritonclient.grpc import service_pb2, service_pb2_grpc

from compress.common.errors import PipelineInvalid
from compress.serve.http.asgi_app import REPOSITORY, Application
from compress.serve.http.bounded_protocol import GRPC_CONNECTIONS
from compress.serve.http.messages import HttpError, Response
from compress.serve.http.shared_state import SMALL_BYTES
from compress.serve.worker.wire import DATATYPES, HEADER_LENGTH

if TYPE_CHECKING:
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
MODELS = f"{REPOSITORY}models/"
CALLS: dict[str, Callable[[Any], tuple[str, str, Any]]] = {
    "ServerLive": lambda _: ("GET", "/v2/health/live", None),
    "ServerReady": lambda _: ("GET", "/v2/health/ready", None),
    "ServerMetadata": lambda _: ("GET", "/v2", None),
    "ModelReady": lambda r: ("GET", f"{model_path(r.name, r.version)}/ready", None),
    "ModelMetadata": lambda r: ("GET", model_path(r.name, r.version), None),
    "RepositoryIndex": lambda r: ("POST", f"{REPOSITORY}index", {"ready": r.ready}),
    "RepositoryModelLoad": lambda r: ("POST", f"{MODELS}{r.model_name}/load", changes(r)),
    "RepositoryModelUnload": lambda r: ("POST", f"{MODELS}{r.model_name}/unload", {}),
}
"""Name → method, path and body over HTTP."""
NUMBERS = {
    **{"bool_contents": "bool", "fp32_contents": "float32", "fp64_contents": "float64"},
    **{"int_contents": "int32", "int64_contents": "int64"},
    **{"uint_contents": "uint32", "uint64_contents": "uint64"},
}
"""Field → type of numbers that are passed on as bytes: as JSON they would take seconds."""
HANDSHAKE_MS, IDLE_MS = 10_000, 75_000


async def start_grpc(application: Application, options: Options) -> Any:
    """Start the server, in the event loop; return it. PipelineInvalid where the port is taken."""
    server = grpc.aio.server(
        interceptors=[TokenCheck(application)],
        maximum_concurrent_rpcs=options.limits.queue,
        options=[
            # What a message adds to the tensors of the largest body.
            ("grpc.max_receive_message_length", options.limits.body_bytes + SMALL_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_allowed_incoming_connections", GRPC_CONNECTIONS),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
            ("grpc.max_connection_idle_ms", IDLE_MS),
            ("grpc.so_reuseport", int(options.processes > 1)),
        ],
    )
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Service(application), server)
    place = f"[{options.host}]" if ":" in options.host else options.host
    place += f":{options.grpc_port}"
    try:
        server.add_insecure_port(place)
    except RuntimeError as error:
        raise PipelineInvalid(f"{place}: cannot listen there ({error})") from error
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
        if response.status != 200:
            await abort(context, response)
        return infer_response(response)

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> Any:  # noqa: N802
        """Yield a model's outputs for each request of a stream, or that request's error."""
        async for request in requests:
            response = await self._infer(request, context)
            error = "" if response.status == 200 else json.loads(response.body)["error"]
            failed = service_pb2.ModelInferResponse(id=request.id)
            reply = failed if error else infer_response(response)
            yield service_pb2.ModelStreamInferResponse(infer_response=reply, error_message=error)

    async def _infer(self, request: Any, context: Any) -> Response:
        path = f"{model_path(request.model_name, request.model_version)}/infer"
        head, raw = infer_body(request)
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
        return Response(sent[0]["status"], b"".join(each["body"] for each in sent[1:]), found)


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


def infer_body(request: Any) -> tuple[bytes, list[bytes]]:
    """Return the JSON of the HTTP request that says the same, and what follows it."""
    raw, inputs = [*request.raw_input_contents], list[dict[str, Any]]()
    for i, tensor in enumerate(request.inputs):
        inputs.append({"name": tensor.name, "datatype": tensor.datatype, "shape": [*tensor.shape]})
        field, values = next(((f.name, v) for f, v in tensor.contents.ListFields()), ("", []))
        dtype = NUMBERS.get(field, "")
        if request.raw_input_contents:
            inputs[i]["parameters"] = {"binary_data_size": len(raw[i]) if i < len(raw) else 0}
        elif DATATYPES.get(dtype) == tensor.datatype:
            raw.append(np.fromiter(values, dtype, len(values)).tobytes())
            inputs[i]["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            texts = [str(v, "utf-8", "replace") if isinstance(v, bytes) else v for v in values]
            inputs[i]["data"] = texts
    head: dict[str, Any] = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    head |= {"id": request.id} if request.id else {}
    if request.outputs:
        head["outputs"] = [{"name": each.name} for each in request.outputs]
    return json.dumps(head).encode(), raw


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
