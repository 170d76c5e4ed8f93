import inspect
import logging
import pydoc
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.export.common.int8_sums import has_16_bit_sums

IN_MAIN = """
import torch, compress
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(8, width), nn.Linear(width, 3)
    def forward(self, x):
        return self.b(self.a(x).relu())

torch.manual_seed(0)
x = torch.randn(64, 8)
small = compress.prune_channels(Net(32), ratio=0.5, data=[*x])
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=16)
graph = compress.quantize_static(small, calibration=loader, out="int8")
print(type(small.module).__name__, small.module.a.out_features, small.only_here)
print(graph.module(x)[:2].flatten().tolist())
"""
LOADED = """
import torch, compress
torch.manual_seed(0)
print(compress.GraphModel.from_directory("int8").module(torch.randn(64, 8))[:2].flatten().tolist())
"""


def network(width: int = 32) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, width), nn.Linear(width, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).relu())

    torch.manual_seed(0)
    return Net()


X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(64) % 3


@pytest.mark.slow
def test_a_class_of_main_is_pruned_and_quantized_and_the_graph_loads_elsewhere(
    fresh_torch: Callable[[str], str],
) -> None:
    pruned, outputs = fresh_torch(IN_MAIN).splitlines()
    assert pruned == "Net 16 True"
    assert fresh_torch(LOADED) == outputs


def test_a_class_of_a_function_loads_in_its_process_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fresh_torch: Callable[[str], str]
) -> None:
    model = network()
    with caplog.at_level(logging.WARNING):
        small = compress.prune_channels(model, ratio=0.5, example_inputs=X[:2], out=tmp_path / "a")
    assert "can be loaded in this process alone" in caplog.text
    assert (small.module.a.out_features, model.a.out_features) == (16, 32)
    assert small.signature.inputs[0].shape == ("batch", 8)
    with small.open() as predict:
        assert torch.equal(predict(X)[0], small.module(X))
    threads = torch.get_num_threads()
    opened = small.open(threads=threads + 1)
    assert torch.equal(opened(X)[0], small.module(X))
    assert torch.get_num_threads() == threads
    opened.close()
    code = (
        "import compress\n"
        "try:\n"
        f"    compress.EagerModel.from_directory({str(tmp_path / 'a')!r}).load()\n"
        "except compress.ArtifactInvalid as error:\n"
        "    print(error)\n"
    )
    assert fresh_torch(code).startswith("Net was given as an object in memory of another process")


def test_training_and_distillation_take_classes_of_a_function() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
    settings = {"epochs": 1, "train": loader, "val": (X.numpy(), Y.numpy())}
    trained = compress.train(network(), optimizer="sgd", learning_rate=0.1, **settings)
    assert not torch.equal(trained.module.a.weight, network().a.weight)
    student = compress.distill(trained, teacher=network(), student=network(4), **settings)
    assert student.module.a.out_features == 4
    assert [step.stage for step in student.manifest.lineage] == ["train", "distill"]


def test_a_module_that_its_class_alone_does_not_rebuild_stays_in_the_process() -> None:
    small = compress.quantize_static(nn.Sequential(nn.Linear(8, 3)), data=X)
    assert small.module(X).shape == (64, 3)
    with pytest.raises(ArtifactInvalid, match="cannot be copied"):
        module = network()
        module.lock = threading.Lock()
        compress.quantize_static(module, data=X)


def test_an_exported_program_is_quantized() -> None:
    dynamic = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(network().eval(), (X[:2],), dynamic_shapes=dynamic)
    small = compress.quantize_static(program, calibration=X, example_inputs=X[:2])
    again = compress.quantize_static(program, data=X)
    assert torch.equal(small.module(X), again.module(X))
    assert torch.allclose(small.module(X), network()(X), atol=0.05)


def test_all_samples_are_taken_where_the_default_is_more(caplog: pytest.LogCaptureFixture) -> None:
    small = compress.quantize_static(network(), data=X[:10])
    assert "calibrated on 10 samples alone" in caplog.text
    assert small.module(X).shape == (64, 3)
    with pytest.raises(
        compress.PipelineInvalid, match="calibration_samples: 100 samples asked for"
    ):
        compress.quantize_static(network(), data=X, calibration_samples=100)


def test_an_onnx_file_is_written_where_it_is_wanted(tmp_path: Path) -> None:
    onnx = compress.export_onnx(network(), tmp_path / "here" / "net.onnx", example_inputs=(X[:2],))
    assert (tmp_path / "here" / "net.onnx").read_bytes() == onnx.payload_path.read_bytes()
    assert torch.allclose(onnx.module(X), network()(X), atol=1e-5)
    with pytest.raises(PipelineInvalid, match="kind onnx, which this stage does not read"):
        compress.prune_channels(onnx, ratio=0.5)


def test_a_signature_shows_the_settings_with_their_defaults() -> None:
    parameters = inspect.signature(compress.quantize_static).parameters
    fields = compress.QuantizeStatic.model_fields
    assert {n: p.default for n, p in parameters.items() if n in fields} == {
        n: f.default for n, f in fields.items() if n not in ("stage", "name", "input")
    }
    assert next(iter(parameters)) == "model"
    assert {"data", "calibration", "out"} <= parameters.keys()
    assert "How a range is estimated" in str(compress.quantize_static.__doc__)
    assert [*inspect.signature(compress.export_onnx).parameters][:2] == ["model", "file"]


def test_help_fits_a_screen_and_shows_an_example() -> None:
    from compress.pipelines.config.registry import stages

    for name in stages():
        function = getattr(compress, name)
        shown = pydoc.plain(pydoc.render_doc(function)).splitlines()[2:]
        assert sum(max(1, -(-len(line) // 100)) for line in shown) <= 54, name
        assert f"small = compress.{name}(model, " in "".join(shown), name
        for setting, text in function.settings.items():
            assert text and setting in function.__doc__, (name, setting)
    assert "observer='percentile'" in compress.quantize_static.__doc__


def test_errors_are_shown_in_a_line() -> None:
    error = PipelineInvalid("prune_channels: ratio:\n  found 2")
    error.add_note("a note")
    assert error._render_traceback_() == [
        "PipelineInvalid: prune_channels: ratio: found 2",
        "PipelineInvalid: a note",
    ]


def test_every_stage_has_a_function() -> None:
    from compress.pipelines.config.registry import stages

    for name, stage in stages().items():
        function = getattr(compress, name)
        assert inspect.signature(function).return_annotation is stage.writes()
        assert function.__name__ in compress.__all__


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="no argument 'ration'; did you mean 'ratio'"):
        compress.prune_channels(network(), ration=0.5)
    with pytest.raises(TypeError, match=r"prune_channels\(model, data=…\)"):
        compress.prune_channels(network(), X)
    with pytest.raises(
        PipelineInvalid, match=r"^prune_channels: ratio: input should be less .*found 2"
    ):
        compress.prune_channels(network(), ratio=2, data=X)
    with pytest.raises(PipelineInvalid, match="pass example_inputs"):
        compress.prune_channels(network(), ratio=0.5)
    with pytest.raises(PipelineInvalid, match="model is a str, expected a torch"):
        compress.prune_channels("net", ratio=0.5, data=X)


def test_progress_bars_are_drawn_on_a_terminal_alone(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(**arguments: bool) -> str:
        compress.train(network(), epochs=1, train=(X, Y), val=(X, Y), **arguments)
        return capfd.readouterr().err

    assert printed() == ""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich takes any stream for a terminal
    assert printed(progress=False) == ""
    assert "train" in printed()


def test_int8_products_are_exact_on_processors_without_vnni(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Sums of pairs beyond 16 bits: 2 x 255 x 127. Processors with VNNI add in 32 bits anyway.
    # Both weights have the same zero points, which the exporter writes once.
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for layer in layers:
        nn.init.constant_(layer.weight, 1.0)
    rows = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)).sqrt()
    small = compress.quantize_static(layers, data=rows)
    onnx = compress.export_onnx(small, example_inputs=(rows[:2],))
    assert torch.allclose(onnx.module(rows), small.module(rows), rtol=1e-5)
    assert ("session.x64quantprecision" in caplog.text) == has_16_bit_sums()


@pytest.mark.parametrize(
    ("stage", "settings", "message"),
    [
        ("train", {"epochs": 0}, r"train: epochs: input should be greater than 0, found 0"),
        ("train", {"epochs": "x"}, r"train: epochs: expected a valid integer, found 'x'"),
        ("train", {}, r"train: epochs: is required and not there"),
        (
            "train",
            {"epochs": 1, "parallel": {"node": 2}},
            r"train: parallel\.node: unknown key; did you mean 'nodes'\?",
        ),
        (
            "prune_channels",
            {"ratio": 0.5, "gates": [{"gate": "max_dro"}]},
            r"prune_channels: gates\[0\]: unknown gate 'max_dro'; did you mean 'max_drop'\?",
        ),
        (
            "prune_channels",
            {"ratio": 2, "gates": [{"gate": "max_drop", "points": "1 %"}]},
            r"prune_channels: gates\[0\]\.points: .*'1 %'\nprune_channels: ratio: .*, found 2",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_found(stage, settings, message) -> None:
    with pytest.raises(PipelineInvalid, match=f"^{message}$"):
        getattr(compress, stage)(torch.nn.Linear(4, 3), data=[torch.ones(4)] * 4, **settings)


@pytest.mark.parametrize(
    ("file", "words"),
    [("", "is a directory"), ("a\0b", "null byte"), ("x" * 300, "too long"), (7, "not int")],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_stage_runs(file, words) -> None:
    with pytest.raises(PipelineInvalid, match=words):
        compress.export_onnx(nn.Linear(4, 2), file, example_inputs=(torch.ones(2, 4),))


def test_an_unknown_device_and_arrays_of_objects_are_refused_in_a_line() -> None:
    with pytest.raises(PipelineInvalid, match="device: Invalid device string"):
        compress.prune_channels(nn.Linear(4, 2), data=(torch.ones(2, 4),), device="cuda:x")
    with pytest.raises(PipelineInvalid, match="data: not an array of numbers"):
        compress.prune_channels(nn.Linear(4, 2), ratio=0.5, data=np.array([object()]))
