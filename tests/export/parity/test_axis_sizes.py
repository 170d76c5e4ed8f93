"""What is compared at several sizes of each named axis."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
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
    for error, samples in ((1.4e-7, []), (1e-6, found)):
        with pytest.raises(ParityMismatch, match="axis 'batch' at size 1"):
            compare_outputs(source, lambda x: (expected(x),), off_by(error), samples)


class TextDetector(torch.nn.Module):
    """Probability of each pixel, near 0 where numbers around it are small."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = torch.nn.Parameter(torch.randn(8, 1, 3, 3, generator=generator))
        self.bias = torch.nn.Parameter(4 * torch.randn(8, generator=generator))
        self.second = torch.nn.Parameter(torch.randn(8, 8, 3, 3, generator=generator) / 8)

    def forward(
        self,
        x: torch.Tensor,
        *,
        transposed: bool = False,
        scale: float = 1.0,
        bias: float = 1.0,
        shift: int = 0,
        slope: float = 0.1,
        level: float = 20.0,
    ) -> torch.Tensor:
        hidden = F.conv2d(x, self.first, bias * self.bias, padding=1)
        hidden = F.leaky_relu(hidden, slope).roll(shift, -1)
        second = self.second.transpose(0, 1) if transposed else self.second
        sums = scale * F.conv2d(hidden, second, padding=1)[:, :4].amax(1)
        return (sums - level).sigmoid()


PAGES = Signature(inputs=(TensorSpec(name="x", shape=("batch", 1, "height", "width")),))


def pages() -> list[tuple[torch.Tensor]]:
    """Return pages with blocks of large numbers, on which a detector finds something."""
    x = 0.1 * torch.randn(8, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    for i, page in enumerate(x):
        page[:, i : i + 8, 4:12] += 8.0
    return [(x,)]


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> GraphModel:
    folder = tmp_path_factory.mktemp("detector")
    source = EagerModel.from_module(TextDetector(), signature=PAGES, root=folder / "model")
    return GraphModel.from_eager(source, folder / "graph")


def test_a_detector_of_integers_that_finds_nothing_in_noise_may_be_far_off_there(
    detector: GraphModel,
) -> None:
    expected, (noise,) = TextDetector(), PAGES.example(sizes={"batch": 3})
    with torch.no_grad():
        usual, found = expected(pages()[0][0]), expected(noise)
        assert found.norm() / found.numel() ** 0.5 < usual.norm() / usual.numel() ** 0.5 / 500
        off = expected(noise, level=19.4) - found
        assert off.norm() > 0.7 * found.norm(), "else any tolerance lets it pass"
        compare_outputs(
            detector, lambda x: (expected(x),), lambda x: (expected(x, level=19.4),), pages()
        )
        with pytest.raises(ParityMismatch, match=r"differ from the source's by 0\.8"):
            compare_outputs(
                detector, lambda x: (expected(x),), lambda x: (expected(x, level=19.4),), []
            )


@pytest.mark.parametrize(
    "fault",
    [{"transposed": True}, {"scale": 1.5}, {"bias": 0.0}, {"shift": 1}, {"slope": 0.5}],
    ids=str,
)
def test_faults_of_a_detector_of_integers_are_found(detector: GraphModel, fault: dict) -> None:
    expected = TextDetector()
    with torch.no_grad(), pytest.raises(StageFailed):
        compare_outputs(
            detector, lambda x: (expected(x),), lambda x: (expected(x, **fault),), pages()
        )
