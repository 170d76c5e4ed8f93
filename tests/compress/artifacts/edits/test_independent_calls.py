"""Models that keep state, change their inputs or carry hooks: every call stands for itself."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import compress
from compress.artifacts.recipe import IndependentCalls
from compress.common.errors import CompressError

X = torch.randn(8, 4, 10, generator=torch.Generator().manual_seed(0))


class Causal(nn.Module):
    """A convolution over a stream: it puts the last frames of the call before in front."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
        self.conv, self.head = nn.Conv1d(4, 8, 3), nn.Linear(8, 2)
        self.register_buffer("cache", torch.ones(1, 4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = torch.cat([self.cache.expand(x.shape[0], -1, -1), x], 2)
        if self.in_place:
            self.cache.copy_(frames[:1, :, -2:].detach())
        else:
            self.cache = frames[:1, :, -2:].detach()
        return self.head(self.conv(frames).relu().mean(2))


class Hidden(nn.Module):
    """A recurrent network that keeps its hidden state, and counts its calls, as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(10, 8, batch_first=True), nn.Linear(8, 2)
        self.hidden: tuple[torch.Tensor, ...] | None = None
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequence, self.hidden = self.lstm(x, self.hidden)
        self.calls.append(len(self.calls))
        return self.head(sequence[:, -1])


class Counter(nn.Module):
    """BatchNorm that always normalizes by the batch, and a count of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(40, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.train()
        self.calls += 1
        return self.head(self.norm(x).flatten(1))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(40, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.sub_(0.5).mul_(2).flatten(1))


class Normalizing(nn.Module):
    """Normalizes its weights, in place, whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(40, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.head.weight.data = nn.functional.normalize(self.head.weight.data)
        return self.head(x.flatten(1))


def first_answer(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).eval()(X.clone())


@pytest.mark.parametrize(
    ("make", "names", "is_read"),
    [
        (Causal, ("cache",), True),
        (lambda: Causal(in_place=True), ("cache",), True),
        (Hidden, ("hidden", "calls"), True),
        (Counter, ("calls", "norm.running_mean"), False),
    ],
)
def test_each_call_starts_from_the_state_that_the_model_came_with(
    make: Callable[[], nn.Module],
    names: tuple[str, ...],
    is_read: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, state = make(), copy.deepcopy(make().state_dict())
    model.load_state_dict(state)
    attributes, expected = copy.deepcopy(vars(model)), first_answer(model)
    artifact = compress.EagerModel.from_module(model, example_inputs=(X,))
    assert all(torch.equal(state[name], x) for name, x in model.state_dict().items())
    assert all(torch.equal(state[name], x) for name, x in artifact.load().state_dict().items())
    for name in ("hidden", "calls", "training"):
        assert isinstance(attributes.get(name), torch.Tensor) or (
            vars(model).get(name) == attributes.get(name)
        )
    found = artifact.signature.state
    assert found is not None and found.names[: len(names)] == names and found.is_read is is_read
    assert found.names[0] in caplog.text
    with artifact.open() as predict:
        for _ in range(2):
            assert torch.allclose(predict(X)[0], expected, atol=1e-6)


@pytest.mark.parametrize("make", [Causal, lambda: Causal(in_place=True), Hidden])
def test_an_exported_graph_answers_every_call_as_the_first(make, tmp_path: Path) -> None:
    model = make()
    expected = first_answer(model)
    program = compress.export_program(model, tmp_path / "model.pt2", example_inputs=X)
    graph = program.program()
    assert not graph.graph_signature.buffers_to_mutate
    assert not [n for n in graph.graph.nodes if n.target is torch.ops.aten.copy_.default]
    assert (
        program.signature.state
        == compress.EagerModel.from_module(model, example_inputs=(X,)).signature.state
    )
    loaded = torch.export.load(tmp_path / "model.pt2").module(check_guards=False)
    for _ in range(2):
        assert torch.allclose(loaded(X), expected, atol=1e-5)


@pytest.mark.slow
def test_an_onnx_file_of_a_stream_answers_as_its_first_call(tmp_path: Path) -> None:
    model = Causal()
    onnx = compress.export_onnx(model, tmp_path / "model.onnx", example_inputs=X)
    with onnx.open() as predict:
        assert torch.allclose(predict(X)[0], first_answer(model), atol=1e-5)
    assert onnx.signature.state is not None


def test_training_keeps_the_state_and_a_counter_counts(tmp_path: Path) -> None:
    data = (X, torch.arange(8) % 2)
    trained = compress.train(Causal(), data=data, val=data, epochs=1, learning_rate=0.01)
    assert torch.equal(trained.module.cache, torch.ones(1, 4, 2))
    counted = compress.train(Counter(), data=data, val=data, epochs=2, batch_size=8)
    assert counted.module.calls == 2  # of training alone: no metric and no probe


def test_inputs_that_forward_changes_are_copied_for_it() -> None:
    model, x = InPlace(), X.clone()
    artifact = compress.EagerModel.from_module(model, example_inputs=(x,))
    assert artifact.recipe.edits == (IndependentCalls(copies_inputs=True),)
    assert artifact.signature.state is None
    with artifact.open() as predict:
        for _ in range(2):
            assert torch.allclose(predict(x)[0], first_answer(model))
    assert torch.equal(x, X)


def test_weights_that_forward_writes_to_stay_the_callers() -> None:
    model = Normalizing()
    weight, before = model.head.weight, model.head.weight.detach().clone()
    compress.EagerModel.from_module(model, example_inputs=(X,))
    assert model.head.weight is weight and torch.equal(weight, before)
    assert not weight.is_inference()


def network() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(40, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x.flatten(1)).relu())

    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("make", [network, Causal])
def test_hooks_that_change_no_output_are_called_twice_whatever_is_run(make) -> None:
    model, calls = make(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    artifact = compress.EagerModel.from_module(model, example_inputs=(X,))
    assert len(calls) == 2  # once in eval mode and once in training mode
    with artifact.open() as predict:
        predict(X)
    compress.train(artifact, data=(X, torch.arange(8) % 2), epochs=1, val=(X, torch.arange(8) % 2))
    assert len(calls) == 2
    model(X)
    assert len(calls) == 3


@pytest.mark.parametrize("training", [False, True])
def test_hooks_that_change_outputs_belong_to_the_model(training: bool) -> None:
    model = network()
    model.a.register_forward_hook(lambda part, _, y: y + (part.training is training))
    artifact = compress.EagerModel.from_module(model, example_inputs=(X,))
    loaded = artifact.load().train(training)
    assert torch.equal(loaded(X), model.train(training)(X))
    assert not torch.allclose(loaded(X), network()(X))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_hooks_of_torch_stay() -> None:
    model = network()
    nn.utils.weight_norm(model.a)
    model.a(torch.ones(1, 40))
    # Weight normalization itself is no hook of the caller's, so that it is not asked for.
    nn.utils.remove_weight_norm(model.a)
    nn.utils.spectral_norm(model.b)
    expected = first_answer(model)
    artifact = compress.EagerModel.from_module(model, example_inputs=(X,))
    assert artifact.load().b._forward_pre_hooks
    assert torch.equal(artifact.load()(X), expected)


def test_state_is_said_by_check_and_in_the_report(tmp_path: Path, caplog) -> None:
    from compress.pipelines.api import Pipeline
    from compress.pipelines.commands.check import check_pipeline

    (tmp_path / "streams.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "class Stream(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(4, 2)\n"
        "        self.register_buffer('last', torch.zeros(1, 4))\n\n"
        "    def forward(self, x):\n"
        "        y = self.layer(x + self.last)\n"
        "        self.last = x[:1].detach()\n"
        "        return y\n"
    )
    file = tmp_path / "p.yaml"
    file.write_text(
        "version: 1\nname: stream\nmodel:\n  factory: streams:Stream\n"
        "  inputs: [{name: x, shape: [batch, 4]}]\nstages:\n  - stage: export_program\n"
    )
    (warning,) = [w for w in check_pipeline(file, models=True).warnings if "state" in w]
    assert warning.startswith("model: keeps state between calls in last;")
    with caplog.at_level(logging.ERROR):
        report = Pipeline.from_yaml(file).run(tmp_path / "out")
    assert warning in report.warnings


class Scripted(nn.Module):
    """A module of Python around one of TorchScript."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.head = torch.jit.script(part), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.part(x))


class Running(nn.Module):
    """Adds what earlier calls summed up."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.total = nn.Linear(4, 2), torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(x) + self.total
        self.total = y.detach().sum(0)
        return y


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:The .grad attribute")
def test_a_torchscript_part_is_called_and_its_state_is_seen(tmp_path: Path) -> None:
    x = torch.randn(8, 4)
    model = Scripted(nn.Linear(4, 2))
    expected = model(x)
    compress.export_torchscript(model, tmp_path / "model.ts", example_inputs=(x,))
    assert torch.equal(torch.jit.load(tmp_path / "model.ts")(x), expected)
    with pytest.raises(CompressError, match="part is TorchScript; build it"):
        compress.export_onnx(model, tmp_path / "model.onnx", example_inputs=(x,))
    with pytest.raises(CompressError, match=r"state between calls in part\.total, of a Torch"):
        compress.export_torchscript(Scripted(Running()), tmp_path / "2.ts", example_inputs=(x,))
