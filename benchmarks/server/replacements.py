"""Replace a served model while clients ask, and count the requests that are lost.

    python -m benchmarks.server.replacements --requests 100000 --replacements 20 --rollbacks 5

starts `compress serve --watch` with a small ONNX model, over HTTP and gRPC. Each version multiplies
by its own number, so that an answer shows which version gave it. Lost is a request without an
answer, with an error, or with another answer than that of the version it names.
"""

import argparse
import json
import shutil
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import tritonclient.grpc as triton

from tests.serve.served_here import TOKEN, Served, serving
from tests.serve.test_model_repository import answer, free_port, model, until

HTTP_CONNECTIONS, GRPC_CONNECTIONS = 6, 2


class Load:
    """Clients that ask until so many requests were sent."""

    def __init__(self, url: str, grpc_address: str, count: int) -> None:
        self.host, self.port = url.removeprefix("http://").split(":")
        self.grpc_address = grpc_address
        self.left, self.lock = count, threading.Lock()
        self.seconds: list[float] = []
        self.lost: list[str] = []
        asks = [self.ask_http] * HTTP_CONNECTIONS + [self.ask_grpc] * GRPC_CONNECTIONS
        self.threads = [threading.Thread(target=each) for each in asks]
        for each in self.threads:
            each.start()

    def turn(self) -> bool:
        with self.lock:
            self.left -= 1
            return self.left >= 0

    def note(self, start: float, version: str, found: float) -> None:
        self.seconds.append(time.perf_counter() - start)
        if found != int(version):
            self.lost.append(f"version {version} answered {found}")

    def ask_http(self) -> None:
        tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
        body = json.dumps({"inputs": [tensor]}).encode()
        head = f"POST /v2/models/net/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        connection = socket.create_connection((self.host, int(self.port)), timeout=60)
        while self.turn():
            start, received = time.perf_counter(), b""
            try:
                connection.sendall(request)
                while b"\r\n\r\n" not in received or len(received) < self.end(received):
                    part = connection.recv(65536)
                    if not part:
                        raise ConnectionError("closed without an answer")
                    received += part
            except OSError as error:
                self.lost.append(repr(error))
                connection = socket.create_connection((self.host, int(self.port)), timeout=60)
                continue
            if not received.startswith(b"HTTP/1.1 200 "):
                self.lost.append(received.decode())
                continue
            content = json.loads(received.partition(b"\r\n\r\n")[2])
            self.note(start, content["model_version"], content["outputs"][0]["data"][0])
        connection.close()

    @staticmethod
    def end(received: bytes) -> int:
        head, _, _ = received.partition(b"\r\n\r\n")
        return len(head) + 4 + int(head.lower().partition(b"content-length:")[2].split()[0])

    def ask_grpc(self) -> None:
        given = triton.InferInput("x", [1, 4], "FP32")
        given.set_data_from_numpy(np.array([[1, 2, 3, 4]], np.float32))
        with triton.InferenceServerClient(self.grpc_address) as client:
            while self.turn():
                start = time.perf_counter()
                try:
                    metadata = {"authorization": f"Bearer {TOKEN}"}
                    found = client.infer("net", [given], headers=metadata, client_timeout=60)
                except triton.InferenceServerException as error:
                    self.lost.append(str(error))
                    continue
                version = found.get_response().model_version
                self.note(start, version, float(found.as_numpy("y")[0, 0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--replacements", type=int, default=20)
    parser.add_argument("--rollbacks", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        watched, port = Path(folder, "watched"), free_port()
        model(watched / "net" / "1", 1)
        with serving(f"--watch={watched}", "--grpc-port", str(port)) as server:
            measure(server, f"127.0.0.1:{port}", watched / "net", options)


def measure(server: Served, grpc_address: str, net: Path, options: argparse.Namespace) -> None:
    process = psutil.Process(server.process.pid)
    before, start = process.memory_info().rss, time.perf_counter()
    load = Load(server.url, grpc_address, options.requests)
    steps = options.replacements + options.rollbacks
    version, present, waits = 1, [1], []
    for step in range(1, steps + 1):
        # At even distances of the load, also where that is slow.
        until_sent = options.requests * step // (steps + 1)
        while options.requests - load.left < until_sent:
            time.sleep(0.01)
        asked = time.perf_counter()
        if step * options.rollbacks // steps > (step - 1) * options.rollbacks // steps:
            shutil.rmtree(net / str(present.pop()))
        else:
            version += 1
            present.append(version)
            model(net.parent.parent / str(version), version).rename(net / str(version))
        until(lambda: answer(server, "net")[1] == str(present[-1]))
        waits.append(time.perf_counter() - asked)
    for each in load.threads:
        each.join()
    seconds = time.perf_counter() - start
    ordered = sorted(load.seconds)
    share = {f"p{p}": ordered[int(len(ordered) * p / 100)] * 1e3 for p in (50, 99)}
    print(
        f"{len(load.lost)} of {options.requests} requests lost through {options.replacements} "
        f"replacements and {options.rollbacks} rollbacks in {seconds:.0f} s; "
        f"{options.requests / seconds:.0f} requests/s; "
        f"p50 {share['p50']:.1f} ms, p99 {share['p99']:.1f} ms, "
        f"longest {ordered[-1] * 1e3:.0f} ms; "
        f"a change answered after {statistics.median(waits):.1f} s (longest {max(waits):.1f} s); "
        f"memory {before / 2**20:.0f} to {process.memory_info().rss / 2**20:.0f} MiB"
    )
    for each in load.lost[:5]:
        print(each)


if __name__ == "__main__":
    main()
