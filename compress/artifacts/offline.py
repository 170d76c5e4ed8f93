"""Lets libraries read foreign files, which may name what they would download, without network."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

from compress.common.errors import ArtifactInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOKUPS = ("socket.getaddrinfo", "socket.gethostbyname")
"""Python's audit events whose first argument is another machine's name."""
CONNECTIONS = ("socket.connect", "socket.sendto")
"""Those whose second one is an address: a pair, or the path of a socket on this machine."""

WEIGHTS_FILE = "checkpoint_path"
"""Argument of timm's: weights to read, whatever their path looks like."""
LOOKED_UP = (
    *("architecture", "attn_implementation", "_attn_implementation", "backbone"),
    *(WEIGHTS_FILE, "experts_implementation"),
)
"""Entries of a config, and of those in it, by which transformers and timm find code or weights."""

_reading: ContextVar[object] = ContextVar("_reading", default=None)


@contextmanager
def offline(source: object) -> Iterator[None]:
    """Refuse connections to other machines in a block, by whatever library, in this thread.

    Raises:
        ArtifactInvalid: a library asked for one; the message begins with the source that is read.
    """
    _watch_connections()
    token = _reading.set(source)
    try:
        yield
    finally:
        _reading.reset(token)


@cache
def _watch_connections() -> None:
    # Each library reads variables such as HF_HUB_OFFLINE when it is imported, and some read none.
    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in LOOKUPS + CONNECTIONS or _reading.get() is None:
            return
        address = arguments if event in LOOKUPS else arguments[1]
        if isinstance(address, tuple):
            raise ArtifactInvalid(
                f"{_reading.get()}: asks for {address[0]}, and nothing is downloaded; save the "
                "model with all that it needs (save_pretrained)"
            )

    sys.addaudithook(audit)


def refuse_lookups(config: dict[str, Any], where: object) -> None:
    """Raise ArtifactInvalid for an entry, at any depth, that names a path or a place on a hub."""
    parts: list[Any] = [config]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        for key, value in part.items() if isinstance(part, dict) else ():
            is_place = isinstance(value, str) and bool({*":/\\"} & {*value})
            if key in LOOKED_UP and (is_place or (value and key == WEIGHTS_FILE)):
                raise ArtifactInvalid(
                    f"{where}: {key}: names {value!r}, which is not read: only names that the "
                    "installed libraries know are; remove that entry"
                )
            parts.append(value)
