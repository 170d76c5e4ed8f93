"""How much worse a model is on half of `val`, and how sure that is."""

import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.core.context import Context
from compress.core.metrics import Metric
from compress.core.val_halves import HalfOfVal
from compress.data.splits import Splits


class Wrong:
    """Answers as a model does, but wrongly for some samples, by the sum of their inputs."""

    def __init__(self, model: EagerModel, below: float) -> None:
        self.model, self.below = model.load(), below

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        is_wrong = x.sum(1, keepdim=True) < self.below
        return (torch.where(is_wrong, -1, 1) * self.model(x),)


def test_the_interval_of_a_drop_is_that_of_a_proportion(mlp: EagerModel, tmp_path) -> None:
    # 400 samples with labels that the model gives, of which some are answered wrongly.
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    y = mlp.load()(x).argmax(1)
    data = Splits({"val": torch.utils.data.TensorDataset(x, y)}, batch_size=50)
    half = HalfOfVal(data, Metric("accuracy"), Context(root=tmp_path / "w", data=data), mlp)
    predict = Wrong(mlp, -2.0)
    drop, interval = half.drop_points(predict), half.drop_interval(predict)
    assert interval is not None and drop > 5
    assert sum(interval) / 2 == pytest.approx(drop)
    share = drop / 100
    expected = 100 * (share * (1 - share) / 400) ** 0.5
    # Twenty parts estimate the standard error, and 2.09 is the quantile of t beside 1.96.
    assert (interval[1] - interval[0]) / 2 == pytest.approx(2.09 * expected, rel=0.3)


def test_without_a_difference_there_is_no_interval(mlp: EagerModel, tmp_path, blobs) -> None:
    context = Context(root=tmp_path / "w", data=blobs)
    half = HalfOfVal(blobs, Metric("accuracy"), context, mlp)
    assert half.drop_interval(Wrong(mlp, -100.0)) is None
