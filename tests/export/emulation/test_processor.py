"""Gates `on` a device: refusals, and real emulated processors where they are prepared."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from compress import LabelAgreement, MaxLatency, Parity, QuantizeStatic, QuantizeWeights
from compress.artifacts.artifact import Artifact
from compress.common.errors import GateRefused, PipelineInvalid, StageFailed, Unavailable
from compress.common.forward import Predictor
from compress.core.context import Context
from compress.core.devices import Device, OnDevice, devices
from compress.core.gates.gate import Gate
from compress.core.verdict import explain
from compress.export import ExportOnnx, OnnxModel
from compress.export.common import remote_session
from compress.export.common.remote_device import FarEnd, RemoteDevice
from compress.export.emulation.processor import PROCESSORS, START
from compress.export.onnx.first_difference import first_difference
from compress.pipelines import Pipeline
from compress.pipelines.planning.planner import build_plan
from compress.pipelines.results.schema import DeviceReport
from tests.export.builders import NETWORKS, images, network, samples
from tests.forking import Commands

PIPELINE = """
version: 1
code: {code}
model: {{factory: "networks:mlp", inputs: [{{name: image, shape: [batch, 1, 8, 8]}}]}}
stages:
  - {{stage: {stage}, name: file, gates: [{gate}]}}
"""


class Here(Device):
    """A device in this process, whose answers are off by a number."""

    name, title, kinds, requirements = "here", "here (a test)", frozenset({"onnx"}), ()

    def __init__(self, off: float = 0.0) -> None:
        self.off, self.opened = off, 0

    @property
    def version(self) -> str:
        return str(self.off)

    @contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Predictor]:
        self.opened += 1
        with artifact.open("cpu", threads) as predict:
            yield lambda *inputs: tuple(y + self.off for y in predict(*inputs))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    device = Here()
    monkeypatch.setitem(devices(), "here", device)
    return device


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    return Context(root=tmp_path_factory.mktemp("devices"), data=samples(images(32)))


@pytest.fixture(scope="module")
def file(context: Context) -> OnnxModel:
    source = network(context.root / "source", "networks:mlp")
    return ExportOnnx().run_checked(source, context.with_root(context.root / "onnx"))


def plan(folder: Path, gate: str, stage: str = "export_onnx") -> None:
    file = folder / "p.yaml"
    file.write_text(PIPELINE.format(code=NETWORKS, stage=stage, gate=gate))
    build_plan(Pipeline.from_yaml(file))


@pytest.mark.parametrize(
    ("gate", "stage", "problem"),
    [
        (
            "{gate: runs_in, runtime: web, atol: 1}",
            "export_onnx",
            r"write \{gate: parity, .*on: web",
        ),
        (
            "{gate: parity, atol: 1, on: cortex}",
            "export_onnx",
            r"\(parity\): there is no device 'cor",
        ),
        ("{gate: parity, atol: 1, on: 3}", "export_onnx", "on: expected"),
        ("{gate: max_latency, p95_ms: 1, on: web}", "export_onnx", "on: takes gates that judge"),
        ("{gate: max_memory, mebibytes: 9, on: cortex-a53}", "export_onnx", "on: takes gates"),
        (
            "{gate: parity, atol: 1, on: web}",
            "export_torchscript",
            "web opens onnx, found torchscr",
        ),
        (
            "{gate: parity, atol: 1, against: file}",
            "export_onnx",
            "no earlier stage is named 'file'",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_before_a_run(
    tmp_path: Path, gate: str, stage: str, problem: str
) -> None:
    with pytest.raises(PipelineInvalid, match=problem):
        plan(tmp_path, gate, stage)


def test_a_device_that_is_not_prepared_is_exit_4_with_the_command(
    tmp_path: Path, file: OnnxModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gate = "{gate: label_agreement, minimum: 0.9, against: file, on: [cortex-a72, web]}"
    with pytest.raises(
        Unavailable, match=r"needs cortex-a72 in .*; compress devices --prepare cor"
    ):
        plan(tmp_path, gate)
    there = OnDevice(file, PROCESSORS["neoverse-n1"])
    with pytest.raises(Unavailable, match=r"on neoverse-n1: needs .*--prepare neoverse-n1"):
        there.open()(images(1))


def test_each_device_has_a_verdict_and_is_compared_with_the_file_here(
    file: OnnxModel, context: Context, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(devices(), "off", other := Here(0.5))
    gates = (Parity(atol=0.1, on=["here", "off"]), LabelAgreement(on="here"))
    stage = ExportOnnx(gates=gates)
    verdicts = stage.judge(file, file, context)
    assert [(v.on, v.passed, v.value) for v in verdicts] == [
        ("here", True, 0.0),
        ("off", False, pytest.approx(0.5, abs=1e-6)),
        ("here", True, 1.0),
    ]
    assert explain(verdicts[1]) == "parity on off: max |difference| <= 0.1, found 0.5"
    assert (here.opened, other.opened) == (1, 1)  # answers are kept for the next gate
    own = Parity(atol=0.1, against="export_onnx", on="off")
    (verdict,) = ExportOnnx(gates=(own,)).judge(file, file, context)
    assert verdict.value == pytest.approx(0.5, abs=1e-6)
    assert gates[0].measurement_key() == {"gate": "parity", "on here": "0.0", "on off": "0.5"}
    assert Parity(atol=1).measurement_key() == {"gate": "parity"}  # as before devices were
    # Asked as one, the first device that refuses decides, wherever it stands.
    verdict = Parity(atol=0.1, on=["off", "here"]).evaluate(file, file, context)
    assert (verdict.on, verdict.passed) == ("off", False)


@pytest.mark.parametrize("gate", [MaxLatency(p95_ms=1, on="here"), Parity(atol=1, on="here")])
def test_what_a_device_cannot_measure_is_refused_without_a_plan(
    gate: Gate, file: OnnxModel, context: Context, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Here, "kinds", frozenset({"aot"}))
    verdict = gate.evaluate(file, file, context)
    assert not verdict.passed
    assert "on: takes gates" in verdict.reason or verdict.reason == "here opens aot, found onnx"
    assert here.opened == 0


def test_frames_keep_arrays() -> None:
    arrays = [np.array(3, "int64"), np.zeros((0, 2), "bool"), np.eye(3, dtype="float16").T]
    header, found = remote_session.unpack(remote_session.pack({"do": "run"}, arrays))
    assert header == {"do": "run"}
    for array, same in zip(arrays, found, strict=True):
        assert (array.dtype, array.shape) == (same.dtype, same.shape)
        assert np.array_equal(array, same)


class Native(RemoteDevice):
    """The far end on this processor, without an emulator."""

    name, title, requirements, version = "native", "native (a test)", (), ""
    arguments = START

    def start(self) -> FarEnd:
        return FarEnd(self.title, [sys.executable, *self.arguments], env={})


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[Native]:
    device = Native()
    monkeypatch.setitem(devices(), "native", device)
    yield device
    device.close()


def test_one_process_answers_for_all_files_and_errors_leave_it(
    file: OnnxModel, context: Context, native: Native, tmp_path: Path
) -> None:
    assert Parity(atol=0, on="native").evaluate(file, file, context).passed
    kept = native._far_end
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with (
        pytest.raises(StageFailed, match=r"does not run on native \(a test\): .*[Pp]rotobuf"),
        native.open_files([tmp_path / "model.onnx"], 1),
    ):
        pass
    assert first_difference(file.payload_path, native, (images(4),), 1).startswith("none alone: ")
    assert native._far_end is kept


class Broken(Native):
    """A device that fails, and answers with another number once it is repaired."""

    is_broken = True

    @contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Predictor]:
        if self.is_broken:
            raise StageFailed("the device is broken")
        with super().open(artifact, threads) as predict:
            yield lambda *inputs: tuple(y + 0.5 for y in predict(*inputs))


def test_the_report_says_why_nothing_was_compared_and_the_next_run_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(devices(), "native", device := Broken())
    gate = "{gate: parity, atol: 1, on: native}"
    text = PIPELINE.format(code=NETWORKS, stage="export_onnx", gate=gate)
    (tmp_path / "p.yaml").write_text(text.replace("batch, 1", "4, 1"))  # always four rows
    pipeline = Pipeline.from_yaml(tmp_path / "p.yaml")
    with pytest.raises(GateRefused, match="the device is broken"):
        pipeline.run(tmp_path / "run", judge="quick")
    page = (tmp_path / "run/report.html").read_text()
    assert '<td class="wrap">the device is broken</td>' in page
    device.is_broken = False
    (row,) = pipeline.run(tmp_path / "run", judge="quick").stages[-1].devices
    device.close()
    assert row.problem == ""
    assert row.largest_difference == pytest.approx(0.5, abs=1e-6)
    assert row.first_difference.startswith("none alone: ")


def test_a_process_that_ends_or_is_late_is_an_error(
    file: OnnxModel, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "arguments", ("-c", "import sys; sys.exit('cannot start')"))
    with pytest.raises(StageFailed, match=r"ended with exit code 1, .*cannot start"):
        native.open(file, 1).__enter__()
    monkeypatch.setattr(native, "arguments", ("-c", "import time; time.sleep(600)"))
    monkeypatch.setattr("compress.export.common.remote_device.DEADLINE_S", 0.5)
    begin = time.monotonic()
    with pytest.raises(StageFailed, match=r"was ended by SIGKILL.*, or took over 0\.5 s"):
        native.open(file, 1).__enter__()
    assert time.monotonic() - begin < 60


def test_an_interrupted_call_leaves_neither_process_nor_timer(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = native.start()
    monkeypatch.setattr(native, "start", lambda: process)

    def interrupt(frame: bytes) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "answer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        native._ask({"do": "run", "session": ""}, [])
    assert process.process.returncode is not None
    for timer in (t for t in threading.enumerate() if isinstance(t, threading.Timer)):
        timer.join(10)
        assert not timer.is_alive()


def test_what_a_library_prints_is_no_frame(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = START[1].replace("remote_session.serve()", "remote_session.unpack = loud; {}")
    loud = "import os; loud = lambda frame: os.write(1, b'printed') and {}; "
    serve = loud + serve.format("remote_session.serve()")
    monkeypatch.setattr(native, "arguments", ("-c", serve, *START[2:]))
    with pytest.raises(StageFailed, match=r"does not run on native \(a test\): TypeError"):
        native._ask({"do": "run", "session": ""}, [])


def test_the_command_lists_devices_and_refuses_unknown_ones(
    tmp_path: Path, commands: Commands
) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path)}
    run = partial(commands.call, cwd=tmp_path, environment=environment)

    listed = json.loads(run("devices", "--json").stdout)
    assert set(listed) == {*PROCESSORS, "web"}
    assert "compress devices --prepare x86-64-v3" in listed["x86-64-v3"]["missing"][0]
    assert (unknown := run("devices", "--prepare", "m4")).returncode == 2
    assert "there is no device 'm4'; known: cortex-a53" in unknown.stderr
    assert (without := run("devices", "--prepare", "cortex-a53")).returncode == 4
    assert "needs apt-get, which is not here" in without.stderr
    assert (web := run("devices", "--prepare", "web")).returncode == 4
    assert "npm install onnxruntime-web" in web.stderr


def test_no_package_takes_the_name_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"own": {"web": Here()}, "theirs": {"web": Here()}}
    monkeypatch.setattr("compress.core.devices.announced", lambda *group: groups)
    with pytest.raises(Unavailable, match="'web': two packages announce this name"):
        devices.__wrapped__()


def test_a_line_of_the_report() -> None:
    row = DeviceReport(
        device="x", equal_labels=0.5, equal_to_baseline=None, largest_difference=0.25,
        first_difference="y (Conv): why",
    )  # fmt: skip
    assert row.line("train") == (
        "on x: 50 % of the labels are those here, largest difference 0.25; first layer that "
        "differs: y (Conv): why"
    )
    row = row.model_copy(
        update={"largest_difference": None, "problem": "does not run", "first_difference": ""}
    )
    assert row.line("train") == "on x: 50 % of the labels are those here, does not run"


CACHE = str(Path.home() / ".cache")
"""The user's, where devices are prepared; tests have one of their own."""


def prepared(*names: str) -> pytest.MarkDecorator:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", CACHE)
        missing = [name for name in names if PROCESSORS[name].requirements[0].missing()]
    why = f"not prepared: compress devices --prepare {' --prepare '.join(missing)}"
    return pytest.mark.skipif(bool(missing), reason=why)


@pytest.mark.slow
@prepared("cortex-a53", "x86-64-v3")
def test_faults_of_other_processors_are_caught_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers that are cut off without VNNI; floats and other processors pass."""
    monkeypatch.setenv("XDG_CACHE_HOME", CACHE)
    torch.manual_seed(0)
    context = Context(root=tmp_path, data=samples(torch.rand(64, 1, 8, 8) * 16))
    source = network(tmp_path / "source", "networks:mlp")

    def exported(name: str, *stages: QuantizeStatic | QuantizeWeights) -> OnnxModel:
        model = source
        for stage in stages:
            model = stage.run_checked(model, context.with_root(tmp_path / name / stage.stage))
        return ExportOnnx().run_checked(model, context.with_root(tmp_path / name / "onnx"))

    control = exported("float")
    int8 = exported("int8", QuantizeStatic(calibration_samples=64))
    for device in ("cortex-a53", "x86-64-v3"):
        assert Parity(atol=1e-4, on=device).evaluate(control, control, context).passed
    inputs = next(context.comparison_inputs(int8.signature))
    assert Parity(atol=1e-4, on="cortex-a53").evaluate(int8, int8, context).passed
    refused = Parity(atol=1e-4, on="x86-64-v3").evaluate(int8, int8, context)
    assert refused.value is not None and not refused.passed
    why = first_difference(int8.payload_path, devices()["x86-64-v3"], inputs, 1)  # type: ignore[arg-type]
    assert "quantization steps apart: sums of 8-bit products are cut off" in why
