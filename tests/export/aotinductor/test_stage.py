import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from compress.artifacts.artifact import Artifact
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import ArtifactInvalid, StageFailed, Unavailable
from compress.common.sealed_json import load_sealed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import MinIntegerMacs, Parity
from compress.export.aotinductor import package as aot_package
from compress.export.aotinductor.package import count_kernels
from compress.export.aotinductor.stage import AotModel, ExportAot
from compress.export.common.runtime import refuse_unrolled_rnn
from compress.export.parity.bisect import LayerSearch
from compress.graph.torch_export import export_program
from compress.pipelines import Pipeline
from compress.pipelines.planning.planner import build_plan
from compress.quantization.stages.static import QuantizeStatic
from tests.export.builders import EXACT_BITS, IMAGE, images, network, network_of, samples

pytestmark = pytest.mark.timeout(900)  # compilers are slow on machines with other work
FUNCTIONS = """
import torch
from torch import nn

class Functions(nn.Module):
    def forward(self, x, context):
        elu = nn.functional.elu(x).mean((1, 2)) + context.sum(1)
        return torch.expm1(x), torch.atanh(x), elu, torch.log1p(context)
"""
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def int8(folder: Path, factory: str, target: str, **bits: int) -> tuple[GraphModel, Context]:
    model = network(folder / "source", factory)
    context = Context(root=folder / "int8", data=samples(images()))
    bits.setdefault("weight_bits", EXACT_BITS)
    stage = QuantizeStatic.model_validate({"target": target, "calibration_samples": 64, **bits})
    return stage(model, context), context.with_root(folder / "aot")


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give the folder that temporary files go to."""
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> tuple[GraphModel, Context]:
    return int8(tmp_path_factory.mktemp("residual"), "networks:residual", "inductor-cpu")


@pytest.fixture(scope="module")
def package(graph: tuple[GraphModel, Context], temporary: Path) -> AotModel:
    return ExportAot()(*graph)


@pytest.mark.slow
def test_convolutions_and_additions_in_integers_have_the_same_outputs(
    package: AotModel, graph: tuple[GraphModel, Context]
) -> None:
    model, context = graph
    kernels = package.manifest.facts["integer_kernels"]
    assert kernels.keys() >= {"qconv_pointwise_tensor", "qconv2d_pointwise_binary_tensor"}
    # The convolution that reads the image, whose one channel stays in float.
    assert package.manifest.facts["float_kernels"] == {"mkldnn__convolution_pointwise": 1}
    in_integers = 2 * 64 * 8 * 8 * 9 + 8 * 10  # two convolutions of an 8×8 image, and the head
    share = in_integers / (in_integers + 64 * 8 * 9)
    assert package.manifest.facts["integer_share"] == pytest.approx(share, rel=1e-12)
    assert not MinIntegerMacs(share=share + 1e-9).evaluate(model, package, context).passed
    assert Parity(atol=0).measure(model, package, context) < 1e-5
    assert (package.parameters(), package.macs()) == (model.parameters(), model.macs())


@pytest.mark.slow
def test_nothing_is_left_behind_but_the_package(package: AotModel, temporary: Path) -> None:
    assert [entry.name for entry in temporary.iterdir()] == []
    assert sorted(f.name for f in package.path.iterdir()) == ["manifest.json", "model.pt2"]
    assert b"#include" not in package.payload_path.read_bytes()


@pytest.mark.slow
def test_a_fresh_process_answers_alike(
    package: AotModel, tmp_path: Path, fresh_torch: Callable[[str], str]
) -> None:
    (image,) = IMAGE.example(3)
    with package.open(threads=2) as predict:
        torch.save({"image": image, "expected": predict(image)[0]}, tmp_path / "answer.pt")
    code = f"""
import torch
from compress.export import AotModel
saved = torch.load({str(tmp_path / "answer.pt")!r})
with AotModel.from_directory({str(package.path)!r}).open() as predict:
    print(torch.equal(predict(saved["image"])[0], saved["expected"]))
"""
    assert fresh_torch(code) == "True"


@pytest.mark.slow
def test_memory_is_read_as_the_code_expects_it(package: AotModel) -> None:
    (image,) = IMAGE.example(3)
    transposed = image.transpose(2, 3).contiguous().transpose(2, 3)
    assert not transposed.is_contiguous()
    with package.open() as predict:
        assert torch.equal(predict(transposed)[0], predict(image)[0])
        with pytest.raises(ValueError, match=r"image is torch\.float32 \[3, 1, 8, 9\], expected"):
            predict(torch.zeros(3, 1, 8, 9))
        with pytest.raises(ValueError, match=r"torch\.float64 .* expected float32 \[batch, 1, 8, "):
            predict(image.double())


def altered(package: AotModel, folder: Path, **built_for: object) -> AotModel:
    shutil.copytree(package.path, folder, copy_function=shutil.copyfile)
    manifest = load_sealed((folder / "manifest.json").read_bytes())
    manifest["facts"]["built_for"] |= built_for
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return AotModel.from_directory(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("built_for", "message"),
    [
        ({"instructions": ["avx2", "amx_int9"]}, "a processor with amx_int9, which this one has "),
        ({"torch": "1.0.0"}, r"compiled for torch 1\.0\.0, found "),
        ({"machine": "riscv"}, "compiled for machine riscv, found "),
    ],
)
def test_another_machines_package_is_refused(
    package: AotModel, tmp_path: Path, built_for: dict[str, object], message: str
) -> None:
    foreign = altered(package, tmp_path / "foreign", **built_for)
    with pytest.raises(Unavailable, match=message) as caught, foreign.open():
        pass
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


@pytest.mark.slow
def test_code_that_was_altered_is_not_loaded(package: AotModel, tmp_path: Path) -> None:
    broken = altered(package, tmp_path / "broken")
    content = bytearray(broken.payload_path.read_bytes())
    content[len(content) // 2] ^= 1
    broken.payload_path.write_bytes(content)
    with pytest.raises(ArtifactInvalid, match="is not the file that was sealed"), broken.open():
        pass


def test_without_a_compiler_nothing_is_begun(
    graph: tuple[GraphModel, Context], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        Unavailable, match=r"needs g\+\+, which is not installed; a C\+\+ compiler"
    ) as caught:
        ExportAot()(graph[0], graph[1].with_root(tmp_path / "aot"))
    assert caught.value.exit_code == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_a_plan_for_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="needs a CUDA device"):
        build_plan(pipeline(tmp_path, "{stage: export_aot, device: cuda}"))


def test_torchserve_takes_it(tmp_path: Path) -> None:
    plan = build_plan(pipeline(tmp_path, "{stage: export_aot}, {stage: package_torchserve}"))
    assert plan.route == "export_aot → package_torchserve"


def pipeline(folder: Path, stages: str) -> Pipeline:
    (folder / "nets.py").write_text("def net(): ...\n")
    file = folder / "pipeline.yaml"
    file.write_text(
        "version: 1\n"
        "model: {factory: 'nets:net', checkpoint: x.pt, inputs: [{name: x, shape: [n]}]}\n"
        f"stages: [{stages}]\n"
    )
    return Pipeline.from_yaml(file)


def test_one_channel_of_integers_is_refused_before_it_is_compiled(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match=r"compiles that into wrong answers; .*inductor-cpu"):
        ExportAot()(*int8(tmp_path, "networks:residual", "onnxruntime-cpu"))


def test_sixteen_bits_are_refused_before_they_are_compiled(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match=r"integer kernels take 8 bits, found uint16"):
        ExportAot()(*int8(tmp_path, "networks:mlp", "onnxruntime-cpu", activation_bits=16))


@pytest.mark.parametrize(
    ("kind", "batch_first", "refused"),
    [("GRU", True, True), ("GRU", False, True), ("RNN", True, True), ("LSTM", True, False)],
)
def test_steps_of_any_number_are_refused_where_they_would_be_written_out(
    kind: str, batch_first: bool, refused: bool
) -> None:
    layer = getattr(torch.nn, kind)(3, 4, batch_first=batch_first).eval()
    shape = ("batch", "time", 3) if batch_first else ("time", "batch", 3)
    open_length = Signature(inputs=(TensorSpec(name="x", shape=shape),))
    fixed = tuple(5 if axis == "time" else axis for axis in shape)
    fixed_length = Signature(inputs=(TensorSpec(name="x", shape=fixed),))
    refuse_unrolled_rnn(export_program(layer, fixed_length), "AOTInductor")
    program = export_program(layer, open_length)
    message = (
        rf"AOTInductor writes out the steps of an? {kind} one by one.*or use (an LSTM, )?export_"
    )
    if refused:
        with pytest.raises(StageFailed, match=message):
            refuse_unrolled_rnn(program, "AOTInductor", kernels=("LSTM",))
    else:
        refuse_unrolled_rnn(program, "AOTInductor", kernels=("LSTM",))
        with pytest.raises(StageFailed, match=message):
            refuse_unrolled_rnn(program, "AOTInductor")


def test_kernels_are_counted_by_their_calls() -> None:
    source = """
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu__qlinear_pointwise_tensor(buf0, 1));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mkldnn__convolution_pointwise(buf0, 1));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mkldnn__convolution_pointwise(buf1, 1));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_bmm_out(buf2, 1));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_sort(buf3, 1));
    // aoti_torch_cpu_bmm_out(
    """
    assert count_kernels(source) == {
        "integer_kernels": {"qlinear_pointwise_tensor": 1},
        "float_kernels": {"bmm_out": 1, "mkldnn__convolution_pointwise": 2},
    }


# What Inductor compiles wrongly; that a stage refuses a wrong package is in test_report.py too.
@pytest.mark.soak
@pytest.mark.slow
def test_wrong_answers_that_compile_without_a_word_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor answers at chance where a convolution reads integers of one channel."""
    monkeypatch.setattr(aot_package, "refuse_one_channel_integers", lambda _: None)
    # It compiles part after part; test_parity_report has it look for a layer of this format.
    monkeypatch.setattr(LayerSearch, "run", lambda _: None)
    with pytest.raises(StageFailed, match=r"answers differ from the source's by"):
        ExportAot()(*int8(tmp_path, "networks:residual", "onnxruntime-cpu"))
    assert not (tmp_path / "aot").exists()


@pytest.mark.gpu
@needs_cuda
def test_code_for_cuda_runs_there_alone(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "networks:residual")
    context = Context(root=tmp_path / "aot", device="cuda")
    artifact = ExportAot(device="cuda", gates=(Parity(atol=1e-3),))(model, context)
    with artifact.open("cpu") as predict:
        assert predict(*IMAGE.example(3))[0].device.type == "cuda"


@pytest.mark.slow
def test_several_dynamic_axes_inputs_and_outputs_keep_the_digits_of_small_numbers(
    tmp_path: Path,
) -> None:
    signature = Signature(
        inputs=(
            TensorSpec(name="x", shape=("batch", "height", "width")),
            TensorSpec(name="context", shape=("batch", 4)),
        ),
        outputs=tuple(OutputSpec(name=name) for name in ("expm1", "atanh", "elu", "log1p")),
    )
    model = network_of(tmp_path, FUNCTIONS, "functions:Functions", signature)
    artifact = ExportAot()(model, Context(root=tmp_path / "aot"))
    x, context = 1e-9 * torch.randn(5, 7, 11), 1e-9 * torch.rand(5, 4)
    with Artifact.from_directory(artifact.path).open() as predict, model.open() as expected:
        for got, wanted in zip(predict(x, context), expected(x, context), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0)
        with pytest.raises(ValueError, match="input context is"):
            predict(x, context[:4])
