"""ONNX files in a real browser: headless Chromium, with onnxruntime-web from npm."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compress import (
    ConvertPrecision,
    QuantizeDynamic,
    QuantizeStatic,
    QuantizeWeights,
    RunsIn,
    Stage,
)
from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed
from compress.common.forward import opened_model
from compress.core.context import Context
from compress.export import ExportOnnx, OnnxModel
from compress.export.web.page import CHROMIUM, ONNXRUNTIME_WEB, run_page
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


@needs_package
def test_a_file_answers_in_the_browser_as_here(
    file: OnnxModel, context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        verdict = RunsIn(atol=1e-6, batch=8).evaluate(file, file, context)
    assert (verdict.passed, verdict.reason) == (True, "")
    assert "a call of 8 takes " in caplog.text


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
    verdict = RunsIn(atol=1e-6, batch=8).evaluate(mobilenet, file, context)
    assert (verdict.passed, verdict.reason) == (True, "")


@needs_package
def test_inputs_of_several_types_and_shapes(tmp_path: Path) -> None:
    for factory, signature in (
        ("networks:two_inputs", IMAGE_AND_CONTEXT),
        ("networks:sequence", TOKENS),
    ):
        context = Context(root=tmp_path / factory.partition(":")[2])
        file = exported(network(context.root / "model", factory, signature), context)
        verdict = RunsIn(atol=1e-6).evaluate(file, file, context)
        assert (verdict.passed, verdict.reason) == (True, "")


class Shifted(OnnxModel):
    """A file whose answers here are others than those of its runtime in a browser."""

    shift = 0.5

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator:
        with super().open(device, threads) as predict:
            yield lambda *inputs: tuple(y + self.shift for y in predict(*inputs))


@needs_package
@pytest.mark.parametrize(("shift", "value"), [(0.5, 0.5), (float("nan"), None)])
def test_other_answers_are_refused(
    file: OnnxModel, context: Context, shift: float, value: float | None
) -> None:
    shifted = Shifted(file.path, file.manifest, file.digest)
    shifted.shift = shift
    verdict = RunsIn(atol=0.4).evaluate(file, shifted, context)
    assert not verdict.passed
    assert verdict.value == (value and pytest.approx(value, abs=1e-6))
    assert value or "an output is NaN" in verdict.reason


@needs_package
def test_what_the_browser_cannot_open_is_an_error(
    file: OnnxModel, context: Context, tmp_path: Path
) -> None:
    class Damaged(OnnxModel):
        def verify_cached(self) -> None:
            """Let other bytes pass."""

        @contextmanager
        def open(self, device: str = "cpu", threads: int = 1) -> Iterator:
            yield lambda *inputs: inputs

    (tmp_path / "model.onnx").write_bytes(b"no model")
    damaged = Damaged(tmp_path, file.manifest, file.digest)
    verdict = RunsIn(atol=1).evaluate(file, damaged, context)
    assert verdict.reason.startswith("does not run in onnxruntime-web ")
    assert "protobuf parsing failed" in verdict.reason


def test_a_page_that_reports_nothing_is_given_up() -> None:
    begin = time.monotonic()
    with pytest.raises(StageFailed, match="reported nothing within 3 s"):
        run_page("<!doctype html><p>silence", deadline_s=3)
    assert time.monotonic() - begin < 60
    assert run_page("<script>fetch('report', {method: 'POST', body: '[1]'})</script>", 60) == [1]


def test_a_browser_that_ends_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / CHROMIUM.what
    program.write_text("#!/bin/sh\necho cannot start\nexit 7\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(StageFailed, match="ended with exit code 7: cannot start"):
        run_page("", deadline_s=60)
