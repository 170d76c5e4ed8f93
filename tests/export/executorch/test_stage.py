from pathlib import Path

import pytest
import torch

import compress
from compress import MinDelegated, QuantizeDynamic, QuantizeStatic
from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.common.errors import ArtifactInvalid, StageFailed, Unavailable
from compress.common.signature import AxisBounds
from compress.common.tensor_difference import largest, relative_error
from compress.core.context import Context
from compress.core.gates import LabelAgreement
from compress.export import AotModel, ExecuTorchModel, ExportExecuTorch, OnnxModel
from compress.export.executorch.stage import EXECUTORCH
from compress.export.parity import report
from tests.export.builders import (
    EXACT_BITS,
    IMAGE_AND_CONTEXT,
    TOKENS,
    images,
    network,
    network_of,
    samples,
)

pytestmark = pytest.mark.skipif(
    EXECUTORCH.missing(), reason="to run these tests: pip install -e '.[executorch]'"
)

UP_TO_64 = TOKENS.model_copy(update={"axes": {"length": AxisBounds(max=64)}})
CLAMPED = """
import torch


class Clamped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.Linear(256, 3)

    def forward(self, image):
        return self.last(self.first(image).clamp(-0.5, 1.0).clamp(min=0).flatten(1))
"""
DOUBLE = """
import torch


class Doubled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.exact = torch.nn.Linear(4, 30), torch.nn.Linear(30, 2).double()

    def forward(self, x):
        return self.exact(self.first(x).double()).float()
"""


WITHOUT_KERNELS = """
import torch
from torch import nn
from torch.nn import functional as F


class Lacking(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.InstanceNorm2d(2, affine=True), nn.Linear(2, 3)
        self.project, self.mixed = nn.Linear(16, 48), nn.Linear(16, 3)

    def forward(self, image, rows):
        image = self.norm(image.chunk(2, 1)[1])
        weights = image.mean(1).softmax(2)[..., None]
        pooled = (weights * image.permute(0, 2, 3, 1)).sum((1, 2))
        query, key, value = self.project(rows).unflatten(2, (3, 2, 8)).transpose(1, 3).unbind(2)
        mask = rows.new_zeros(6, 6).index_put(tuple(torch.tril_indices(6, 6)), rows.new_ones(21))
        heads = F.scaled_dot_product_attention(query, key, value, mask.bool())
        largest = F.adaptive_max_pool2d(heads, (3, 2)).sum(2).sum(2)
        causal = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        heads = F.gelu(heads + causal, approximate="tanh")
        mixed = heads.transpose(1, 2).reshape(rows.shape[0], -1, 16)
        return self.last(pooled) + self.mixed(mixed).sum(1) + largest.sum(1, keepdim=True)
"""
VOLUME = """
import torch


class Volume(torch.nn.Module):
    def forward(self, clip):
        return torch.nn.functional.avg_pool3d(clip, 2).flatten(1)
"""


MASKED = """
import torch


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(4, 16)

    def forward(self, x, mask):
        heads = self.project(x).unflatten(2, (2, 8)).transpose(1, 2)
        mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, mask)
        return mixed.mean((1, 2))
"""


def error(model: Artifact, exported: Artifact, *inputs: torch.Tensor) -> float:
    """Return the largest error of an output, as a part of its norm."""
    pairs = zip(model.open()(*inputs), exported.open()(*inputs), strict=True)
    return largest(relative_error(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def sequence(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    return network(tmp_path_factory.mktemp("sequence") / "source", "networks:sequence", UP_TO_64)


@pytest.fixture(scope="module")
def exported_sequence(
    sequence: EagerModel, tmp_path_factory: pytest.TempPathFactory
) -> ExecuTorchModel:
    return ExportExecuTorch()(sequence, Context(root=tmp_path_factory.mktemp("pte") / "model"))


def test_every_input_and_output_keeps_its_name_and_place(tmp_path: Path) -> None:
    bounds = {axis: AxisBounds(max=32) for axis in ("height", "width")}
    signature = IMAGE_AND_CONTEXT.model_copy(update={"axes": bounds})
    model = network(tmp_path / "source", "networks:two_inputs", signature)
    exported = ExportExecuTorch()(model, Context(root=tmp_path / "pte"))
    inputs = torch.randn(5, 1, 12, 9), torch.randn(5, 4)
    assert error(model, exported, *inputs) < 1e-5
    assert exported.signature == model.signature
    assert (exported.parameters(), exported.macs()) == (model.parameters(), model.macs())
    facts = exported.manifest.facts
    assert facts["sizes"] == {"batch": [1, 32], "height": [1, 32], "width": [1, 32]}
    assert facts["float_kernels"] == {"aten.convolution": 1, "aten.linear": 2}


def test_a_quantized_graph_runs_in_integers_that_give_the_same_answers(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "networks:mobilenet")
    context = Context(root=tmp_path / "int8", data=samples(images(64)))
    stage = QuantizeStatic(target="xnnpack", calibration_samples=64, weight_bits=EXACT_BITS)
    graph = stage(model, context)
    gates = (MinDelegated(share=1), LabelAgreement(minimum=0.95))
    exported = ExportExecuTorch(gates=gates)(graph, context.with_root(tmp_path / "pte"))
    facts = exported.manifest.facts
    assert facts["integer_kernels"] == {"aten.convolution": 3, "aten.linear": 1}
    assert facts["float_kernels"] == {}
    assert facts["integer_share"] == 1
    # A number on the edge of two integers may be rounded to either.
    assert error(graph, exported, images(40)) < 0.01  # of more than a batch


def test_ranges_found_at_run_time_are_those_of_rows(
    sequence: EagerModel, exported_sequence: ExecuTorchModel, tmp_path: Path
) -> None:
    tokens = torch.randint(0, 50, (64, 12), generator=torch.Generator().manual_seed(0))
    context = Context(root=tmp_path / "int8", data=samples(tokens))
    graph = QuantizeDynamic(target="xnnpack")(sequence, context)
    with graph.open() as predict:
        # no row's range depends on the others; with one range for all they differ by 1e-3 and more
        torch.testing.assert_close(
            predict(tokens[:3])[0], predict(tokens)[0][:3], rtol=0, atol=1e-6
        )
    exported = ExportExecuTorch()(graph, context.with_root(tmp_path / "pte"))
    assert exported.manifest.facts["integer_kernels"] == {"aten.linear": 2}
    assert exported.manifest.facts["integer_share"] == 1
    assert error(graph, exported, tokens[:5]) < 0.01
    assert exported.payload_bytes < 0.8 * exported_sequence.payload_bytes
    with pytest.raises(ValueError, match="XNNPACK takes a range for each row, found tensor"):
        QuantizeDynamic(target="xnnpack", activation_range="tensor")


def test_clamps_stay_in_the_integer_layer_before(tmp_path: Path) -> None:
    model = network_of(
        tmp_path,
        CLAMPED,
        "clamped:Clamped",
        compress.Signature(inputs=(compress.TensorSpec(name="image", shape=("batch", 1, 8, 8)),)),
    )
    context = Context(root=tmp_path / "int8", data=samples(images(64)))
    graph = QuantizeStatic(target="xnnpack", calibration_samples=64)(model, context)
    exported = ExportExecuTorch()(graph, context.with_root(tmp_path / "pte"))
    assert exported.manifest.facts["float_kernels"] == {}


def test_what_is_left_to_portable_kernels_is_named_and_judged(tmp_path: Path) -> None:
    model = network_of(tmp_path, DOUBLE, "doubles:Doubled")  # XNNPACK has no kernels of float64
    context = Context(root=tmp_path / "pte")
    exported = ExportExecuTorch().run(model, context)
    assert exported.manifest.facts["portable_operators"]["exact"].keys() & {"aten.addmm", "aten.mm"}
    verdict = MinDelegated(share=0.9).evaluate(model, exported, context)
    assert not verdict.passed
    assert verdict.value == pytest.approx(4 * 30 / (4 * 30 + 30 * 2))


def test_operators_that_executorch_has_no_kernels_for_are_written_as_others(tmp_path: Path) -> None:
    axes = {"height": AxisBounds(max=32), "width": AxisBounds(max=32)}
    image = compress.TensorSpec(name="image", shape=("batch", 4, "height", "width"))
    rows = compress.TensorSpec(name="rows", shape=("batch", 6, 16))
    signature = compress.Signature(inputs=(image, rows), axes=axes)
    model = network_of(tmp_path, WITHOUT_KERNELS, "lacking:Lacking", signature)
    # Parity is tried with channels of equal values, and at several sizes of each axis.
    exported = ExportExecuTorch()(model, Context(root=tmp_path / "pte"))
    assert exported.manifest.facts["float_kernels"]["aten.bmm"] == 4


def test_an_operator_without_any_kernel_is_named(tmp_path: Path) -> None:
    clip = compress.TensorSpec(name="clip", shape=("batch", 1, 4, 4, 4))
    signature = compress.Signature(inputs=(clip,))
    model = network_of(tmp_path, VOLUME, "volume:Volume", signature)
    with pytest.raises(ArtifactInvalid, match=r"no kernel for aten::avg_pool3d\.out; use export_"):
        ExportExecuTorch()(model, Context(root=tmp_path / "pte"))


def test_an_error_of_a_call_has_the_reason_that_the_runtime_prints(
    exported_sequence: ExecuTorchModel,
) -> None:
    from compress.export.executorch.runtime import ExecuTorchProgram

    program = ExecuTorchProgram(exported_sequence.payload_path, threads=1)
    with pytest.raises(
        RuntimeError, match=r"set_inputs.* failed.*: \[method\.cpp.*resizing tensor"
    ):
        program(torch.zeros(1, 65 * 32, dtype=torch.int64))


def test_attention_is_left_to_xnnpack_but_for_its_mask(tmp_path: Path) -> None:
    x = compress.TensorSpec(name="x", shape=("batch", 5, 4))
    model = network(tmp_path / "source", "networks:attention", compress.Signature(inputs=(x,)))
    context = Context(root=tmp_path / "int8", data=samples(torch.randn(16, 5, 4)))
    graph = QuantizeDynamic(target="xnnpack")(model, context)
    exported = ExportExecuTorch()(graph, context.with_root(tmp_path / "pte"))
    facts = exported.manifest.facts
    assert facts["float_kernels"] == {"aten.bmm": 2}
    assert facts["portable_operators"].keys() == {""}
    assert facts["portable_operators"][""].keys() == {"aten.view_copy"}
    mask = compress.TensorSpec(name="mask", shape=("batch", 1, 5, 5), dtype="bool")
    masked = network_of(tmp_path, MASKED, "masked:Masked", compress.Signature(inputs=(x, mask)))
    # Parity is tried with rows of which a mask leaves nothing.
    with_mask = ExportExecuTorch()(masked, Context(root=tmp_path / "masked.pte"))
    assert with_mask.manifest.facts["delegated_share"] == 1


@pytest.mark.parametrize("written", [OnnxModel, AotModel])
def test_runtimes_that_delegate_nothing_have_no_share(written: type[Artifact]) -> None:
    problem = MinDelegated(share=0.9).unsuitable_artifact(written)
    assert problem.startswith(f"is for the results of export_executorch, found {written.kind}: ")


def test_sizes_without_memory_are_refused_and_batches_answered_in_parts(
    sequence: EagerModel, exported_sequence: ExecuTorchModel, tmp_path: Path
) -> None:
    with exported_sequence.open() as predict:
        assert predict(torch.zeros(70, 64, dtype=torch.int64))[0].shape == (70, 64, 16)
        for tokens, found in (
            (torch.zeros(1, 65, dtype=torch.int64), r"torch\.int64 \[1, 65\]"),
            (torch.zeros(2, 5), r"torch\.float32 \[2, 5\]"),
            (torch.zeros(0, 5, dtype=torch.int64), r"torch\.int64 \[0, 5\]"),
            (torch.zeros(5, dtype=torch.int64), r"torch\.int64 \[5\]"),
        ):
            expected = r"int64 \[batch of 1 to 32, length of 1 to 64\]"
            with pytest.raises(ValueError, match=rf"input tokens is {found}, expected {expected}"):
                predict(tokens)
    single = ExportExecuTorch(largest_batch=1)(sequence, Context(root=tmp_path / "single"))
    tokens = torch.randint(0, 50, (3, 7))
    assert error(sequence, single, tokens) < 1e-5


def test_an_axis_without_a_largest_size_is_refused(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "networks:sequence", TOKENS)
    with pytest.raises(StageFailed, match=r"'length' has no largest size.*model\.axes: \{length: "):
        ExportExecuTorch()(model, Context(root=tmp_path / "pte"))


def test_layers_for_which_there_are_no_kernels_are_refused(tmp_path: Path) -> None:
    context = Context(root=tmp_path / "int8", data=samples(images(64)))
    model = network(tmp_path / "source", "networks:mlp")
    unsigned = QuantizeStatic(calibration_samples=64)(model, context)
    assert "target: xnnpack" in ExportExecuTorch().unsupported_input_reason({"uint8"})
    with pytest.raises(StageFailed, match=r"signed 8 bits.*; quantize with target: xnnpack"):
        ExportExecuTorch()(unsigned, context.with_root(tmp_path / "pte"))
    recurrent = network(tmp_path / "lstm", "recurrences:classifier", UP_TO_64)
    with pytest.raises(StageFailed, match=r"ExecuTorch writes out the steps of an LSTM one by one"):
        ExportExecuTorch()(recurrent, context.with_root(tmp_path / "lstm.pte"))


def test_programs_loaded_before_the_number_of_threads_changed_still_answer(
    sequence: EagerModel, exported_sequence: ExecuTorchModel
) -> None:
    from executorch.extension.pybindings import portable_lib

    tokens = torch.randint(0, 50, (4, 9))
    (expected,) = sequence.open()(tokens)
    with exported_sequence.open(threads=1) as one, exported_sequence.open(threads=2) as two:
        for predict, threads in ((one, 1), (two, 2), (one, 1)):
            torch.testing.assert_close(predict(tokens)[0], expected)
            assert portable_lib._threadpool_get_thread_count() == threads
        kept, copy = one(tokens)[0], one(tokens)[0].clone()
        one(tokens + 1 - tokens)
        assert torch.equal(kept, copy)  # an answer is not overwritten by the next one


def test_equal_models_give_equal_bytes_and_altered_ones_are_not_loaded(
    sequence: EagerModel, exported_sequence: ExecuTorchModel, tmp_path: Path
) -> None:
    again = ExportExecuTorch()(sequence, Context(root=tmp_path / "again"))
    assert again.payload_path.read_bytes() == exported_sequence.payload_path.read_bytes()
    content = bytearray(again.payload_path.read_bytes())
    content[len(content) // 2] ^= 1
    again.payload_path.chmod(0o644)
    again.payload_path.write_bytes(content)
    with pytest.raises(ArtifactInvalid, match=r"model\.pte is not the file that was sealed"):
        again.open().__enter__()


def test_a_file_that_is_no_program_is_refused_in_one_line(tmp_path: Path) -> None:
    from compress.export.executorch.runtime import load

    file = tmp_path / "model.pte"
    file.write_bytes(b"nothing of the kind" * 9)
    with pytest.raises(ArtifactInvalid, match=r"model\.pte: not an ExecuTorch program") as caught:
        load(file, UP_TO_64, {"batch": [1, 32], "length": [1, 64]}, threads=1)
    assert "\n" not in str(caught.value)


def test_wrong_answers_are_refused_with_a_script(
    sequence: EagerModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.export.executorch.runtime import ExecuTorchProgram

    monkeypatch.setattr(report, "LEAST_SECONDS", 120.0)  # on a busy machine too
    right = ExecuTorchProgram.__call__
    monkeypatch.setattr(
        ExecuTorchProgram, "__call__", lambda *given: tuple(1.5 * y for y in right(*given))
    )
    message = r"differ from the source's by 0\.5 .*first layer out of tolerance is .*parity\.json"
    with pytest.raises(StageFailed, match=message):
        ExportExecuTorch()(sequence, Context(root=tmp_path / "pte"))
    folder = tmp_path / "parity" / "export_executorch"
    assert "from executorch.runtime import Runtime" in (folder / "reproduce.py").read_text()


def test_a_function_of_a_module(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    rows = torch.randn(3, 4)
    exported = compress.export_executorch(module, tmp_path / "model.pte", example_inputs=(rows,))
    assert isinstance(exported, ExecuTorchModel)
    torch.testing.assert_close(exported.module(rows), module(rows), rtol=1e-4, atol=1e-5)


def test_without_executorch_one_line_says_how_to_install_it(
    exported_sequence: ExecuTorchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(EXECUTORCH), "missing", lambda _: True)
    with pytest.raises(
        Unavailable, match=r"needs executorch, which is not installed; pip install .*\[executorch\]"
    ):
        exported_sequence.open().__enter__()
