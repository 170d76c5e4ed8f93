"""A model resized to widths has the sizes of one that was exported at them."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

from compress.common.errors import StageFailed
from compress.export.latency.kernels import KernelTable
from compress.export.latency.resizing import ResizableModel
from compress.export.latency.served_latency import WidthCosts, measure_grid
from compress.export.onnx.graph import stored
from compress.export.onnx.proto_io import read


class Joined(nn.Module):
    """Two branches that are joined, a depthwise layer, and a size written into the graph."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, a, 3, padding=1), nn.Conv2d(3, b, 1)
        self.depthwise = nn.Conv2d(a + b, a + b, 3, groups=a + b)
        self.head = nn.Linear(36 * (a + b), 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = self.depthwise(torch.cat([self.a(x).relu(), self.b(x)], 1))
        return self.head(joined.reshape(1, -1))


def export(tmp_path: Path, a: int, b: int, module: nn.Module | None = None) -> ir.Model:
    file = tmp_path / "model.onnx"
    module = (module or Joined(a, b)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own
        torch.onnx.export(module, (torch.zeros(1, 3, 8, 8),), file, external_data=False)
    return read(file)


def sizes(model: ir.Model) -> Iterator[list[list[int]]]:
    """Yield the sizes of the weights that each operator reads."""
    for node in model.graph:
        yield [[*tensor.shape] for v in node.inputs if (tensor := stored(v)) is not None]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("exports")
    return [
        ({"a": a, "b": b}, export(folder, a, b)) for a, b in ((16, 12), (7, 9), (13, 5), (10, 3))
    ]


@pytest.mark.slow
def test_sizes_are_those_of_an_export_at_these_widths(exports, tmp_path: Path) -> None:
    resized = ResizableModel.fit(exports).resize({"a": 6, "b": 11})
    expected = export(tmp_path, 6, 11)
    resized_sizes, expected_sizes = ([*sizes(model)] for model in (resized, expected))
    assert resized_sizes == expected_sizes
    session = onnxruntime.InferenceSession(ir.to_proto(resized).SerializeToString())
    (found,) = session.run(None, {session.get_inputs()[0].name: np.ones((1, 3, 8, 8), "f")})
    assert found.shape == (1, 5)


def test_four_branches_are_added(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def __init__(self, widths: dict[str, int]) -> None:
            super().__init__()
            *branches, stem, after = widths.values()
            self.stem, self.branches = nn.Conv2d(3, stem, 3), nn.ModuleList()
            self.branches.extend(nn.Conv2d(stem, width, 1) for width in branches)
            self.after = nn.Conv2d(sum(branches), after, 1)
            self.head = nn.Linear(36 * sum(branches), 5)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            stem = self.stem(x)
            joined = torch.cat([branch(stem) for branch in self.branches], 1)
            return self.after(joined), self.head(joined.reshape(1, -1))

    settings = (9, 22, 17, 31, 13, 40), (25, 13, 26, 11, 8, 33), (26, 24, 7, 27, 5, 21)
    exports = [
        (widths, export(tmp_path, 0, 0, Branches(widths)))
        for widths in (dict(zip("abcdst", each, strict=True)) for each in (*settings, range(2, 8)))
    ]
    new = dict(zip("abcdst", (4, 6, 8, 10, 3, 5), strict=True))
    resized = ResizableModel.fit(exports).resize(new)
    assert [*sizes(resized)] == [*sizes(export(tmp_path, 0, 0, Branches(new)))]


@pytest.mark.soak
def test_two_exports_are_enough_where_each_size_has_one_group(tmp_path: Path) -> None:
    def chain(a: int, b: int) -> ir.Model:
        layers = nn.Conv2d(3, a, 3), nn.Conv2d(a, b, 3), nn.Flatten(), nn.Linear(16 * b, 5)
        return export(tmp_path, 0, 0, nn.Sequential(*layers))

    def exports(*widths: tuple[int, int]) -> Iterator[tuple[dict[str, int], ir.Model]]:
        yield from (({"a": a, "b": b}, chain(a, b)) for a, b in widths)
        yield {"a": 9, "b": 4}, chain(9, 4)
        pytest.fail("a fourth export was asked for")

    resized = ResizableModel.fit(exports((16, 12), (7, 9))).resize({"a": 6, "b": 11})
    assert [*sizes(resized)] == [*sizes(chain(6, 11))]
    # Two groups whose widths are alike, or the same, cannot be told apart by two exports.
    with pytest.raises(pytest.fail.Exception):
        ResizableModel.fit(exports((16, 16), (7, 7)))
    with pytest.raises(pytest.fail.Exception):
        ResizableModel.fit(exports((16, 12), (16, 9)))


def test_groups_that_meet_in_a_weight_are_found(exports) -> None:
    assert ResizableModel.fit(exports).groups_together() == {("a", "b")}


def test_other_operators_and_other_sizes_are_refused(exports, tmp_path: Path) -> None:
    other = export(tmp_path, 0, 0, nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    with pytest.raises(StageFailed, match="other operators"):
        ResizableModel.fit([*exports, ({"a": 4, "b": 4}, other)])
    widths, model = exports[-1]
    with pytest.raises(StageFailed, match="no sum over widths"):
        ResizableModel.fit([*exports[:-1], ({**widths, "a": widths["a"] + 1}, model)])


def test_costs_of_a_grid_are_sums_over_groups_and_pairs(exports, tmp_path: Path) -> None:
    costs = WidthCosts(
        ResizableModel.fit(exports),
        exports[0][0],
        {"x": np.ones((1, 3, 8, 8), "f")},
        KernelTable(tmp_path, {}, 1),
    )
    grid = {"a": (16, 8, 4), "b": (12, 6)}
    seconds, weight_bytes, file_bytes = measure_grid(costs, grid, [("a", "b")])
    for a in grid["a"]:
        for b in grid["b"]:
            exact = costs.at({"a": a, "b": b})
            assert seconds({"a": a, "b": b}) == pytest.approx(exact.seconds, rel=1e-9)
            assert weight_bytes({"a": a, "b": b}) == exact.weight_bytes
            assert file_bytes({"a": a, "b": b}) == exact.file_bytes
