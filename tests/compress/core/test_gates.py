import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe import KeepIndices, Recipe
from compress.common.errors import GateRefused, StageFailed
from compress.common.forward import Predictor
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import (
    LabelAgreement,
    MaxDrop,
    MaxFileSize,
    MaxLatency,
    MaxMemory,
    MaxParameters,
    MaxRelativeDrop,
    MaxSize,
    MinCosine,
    MinMetric,
    MinSpeedup,
    Parity,
)
from compress.core.gates.gate import Gate
from compress.core.metrics import Metric
from compress.core.metrics.builtin import predicted_decisions
from compress.core.stage import Stage
from compress.core.verdict import Uncertainty, explain
from compress.data.splits import Splits
from compress.profiling import benchmark
from compress.profiling.benchmark import InterleavedLatencies, Latency
from compress.profiling.quantiles import Interval


@pytest.fixture
def context(tmp_path: Path, blobs: Splits) -> Context:
    return Context(root=tmp_path / "result", data=blobs)


@pytest.fixture
def trained(mlp: EagerModel, tmp_path: Path) -> EagerModel:
    """A classifier by hand: class i is where feature i is large."""
    module = mlp.load()
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
        module[0].weight[:3, :3] = torch.eye(3)
        module[2].weight[:, :3] = torch.eye(3)
    return mlp.derive(tmp_path / "trained", module)


@pytest.fixture
def slim(trained: EagerModel, tmp_path: Path) -> EagerModel:
    """The same without its idle neurons: equal answers, fewer weights."""
    kept = {0: (0, 1, 2)}
    edit = KeepIndices(kept={"0.weight": kept, "0.bias": kept, "2.weight": {1: (0, 1, 2)}})
    module = trained.load()
    edit.apply_(module)
    return trained.derive(tmp_path / "slim", module, edits=[edit])


@pytest.fixture
def shifted(trained: EagerModel, tmp_path: Path) -> EagerModel:
    """The same with one logit raised by 0.5."""
    module = trained.load()
    with torch.no_grad():
        module[2].bias[0] += 0.5
    return trained.derive(tmp_path / "shifted", module)


def test_parity_measures_the_largest_difference(trained, slim, shifted, context) -> None:
    assert Parity(atol=1e-6).evaluate(trained, slim, context).passed
    verdict = Parity(atol=0.1).evaluate(trained, shifted, context)
    assert verdict.value == pytest.approx(0.5)
    assert not verdict.passed


def test_equal_infinities_are_equal(trained, shifted, context, tmp_path) -> None:
    def masked(model: EagerModel, mask: float) -> EagerModel:
        module = model.load()
        with torch.no_grad():
            module[2].bias[2] = mask
        return model.derive(tmp_path / f"{model.path.name}{mask}", module)

    one, other = masked(trained, -torch.inf), masked(shifted, -torch.inf)
    assert Parity(atol=0.1).evaluate(one, one, context).value == 0
    assert Parity(atol=0.1).evaluate(one, other, context).value == pytest.approx(0.5)
    assert Parity(atol=1e9).evaluate(one, masked(trained, torch.inf), context).value is None
    assert Parity(atol=1e9).evaluate(one, trained, context).value is None


def test_parity_works_without_data(trained, shifted, context) -> None:
    verdict = Parity(atol=0.1).evaluate(trained, shifted, replace(context, data=None))
    assert verdict.value == pytest.approx(0.5)


def test_label_agreement(trained, slim, mlp, context) -> None:
    assert LabelAgreement().evaluate(trained, slim, context).value == 1.0
    verdict = LabelAgreement().evaluate(trained, mlp, context)
    assert not verdict.passed
    x = torch.cat([batch.inputs[0] for batch in context.data.batches("val")])
    equal = trained.load()(x).argmax(1) == mlp.load()(x).argmax(1)
    assert 0 < verdict.value == int(equal.sum()) / len(x) < 1


def test_one_output_is_decided_by_its_sign() -> None:
    outputs = torch.tensor([[0.5], [-0.1], [0.0]])
    assert predicted_decisions(outputs).flatten().tolist() == [True, False, False]
    assert Metric("fidelity").score(outputs, predicted_decisions(outputs)) == 1


@pytest.mark.parametrize(
    ("metric", "before", "after", "percent"),
    [("accuracy", 0.9, 0.882, 2), ("loss", 20.0, 20.4, 2), ("r2", -0.5, -0.6, 20)],
)
def test_a_relative_drop_is_in_percent_of_the_metric_before(metric, before, after, percent) -> None:
    assert MaxRelativeDrop(percent=1).measure(before, after, _scored(metric)).value == percent
    assert MaxRelativeDrop(percent=1).measure(after, before, _scored(metric)).value < 0


def _scored(metric):
    """Return a context in which the score of a number is this number."""
    unsure = Uncertainty(samples=1)
    return SimpleNamespace(
        metric=Metric(metric), score=lambda value: value, drop_uncertainty=lambda *_: unsure
    )


def test_a_metric_of_0_has_no_relative_drop() -> None:
    verdict = MaxRelativeDrop(percent=100).evaluate(0.0, 0.0, _scored("accuracy"))
    assert not verdict.passed and "was 0 before" in verdict.reason


def test_a_file_size_is_in_mebibytes(trained, context) -> None:
    size = trained.payload_bytes / 2**20
    assert MaxFileSize(mebibytes=size).evaluate(trained, trained, context).passed
    verdict = MaxFileSize(mebibytes=size * 0.99).evaluate(trained, trained, context)
    assert not verdict.passed and verdict.against is None


def test_drop_and_metric(trained, mlp, slim, context) -> None:
    assert MaxDrop(points=0).evaluate(trained, slim, context).passed
    drop = MaxDrop(points=1).evaluate(trained, mlp, context)
    assert drop.value is not None
    assert drop.value > 20
    assert not drop.passed
    assert MaxDrop(points=0).evaluate(mlp, trained, context).value == pytest.approx(-drop.value)
    assert MinMetric(at=0.8).evaluate(mlp, trained, context).passed
    assert not MinMetric(at=0.999).evaluate(mlp, trained, context).passed


def test_a_drop_of_exactly_the_limit_passes(context) -> None:
    assert MaxDrop(points=1.0).verdict(round(100 * (0.98 - 0.97), 9)).passed


@pytest.mark.parametrize(
    ("metric", "before", "after", "points"),
    [
        ("accuracy", 0.98, 0.97, 1),
        ("accuracy", 0.98765, 0.97654, 1.111),
        ("accuracy", 0.5, 0.75, -25),
        ("loss", 0.1, 0.35, 25),
    ],
)
def test_a_drop_is_in_hundredths_and_free_of_float_errors(metric, before, after, points) -> None:
    assert MaxDrop(points=0).measure(before, after, _scored(metric)).value == points


def test_max_parameters_fails_for_artifacts_without_weights(context) -> None:
    def counted(number: int | None) -> SimpleNamespace:
        return SimpleNamespace(parameters=lambda: number, kind="thing")

    gate = MaxParameters(ratio=1)
    assert gate.evaluate(counted(8), counted(2), context).value == 0.25
    for before, after in ((None, 2), (0, 2), (8, None), (None, None)):
        verdict = gate.evaluate(counted(before), counted(after), context)
        assert not verdict.passed and "of thing or thing cannot be counted" in verdict.reason


def test_latency_is_measured_at_the_gates_batch_size(slim, trained) -> None:
    calls = []
    comparison = SimpleNamespace(
        interval=Interval(1.5, 2.5),
        speedup_doubt="",
        after=SimpleNamespace(p50=2, p95=7.0, doubt_of=lambda figure: ""),
    )
    context = SimpleNamespace(compare_latency=lambda *args: calls.append(args) or comparison)
    assert MinSpeedup(ratio=1, batch=3).measure(trained, slim, context) == 1.5
    assert MaxLatency(p95_ms=1, batch=3).measure(trained, slim, context) == 7.0
    assert calls == [(trained, slim, 3)] * 2


def test_memory_is_measured_at_the_gates_batch_size(slim, trained) -> None:
    calls = []
    context = SimpleNamespace(peak_memory=lambda *args: calls.append(args) or 12.5)
    assert MaxMemory(mebibytes=12.5, batch=3).evaluate(trained, slim, context).passed
    assert not MaxMemory(mebibytes=12.4, batch=3).evaluate(trained, slim, context).passed
    assert calls == [(slim, 3)] * 2


@pytest.mark.parametrize(
    ("gate", "passing", "failing"),
    [
        (Parity(atol=0.5, against="x"), 0.5, 0.5000001),
        (MinMetric(at=0.9), 0.9, 0.8999999),
        (MinSpeedup(ratio=2, batch=8), 2.0, 1.9999999),
        (MaxSize(ratio=0.25), -1.0, 0.2500001),
    ],
)
def test_a_verdict_compares_the_value_with_the_limit(gate: Gate, passing, failing) -> None:
    verdict = gate.verdict(passing)
    assert verdict.passed and verdict.value == passing and verdict.reason == ""
    assert verdict.gate == gate.gate and verdict.limit == gate.limit
    assert verdict.against == {"parity": "x", "min_metric": None}.get(gate.gate, "input")
    assert not gate.verdict(failing).passed
    for value in (None, float("inf"), -float("inf"), float("nan")):
        refused = gate.verdict(value)
        assert not refused.passed and refused.value is None
        assert refused.reason == "the measured value is not finite"
    assert gate.verdict(None, "no data").reason == "no data"


def test_a_verdict_is_explained_in_one_line() -> None:
    gate = MinSpeedup(ratio=2, batch=8)
    rule = "speedup at batch 8 >= 2 with 95 % confidence"
    assert explain(gate.verdict(1.23456)) == f"min_speedup: {rule}, found 1.235"
    assert explain(gate.verdict(None, "no data")) == f"min_speedup: {rule}, no data"
    against = Parity(atol=0.5, against="train").verdict(0.25)
    assert explain(against) == "parity against train: max |difference| <= 0.5, found 0.25"
    alone = MinMetric(at=0.9).verdict(0.95)
    assert explain(alone) == "min_metric: metric >= 0.9, found 0.95"


def test_size_and_parameters(trained, slim, context) -> None:
    ratio = slim.payload_bytes / trained.payload_bytes
    assert MaxSize(ratio=ratio).evaluate(trained, slim, context).passed
    assert not MaxSize(ratio=ratio * 0.99).evaluate(trained, slim, context).passed
    assert MaxParameters(ratio=0.3).evaluate(trained, slim, context).passed
    assert not MaxParameters(ratio=0.1).evaluate(trained, slim, context).passed


def test_speed_is_measured(trained, slim, context) -> None:
    faster = MinSpeedup(ratio=1000, batch=4).evaluate(trained, slim, context)
    assert faster.value is not None
    assert 0 < faster.value < 1000
    assert not faster.passed
    assert MaxLatency(p95_ms=1e6).evaluate(trained, slim, context).passed
    assert not MaxLatency(p95_ms=1e-6).evaluate(trained, slim, context).passed


@dataclass
class Recording:
    """An artifact that records its inputs."""

    signature: Signature
    inputs: list[torch.Tensor] = field(default_factory=list)
    digest: str = "recording"
    only_device: str = ""
    is_cascade: bool = False
    manifest: Any = field(default_factory=lambda: SimpleNamespace(files={}))
    devices: list[str] = field(default_factory=list)

    def runs_on(self, device: str) -> str:
        return self.only_device or device

    def make_ready(self) -> None: ...

    @contextmanager
    def open_anew(self, device: str, threads: int) -> Iterator[Predictor]:
        self.devices.append(self.runs_on(device))
        yield lambda x: (self.inputs.append(x), (x,))[1]


def test_a_file_for_the_cpu_is_compared_with_its_source_on_the_cpu(mlp, context) -> None:
    before, after = (Recording(mlp.signature, digest=name) for name in "ab")
    on_device = replace(context, device="meta")
    on_device.compare_latency(before, after, 1)
    assert {*before.devices} == {*after.devices} == {"meta"}
    before.devices.clear()
    exported = Recording(mlp.signature, digest="c", only_device="cpu")
    on_device.compare_latency(before, exported, 1)
    assert {*before.devices} == {*exported.devices} == {"cpu"}


def test_a_reliable_comparison_is_measured_once(mlp, context, monkeypatch) -> None:
    """The gate and the report then name the same figure; an uncertain one is measured again."""
    before, after = Recording(mlp.signature, digest="a"), Recording(mlp.signature, digest="b")
    reliable = SimpleNamespace(unreliable_reason="")
    found = [SimpleNamespace(unreliable_reason="noise"), reliable]

    def compare(first: int, second: int) -> SimpleNamespace:
        return found.pop(0) if first != second else reliable

    measured = SimpleNamespace(comparison=compare)
    monkeypatch.setattr(benchmark, "compare_latencies", lambda *_, **__: measured)
    assert context.compare_latency(before, after, 1).unreliable_reason == "noise"
    assert [context.compare_latency(before, after, 1) for _ in range(2)] == [reliable, reliable]
    found.append(SimpleNamespace(unreliable_reason=""))
    assert context.compare_latency(before, after, 2) is not reliable
    assert not found


def test_each_comparison_of_several_is_with_its_own_model(mlp, context, monkeypatch) -> None:
    """Those that are measured already are not again, and each has its own figures for later."""
    names = "abc"
    first, second, after = (Recording(mlp.signature, digest=name) for name in names)
    milliseconds, timed = dict(zip(names, (8.0, 4.0, 2.0), strict=True)), []

    def compare(openers, *_, **__):
        digests = [opener.func.__self__.digest for opener in openers]
        timed.append("".join(sorted(digests)))
        times = [milliseconds[digest] for digest in digests]
        latencies = [
            Latency(batch=1, p50=x, p95=x, p50_interval=(x, x), p95_interval=(x, x), outliers=0)
            for x in times
        ]
        return InterleavedLatencies(tuple(latencies), tuple((x,) * 8 for x in times))

    monkeypatch.setattr(benchmark, "compare_latencies", compare)
    compared = context.compare_latencies([first, second, first], after, 1)
    assert [one.speedup for one in compared] == [4, 2, 4]
    assert [one.before.p50 for one in compared] == [8, 4, 8]
    assert {one.after.p50 for one in compared} == {2}
    assert context.compare_latency(second, after, 1).speedup == 2
    assert context.compare_latency(first, first, 1).after.p50 == 8
    assert timed == ["abc"]
    assert context.compare_latency(first, second, 1).speedup == 2
    assert timed == ["abc", "ab"]


def test_models_that_a_gpu_has_no_room_for_at_once_are_timed_in_pairs(
    mlp, context, monkeypatch
) -> None:
    opened, room = [], 2

    class Large(Recording):
        @contextmanager
        def open_anew(self, *_):
            if len(opened) == room:
                raise torch.OutOfMemoryError("CUDA out of memory")
            opened.append(self.digest)
            try:
                yield lambda *inputs: inputs
            finally:
                opened.remove(self.digest)

    first, second, after = (Large(mlp.signature, digest=name) for name in "abc")
    compared = context.compare_latencies([first, second], after, 1)
    assert len(compared) == 2 and not opened
    room = 1
    with pytest.raises(torch.OutOfMemoryError):
        context.compare_latency(first, second, 1)


@pytest.mark.parametrize("batch", [1, 8])
def test_latency_is_measured_on_distinct_samples_of_val(mlp, context, blobs, batch) -> None:
    before, after = (Recording(mlp.signature, digest=name) for name in "ab")
    context.compare_latency(before, after, batch)
    val = {*map(tuple, blobs.datasets["val"].tensors[0].tolist())}
    assert all({*map(tuple, x.tolist())} <= val for x in after.inputs)
    assert all(len({*map(tuple, x.tolist())}) == batch for x in after.inputs)
    seen, expected = ({tuple(x.flatten().tolist()) for x in one.inputs} for one in (after, before))
    assert len(seen) >= 8
    assert seen == expected


@pytest.mark.parametrize("gate", [MaxDrop(points=100), MinMetric(at=0)])
def test_a_gate_that_cannot_be_measured_fails(gate: Gate, trained, slim, context) -> None:
    verdict = gate.evaluate(trained, slim, replace(context, data=None))
    assert verdict.value is None
    assert not verdict.passed
    assert "needs data" in verdict.reason


def test_min_metric_fails_for_a_metric_that_falls_with_quality(trained, slim, context) -> None:
    verdict = MinMetric(at=0).evaluate(trained, slim, replace(context, metric=Metric("loss")))
    assert not verdict.passed


@pytest.mark.parametrize(
    "gate", [Parity(atol=1), LabelAgreement(minimum=0), MaxDrop(points=1), MinSpeedup(ratio=1)]
)
def test_nan_never_passes(gate: Gate) -> None:
    assert not gate.verdict(float("nan")).passed


def test_nan_outputs_fail_parity(trained, context, tmp_path) -> None:
    module = trained.load()
    with torch.no_grad():
        module[2].bias[0] = float("nan")
    broken = trained.derive(tmp_path / "nan", module)
    verdict = Parity(atol=1e9).evaluate(trained, broken, context)
    assert not verdict.passed
    assert "NaN" in verdict.reason


class Copy(Stage[EagerModel, EagerModel]):
    """Copy."""

    stage: str = "copy"

    def run(self, model: EagerModel, context: Context) -> EagerModel:
        return model.derive(context.root, model.load(), lineage=self.lineage(model))


def test_a_refusing_gate_keeps_and_names_the_artifact(trained, shifted, context) -> None:
    with pytest.raises(GateRefused, match=r"copy: parity against shifted.*found 0\.5") as refusal:
        Copy(gates=(Parity(atol=0.1, against="shifted"),))(
            trained, replace(context, artifacts={"shifted": shifted})
        )
    assert str(context.root) in str(refusal.value)
    EagerModel.from_directory(context.root).verify()


def test_the_lineage_has_the_inputs_digest(trained, context) -> None:
    result = Copy(gates=(Parity(atol=0),))(trained, context)
    assert result.manifest.lineage[-1].inputs == {"input": trained.digest}


def test_a_stage_that_keeps_no_checkpoints_leaves_no_folder_for_them(
    trained, context, tmp_path
) -> None:
    Copy()(trained, replace(context, scratch=tmp_path / "work" / "copy"))
    assert not (tmp_path / "work").exists()


def test_a_changed_limit_reuses_the_measured_value() -> None:
    assert Parity(atol=1).measurement_key() == Parity(atol=2, against="x").measurement_key()
    assert MinSpeedup(ratio=1, batch=1).measurement_key() != (
        MinSpeedup(ratio=1, batch=2).measurement_key()
    )


def test_a_fixed_batch_is_not_measured_at_another_size(mlp, context, tmp_path) -> None:
    fixed = Signature(inputs=(TensorSpec(name="x", shape=(4, 4)),))
    folder = mlp.code
    model = EagerModel.create(
        tmp_path / "fixed", mlp.recipe, mlp.load().state_dict(), fixed, folder=folder
    )
    verdict = MinSpeedup(ratio=0.1, batch=32).evaluate(model, model, context)
    assert not verdict.passed
    assert "fixed at 4" in verdict.reason
    assert model.macs() == mlp.macs()


def test_an_exception_in_a_measurement_fails_only_the_gate(trained, context) -> None:
    class Falling(MaxSize):
        def measure(self, before, after, context) -> float:
            raise ZeroDivisionError("by the user's metric")

    verdict = Falling(ratio=1).evaluate(trained, trained, context)
    assert not verdict.passed
    assert verdict.reason == "ZeroDivisionError: by the user's metric"


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_lack_of_memory_or_disk_is_no_verdict(error: Exception, trained, context) -> None:
    class Full(MaxSize):
        def unsuitable_device(self, kind) -> str:
            raise error

    with pytest.raises(StageFailed, match=r"gate max_size: .*(memory ran out|No space left)"):
        Full(ratio=1).evaluate(trained, trained, context)
    # A device may have too little for this model.
    verdict = (
        Full(ratio=1).model_copy(update={"on": ("phone",)}).evaluate(trained, trained, context)
    )
    assert not verdict.passed


def test_scores_are_cached_for_each_metric(trained, context) -> None:
    accuracy = context.score(trained)
    assert replace(context, metric=Metric("loss")).score(trained) != accuracy


def test_a_model_with_a_fixed_batch_is_evaluated_on_every_sample(
    trained, shifted, context, tmp_path
) -> None:
    fixed = Signature(inputs=(TensorSpec(name="x", shape=(7, 4)),))
    pair = [
        EagerModel.create(
            tmp_path / f"fixed{i}", m.recipe, m.load().state_dict(), fixed, folder=m.code
        )
        for i, m in enumerate((trained, shifted))
    ]
    assert context.score(pair[0]) == context.score(trained)
    assert Parity(atol=1).evaluate(*pair, context).value == pytest.approx(0.5)


@pytest.fixture
def answering(tmp_path: Path):
    """Return a function that seals a model of 4 numbers by the expression that it answers."""

    def make(name: str, expression: str) -> EagerModel:
        (tmp_path / f"{name}.py").write_text(
            "import torch\n\nclass Net(torch.nn.Module):\n"
            f"    def forward(self, x):\n        return {expression}\n"
        )
        signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
        recipe = Recipe(factory=f"{name}:Net")
        return EagerModel.create(tmp_path / name, recipe, {}, signature, folder=tmp_path)

    return make


def test_nan_in_a_later_output_or_batch_fails_parity(answering, context) -> None:
    whole = answering("whole", "(x, x)")
    later = answering("later", "(x, x / (x[:1] == 0))")
    for other in (later, answering("rows", "(x, x.where(x.abs() < 2, torch.nan))")):
        verdict = Parity(atol=1e9).evaluate(whole, other, context)
        assert (verdict.value, verdict.passed) == (None, False)
    assert "NaN" in verdict.reason


def test_parity_needs_at_least_one_output_with_elements(answering, context) -> None:
    some = answering("some", "(x, x[:, :0])")
    assert Parity(atol=0).evaluate(some, some, context).value == 0
    nothing = answering("nothing", "x[:, :0]")
    verdict = Parity(atol=1).evaluate(nothing, nothing, context)
    assert not verdict.passed
    assert verdict.reason == "the outputs have no elements, so that there is nothing to compare"


@pytest.mark.parametrize("expression", ["x[:0]", "x[:, :0]"], ids=["no samples", "no vectors"])
def test_a_cosine_needs_vectors(answering, context, expression) -> None:
    nothing = answering("nothing", expression)
    verdict = MinCosine(minimum=-1).evaluate(nothing, nothing, context)
    assert not verdict.passed
    assert verdict.reason == "the outputs have no elements, so that there is nothing to compare"


def test_labels_agree_beside_a_masked_class(answering, context) -> None:
    plain, masked = (
        answering("plain", "x[:, :3]"),
        answering("masked", "x.masked_fill(torch.arange(4) == 3, -torch.inf)"),
    )
    assert LabelAgreement().evaluate(plain, masked, context).value == 1.0
    another = answering("another", "x.masked_fill(torch.arange(4) == 0, -torch.inf)")
    assert LabelAgreement().evaluate(plain, another, context).value < 0.9
    everything = answering("everything", "x.masked_fill(x < 9, -torch.inf)")
    verdict = LabelAgreement().evaluate(plain, everything, context)
    assert "all classes of a sample are masked" in verdict.reason
