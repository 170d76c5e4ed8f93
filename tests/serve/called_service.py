"""What a helper process calls in tests; it imports little, as the process starts sooner then."""

import os
import time
from pathlib import Path

from compress.common.errors import ArtifactInvalid
from compress.serve.http.messages import HttpError


class Service:
    """What a helper process calls."""

    def pid(self) -> int:
        return os.getpid()

    def echo(self, number: int, body: bytes) -> tuple[int, int]:
        return number, len(body)

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "awake"

    def allocate(self, mebibytes: int) -> int:
        return len(bytearray(mebibytes << 20))

    def grow(self, mebibytes: int) -> int:
        self.kept = [*getattr(self, "kept", []), bytearray(mebibytes << 20)]
        return len(self.kept)

    def abort(self) -> None:
        os.abort()

    def refuse(self) -> None:
        raise HttpError(418, "no coffee", retry_after="1")

    def fail(self) -> None:
        raise KeyError("a bug")


def slow(file: str) -> Service:
    """Create a service: at once while a file says so, else after a second, or never."""
    how = Path(file).read_text()
    if how == "broken":
        broken()
    time.sleep(float(how))
    return Service()


def broken() -> Service:
    raise ArtifactInvalid("the tokenizer is broken")
