import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from compress.common.errors import PipelineInvalid, StageFailed
from compress.core.metrics import Metric
from compress.core.objectives.loss import Loss
from compress.core.objectives.task import target_kind
from compress.data.splits import Splits

FOUR = torch.tensor([[0.5], [-1.0], [2.0], [0.25]])
CLASSES = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [0.5, 0.5, 3.0], [1.0, 0.0, 0.0]])


def value(name: str | None, outputs: torch.Tensor, targets: torch.Tensor, **settings) -> float:
    return float(Loss(name).function()(outputs, targets, label_smoothing=0.0, **settings))


@pytest.mark.parametrize(
    ("outputs", "targets", "name", "expected"),
    [
        (CLASSES, torch.tensor([0, 1, 2, 0]), "cross_entropy", F.cross_entropy),
        (CLASSES, torch.eye(3)[[0, 1, 2, 0]], "cross_entropy", F.cross_entropy),
        (CLASSES, torch.eye(3)[[0, 1, 2, 0]] * 0.7 + 0.1, "cross_entropy", F.cross_entropy),
        (FOUR, torch.tensor([[1.0], [0], [1], [0]]), "binary_cross_entropy", None),
        (FOUR, torch.tensor([1.0, 0, 1, 0]), "binary_cross_entropy", None),
        (FOUR, torch.tensor([1, 0, 1, 0]), "binary_cross_entropy", None),
        (FOUR, torch.tensor([True, False, True, False]), "binary_cross_entropy", None),
        (FOUR[:, 0], torch.tensor([[1], [0], [1], [0]]), "binary_cross_entropy", None),
        (CLASSES, torch.tensor([[1.0, 1, 0]] * 4), "binary_cross_entropy", None),
        (FOUR, torch.tensor([0.5, 3.0, -1.0, 2.0]), "mse", F.mse_loss),
        (FOUR[:, 0], torch.tensor([[0.5], [3.0], [-1.0], [2.0]]), "mse", F.mse_loss),
        (CLASSES, CLASSES.double() * 2 + 1, "mse", F.mse_loss),
        (CLASSES.view(2, 2, 3), torch.tensor([[0, 1, 1], [1, 0, 0]]), "cross_entropy", None),
    ],
)
def test_the_loss_is_inferred_from_the_targets(outputs, targets, name, expected) -> None:
    assert Loss().name_for(outputs, targets) == name
    same = targets.reshape(outputs.shape).float() if name != "cross_entropy" else targets
    expected = (
        expected
        or {
            "binary_cross_entropy": F.binary_cross_entropy_with_logits,
            "cross_entropy": F.cross_entropy,
        }[name]
    )
    assert value(None, outputs, targets) == pytest.approx(float(expected(outputs, same)), rel=1e-6)
    assert value(name, outputs, targets) == value(None, outputs, targets)
    summed, count = Loss().sums_and_counts(outputs, targets).sum(1)
    assert summed / count == pytest.approx(value(None, outputs, targets), rel=1e-6)


def test_a_column_and_a_row_are_not_broadcast_against_each_other() -> None:
    assert value("l1", FOUR, FOUR[:, 0]) == 0
    assert value("smooth_l1", FOUR[:, 0], FOUR) == 0


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "reason"),
    [
        ("cross_entropy", FOUR, FOUR, "two classes on axis 1 .* for numbers use mse"),
        ("cross_entropy", CLASSES, FOUR, r"found targets float32 \[n, 1\] .* of shape \[n\]"),
        ("cross_entropy", CLASSES, torch.tensor([[0], [1], [2], [0]]), r"labels of shape \[n\]"),
        (
            "cross_entropy",
            CLASSES,
            torch.tensor([0, 3, 1, 2]),
            "label 3 is out of range: .* 0 to 2",
        ),
        ("cross_entropy", CLASSES, torch.tensor([0, -1, 1, 2]), "label -1 is out of range"),
        ("cross_entropy", CLASSES, CLASSES, "probabilities .* sum to 1.* for numbers use mse"),
        ("nll", CLASSES, torch.tensor([0, 1, 2, 0]), "log-probabilities.* reach 3; .*log_softmax"),
        ("nll", CLASSES, FOUR, "log-probabilities"),  # before what is wrong with the targets
        ("mse", CLASSES, torch.tensor([0, 1, 2, 0]), r"outputs' shape.* use cross_entropy"),
        ("mse", FOUR, torch.tensor([[1], [2], [3], [4]]), r"numbers, found int64 \[n, 1\]"),
        ("l1", CLASSES, FOUR, r"found outputs float32 \[n, 3\] and targets float32 \[n, 1\]"),
        ("binary_cross_entropy", FOUR, 3 * FOUR, "from 0 to 1, found 1.5"),
        ("binary_cross_entropy", CLASSES, torch.tensor([0, 1, 2, 0]), "use cross_entropy"),
        (None, FOUR, torch.tensor([3, 4, 5, 6]), "from 0 to 1, found 3; for numbers use mse"),
        (
            None,
            CLASSES,
            FOUR,
            r"no loss fits outputs float32 \[n, 3\] and targets float32 \[n, 1\]",
        ),
    ],
)
def test_targets_that_do_not_fit_are_refused(name, outputs, targets, reason) -> None:
    with pytest.raises(StageFailed, match=reason):
        value(name, outputs, targets)


def test_the_kind_of_targets_is_inferred_from_all_samples() -> None:
    counts = torch.zeros(600, 1)
    counts[1::2] = 3.5
    data = Splits({"train": TensorDataset(torch.zeros(600, 2), counts)})
    settled = Loss().infer_targets(data)
    assert target_kind(counts[::2]) == "binary"
    assert settled.name_for(FOUR, counts[::2][:4]) == "mse"
    assert Loss().infer_targets(Splits({"train": TensorDataset(torch.zeros(3, 2))})) == Loss()


def test_log_probabilities_have_the_nll_of_their_cross_entropy() -> None:
    labels = torch.tensor([0, 1, 2, -100])
    assert value("nll", CLASSES.log_softmax(1), labels) == pytest.approx(
        value("cross_entropy", CLASSES, labels)
    )


def test_the_loss_is_0_with_a_gradient_where_all_labels_are_ignored() -> None:
    outputs = CLASSES.clone().requires_grad_()
    loss = Loss().function()(outputs, torch.full((4,), -100))
    loss.backward()
    assert float(loss.detach()) == 0
    assert not outputs.grad.any()


@pytest.mark.parametrize("name", ["mse", "l1", "smooth_l1", "binary_cross_entropy"])
def test_samples_without_numbers_add_nothing_beside_a_teacher(name: str) -> None:
    targets = torch.tensor([0.5, float("nan"), 1.0, float("nan")])
    assert value(name, FOUR, targets * float("nan"), over_all=True) == 0
    found = value(name, FOUR, targets, over_all=True)
    assert found == pytest.approx(value(name, FOUR[::2], targets[::2]) / 2)


@pytest.mark.parametrize("settings", [{}, {"class_weights": torch.arange(5.0)}])
@pytest.mark.parametrize("name", ["cross_entropy", "nll"])
def test_classes_in_any_layout_have_one_loss(name: str, settings: dict) -> None:
    scores = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    labels = torch.tensor([[0, 1, 2, 3], [4, -100, 0, 1], [-100, 2, 2, 2]])
    losses, gradients, sums = [], [], []
    for layout in (scores, scores.mT.contiguous().mT):
        outputs = layout.detach().requires_grad_()
        loss = Loss(name).function()(outputs, labels, **settings)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(outputs.grad)
        sums.append(Loss(name).sums_and_counts(layout, labels).sum(1))
    assert losses[0] == pytest.approx(losses[1])
    assert sums[0] == pytest.approx(sums[1])
    assert torch.allclose(*gradients)


def test_scores_that_lie_side_by_side_are_read_in_their_order() -> None:
    class Axes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._log_softmax.default:
                axes.append((args[0].dim(), args[1]))
            return function(*args, **(kwargs or {}))

    axes: list[tuple[int, int]] = []
    with Axes():
        Loss("cross_entropy").function()(torch.randn(2, 6, 9).mT, torch.zeros(2, 6).long())
    assert axes == [(2, 1)]


def test_half_precision_losses_are_computed_in_float32() -> None:
    half = value("mse", (FOUR * 300).bfloat16(), torch.zeros(4))
    assert half == pytest.approx(float((FOUR * 300).bfloat16().float().square().mean()))


def test_a_function_of_the_users_is_part_of_the_identity(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def huber(y, t):\n    return ((y - t) ** 2).mean() / 2\n")
    loss = Loss("mine:huber", folder=tmp_path)
    assert float(loss.function()(FOUR, FOUR + 2)) == pytest.approx(2)
    assert loss.sums_and_counts(FOUR, FOUR + 2).sum(1).tolist() == [8, 4]
    before = loss.identity()
    (tmp_path / "mine.py").write_text("def huber(y, t):\n    return (y - t).abs()\n")
    assert loss.identity() != before
    with pytest.raises(StageFailed, match=r"'mine:huber' returned float32 \[n, 1\], expected a"):
        loss.function()(FOUR, FOUR)
    with pytest.raises(StageFailed, match=r"'mine:huber' fails for outputs .*: RuntimeError"):
        loss.function()(FOUR, torch.zeros(7, 3))
    with pytest.raises(PipelineInvalid, match="class_weights is for loss: cross_entropy or nll"):
        loss.function()(FOUR, FOUR, class_weights=torch.ones(1))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(PipelineInvalid, match=r"unknown loss 'mae'.* module:callable"):
        Loss("mae")
    with pytest.raises(PipelineInvalid, match=r"did you mean 'cross_entropy'\? expected"):
        Loss("crossentropy")


@pytest.mark.parametrize(
    ("outputs", "targets", "expected"),
    [
        (FOUR, torch.tensor([1.0, 0, 0, 1]), 0.75),
        (FOUR, torch.tensor([[1], [0], [0], [1]]), 0.75),
        (CLASSES, torch.eye(3)[[0, 1, 0, 0]], 0.75),
        (CLASSES, torch.tensor([0, 1, 0, -100]), 2 / 3),
    ],
)
def test_accuracy_of_binary_logits_and_ignored_labels(outputs, targets, expected) -> None:
    assert Metric("accuracy").score(outputs, targets) == pytest.approx(expected)


def test_accuracy_of_regression_targets_is_refused() -> None:
    with pytest.raises(StageFailed, match=r"targets are numbers, float32 \[n\]; use metric: loss"):
        Metric("accuracy").score(FOUR, torch.tensor([1.5, 2.0, 3.0, 4.0]))


def test_regression_metrics_equal_torchmetrics() -> None:
    from torchmetrics import MeanAbsoluteError, MeanSquaredError, R2Score

    targets = CLASSES * 0.9 + torch.arange(12).view(4, 3) / 10
    for name, theirs in (
        ("mse", MeanSquaredError()),
        ("mae", MeanAbsoluteError()),
        ("r2", R2Score()),
    ):
        theirs.update(CLASSES, targets)
        assert Metric(name).score(CLASSES, targets) == pytest.approx(float(theirs.compute()))
        assert Metric(name).higher_is_better == (name == "r2")
    with pytest.raises(StageFailed, match="all equal"):
        Metric("r2").score(FOUR, torch.ones(4))
