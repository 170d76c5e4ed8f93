"""What can go wrong with a real TorchServe: every request is answered, and the server stays up.

One server for all of them, with the model of served_here.py. What clients get wrong is the table
that the built-in server is asked too.
"""

import contextlib
import http.client
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import TensorDataset

from compress.common.errors import StageFailed
from compress.core.context import Context
from compress.data.splits import Splits
from compress.serve.client.client import Client, OpenInference
from compress.serve.torchserve.artifact import TorchServeArchive
from compress.serve.torchserve.mar_file import read_mar, write_mar
from compress.serve.torchserve.process import TorchServe
from compress.serve.torchserve.stage import PackageTorchServe
from compress.serve.worker.wire import JSON, NPZ, from_npz, to_npz
from tests.serve.mistakes import GOOD, MISTAKES
from tests.serve.served_here import sealed

pytestmark = pytest.mark.torchserve

QUEUE = 4
DEADLINE = 4
"""Seconds for one call of the model."""
PATIENCE = 60
"""Seconds within which every request must be answered; a client that waits longer fails."""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> TorchServeArchive:
    folder = tmp_path_factory.mktemp("faults")
    model = sealed(folder / "model")
    stage = PackageTorchServe(
        batch_size=4,
        max_batch_delay_ms=50,
        queue_size=QUEUE,
        max_rows=16,
        response_seconds=DEADLINE,
    )
    rows = torch.rand(16, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [0, 1, 1, 1]
    )
    data = Splits({"val": TensorDataset(rows)})
    archive = stage.run(model, Context(root=folder / "mar", data=data))
    assert "warnings" not in archive.manifest.facts  # requests are joined
    return archive


@pytest.fixture(scope="module")
def running(archive: TorchServeArchive) -> Iterator[TorchServe]:
    with TorchServe(archive.payload_path) as server:
        yield server


@pytest.fixture
def server(running: TorchServe) -> Iterator[TorchServe]:
    """Give the server, and see that it answers rightly after a test."""
    yield running
    assert right(running)


def ask(
    server: TorchServe, body: bytes, headers: dict[str, str] | None = None, **more: str
) -> tuple[int, dict[str, Any] | bytes]:
    """Send a request, by default npz both ways; return the response's status and content."""
    place = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(place, timeout=PATIENCE)
    sent = {"Authorization": f"Bearer {server.token}"} | more
    sent |= {"Content-Type": NPZ, "Accept": NPZ} if headers is None else headers
    with contextlib.closing(connection):
        connection.request("POST", "/predictions/model", body, {k: v for k, v in sent.items() if v})
        response = connection.getresponse()
        content = response.read()
    return response.status, content if response.status == 200 else json.loads(content or b"{}")


def npz(*row: float) -> bytes:
    return to_npz({"x": np.array([row], np.float32)})


def right(server: TorchServe, value: float = 4.0) -> bool:
    """Return whether a request is answered rightly, wrong answers being an error."""
    status, content = ask(server, npz(0, 3, value, 8))
    if status == 200:
        assert isinstance(content, bytes)
        answer = from_npz(content)
        assert (answer["double"].tolist(), answer["looked"]) == ([[0, 6, 2 * value, 16]], [3])
    return status == 200


GOOD_BODY = npz(*GOOD)


@pytest.mark.slow
def test_each_request_of_a_batch_gets_its_own_status(
    server: TorchServe,
) -> None:
    with ThreadPoolExecutor(4) as pool:
        for case, (body, headers, expected, words) in MISTAKES.items():
            bad = pool.submit(ask, server, body, {"Content-Type": JSON} | headers)
            good = pool.submit(right, server)
            status, content = bad.result()
            assert isinstance(content, dict)
            missing = [word for word in words if word not in content["message"]]
            assert (case, status, missing) == (case, expected, []), content
            assert good.result()


@pytest.mark.slow
def test_infinity_out_is_answered_losslessly(server: TorchServe) -> None:
    status, content = ask(server, npz(0, 3, 3e38, 0))
    assert status == 200 and isinstance(content, bytes)
    assert np.isinf(from_npz(content)["double"][0, 2])


@pytest.mark.slow
def test_the_protocols_binary_tensors_work_both_ways(server: TorchServe) -> None:
    """By its binary extension, as Triton's clients send them."""
    form = OpenInference()
    body, headers = form.request({"x": np.array([GOOD], np.float32)})
    place = server.url.removeprefix("http://")
    with contextlib.closing(http.client.HTTPConnection(place, timeout=PATIENCE)) as connection:
        headers["Authorization"] = f"Bearer {server.token}"
        connection.request("POST", "/predictions/model", body, headers)
        response = connection.getresponse()
        answer = form.outputs(response.read(), response.headers)  # type: ignore[arg-type]  # get
    assert answer["double"].tolist() == [[2 * value for value in GOOD]]


@pytest.mark.slow
def test_a_body_over_the_limit_is_refused_before_it_is_sent(server: TorchServe) -> None:
    status, _ = ask(server, GOOD_BODY, **{"Content-Length": str(300 * 1024**2)})
    assert status == 413


@pytest.mark.slow
def test_without_the_key_nothing_is_answered(server: TorchServe) -> None:
    for key in ("", "Bearer ", "Bearer wrong", f"Basic {server.token}"):
        status, content = ask(server, GOOD_BODY, Authorization=key)
        assert (key, status) == (key, 400) and isinstance(content, dict)


@pytest.mark.slow
def test_a_full_queue_refuses_at_once_and_answers_the_rest(server: TorchServe) -> None:
    """One call takes about a second; four are joined, four wait, and the others get 503."""
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask, server, npz(1500, 3, 1, 1)) for _ in range(16)]
        statuses = [each.result()[0] for each in asked]
    assert set(statuses) == {200, 503}, statuses


def worker_of(server: TorchServe) -> psutil.Process:
    (java,) = [p for p in psutil.process_iter(["cmdline"]) if _is_java(p, server)]
    (worker,) = [p for p in java.children() if "model_service_worker" in " ".join(p.cmdline())]
    return worker


def _is_java(process: psutil.Process, server: TorchServe) -> bool:
    command = process.info["cmdline"] or [""]
    return Path(command[0]).name == "java" and str(server.folder) in " ".join(command)


def recovered(server: TorchServe) -> float:
    """Return the seconds until the server answers again; it may lose what it is asked before."""
    began = time.monotonic()
    while time.monotonic() - began < 2 * PATIENCE:
        with contextlib.suppress(TimeoutError):
            if right(server):
                return time.monotonic() - began
        time.sleep(0.1)
    pytest.fail("the server does not answer again")


@pytest.mark.slow
def test_a_full_disk_for_logs_does_not_end_the_answers(server: TorchServe) -> None:
    """No log can grow by a byte, in Java and in the worker; bad requests want to be logged."""
    worker = worker_of(server)
    processes = (worker, worker.parent())
    limits = [each.rlimit(resource.RLIMIT_FSIZE) for each in processes if each]
    for each in processes:
        assert each is not None
        each.rlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    try:
        for _ in range(20):
            assert ask(server, npz(0, 3, 0, 3e38))[0] == 422
            assert right(server)
    finally:
        for each, limit in zip(processes, limits, strict=True):
            assert each is not None
            each.rlimit(resource.RLIMIT_FSIZE, limit)


@pytest.mark.slow
def test_a_model_past_its_deadline_is_ended_and_the_server_recovers(server: TorchServe) -> None:
    began = time.monotonic()
    status, _ = ask(server, npz(600_000, 3, 1, 1))
    print(f"refused with {status} after {time.monotonic() - began:.1f} s, ", end="")
    assert status in (500, 503, 507)
    print(f"answering again {recovered(server):.1f} s later")


@pytest.mark.slow
def test_a_worker_killed_under_load_answers_nothing_wrongly(server: TorchServe) -> None:
    """Each client waits for its answer before it asks again; so few never fill the queue."""
    ended = threading.Event()

    def load(client: int) -> list[tuple[float, int]]:
        answered = []
        while not ended.is_set():
            asked = time.monotonic()
            try:
                status = 200 if right(server, 3.0 + client + len(answered)) else 500
            except TimeoutError:
                status = 0  # TorchServe loses requests that wait in its batch window
            answered.append((asked, status))
        return answered

    worker = worker_of(server)
    with ThreadPoolExecutor(QUEUE) as pool:
        clients = [pool.submit(load, client) for client in range(QUEUE)]
        try:
            time.sleep(0.5)
            killed = time.monotonic()
            worker.kill()
            seconds = recovered(server)
            answers_again = time.monotonic()
            time.sleep(0.5)
        finally:
            ended.set()
        answers = [each for client in clients for each in client.result()]
    refused = sum(status != 200 for _, status in answers)
    print(f"answering again {seconds:.1f} s after the kill; {refused} of {len(answers)} refused")
    assert {status for asked, status in answers if asked > answers_again} == {200}
    assert 200 in {status for asked, status in answers if asked < killed}


@pytest.mark.slow
def test_a_killed_server_is_reported_and_another_answers_the_same(
    archive: TorchServeArchive, server: TorchServe
) -> None:
    x = np.array([GOOD], np.float32)

    def connected(to: TorchServe) -> Client:
        return Client(to.url, to.model_name, archive.signature, token=to.token)

    with TorchServe(archive.payload_path) as other, connected(other) as client:
        before = client.predict([x])[0]
        java = worker_of(other).parent()
        assert java is not None
        os.kill(java.pid, signal.SIGKILL)
        with pytest.raises(StageFailed, match="/predictions/model: "):
            client.predict([x])
    with connected(server) as client:
        np.testing.assert_array_equal(before, client.predict([x])[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "member",
    [
        pytest.param("model-config.yaml", marks=pytest.mark.soak),  # which Java reads
        "model.onnx",  # which the handler reads
        pytest.param("handler.py", marks=pytest.mark.soak),
        pytest.param("provenance.json", marks=pytest.mark.soak),
    ],
)
def test_an_archive_with_a_corrupt_member_is_never_ready(
    archive: TorchServeArchive, tmp_path: Path, member: str
) -> None:
    """These are read each in its own way; the others are only hashed."""
    members = read_mar(archive.payload_path)
    assert member in members
    write_mar(tmp_path / "x.mar", members | {member: members[member][:-9] + b"\0garbage\0"})
    with (
        pytest.raises(StageFailed, match=r"was not loaded|not every worker|ended while"),
        TorchServe(tmp_path / "x.mar", startup_seconds=12),
    ):
        pass
