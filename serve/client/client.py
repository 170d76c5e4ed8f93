"""HTTP client of a served model: npz or the Open Inference Protocol; all but JSON are lossless."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

import numpy as np

from compress.common.errors import StageFailed, first_line
from compress.serve.worker.wire import DATATYPES, HEADER_LENGTH, JSON, NPZ, RAW, from_npz, to_npz

if TYPE_CHECKING:
    from compress.common.signature import Signature
    from compress.serve.worker.tensors import Array

    Headers = Mapping[str, str]

DTYPES = {datatype: dtype for dtype, datatype in DATATYPES.items()}
REQUEST_BYTES = 4 * 1024**2  # larger requests are split: TorchServe accepts 6.5 MB by default


@dataclass(frozen=True)
class Npz:
    """Every tensor by name, as ``numpy.savez`` writes them; both servers accept it."""

    folder: str = "/predictions/"
    ending: str = ""

    def path(self, model_name: str) -> str:
        """Return the path of a model's inference requests."""
        return f"{self.folder}{quote(model_name, safe='')}{self.ending}"

    def request(self, named: Mapping[str, Array]) -> tuple[bytes, dict[str, str]]:
        """Encode inputs as npz."""
        return to_npz(named), {"Content-Type": NPZ, "Accept": f"{NPZ}, {JSON}"}

    def outputs(self, body: bytes, headers: Headers) -> dict[str, Array]:
        """Decode outputs from npz."""
        return from_npz(body)


@dataclass(frozen=True, kw_only=True)
class OpenInference:
    """Open Inference Protocol v2: tensors as raw bytes after a JSON header, or as JSON."""

    binary: bool = True
    """Raw bytes (lossless) or JSON."""

    def path(self, model_name: str) -> str:
        """Return the path of a model's inference requests."""
        return f"/v2/models/{quote(model_name, safe='')}/infer"

    def request(self, named: Mapping[str, Array]) -> tuple[bytes, dict[str, str]]:
        """Encode inputs; request outputs in the same encoding."""
        tensors: list[dict[str, Any]] = []
        raw: list[bytes] = []
        for name, array in named.items():
            tensor: dict[str, Any] = {"name": name, "shape": [*array.shape]}
            tensor["datatype"] = DATATYPES[str(array.dtype)]
            if self.binary:  # the protocol's raw tensors are little-endian
                raw.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
                tensor["parameters"] = {"binary_data_size": len(raw[-1])}
            else:
                tensor["data"] = array.ravel().tolist()
            tensors.append(tensor)
        value = {"inputs": tensors, "parameters": {"binary_data_output": self.binary}}
        text = json.dumps(value).encode()
        if not self.binary:
            return text, {"Content-Type": JSON}
        return b"".join([text, *raw]), {"Content-Type": RAW, HEADER_LENGTH: str(len(text))}

    def outputs(self, body: bytes, headers: Headers) -> dict[str, Array]:
        """Decode outputs."""
        length = int(headers.get(HEADER_LENGTH) or len(body))
        at, outputs = length, {}
        for tensor in json.loads(body[:length])["outputs"]:
            dtype = np.dtype(DTYPES[tensor["datatype"]])
            size = tensor.get("parameters", {}).get("binary_data_size")
            if size is None:
                array = np.asarray(tensor["data"], dtype)
            else:
                array = np.frombuffer(body[at : at + size], dtype.newbyteorder("<")).astype(dtype)
                at += size
            outputs[tensor["name"]] = array.reshape(tensor["shape"])
        return outputs


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
        form: Npz | OpenInference | None = None,
    ) -> None:
        """Create a client of a model at an address such as ``http://127.0.0.1:8080``.

        A path in the address is put before the server's own paths. The timeout is that of a whole
        answer, from the request's first byte to the answer's last; `form` is the wire format of
        requests, by default TorchServe's npz. StageFailed unless the address is ``http://``.
        """
        parts = urlsplit(url)
        # An https:// address must not send the token unencrypted.
        if parts.scheme != "http" or not parts.hostname:
            raise StageFailed(f"{url}: expected http://HOST:PORT; this client does not speak TLS")
        self.url = url.rstrip("/")
        self.form = form or Npz()
        self.path = self.form.path(model_name)
        self.signature = signature
        self.max_rows = max_rows
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._target = parts.path.rstrip("/") + self.path
        # A deadline, because TorchServe can lose a request that waits in its batch window when a
        # worker dies.
        self._connection = DeadlineConnection(parts.hostname, parts.port, timeout=timeout_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def predict(self, inputs: Mapping[str, Array] | Sequence[Array]) -> tuple[Array, ...]:
        """Return the outputs in the signature's order; split too many rows into several requests.

        Inputs are arrays by name, or in the signature's order. StageFailed if the server cannot be
        reached or answers an error, which is quoted, or if rows have to be split and some output
        has them on another axis than the first.
        """
        names = [spec.name for spec in self.signature.inputs]
        named = dict(inputs) if hasattr(inputs, "keys") else dict(zip(names, inputs, strict=True))
        first, *rest = self._split(named)
        answer, rows_on_axis_0 = self._request(first)
        if not rest:
            return answer
        if not rows_on_axis_0:
            raise StageFailed(
                f"{self.url}{self.path}: too many rows for one request, and the answers of several "
                "cannot be joined, because the rows do not lie on axis 0 of every output; raise "
                "max_rows or send fewer rows"
            )
        answers = [answer, *(self._request(part)[0] for part in rest)]
        return tuple(np.concatenate(column) for column in zip(*answers, strict=True))

    def _split(self, named: dict[str, Array]) -> list[dict[str, Array]]:
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
        """Return the outputs, and whether axis 0 of each counts the request's rows."""
        sent, headers = self.form.request(named)
        response, body = self._post(sent, headers | self.headers)
        if response.status != 200:
            message = body.decode(errors="replace")
            try:  # JSON with `error` is our server's, with `message` TorchServe's
                content = json.loads(message)
                message = str(content["error"] if "error" in content else content["message"])
            except (ValueError, KeyError, TypeError):
                message = message[:300]
            message = " ".join(message.split()) or "no message"
            raise StageFailed(f"{self.url}{self.path}: HTTP {response.status}: {message}")
        answer = self.form.outputs(body, response.headers)  # type: ignore[arg-type]  # has get
        outputs = tuple(answer[output.name] for output in self.signature.outputs)
        return outputs, response.headers.get("X-Batch-Axis") == "0"

    def _post(
        self, body: bytes, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        reused = self._connection.sock is not None
        try:
            self._connection.start_deadline()
            self._connection.request("POST", self._target, body, headers)
            response = self._connection.getresponse()
            return response, response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            if reused and isinstance(error, ConnectionError | http.client.BadStatusLine):
                return self._post(body, headers)  # the server closed an idle connection
            reason = first_line(error) or "no answer"
            raise StageFailed(f"{self.url}{self.path}: {type(error).__name__}: {reason}") from error


class DeadlineConnection(http.client.HTTPConnection):
    """A connection whose timeout bounds a whole exchange, not each read of it."""

    def start_deadline(self) -> None:
        """Start the timeout of one exchange."""
        deadline = time.monotonic() + (self.timeout or 0)
        if self.sock is None:
            self.connect()
        self._deadline_socket.deadline = deadline

    def connect(self) -> None:
        """Connect, and give the socket a deadline."""
        super().connect()
        self.sock = self._deadline_socket = DeadlineSocket(fileno=self.sock.detach())


class DeadlineSocket(socket.socket):
    """A socket with a deadline, so that a server cannot stall its client byte by byte."""

    deadline = 0.0  # on the clock of ``time.monotonic``, seconds

    def recv_into(self, *args: object) -> int:
        """Read within the time that is left; TimeoutError where none is."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left)
        return super().recv_into(*args)  # type: ignore[arg-type]  # passed through

    def sendall(self, data: object, flags: int = 0) -> None:
        """Send within the time that is left."""
        # A timeout of 0 would make the socket non-blocking, and a negative one is an error.
        self.settimeout(max(0.001, self.deadline - time.monotonic()))
        super().sendall(data, flags)  # type: ignore[arg-type]  # passed through
