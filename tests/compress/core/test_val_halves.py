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
    drop, interval = half.drop_with_interval(predict)
    assert interval is not None and drop > 5
    assert sum(interval) / 2 == pytest.approx(drop, rel=0.1)
    share = drop / 100
    expected = 100 * (share * (1 - share) / 400) ** 0.5
    assert (interval[1] - interval[0]) / 2 == pytest.approx(1.96 * expected, rel=0.1)


def test_without_a_difference_the_interval_is_that_of_no_sample_of_all(
    mlp: EagerModel, tmp_path, blobs
) -> None:
    context = Context(root=tmp_path / "w", data=blobs)
    half = HalfOfVal(blobs, Metric("accuracy"), context, mlp)
    drop, interval = half.drop_with_interval(Wrong(mlp, -100.0))
    # The rule of three: of n samples none changed, so that up to about 4 / n of others may.
    bound = 100 * 1.96**2 / (half.samples + 1.96**2)
    assert (drop, interval) == (
        0,
        (pytest.approx(-bound, rel=1e-3), pytest.approx(bound, rel=1e-3)),
    )
