"""Passes of many batches in step, beside the same passes one after the other."""

import copy
import gc
import threading
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import TensorDataset

from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.batch import Batch
from compress.data.splits import Splits
from compress.pruning.channel_pruner import ChannelPruner
from compress.pruning.importance import scores
from compress.pruning.prune_channels import PruneChannels
from compress.pruning.recovery import paused_forward
from compress.pruning.recovery.paused_forward import ActivationFiles, PausedForward
from compress.pruning.recovery.recovery import ReferenceOutputs, recover_, refit_
from tests.compress.pruning import pruning_nets
from tests.compress.pruning.pruning_nets import Tower
from tests.compress.pruning.recovery.test_least_squares import batches, cut, everything


def counted(module: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of samples of each forward pass."""
    forward, samples = module.forward, list[int]()

    def noting(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        samples.append(len(x))
        return forward(self, x)

    monkeypatch.setattr(module, "forward", noting)
    return samples


def test_the_passes_of_a_recovery_do_not_grow_with_depth(monkeypatch) -> None:
    passes = counted(Tower, monkeypatch)
    for depth in (1, 5):
        torch.manual_seed(0)
        net = Tower(depth).double().eval()
        given = batches(1, 6, 6)
        smaller, kept = cut(net, everything(given)[:2])
        before = ReferenceOutputs(net, given).error(smaller)
        passes.clear()
        facts = recover_(smaller, net, kept, given)
        assert len(facts["layers"]) == 2 * depth + 1
        assert facts["output_error"]["refit"] < facts["output_error"]["cut"]
        assert facts["output_error"]["cut"] == pytest.approx(before, rel=1e-3)
        # One batch shows the layers. Then both models run each batch once, the sliced one once
        # more before its refit, and twice for BatchNorm's statistics and what they give.
        assert len(passes) <= 1 + 5 * len(given)


def test_the_passes_of_prune_channels_do_not_grow_with_depth(monkeypatch, tmp_path: Path) -> None:
    samples = {}
    for depth in (2, 6):
        recipe = Recipe(factory="pruning_nets:Tower", arguments={"depth": depth})
        signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 1, 6, 6)),))
        folder = Path(pruning_nets.__file__).parent
        place = tmp_path / f"source{depth}"
        model = import_checkpoint(place, recipe, signature, checkpoint=None, folder=folder)
        images = TensorDataset(torch.randn(96, 1, 6, 6), torch.zeros(96))
        context = Context(root=tmp_path / f"x{depth}", data=Splits({"train": images}, 32))
        passes = counted(type(model.load()), monkeypatch)
        # The speedup is measured by calls whose number is a matter of time.
        monkeypatch.setattr(ChannelPruner, "_log_speedup", lambda _: None)
        pruned = PruneChannels(ratio=0.5, round_to=1)(model, context)
        assert len(pruned.manifest.facts["refit"]["layers"]) == 2 * depth + 1
        samples[depth] = sum(passes)
        monkeypatch.undo()
    assert samples[2] == samples[6]


def test_activations_in_files_give_the_same_weights(monkeypatch, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Tower(3).eval()
    given = [Batch((batch.inputs[0].float(),), None) for batch in batches(1, 6, 6)]
    in_memory, kept = cut(net, everything(given)[:2])
    in_files = copy.deepcopy(in_memory)
    refit_(in_memory, net, kept, given)
    stored: list[int] = []
    monkeypatch.setattr(paused_forward, "MAX_RESIDENT", 20_000)
    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda file, data: stored.append(write(file, data)))
    refit_(in_files, net, kept, given, folder=tmp_path)
    assert len(stored) > 10 and not list(tmp_path.iterdir())
    for one, other in zip(in_memory.parameters(), in_files.parameters(), strict=True):
        assert torch.equal(one, other)


class Products(TorchFunctionMode):
    """Notes how many rows are multiplied by each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Counter[int] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            self.rows[id(args[1])] += len(args[0])
        return func(*args, **(kwargs or {}))


def test_a_refit_runs_each_layer_once() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(p for _ in range(3) for p in (nn.Linear(12, 12), nn.Tanh()))).double()
    given = batches(12)
    smaller, kept = cut(net, everything(given)[:2])
    with Products() as products:
        refit_(smaller, net, kept, given, on_outputs=lambda *_: None)
    samples, shown = sum(map(len, given)), len(given[0])  # one batch shows the layers
    assert [products.rows[id(layer.weight)] for layer in net[::2]] == 3 * [samples]
    assert [products.rows[id(layer.weight)] for layer in smaller[::2]] == 3 * [shown + samples]


def test_a_pass_that_cannot_begin_fails_and_is_closed(monkeypatch, tmp_path: Path) -> None:
    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    one = PausedForward(
        nn.Linear(4, 2), Batch((torch.ones(3, 4),), None), ActivationFiles(str(tmp_path), 0)
    )
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", full)
        with pytest.raises(RuntimeError, match="new thread"):
            one.outputs()
    one.close()  # waits for no thread
    assert one.outputs()[0].shape == (3, 2)
    one.close()


def test_a_layer_with_many_positions_is_fitted_on_the_first_samples(monkeypatch) -> None:
    monkeypatch.setattr(scores, "MIN_SAMPLES", 40)
    monkeypatch.setattr(scores, "POSITIONS_PER_COLUMN", 1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3)).double()
    given = batches(1, 7, 7)
    on_all, kept = cut(net, everything(given)[:2])
    on_first = copy.deepcopy(on_all)
    refit_(on_all, net, kept, given)
    refit_(on_first, net, kept, given[:1])
    torch.testing.assert_close(on_all[2].weight, on_first[2].weight)


def test_a_layer_between_two_calls_of_another_is_refitted_after_it() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared, self.between = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.shared(torch.tanh(self.first(x))))
            return self.shared(torch.tanh(self.between(x)))

    torch.manual_seed(0)
    net = Between().double().eval()
    given = batches(8)
    smaller = copy.deepcopy(net)
    kept = {f"{name}.weight": {1: tuple(range(8))} for name in ("shared", "between")}
    with torch.no_grad():
        smaller.shared.weight.mul_(0.7)
        smaller.between.weight.mul_(0.7)
    results = refit_(smaller, net, kept, given)
    assert [one.weight for one in results] == ["shared.weight", "between.weight"]
    # `between` is fitted on what the refitted `shared` gives.
    alone = copy.deepcopy(smaller)
    with torch.no_grad():
        alone.between.weight.copy_(net.between.weight * 0.7)
        alone.between.bias.copy_(net.between.bias)
    refit_(alone, net, {"between.weight": kept["between.weight"]}, given)
    torch.testing.assert_close(alone.between.weight, smaller.between.weight)


def test_what_forward_keeps_on_the_module_belongs_to_its_batch() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = x.mean()
            return self.two(torch.tanh(self.one(x))) * self.seen

    torch.manual_seed(0)
    net = Keeps().double().eval()
    given = batches(8)
    smaller = copy.deepcopy(net)
    with torch.no_grad():
        smaller.two.weight.mul_(0.7)
    kept = {"two.weight": {1: tuple(range(8))}}
    outputs = []
    refit_(smaller, net, kept, given, on_outputs=lambda *pair: outputs.append(pair))
    for batch, ((expected,), (found,)) in zip(given, outputs, strict=True):
        torch.testing.assert_close(expected, net(*batch.inputs))
        torch.testing.assert_close(found, smaller(*batch.inputs))


def test_autocast_of_the_model_counts_where_its_functions_run() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.layer(x)

    net = Mixed().eval()
    batch = Batch((torch.randn(2, 8),), None)
    one = PausedForward(net, batch, ActivationFiles("", 0))
    (output,) = one.outputs_of("layer.weight", 1)
    assert output.dtype is torch.bfloat16
    assert torch.equal(one.outputs()[0], net(*batch.inputs))
    one.close()


MASK = torch.ones(2, 8)


def read_by_script(layer: nn.Module, x: torch.Tensor, between: nn.Module) -> torch.Tensor:
    # No function that a mode sees runs in compiled code.
    scripted = torch.jit.CompilationUnit("def add_one(x):\n    return torch.relu(x) + 1\n")
    kept = layer(x)
    return between(kept) + scripted.add_one(kept)


def shared_with_numpy(layer: nn.Module, x: torch.Tensor, between: nn.Module) -> torch.Tensor:
    array = layer(x).detach().numpy()
    return between(x) + torch.from_numpy(array)


def view_of_a_global(layer: nn.Module, x: torch.Tensor, between: nn.Module) -> torch.Tensor:
    mask = MASK[: len(x)]
    return between(layer(x) * mask)  # which is alive meanwhile, and not read any more


def own_gradient(layer: nn.Module, x: torch.Tensor, between: nn.Module) -> torch.Tensor:
    with torch.enable_grad():
        point = x.clone().requires_grad_()
        energy = layer(point).square().sum()
    return between(torch.autograd.grad(energy, point)[0])


@pytest.mark.parametrize(
    "code", [read_by_script, shared_with_numpy, view_of_a_global, own_gradient]
)
def test_any_code_finds_its_tensors_after_a_pause(code, tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.between = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return code(self.layer, x, self.between)

    net, batch = Net().eval(), Batch((torch.randn(2, 8),), None)
    with torch.no_grad():
        expected = net(*batch.inputs)
        one = PausedForward(net, batch, ActivationFiles(str(tmp_path), 0))
        assert len(one.inputs_of("between.weight", 1)) == 1
        one.pause()
        if code in (read_by_script, view_of_a_global):
            assert [*tmp_path.iterdir()]
        assert torch.equal(MASK, torch.ones(2, 8))
        assert torch.equal(one.outputs()[0], expected)
        one.close()


def test_errors_are_caught_by_the_model_or_told_and_no_thread_stays() -> None:
    class Tries(nn.Module):
        def __init__(self, *, catches: bool) -> None:
            super().__init__()
            self.layer, self.catches = nn.Linear(8, 8), catches

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                x = x.reshape(7, 7)
            except RuntimeError:
                if not self.catches:
                    raise
            return self.layer(x)

    batch = Batch((torch.randn(2, 8),), None)
    threads = threading.active_count()
    catches = PausedForward(Tries(catches=True), batch, ActivationFiles("", 0))
    assert len(catches.inputs_of("layer.weight", 1)) == 1
    fails = PausedForward(Tries(catches=False), batch, ActivationFiles("", 0))
    with pytest.raises(StageFailed, match=r"does not take .*\(2, 8\): RuntimeError: shape"):
        fails.outputs_of("layer.weight", 1)
    for one in (catches, fails):
        one.close()
    assert threading.active_count() == threads


def test_a_pass_that_is_closed_holds_no_activations() -> None:
    results: list[weakref.ref[torch.Tensor]] = []

    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.one(x)
            results.append(weakref.ref(x))
            return self.two(x)

    gc.disable()  # what is freed is freed at once, and not by and by
    try:
        one = PausedForward(Notes(), Batch((torch.randn(2, 8),), None), ActivationFiles("", 0))
        assert len(one.inputs_of("two.weight", 1)) == 1
        assert results[0]() is not None
        one.close()
        assert results[0]() is None
    finally:
        gc.enable()


def test_a_share_of_the_positions_says_what_all_say(monkeypatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2)).double()
    given = batches(1, 24, 24)
    on_all, kept = cut(net, everything(given)[:2])
    on_some = copy.deepcopy(on_all)
    rows: list[int] = []
    add = scores.Moments.add_

    def noting(self: scores.Moments, columns: torch.Tensor, answers: torch.Tensor) -> None:
        rows.append(columns.shape[1])
        add(self, columns, answers)

    monkeypatch.setattr(scores.Moments, "add_", noting)
    everywhere, every_row = refit_(on_all, net, kept, given), sum(rows)
    rows.clear()
    monkeypatch.setattr(scores, "MIN_POSITIONS", 0)
    monkeypatch.setattr(scores, "USED_PER_COLUMN", 200)
    (drawn,) = refit_(on_some, net, kept, given)
    assert sum(rows) < every_row / 4
    assert drawn.before == pytest.approx(everywhere[0].before, rel=0.1)
    inputs = everything(given)
    error = ReferenceOutputs(net, [Batch((inputs,), None)]).error
    assert error(on_some) < 1.05 * error(on_all)


def test_convolutions_are_channels_last_where_the_model_takes_it() -> None:
    seen: list[bool] = []

    class Views(nn.Module):
        def __init__(self, *, views: bool) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3))
            self.head, self.views = nn.Linear(6 * 9, 3), views

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self.layers[2].weight.is_contiguous())
            x = self.layers(x)
            return self.head(x.view(len(x), -1) if self.views else x.flatten(1))

    for views in (False, True):
        torch.manual_seed(0)
        net = Views(views=views).eval()
        given = [Batch((batch.inputs[0].float(),), None) for batch in batches(1, 7, 7)]
        smaller, kept = cut(net, everything(given)[:2])
        weights = [one.detach().clone() for one in net.parameters()]
        seen.clear()
        assert recover_(smaller, net, kept, given)["output_error"]["refit"] < 0.5
        assert sum(seen) == (1 if not views else len(seen) - 1)
        assert all(one.is_contiguous() for one in [*net.parameters(), *smaller.parameters()])
        for one, before in zip(net.parameters(), weights, strict=True):
            assert torch.equal(one, before)
