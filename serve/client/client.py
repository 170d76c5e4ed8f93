"""A client for a served model: arrays in, arrays out, the same bits as in the process."""

from __future__ import annotations

import http.client
import json
import socket
import time
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from compress.common.errors import StageFailed
from serve.client.wire_format import Npz

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from serve.client.wire_format import Form
    from serve.worker.tensors import Array

REQUEST_BYTES = 4 * 1024**2
"""Requests are split above this: TorchServe takes 6.5 MB unless told otherwise."""


class Client:
    """One kept-alive connection to a served model."""

    def __init__(
        self,
        url: str,
        model_name: str,
        signature: Signature,
        *,
        token: str | None = None,
        max_rows: int = 1,
        timeout_seconds: float = 60.0,
        form: Form | None = None,
    ) -> None:
        """Remember where the model is served; nothing is sent yet.

        Args:
            url: address of the server, such as ``http://127.0.0.1:8080``; of TorchServe, its
                inference API's. A path in it stands before those of the server.
            model_name: the name under which it is served.
            signature: the model's interface.
            token: what the server asks for, if anything.
            max_rows: rows that one request may hold.
            timeout_seconds: how long one answer may take, from the request's first byte to the
                answer's last: TorchServe can lose a request that waits in its batch window when a
                worker dies.
            form: how requests are written; TorchServe's npz where left out.

        Raises:
            StageFailed: the address is no ``http://``; the token must not travel otherwise than
                you think.
        """
        place = urlsplit(url)
        if place.scheme != "http" or not place.hostname:
            raise StageFailed(f"{url}: expected http://HOST:PORT; this client does not speak TLS")
        self.url = url.rstrip("/")
        self.form = form or Npz()
        self.path = self.form.path(model_name)
        self.signature = signature
        self.max_rows = max_rows
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._target = place.path.rstrip("/") + self.path
        self._connection = Connection(place.hostname, place.port, timeout=timeout_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def predict(self, inputs: Mapping[str, Array] | Sequence[Array]) -> tuple[Array, ...]:
        """Return the outputs in the signature's order; too many rows go in several requests.

        Args:
            inputs: arrays by name, or in the signature's order.

        Raises:
            StageFailed: the server cannot be reached, or refused; with its own message. Or there
                are too many rows, and an output has them on another axis than the first.
        """
        import numpy as np

        names = [spec.name for spec in self.signature.inputs]
        named = dict(inputs) if hasattr(inputs, "keys") else dict(zip(names, inputs, strict=True))
        first, *rest = self._split(named)
        answer, can_be_joined = self._request(first)
        if not rest:
            return answer
        if not can_be_joined:
            raise StageFailed(
                f"{self.url}{self.path}: too many rows for one request, and the answers of several "
                "cannot be joined, because the rows do not lie on axis 0 of every output; raise "
                "max_rows or send fewer rows"
            )
        answers = [answer, *(self._request(part)[0] for part in rest)]
        return tuple(np.concatenate(column) for column in zip(*answers, strict=True))

    def _split(self, named: dict[str, Array]) -> list[dict[str, Array]]:
        """Cut the batch axis into requests, where it is the first axis of every input."""
        heads = {spec.shape[:1] for spec in self.signature.inputs}
        if self.signature.batch_axis is None or len(heads) > 1:
            return [named]
        rows = len(next(iter(named.values())))
        row_bytes = sum(array.nbytes for array in named.values()) // max(rows, 1)
        step = max(1, min(self.max_rows, REQUEST_BYTES // max(row_bytes, 1)))
        return [
            {name: array[start : start + step] for name, array in named.items()}
            for start in range(0, max(rows, 1), step)
        ]

    def _request(self, named: dict[str, Array]) -> tuple[tuple[Array, ...], bool]:
        """Return the outputs, and whether they may be joined to those for other rows."""
        sent, headers = self.form.request(named)
        response, body = self._post(sent, headers | self.headers)
        if response.status != 200:
            raise StageFailed(f"{self.url}{self.path}: HTTP {response.status}: {_message(body)}")
        answer = self.form.outputs(body, response.headers)  # type: ignore[arg-type]  # has get
        outputs = tuple(answer[output.name] for output in self.signature.outputs)
        return outputs, response.headers.get("X-Batch-Axis") == "0"

    def _post(
        self, body: bytes, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        reused = self._connection.sock is not None
        try:
            self._connection.begin()
            self._connection.request("POST", self._target, body, headers)
            response = self._connection.getresponse()
            return response, response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            if reused and isinstance(error, ConnectionError | http.client.BadStatusLine):
                return self._post(body, headers)  # the server closed an idle connection
            raise StageFailed(
                f"{self.url}{self.path}: {type(error).__name__}: {error or 'no answer'}"
            ) from error


class Connection(http.client.HTTPConnection):
    """A connection whose timeout is for a whole exchange, and not for each read of it."""

    def begin(self) -> None:
        """Begin an exchange: from now on it may take as long as the timeout says."""
        due = time.monotonic() + (self.timeout or 0)
        if self.sock is None:
            self.connect()
        self._due_socket.due = due

    def connect(self) -> None:
        """Connect, with a socket that knows when the exchange is due."""
        super().connect()
        self.sock = self._due_socket = DueSocket(fileno=self.sock.detach())


class DueSocket(socket.socket):
    """A socket that reads until a moment: a server that trickles does not hold its client."""

    due = 0.0
    """When reading ends, by ``time.monotonic``."""

    def recv_into(self, *args: object) -> int:
        """Read, for as long as is left.

        Raises:
            TimeoutError: nothing is left.
        """
        left = self.due - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left)
        return super().recv_into(*args)  # type: ignore[arg-type]  # as it was called

    def sendall(self, data: object, flags: int = 0) -> None:
        """Send, for as long as is left."""
        self.settimeout(max(0.001, self.due - time.monotonic()))
        super().sendall(data, flags)  # type: ignore[arg-type]  # as it was called


def as_predictor(client: Client) -> Predictor:
    """Return a client as a function of tensors."""

    def predict(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        import torch

        outputs = client.predict([tensor.detach().cpu().numpy() for tensor in inputs])
        return tuple(torch.from_numpy(output) for output in outputs)

    return predict


def _message(body: bytes) -> str:
    """Return the server's own words: TorchServe's and ours are JSON, with a message or an error."""
    text = body.decode(errors="replace")
    try:
        answer = json.loads(text)
        text = str(answer["error"] if "error" in answer else answer["message"])
    except (ValueError, KeyError, TypeError):
        text = text[:300]
    return " ".join(text.split()) or "no message"
