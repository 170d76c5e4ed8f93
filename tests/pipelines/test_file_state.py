"""Exported files that keep state between calls, or change their inputs."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.artifacts.artifact import Artifact
from compress.common.errors import ArtifactInvalid
from compress.common.signature import Signature
from compress.export.imported.exported_files import import_file
from compress.export.torchscript.file_io import load, quiet
from compress.serve.http.loaded_model import open_model
from compress.serve.worker.loaders import LOADERS

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Stream(nn.Module):
    """Keeps the last row, and counts calls, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cache", torch.ones(1, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer = self.linear(x) + self.cache
        self.cache.copy_(x[-1:])
        self.calls += 1
        return answer


class Attributes(nn.Module):
    """Keeps state in attributes of every type that TorchScript has code for."""

    hidden: torch.Tensor | None
    frames: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.stream = Stream()
        self.hidden = None
        self.calls, self.gain, self.mode = 0, float("inf"), "first"
        self.frames = []
        self.sizes = {"rows": [1]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden
        if hidden is not None:
            x = x + hidden
        self.hidden = x.mean(0)
        self.frames.append(x)
        self.sizes["rows"].append(x.shape[0])
        scale = len(self.frames) + len(self.sizes["rows"]) + min(self.gain, 2.0) + self.calls
        if self.mode == "first":
            scale = scale + 1
        self.mode, self.gain, self.calls = "later", 1.0, self.calls + 1
        return self.stream(x) * scale


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sub_(0.5).mul_(2)


class Ordered(nn.Module):
    def forward(self, x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        return x / divisor


class Total:
    """State of a class of its own."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, x: float) -> float:
        self.value += x
        return self.value


class Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = Total()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.total.add(1.0)


def scripted(module: nn.Module) -> torch.jit.ScriptModule:
    with quiet():
        return torch.jit.script(module)


def write(module: nn.Module, file: Path) -> torch.Tensor:
    """Write a module as a file; return what its first call answers."""
    if file.suffix == ".ts":
        scripted(module.eval()).save(file)
    else:
        rows = {0: torch.export.Dim("rows")}
        torch.export.save(
            torch.export.export(module.eval(), (X.clone(),), dynamic_shapes=(rows,)), file
        )
    with torch.no_grad():
        return module(X.clone())


def imported(file: Path, signature: Signature | None = None) -> Artifact:
    kind = "torchscript" if file.suffix == ".ts" else "graph"
    signature = signature or Signature.from_examples([X])
    return import_file(kind, file, signature, file.with_name("artifact"))


@pytest.mark.parametrize(
    ("module", "name", "state"),
    [
        (Stream, "model.ts", {"cache", "calls"}),
        (Stream, "model.pt2", {"cache", "calls"}),
        (
            Attributes,
            "model.ts",
            {
                *("hidden", "calls", "gain", "mode", "frames", "sizes"),
                *("stream.cache", "stream.calls"),
            },
        ),
    ],
)
def test_every_call_of_a_file_starts_from_the_state_that_it_came_with(
    module, name, state, tmp_path: Path
) -> None:
    expected = write(module(), tmp_path / name)
    model = imported(tmp_path / name)
    assert model.signature.state is not None and model.signature.state.is_read
    assert set(model.signature.state.names) == state
    (tmp_path / name).unlink()
    with Artifact.from_directory(model.path).open() as predict:
        for x in (X, torch.zeros(5, 4), X):
            (answer,) = predict(x)
    torch.testing.assert_close(answer, expected)


def test_a_traced_file_with_state_and_one_output_of_two(tmp_path: Path) -> None:
    class Two(Stream):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x), x

    module = Two().eval()
    expected, _ = Two.forward(module, X)
    module.cache.fill_(1)
    with quiet():
        traced = torch.jit.trace(module, X, check_trace=False)
    traced.save(tmp_path / "model.ts")
    first = {"outputs": [{"name": "output_0"}]}
    signature = Signature.model_validate({**Signature.from_examples([X]).model_dump(), **first})
    # Tracing has called it, too.
    moved = load(tmp_path / "model.ts").cache.clone()
    model = imported(tmp_path / "model.ts", signature)
    with model.open() as predict:
        for _ in range(2):
            (answer,) = predict(X)
    torch.testing.assert_close(answer, expected - 1 + moved)


@pytest.mark.parametrize("name", ["model.ts", "model.pt2"])
def test_inputs_that_a_file_changes_are_copied_for_it(name, tmp_path: Path) -> None:
    expected = write(InPlace(), tmp_path / name)
    model, x = imported(tmp_path / name), X.clone()
    assert model.signature.state is None
    with model.open() as predict:
        torch.testing.assert_close(predict(x)[0], expected)
    assert torch.equal(x, X)


def test_inputs_of_torchscript_are_passed_by_their_names(tmp_path: Path) -> None:
    scripted(Ordered()).save(tmp_path / "model.ts")
    signature = Signature.from_examples({"divisor": X, "x": torch.ones(3, 4)})
    with imported(tmp_path / "model.ts", signature).open() as predict:
        torch.testing.assert_close(predict(X, torch.ones(3, 4))[0], 1 / X)


def test_state_of_other_objects_is_refused(tmp_path: Path) -> None:
    scripted(Summing()).save(tmp_path / "model.ts")
    with pytest.raises(ArtifactInvalid, match=r"state in total\.value, of an object"):
        imported(tmp_path / "model.ts")
    assert not (tmp_path / "artifact").exists()


def test_threads_of_a_server_share_no_state(tmp_path: Path) -> None:
    class Slow(nn.Module):
        """Reads its state long after it was written."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("start", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.start = self.start + x.sum(0)
            wide = torch.ones(300, 300)
            for _ in range(40):
                wide = wide.matmul(wide).clamp(0, 1)
            return x + self.start + wide.mean() - 1

    scripted(Slow()).save(tmp_path / "model.ts")
    model = imported(tmp_path / "model.ts")
    run = LOADERS["torchscript"](model.payload_path, model.manifest.facts, 1)
    samples = [torch.full((3, 4), float(i)).numpy() for i in range(16)]
    with open_model(model, "model", threads=1) as served, ThreadPoolExecutor(4) as threads:
        answers = [*threads.map(lambda x: run([x])[0], samples)]
        answers += threads.map(lambda x: served.call(x)[0], samples)
    for i, answer in enumerate(answers):
        assert (answer == 4 * (i % 16)).all()


def test_an_imported_file_is_hashed_by_the_child_alone(tmp_path: Path, monkeypatch) -> None:
    scripted(nn.Linear(4, 2)).save(tmp_path / "model.ts")
    model = imported(tmp_path / "model.ts")
    monkeypatch.setattr("compress.artifacts.artifact._digest", lambda _: pytest.fail("hashed"))
    model.verify_cached()
    model.payload_path.chmod(0o644)
    with pytest.raises(pytest.fail.Exception, match="hashed"):
        model.verify_cached()
