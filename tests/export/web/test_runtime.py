"""ONNX files in a real browser: headless Chromium, with onnxruntime-web from npm."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

import pytest

from compress import (
    ConvertPrecision,
    Parity,
    QuantizeDynamic,
    QuantizeStatic,
    QuantizeWeights,
    Stage,
)
from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed
from compress.core.context import Context
from compress.core.devices import devices
from compress.export import ExportOnnx, OnnxModel
from compress.export.onnx.first_difference import first_difference
from compress.export.web.device import CHROMIUM, Page
from compress.export.web.page import ONNXRUNTIME_WEB, SCRIPT, WASM
from tests.export.builders import IMAGE_AND_CONTEXT, TOKENS, images, network, samples

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM.missing(), reason=f"no {CHROMIUM.what}: {CHROMIUM.install}"),
]
needs_package = pytest.mark.skipif(
    ONNXRUNTIME_WEB.missing(), reason=f"no onnxruntime-web: {ONNXRUNTIME_WEB.install}"
)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    return Context(root=tmp_path_factory.mktemp("web"), data=samples(images(64)))


@pytest.fixture(scope="module")
def mobilenet(context: Context) -> EagerModel:
    return network(context.root / "mobilenet", "networks:mobilenet")


def exported(model: EagerModel, context: Context, stage: Stage | None = None) -> OnnxModel:
    folder = context.root / (stage.stage if stage else "float")
    graph = stage.run_checked(model, context.with_root(folder / "graph")) if stage else model
    return ExportOnnx().run_checked(graph, context.with_root(folder / "onnx"))


@pytest.fixture(scope="module")
def file(mobilenet: EagerModel, context: Context) -> OnnxModel:
    return exported(mobilenet, context)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the name of onnxruntime-web and of its files, and a page that does nothing."""
    (tmp_path / "package.json").write_text('{"name": "onnxruntime-web", "version": "1"}')
    (tmp_path / "dist").mkdir()
    for name in (SCRIPT, WASM):
        (tmp_path / "dist" / name).touch()
    (tmp_path / "page.js").write_text("new Promise(() => {})")
    monkeypatch.setenv(ONNXRUNTIME_WEB.variable, str(tmp_path))


@needs_package
def test_a_file_answers_in_the_browser_as_here(file: OnnxModel, context: Context) -> None:
    verdict = Parity(atol=1e-6, on="web").evaluate(file, file, context)
    assert (verdict.passed, verdict.reason, verdict.on) == (True, "", "web")


@needs_package
@pytest.mark.parametrize(
    ("stage", "operator"),
    [
        (QuantizeStatic(calibration_samples=64), "QuantizeLinear"),
        (QuantizeDynamic(), "DynamicQuantizeLinear"),
        (QuantizeWeights(activation_bits=32), "MatMulNBits"),
        (ConvertPrecision(dtype="float16"), "Cast"),
    ],
    ids=lambda value: value.stage if isinstance(value, Stage) else value,
)
def test_quantized_files_answer_in_the_browser_as_here(
    mobilenet: EagerModel, context: Context, stage: Stage, operator: str
) -> None:
    file = exported(mobilenet, context, stage)
    assert operator in file.manifest.facts["operators"]
    verdict = Parity(atol=1e-6, on="web").evaluate(file, file, context)
    assert (verdict.passed, verdict.reason) == (True, "")


@needs_package
def test_inputs_of_several_types_and_shapes(tmp_path: Path) -> None:
    for factory, signature in (
        ("networks:two_inputs", IMAGE_AND_CONTEXT),
        ("networks:sequence", TOKENS),
    ):
        context = Context(root=tmp_path / factory.partition(":")[2])
        file = exported(network(context.root / "model", factory, signature), context)
        verdict = Parity(atol=1e-6, on="web").evaluate(file, file, context)
        assert (verdict.passed, verdict.reason) == (True, "")


@needs_package
def test_other_answers_are_refused(
    file: OnnxModel, mobilenet: EagerModel, context: Context
) -> None:
    int8 = exported(mobilenet, context, QuantizeStatic(calibration_samples=64))
    verdict = Parity(atol=1e-6, on="web").evaluate(int8, file, context)
    assert not verdict.passed
    here = Parity(atol=1e-6).evaluate(int8, file, context)
    assert verdict.value == pytest.approx(here.value, abs=1e-5)


@needs_package
def test_what_the_browser_cannot_open_is_an_error_that_leaves_it_open(
    file: OnnxModel, tmp_path: Path
) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no model")
    browser = devices()["web"]
    with (
        pytest.raises(StageFailed, match=r"does not run on web .*protobuf parsing failed"),
        browser.open_files([tmp_path / "model.onnx"], 1),
    ):
        pass
    with browser.open(file, 1) as predict:
        assert predict(images(2))[0].shape[0] == 2
    # Layers are compared by a graph with its weights in a file beside it.
    found = first_difference(file.payload_path, browser, (images(2),), 1)
    assert found.startswith("none alone: ") or "products are added in another order" in found


def test_a_page_that_answers_nothing_is_given_up(tmp_path: Path, package: None) -> None:
    page = Page(tmp_path / "page.js")
    with pytest.raises(StageFailed, match=r"was ended by SIGKILL.* or took over 1 s"):
        page.exchange(b"frame", 1)
    page.close()
    assert page.process.poll() is not None


def test_an_incomplete_package_is_an_error_at_once(tmp_path: Path, package: None) -> None:
    (tmp_path / "dist" / WASM).unlink()
    with pytest.raises(FileNotFoundError, match=WASM):
        Page(tmp_path / "page.js")


def test_chromium_ends_with_a_killed_process(tmp_path: Path, package: None) -> None:
    code = (
        "import os, sys; from pathlib import Path; from compress.export.web.device import Page; "
        "page = Page(Path(sys.argv[1])); print(page.process.pid, flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "page.js")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": gettempdir()},  # Chromium's sockets have paths of 108 bytes
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())

    def commands() -> list[bytes]:
        """Return the command lines of the browser's session."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ProcessLookupError):
                if os.getsid(int(folder.name)) == pid:
                    found.append((folder / "cmdline").read_bytes())
        return found

    deadline = time.monotonic() + 150
    while len(commands()) < 4 and time.monotonic() < deadline:  # with the page's own process
        time.sleep(0.1)
    assert len(commands()) >= 4
    owner.kill()
    owner.communicate()
    while any(commands()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(commands())


def test_a_browser_that_ends_is_an_error(
    tmp_path: Path, package: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / CHROMIUM.what
    program.write_text("#!/bin/sh\necho cannot start\nexit 7\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    page = Page(tmp_path / "page.js")
    with pytest.raises(StageFailed, match=r"ended with exit code 7, .*cannot start"):
        page.exchange(b"frame", 60)
    page.close()
