"""What is compared at several sizes of each named axis."""

from pathlib import Path

import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.export.parity.compare import ParityMismatch, check_axis_sizes, compare_outputs

SIGNATURE = Signature(inputs=(TensorSpec(name="x", shape=("batch", "length")),))


def doubled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (2 * x,)


def test_an_axis_of_which_the_source_takes_one_size_is_not_dynamic() -> None:
    def takes_eight(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if x.shape[1] != 8:
            raise ValueError("8 columns alone")
        return doubled(x)

    with pytest.raises(StageFailed, match=r"'length' .* takes one size only .*8 columns alone"):
        check_axis_sizes(takes_eight, takes_eight, SIGNATURE)


@pytest.mark.parametrize(
    "exported", [lambda x: (2 * x[:, :1],), lambda x: (2 * x, x)], ids=["a column", "two outputs"]
)
def test_other_shapes_and_other_numbers_of_outputs_are_named(exported) -> None:
    with pytest.raises(ParityMismatch, match="the exported model returns shapes"):
        check_axis_sizes(doubled, exported, SIGNATURE)


def test_equal_models_are_accepted() -> None:
    check_axis_sizes(doubled, doubled, SIGNATURE)


class Detector(torch.nn.Module):
    """Finds nothing in noise: its answers are 1e-7 unless numbers are large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - 17).sigmoid()


def test_rounding_of_usual_answers_is_nothing_where_seeded_inputs_have_tiny_ones(
    tmp_path: Path,
) -> None:
    source = EagerModel.from_module(Detector(), signature=SIGNATURE, root=tmp_path / "model")
    expected = source.load()

    def off_by(error: float):
        return lambda x: (expected(x) + error,)

    found = [(torch.arange(32.0).view(8, 4),)]
    compare_outputs(source, lambda x: (expected(x),), off_by(1.4e-7), found)
    for error, samples in ((1.4e-7, []), (5e-7, found)):
        with pytest.raises(ParityMismatch, match="axis 'batch' at size 1"):
            compare_outputs(source, lambda x: (expected(x),), off_by(error), samples)
