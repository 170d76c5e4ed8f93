"""Start and stop the built-in server: uvicorn on uvloop, with threads that call the model."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.common.errors import PipelineInvalid
from compress.common.requirements import Requirement, pip_install, require_all

if TYPE_CHECKING:
    from compress.serve.http.asgi_app import Application
    from compress.serve.http.options import Options

logger = logging.getLogger(__name__)

REQUIREMENTS = tuple(
    Requirement(what=what, install=pip_install("server"))
    for what in ("uvicorn", "httptools", "uvloop", "prometheus_client")
)

GRPC = ("tritonclient", "grpc")
TOKEN_VARIABLE = "COMPRESS_SERVE_TOKEN"
TOKEN_CHARACTERS = 16
SILENT_SECONDS = 10  # how long the kernel keeps new connections on which nothing was sent
KEEP_ALIVE_SECONDS = 75
CANCEL_SECONDS = 1  # time limit of the requests that a stopping server has cancelled
BACKLOG = 4096  # most connections that wait in the kernel to be accepted


def refuse_missing(options: Options | None = None) -> None:
    """Raise Unavailable if a library of an extra that the options need is missing."""
    needed = [*REQUIREMENTS]
    if options is not None and options.grpc_port is not None:
        needed += [Requirement(what=w, install=pip_install("grpc")) for w in GRPC]
    if options is not None and options.traces:
        needed.append(Requirement(what="opentelemetry", install=pip_install("otel")))
    require_all(needed, "compress serve")


def token_from(file: Path | None) -> tuple[str, bool]:
    """Return the token (of a file, else of the environment, else new), and whether it is new."""
    if file is None and TOKEN_VARIABLE not in os.environ:
        return secrets.token_urlsafe(24), True
    try:
        source, token = TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE, "")
        if file is not None:
            source, token = str(file), file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineInvalid(f"{file}: the token cannot be read ({error})") from error
    token = token.strip()
    if len(token) < TOKEN_CHARACTERS or not token.isascii() or any(c.isspace() for c in token):
        raise PipelineInvalid(
            f"{source}: found a token of {len(token)} characters, expected {TOKEN_CHARACTERS} or "
            "more of ASCII without spaces"
        )
    return token, False


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Open the socket on which the server listens; PipelineInvalid where that cannot be."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise PipelineInvalid(f"{host}:{port}: cannot listen there ({error})") from error
    # A connection that sends nothing costs next to nothing while the kernel holds it back.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT_SECONDS)
    with listener:
        yield listener


def serve(
    create_application: Callable[[], Awaitable[Application]],
    listener: socket.socket,
    options: Options,
    ready: Callable[[], None],
) -> None:
    """Serve until SIGINT or SIGTERM; finish the requests in progress, then raise the signal again.

    The application is created in the event loop. `ready` is called once requests are answered.
    SIGHUP loads the models that have changed.
    """
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(create_application, listener, options, ready))


async def _serve(
    create_application: Callable[[], Awaitable[Application]],
    listener: socket.socket,
    options: Options,
    ready: Callable[[], None],
) -> None:
    import uvicorn

    from compress.serve.http.bounded_protocol import BufferedHttpProtocol, WaitingConnections

    application = await create_application()
    # What is here stays: a collection that visited it would hold up the requests meanwhile.
    gc.collect()
    gc.freeze()
    protocol: Any = partial(BufferedHttpProtocol, waiting=WaitingConnections())
    asgi: Any = application
    config = uvicorn.Config(
        asgi,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(options.stop_seconds)),
    )
    server = uvicorn.Server(config)

    async def notify_when_ready() -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        ready()

    loop, repository = asyncio.get_running_loop(), application.repository
    loop.add_signal_handler(signal.SIGHUP, lambda: repository.spawn(repository.reload()))
    if options.watch is not None:
        repository.spawn(repository.watch())
    notifying, grpc_server = loop.create_task(notify_when_ready()), None
    try:
        if options.grpc_port is not None:
            from compress.serve.http.grpc_server import start_grpc

            grpc_server = await start_grpc(application, options)
        await server.serve(sockets=[listener])
    finally:
        notifying.cancel()
        if unfinished := server.server_state.tasks:  # cancelled now: they may tell their clients
            await asyncio.wait(unfinished, timeout=CANCEL_SECONDS)
        if grpc_server is not None:
            await grpc_server.stop(options.stop_seconds)
        application.close()
