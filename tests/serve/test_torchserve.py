"""The real TorchServe: started, asked, damaged, and nothing of it left."""

import http.client
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from compress.artifacts.artifact import Artifact
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import StageFailed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import LabelAgreement, MaxLatency, Parity
from compress.data.splits import DataReference
from compress.export.onnx.stage import ExportOnnx
from compress.export.torchscript.stage import ExportTorchScript
from compress.serve.client.client import Client
from compress.serve.packaging.provenance import digest_of
from compress.serve.packaging.request_forms import ImageInput
from compress.serve.torchserve.artifact import TorchServeArchive
from compress.serve.torchserve.mar_file import read_mar, write_mar
from compress.serve.torchserve.process import (
    TorchServe,
    free_ports,
    has_ended,
    kill_group,
    log_tail,
)
from compress.serve.torchserve.stage import PackageTorchServe
from compress.serve.worker.wire import NPZ, from_npz, to_npz
from tests.pipelines.conftest import measured_briefly
from tests.serve.served_here import TOKEN, serving

pytestmark = pytest.mark.torchserve

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits"


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    data = DataReference("data:digits", {}, DIGITS, 120).load()
    return Context(root=tmp_path_factory.mktemp("serve") / "source", data=data)


@pytest.fixture(scope="module")
def source(context: Context) -> Artifact:
    signature = Signature(
        inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),),
        outputs=(OutputSpec(name="logits"),),
    )
    recipe = Recipe(factory="models:ResNet", arguments={"blocks": 1, "width": 4, "classes": 10})
    return import_checkpoint(context.root, recipe, signature, checkpoint=None, folder=DIGITS)


@pytest.fixture(scope="module")
def exported(source: Any, context: Context) -> Artifact:
    return ExportOnnx().run_checked(source, context.with_root(context.root.with_name("onnx")))


@pytest.fixture(scope="module")
def archive(exported: Any, context: Context) -> TorchServeArchive:
    """Requests are joined up to 8, and one may hold 50 rows."""
    stage = PackageTorchServe(
        batch_size=8,
        max_batch_delay_ms=200,
        max_rows=50,
        class_names=tuple("abcdefghij"),
        image=ImageInput(mean=(0.5,), std=(0.5,)),  # as `val` is scaled: from -1 to 1
    )
    return stage.run(exported, context.with_root(context.root.with_name("mar")))


@pytest.fixture(scope="module")
def server(archive: TorchServeArchive) -> Iterator[TorchServe]:
    with TorchServe(archive.payload_path) as running:
        yield running


@pytest.fixture
def client(server: TorchServe, archive: TorchServeArchive) -> Iterator[Client]:
    signature = archive.signature
    with Client(
        server.url, server.model_name, signature, token=server.token, max_rows=50
    ) as connected:
        yield connected


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return the living processes, Java and workers, that were started for a server's folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or ())
        if str(folder) in command and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def send(
    server: TorchServe, body: bytes, headers: dict[str, str], wait: bool = True
) -> tuple[int, bytes] | http.client.HTTPConnection:
    place = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(place, timeout=120)
    connection.request("POST", "/predictions/model", body, headers)
    return receive(connection) if wait else connection


def receive(connection: http.client.HTTPConnection) -> tuple[int, bytes]:
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer


@pytest.mark.slow
def test_many_rows_are_split_and_answered_as_in_the_process(
    client: Client, exported: Artifact
) -> None:
    images = torch.randn(120, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with exported.open() as predict:
        parts = torch.split(images, 50)
        expected = np.concatenate([predict(part)[0].numpy() for part in parts])
    (got,) = client.predict([images.numpy()])
    assert got.dtype == np.float32 and np.array_equal(got, expected)
    (by_name,) = client.predict({"image": images.numpy()})
    assert np.array_equal(by_name, expected)


def in_form(body: bytes, content_type: str, name: str = "data") -> tuple[bytes, dict[str, str]]:
    """Return a form with a file, as curl -F and the `requests` package send one."""
    head = f'--7f\r\nContent-Disposition: form-data; name="{name}"; filename="a"\r\n'
    parts = f"{head}Content-Type: {content_type}\r\n\r\n".encode(), body, b"\r\n--7f--\r\n"
    return b"".join(parts), {"Content-Type": "multipart/form-data; boundary=7f"}


@pytest.mark.slow
def test_the_built_in_server_answers_torchserves_clients_with_the_same_bytes(
    server: TorchServe, archive: TorchServeArchive
) -> None:
    rows = np.random.default_rng(0).standard_normal((3, 1, 8, 8)).astype(np.float32)
    picture = io.BytesIO()
    Image.fromarray((rows[0, 0] * 40 + 99).astype(np.uint8)).save(picture, "PNG")
    png, npz, npy = picture.getvalue(), to_npz({"image": rows}), io.BytesIO()
    np.save(npy, rows)
    as_json = json.dumps({"inputs": {"image": rows.tolist()}}).encode()
    tensor = {"name": "image", "shape": [3, 1, 8, 8], "datatype": "FP32"}
    # TorchServe's answers of the protocol hold labels unasked, as its handler has always done.
    asked = {"id": "7", "outputs": [{"name": "logits"}]}
    protocol = json.dumps({**asked, "inputs": [{**tensor, "data": rows.ravel().tolist()}]})
    described = {**tensor, "parameters": {"binary_data_size": rows.nbytes}}
    in_bytes = json.dumps({**asked, "inputs": [described]})
    json_type = {"Content-Type": "application/json"}
    length = {"Inference-Header-Content-Length": f"{len(in_bytes)}"}
    cases: list[tuple[bytes, dict[str, str]]] = [
        (as_json, json_type),
        (json.dumps(rows.tolist()).encode(), json_type),
        (npz, {"Content-Type": NPZ, "Accept": NPZ}),
        (npy.getvalue(), {"Content-Type": "application/x-npy", "Accept": NPZ}),
        (rows.tobytes(), {"Content-Type": "application/octet-stream"}),
        (rows.tobytes(), {}),
        (png, {"Content-Type": "image/png"}),
        (protocol.encode(), json_type),
        (in_bytes.encode() + rows.tobytes(), length),
        in_form(png, "image/png"),
        in_form(as_json, "application/json"),
        in_form(as_json, "application/json", "other"),
        (b"", json_type),
        (b"{", json_type),
        (b"x", {"Content-Type": "text/plain"}),
        (rows.tobytes()[1:], {}),
        (json.dumps(rows[:, :, :7].tolist()).encode(), json_type),
        (np.repeat(rows, 20, axis=0).tobytes(), {}),
    ]
    with serving(archive.payload_path) as ours:
        for body, headers in cases:
            token = {"Authorization": f"Bearer {server.token}"}
            expected = send(server, body, headers | token)
            given = {"Content-Type": ""} | headers
            status, _, answer = ours.ask(body, given, "/predictions/model")
            # In the protocol's answers, the built-in server names the version, too.
            answer = answer.replace(b' "model_version": "1",', b"")
            assert (status, answer) == expected, headers
        assert ours.ask(as_json, json_type, "/predictions/model/1.0")[0] == 200
        assert ours.ask(as_json, json_type, "/predictions/model", "PUT")[0] == 200
        missing = ours.ask(as_json, json_type, "/predictions/other")
        found = json.loads(missing[2])
        assert (missing[0], found["type"]) == (404, "ModelNotFoundException")
        signature, most = archive.signature, {"max_rows": 50}
        with (
            Client(server.url, "model", signature, token=server.token, **most) as theirs,
            Client(ours.url, "model", signature, token=TOKEN, **most) as client,
        ):
            images = np.repeat(rows, 40, axis=0)
            assert np.array_equal(client.predict([images]), theirs.predict([images]))


@pytest.mark.slow
def test_bad_requests_are_refused_one_by_one_in_a_joined_batch(
    server: TorchServe, exported: Artifact
) -> None:
    token = {"Authorization": f"Bearer {server.token}"}
    image = np.ones((1, 1, 8, 8), np.float32)
    bad = [(b"[" * 100_000, "application/json"), (b"x", "text/plain"), (b"x", NPZ)]
    good = [(to_npz({"image": image * i}), NPZ) for i in range(3)]
    requests = [request for pair in zip(good, bad, strict=True) for request in pair]
    waiting: Any = [
        send(server, body, {**token, "Content-Type": kind, "Accept": NPZ}, wait=False)
        for body, kind in requests
    ]
    answers = [receive(connection) for connection in waiting]
    assert [status for status, _ in answers] == [200, 400, 200, 415, 200, 400]
    assert all("message" in json.loads(body) for status, body in answers if status != 200)
    with exported.open() as predict:
        for i, (_, body) in enumerate(answers[::2]):
            (expected,) = predict(torch.from_numpy(image * i))
            assert np.allclose(from_npz(body)["logits"], expected.numpy(), atol=1e-5)


@pytest.mark.slow
def test_an_image_is_answered_with_labels_as_its_tensor_is_by_the_protocol(
    server: TorchServe, exported: Artifact
) -> None:
    pixels = np.arange(0, 192, 3, np.uint8).reshape(8, 8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    x = ((pixels / 255 - 0.5) / 0.5).astype(np.float32)
    tensor = {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32"}
    tensor["data"] = x.ravel().tolist()
    token = {"Authorization": f"Bearer {server.token}"}
    asked = json.dumps({"id": "7", "inputs": [tensor]}).encode()
    status, body = send(server, stream.getvalue(), {**token, "Content-Type": "image/png"})
    answered, protocol = send(server, asked, {**token, "Content-Type": "application/json"})
    assert (status, answered) == (200, 200)
    logits, labels, _ = json.loads(protocol)["outputs"]
    with exported.open() as predict:
        (expected,) = predict(torch.from_numpy(x)[None, None])
    assert np.array_equal(np.array(logits["data"], np.float32), expected.numpy()[0])
    assert json.loads(body)["outputs"]["logits"] == [logits["data"]]
    assert labels["data"][0] == "abcdefghij"[int(expected.argmax())]
    assert [each["label"] for each in json.loads(body)["labels"][0]] == labels["data"]


@pytest.mark.slow
def test_too_many_rows_and_a_missing_key_are_refused(server: TorchServe, client: Client) -> None:
    client.max_rows = 51
    with pytest.raises(StageFailed, match="HTTP 413: 51 rows, at most 50"):
        client.predict([np.zeros((51, 1, 8, 8), np.float32)])
    status, _ = send(server, b"", {"Content-Type": NPZ})
    assert status == 400
    client.headers["Authorization"] = "Bearer wrong"
    with pytest.raises(StageFailed, match="HTTP 400"):
        client.predict([np.zeros((1, 1, 8, 8), np.float32)])


@pytest.mark.slow
def test_everything_listens_on_loopback_alone(server: TorchServe) -> None:
    (java,) = [p for p in processes_in(server.folder) if p.name() == "java"]
    listening = [c.laddr.ip for c in java.net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening and {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


def test_a_client_reports_a_refused_connection() -> None:
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 2)),))
    with (
        Client("http://127.0.0.1:9", "model", signature, timeout_seconds=5) as lonely,
        pytest.raises(StageFailed, match="9/predictions/model: ConnectionRefusedError"),
    ):
        lonely.predict([np.zeros((1, 2), np.float32)])


@pytest.mark.slow
def test_torchscript_passes_its_gates_through_one_server(
    source: Any, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ExportTorchScript().run_checked(source, context.with_root(context.root.with_name("ts")))
    started: list[Path] = []
    enter = TorchServe.__enter__

    def counted(server: TorchServe) -> TorchServe:
        enter(server)
        started.append(server.folder)
        return server

    monkeypatch.setattr(TorchServe, "__enter__", counted)
    gates = (LabelAgreement(), Parity(atol=1e-5), MaxLatency(p95_ms=1e-6))
    stage = PackageTorchServe(gates=gates)
    archive = stage.run(model, context.with_root(context.root.with_name("ts-mar")))
    with measured_briefly(), archive.keep_loaded():
        assert not started  # a run that measures nothing starts nothing
        verdicts = stage.judge(model, archive, context)
        running = processes_in(started[0])
        assert [p.environ()["HANDLER_THREADS"] for p in running] == ["1", "1"]
        accuracy = context.score(archive)
    assert [v.passed for v in verdicts] == [True, True, False]
    assert verdicts[2].value is not None
    assert accuracy == context.score(model)
    assert len(started) == 1
    assert not processes_in(started[0]) and not started[0].exists()


@pytest.mark.soak
def test_a_server_that_ends_while_starting_shows_its_log(
    archive: TorchServeArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho starting >&2\necho no memory >&2\nexit 3\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    server = TorchServe(archive.payload_path)
    ended = r"TorchServe ended while starting; its log ends: starting \| no memory$"
    with pytest.raises(StageFailed, match=ended), server:
        pass
    assert not server.folder.exists()


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("taken", [1, 4], ids=["rest", "grpc"])
def test_a_port_taken_by_another_process_is_replaced(
    archive: TorchServeArchive, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices: list[list[int]] = []
    with socket.create_server(("127.0.0.1", 0)) as other:

        def choose(count: int) -> list[int]:
            ports = free_ports(count)
            if not choices:
                ports[taken] = other.getsockname()[1]
            choices.append(ports)
            return ports

        monkeypatch.setattr("compress.serve.torchserve.process.free_ports", choose)
        with TorchServe(archive.payload_path) as server:
            assert server.url == f"http://127.0.0.1:{choices[1][0]}"
    assert len(choices) == 2


def test_the_tail_of_a_log_is_one_short_line() -> None:
    assert log_tail("") == "nothing"
    assert log_tail("a\n\nTraceback (most recent call last):\n  File\nE: b  c\n") == "a | E: b  c"
    assert log_tail("first\n" + "x" * 1000) == "x" * 300
    assert log_tail("\n".join("abcdefghi" for _ in range(99))).count("abcdefghi") == 25


def test_killing_an_ended_process_is_no_error() -> None:
    with subprocess.Popen([sys.executable, "-c", ""], start_new_session=True) as process:
        while not has_ended(process.pid):
            time.sleep(0.01)
        kill_group(process)
        assert process.returncode == 0


@pytest.mark.slow
def test_a_state_with_its_rows_on_the_second_axis_is_not_joined_from_parts(tmp_path: Path) -> None:
    signature = Signature(
        inputs=(TensorSpec(name="x", shape=("batch", 6, 3)),),
        outputs=(OutputSpec(name="y"), OutputSpec(name="state")),
    )
    (tmp_path / "recurrent.py").write_text(
        "from torch import nn\n\nclass Recurrent(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        y = super().forward(x)\n        return y, y[:, -1].unsqueeze(0)\n"
    )
    recipe = Recipe(factory="recurrent:Recurrent", arguments={"in_features": 3, "out_features": 5})
    source = import_checkpoint(
        tmp_path / "source", recipe, signature, checkpoint=None, folder=tmp_path
    )
    model = ExportTorchScript().run_checked(source, Context(root=tmp_path / "ts"))
    stage = PackageTorchServe(max_rows=4, batch_size=8, max_batch_delay_ms=200)
    archive = stage.run(model, Context(root=tmp_path / "mar"))
    x = torch.randn(8, 6, 3)
    with archive.open() as served, model.open() as predict:
        for got, expected in zip(served(x[:4]), predict(x[:4]), strict=True):
            torch.testing.assert_close(got, expected)
        with pytest.raises(StageFailed, match="not lie on axis 0 of every output; raise max_rows"):
            served(x)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["payload", pytest.param("probe", marks=pytest.mark.soak)])
def test_a_damaged_model_is_never_ready_and_leaves_nothing(
    archive: TorchServeArchive, tmp_path: Path, damage: str
) -> None:
    members = read_mar(archive.payload_path)
    probe = from_npz(members["probe.npz"])
    probe["logits"] = probe["logits"] + 1
    changes = {"payload": {"model.onnx": b"garbage"}, "probe": {"probe.npz": to_npz(probe)}}
    words = {"payload": "Protobuf parsing failed", "probe": "does not answer the probe"}[damage]
    members |= changes[damage]
    content = json.loads(members["provenance.json"])
    content["members"] |= {n: digest_of(members[n]).model_dump() for n in changes[damage]}
    members["provenance.json"] = json.dumps(content).encode()  # only the model can tell now
    write_mar(tmp_path / "x.mar", members)
    server = TorchServe(tmp_path / "x.mar", startup_seconds=120)
    with pytest.raises(StageFailed, match=f"the model was not loaded.*{words}") as caught, server:
        pass
    assert "\n" not in str(caught.value) and str(server.folder) not in str(caught.value)
    assert not processes_in(server.folder) and not server.folder.exists()


@pytest.mark.slow
def test_java_of_the_package_serves_and_an_exception_inside_leaves_nothing(
    archive: TorchServeArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # where no Java is
    with pytest.raises(ZeroDivisionError), TorchServe(archive.payload_path) as server:
        command = psutil.Process(server.pid).cmdline()
        assert Path(command[0]).is_relative_to(Path(sys.prefix))
        assert len(processes_in(server.folder)) == 2
        raise ZeroDivisionError
    assert not processes_in(server.folder) and not server.folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGKILL]
)
def test_a_signal_leaves_no_process(archive: TorchServeArchive, number: int) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from compress.serve.torchserve.process import TorchServe\n"
        f"with TorchServe(Path({str(archive.payload_path)!r})) as server:\n"
        "    print(server.folder, flush=True); time.sleep(100)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert len(processes_in(folder)) == 2
        os.kill(process.pid, number)
        process.wait(150)
    deadline = time.monotonic() + 60
    while processes_in(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_in(folder)
    if number == signal.SIGINT:
        assert not folder.exists()
    shutil.rmtree(folder, ignore_errors=True)  # nobody is left to do it after SIGKILL
