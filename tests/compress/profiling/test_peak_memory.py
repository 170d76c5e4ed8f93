"""Peak memory, held against intermediates and weights whose size is known."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.utils.data import TensorDataset

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe import Recipe
from compress.common.errors import GateRefused, StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import MaxMemory
from compress.core.stage import Stage
from compress.data.splits import Splits
from compress.export.onnx.stage import OnnxModel
from compress.export.torchscript.stage import TorchScriptModel
from compress.profiling import peak_memory
from compress.profiling.peak_memory import measurement_process
from compress.profiling.rss import PROCESS

pytestmark = pytest.mark.skipif(
    not (PROCESS / "clear_refs").exists(), reason="this system reports no peaks"
)

NETS = """
import os
import time

from torch import nn

class Square(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.wide = nn.Linear(4, width)

    def forward(self, x):
        y = self.wide(x)
        return (y.unsqueeze(2) * y.unsqueeze(1)).amax((1, 2))

class Greedy(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.wide = nn.Linear(4, width)

    def forward(self, x):
        y = self.wide(x)
        if x.max() > 50:
            y = (y.unsqueeze(2) * y.unsqueeze(1)).amax(1)
        return y[:, :3]

class Heavy(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.wide = nn.Linear(4, width)

    def forward(self, x):
        return self.wide(x)[:, :3]

class Dying(nn.Identity):
    def forward(self, x):
        os.kill(os.getpid(), 9)

class Leaving(nn.Identity):
    def forward(self, x):
        os._exit(7)

class Raising(nn.Identity):
    def forward(self, x):
        raise SystemExit("enough")

class Loud(nn.Identity):
    def forward(self, x):
        print("hello", flush=True)
        os.write(1, b"hello")
        os.system("echo hello")
        return x

class Importing(nn.Identity):
    def forward(self, x):
        import scipy.signal
        return x

class Placed(nn.Identity):
    def forward(self, x):
        import beside
        assert os.environ["PLACE"] == open("place").read() == beside.PLACE
        return x

class Slow(nn.Module):
    def __init__(self, file: str):
        super().__init__()
        self.file = file

    def forward(self, x):
        with open(self.file, "a") as out:
            out.write("called ")
        time.sleep(0.6)
        return x

class Sleeping(nn.Module):
    def __init__(self, file: str):
        super().__init__()
        self.file = file

    def forward(self, x):
        with open(self.file, "w") as out:
            out.write(f"{os.getppid()} {os.getpid()} ")
        time.sleep(600)
"""
ROWS = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
MIB = 2**20
WIDTH = 7000
PRODUCT = WIDTH**2 * 4 / MIB
"""MiB of the intermediate of `Square`: 187."""
BESIDE = 15
"""MiB that a runtime may take besides."""

Make = Callable[..., EagerModel]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that seals one of the nets above."""
    (tmp_path / "nets.py").write_text(NETS)

    def make(name: str, **arguments: object) -> EagerModel:
        recipe = Recipe(factory=f"nets:{name}", arguments=arguments)
        state = recipe.build(tmp_path).state_dict()
        path = tmp_path / f"{name}-{len([*tmp_path.iterdir()])}"
        return EagerModel.create(path, recipe, state, ROWS, folder=tmp_path)

    return make


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(root=tmp_path / "result")


def in_onnx(model: EagerModel, path: Path) -> OnnxModel:
    """Write `Square` in ONNX; to export it would take longer than all the rest."""
    state = model.load().state_dict()
    named = {"weight": state["wide.weight"], "bias": state["wide.bias"]}
    named |= {"one": torch.tensor([1]), "two": torch.tensor([2]), "both": torch.tensor([1, 2])}
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "weight", "bias"], ["y"], transB=1),
            helper.make_node("Unsqueeze", ["y", "two"], ["column"]),
            helper.make_node("Unsqueeze", ["y", "one"], ["row"]),
            helper.make_node("Mul", ["column", "row"], ["product"]),
            helper.make_node("ReduceMax", ["product", "both"], ["output"], keepdims=0),
        ],
        "square",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch"])],
        [numpy_helper.from_array(tensor.numpy(), name) for name, tensor in named.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    with OnnxModel.atomic_write(path, ROWS) as partial:
        onnx.save(made, partial / OnnxModel.payload)
    return OnnxModel.from_directory(path)


def in_torchscript(model: EagerModel, path: Path) -> TorchScriptModel:
    with TorchScriptModel.atomic_write(path, ROWS) as partial:
        torch.jit.script(model.load()).save(partial / TorchScriptModel.payload)
    return TorchScriptModel.from_directory(path)


@pytest.mark.parametrize(
    "written",
    [
        lambda model, path: model,
        in_onnx,
        pytest.param(in_torchscript, marks=pytest.mark.soak),  # one more runtime
    ],
    ids=["eager", "onnx", "torchscript"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_intermediate_tensors_are_counted(make: Make, written, context, tmp_path) -> None:
    """Of the smaller model, too, though the larger was opened before: no heap is used again."""
    large = written(make("Square", width=WIDTH), tmp_path / "large")
    small = written(make("Square", width=WIDTH // 10), tmp_path / "small")
    found = [context.peak_memory(model, batch=1) for model in (large, small, large)]
    assert PRODUCT - 2 < found[0] < PRODUCT + BESIDE
    assert 0 < found[1] < PRODUCT / 100 + BESIDE
    assert found[2] == pytest.approx(found[0], abs=4)
    assert context.peak_memory(large, batch=2) > found[0] + 0.9 * PRODUCT


def test_memory_for_samples_of_val_is_counted(make: Make, context: Context) -> None:
    model = make("Greedy", width=WIDTH)
    assert context.peak_memory(model, batch=1) < BESIDE
    few = torch.zeros(40, 4).index_fill(0, torch.arange(5, 40, 10), 100.0)
    data = Splits({"val": TensorDataset(few)})
    found = replace(context, data=data).peak_memory(model, batch=1)
    assert PRODUCT - 2 < found < PRODUCT + BESIDE


def test_a_model_whose_calls_take_long_is_called_until_its_memory_is_steady(
    make: Make, context: Context, tmp_path: Path
) -> None:
    data = Splits({"val": TensorDataset(torch.zeros(40, 4))})
    slow = make("Slow", file=str(tmp_path / "calls"))
    assert replace(context, data=data).peak_memory(slow, batch=1) < BESIDE
    assert (tmp_path / "calls").read_text().split() == ["called"] * 2


def test_weights_are_counted(make: Make, context: Context) -> None:
    heavy = make("Heavy", width=5_000_000)
    weights = heavy.payload_bytes / MIB
    assert weights > 95
    found = context.peak_memory(heavy, batch=1)
    assert weights < found < 2 * weights + BESIDE  # as it is built, and as it is read


def test_what_was_hashed_is_not_hashed_again(make: Make, context: Context, monkeypatch) -> None:
    model, requests = make("Heavy", width=8), []
    monkeypatch.setattr(peak_memory, "_send", lambda r: requests.append(r) or {"mebibytes": 1})
    context.peak_memory(model, 1)  # writing hashed it
    model.payload_path.chmod(0o400)
    context.peak_memory(model, 1)  # the file may be another one
    files = len(model.manifest.files)
    assert [len(request.hashed) for request in requests] == [files, files - 1]


def test_imported_modules_are_not_counted(make: Make, context: Context) -> None:
    assert context.peak_memory(make("Importing"), batch=1) < BESIDE / 3


def test_output_that_a_model_prints_is_dropped(
    make: Make, context: Context, capfd: pytest.CaptureFixture[str]
) -> None:
    assert 0 <= context.peak_memory(make("Loud"), batch=1) < BESIDE
    assert "hello" not in capfd.readouterr().out


def test_a_model_runs_in_the_current_environment(
    make: Make, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an earlier question was asked from elsewhere, in a folder that is gone."""
    model = make("Placed")
    for place in ("here", "there"):
        folder = tmp_path / place
        folder.mkdir()
        (folder / "place").write_text(place)
        (folder / "beside.py").write_text(f"PLACE = {place!r}")
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("PLACE", place)
        monkeypatch.setenv("TMPDIR", str(folder))
        assert context.peak_memory(model, batch=1) < BESIDE
        shutil.rmtree(folder)
    assert context.peak_memory(make("Loud"), batch=1) < BESIDE


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Dying", "was ended by SIGKILL; perhaps memory ran out"),
        ("Leaving", "ended with exit code 7"),
        ("Raising", "SystemExit: enough"),
    ],
)
def test_a_model_that_ends_its_process_is_an_error(make: Make, context, name, why) -> None:
    with pytest.raises(StageFailed, match=f"^peak memory cannot be measured: .*{why}$"):
        context.peak_memory(make(name), batch=1)
    assert context.peak_memory(make("Square", width=8), batch=1) < BESIDE


def test_a_class_that_another_process_cannot_import_is_refused(make: Make, context) -> None:
    class Local(EagerModel):
        """No kind of its own."""

    model = make("Loud")
    with pytest.raises(StageFailed, match="another process cannot import Local"):
        context.peak_memory(Local(model.path, model.manifest, model.digest), batch=1)


def test_another_batch_size_than_the_fixed_one_is_refused(make: Make, context, tmp_path) -> None:
    model = make("Loud")
    fixed = Signature(inputs=(TensorSpec(name="x", shape=(4, 4)),))
    model = EagerModel.create(tmp_path / "fixed", model.recipe, {}, fixed, folder=tmp_path)
    with pytest.raises(StageFailed, match="fixed at 4"):
        context.peak_memory(model, batch=1)


def test_memory_cannot_be_measured_without_proc(make: Make, context, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(peak_memory, "PROCESS", tmp_path)
    with pytest.raises(StageFailed, match="this system does not report"):
        context.peak_memory(make("Loud"), batch=1)


class Copy(Stage[EagerModel, EagerModel]):
    """Copy."""

    stage: str = "copy"

    def run(self, model: EagerModel, context: Context) -> EagerModel:
        return model.derive(context.root, model.load(), lineage=self.lineage(model))


def test_max_memory_compares_the_peak_with_its_limit(make: Make, context: Context) -> None:
    model = make("Square", width=WIDTH)
    Copy(gates=(MaxMemory(mebibytes=PRODUCT + BESIDE),))(model, context)
    refused = r"copy: max_memory: peak memory at batch 1 <= 150 MiB, found \d+"
    with pytest.raises(GateRefused, match=refused):
        Copy(gates=(MaxMemory(mebibytes=150),))(model, context)


def test_a_gate_that_cannot_be_measured_says_why(make: Make, context: Context) -> None:
    model = make("Dying")
    verdict = MaxMemory(mebibytes=1e6).evaluate(model, model, context)
    assert not verdict.passed
    assert "was ended by SIGKILL" in verdict.reason


@pytest.mark.slow
def test_the_worker_lives_until_the_outermost_block_ends(
    make: Make, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak_memory, "_open_blocks", 0)
    monkeypatch.setattr(peak_memory, "_worker", None)
    model = make("Square", width=8)
    with measurement_process():
        with measurement_process():
            context.peak_memory(model, batch=1)
        first = peak_memory._worker
        assert first is not None
        context.peak_memory(model, batch=1)
        assert peak_memory._worker is first
        os.kill(first.pid, 0)  # raises where it has ended
    with pytest.raises(ProcessLookupError):
        os.kill(first.pid, 0)


FORKING = """
import sys
import threading
from pathlib import Path

from compress import Context, EagerModel
from compress.profiling import peak_memory
from compress.profiling.peak_memory import fork_worker, measurement_process

model = EagerModel.from_directory(sys.argv[1])
idle = threading.Event()
with measurement_process():
    if sys.argv[2] == "threads":
        threading.Thread(target=idle.wait).start()
    fork_worker()
    forked = peak_memory._worker is not None and peak_memory._worker.is_fork
    print(forked, Context(root=Path("none")).peak_memory(model, batch=1), flush=True)
    idle.set()
"""


@pytest.mark.slow  # beside threads torch is imported once more
@pytest.mark.parametrize("threads", [False, True], ids=["alone", "beside threads"])
def test_a_process_that_has_not_computed_is_forked(
    make: Make, threads, fresh_torch: Callable[[str], str]
) -> None:
    """Its fork measures the same; beside threads, whose locks it would hold, another is started."""
    given = ["", str(make("Square", width=WIDTH).path), "threads" if threads else ""]
    forked, peak = fresh_torch(f"import sys; sys.argv = {given!r}\n{FORKING}").split()
    assert forked == str(not threads)
    assert PRODUCT - 2 < float(peak) < PRODUCT + BESIDE


@pytest.mark.slow
@pytest.mark.parametrize(
    "forks",
    # Both end once nothing can be read from the pipe.
    [pytest.param(False, id="started", marks=pytest.mark.soak), pytest.param(True, id="forked")],
)
def test_no_worker_outlives_a_killed_process(make: Make, tmp_path: Path, forks: bool) -> None:
    pids = tmp_path / "pids"
    model = make("Sleeping", file=str(pids))
    ask = (
        "from pathlib import Path; from compress import Context, EagerModel; "
        "from compress.profiling.peak_memory import fork_worker; "
        f"fork_worker() if {forks} else None; "
        f"model = EagerModel.from_directory({str(model.path)!r}); "
        "Context(root=Path('none')).peak_memory(model, batch=1)"
    )
    asking = subprocess.Popen([sys.executable, "-c", ask], cwd=tmp_path)
    _wait(lambda: pids.exists() and pids.read_text().endswith(" "))
    started = [int(pid) for pid in pids.read_text().split()]
    assert all(Path(f"/proc/{pid}").exists() for pid in started)
    os.kill(asking.pid, signal.SIGKILL)
    asking.wait()
    _wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


def _wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.05)
