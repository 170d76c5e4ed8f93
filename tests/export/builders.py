"""Models and samples that the tests of exporters share."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe import Recipe
from compress.common.forward import Predictor
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.export.common.int8_sums import has_16_bit_sums
from compress.export.parity.compare import compare_outputs, source_predictor
from compress.export.parity.sample_parity import val_inputs

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NETWORKS = ROOT / "tests" / "compress" / "quantization"
DIGITS = ROOT / "examples" / "digits"
IMAGE = Signature(
    inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),),
    outputs=(OutputSpec(name="logits"),),
)
ROWS = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
TOKENS = Signature(
    inputs=(TensorSpec(name="tokens", shape=("batch", "length"), dtype="int64"),),
    outputs=(OutputSpec(name="states"),),
)
EXACT_BITS = 7 if has_16_bit_sums() else 8
"""Bits of weights whose integer products no runtime cuts off on this processor."""
needs_32_bit_sums = pytest.mark.skipif(
    has_16_bit_sums(), reason="no VNNI: torch's int8 kernels cut sums off to 16 bits here"
)
IMAGE_AND_CONTEXT = Signature(
    inputs=(
        TensorSpec(name="image", shape=("batch", 1, "height", "width")),
        TensorSpec(name="context", shape=("batch", 4)),
    ),
    outputs=(OutputSpec(name="logits"), OutputSpec(name="features")),
)
"""Interface of `networks:two_inputs`."""


def network(
    path: Path,
    factory: str,
    signature: Signature = IMAGE,
    folder: Path = NETWORKS,
    **arguments: int,
) -> EagerModel:
    """Return a network of the tests with seeded weights, as an artifact."""
    torch.manual_seed(0)
    recipe = Recipe(factory=factory, arguments=arguments)
    state = recipe.build(folder).state_dict()
    return EagerModel.create(path, recipe, state, signature, folder=folder)


def check_parity(
    source: EagerModel,
    exported: Predictor,
    context: Context,
    limits: Mapping[str, int] | None = None,
) -> None:
    """Compare an exported model with its source, which is opened, as exporters do."""
    with source_predictor(source, context) as expected:
        compare_outputs(source, expected, exported, [*val_inputs(context, source)], limits)


def network_of(folder: Path, source: str, factory: str, signature: Signature = ROWS) -> EagerModel:
    """Return a network whose code is written into a folder as the factory's module."""
    (folder / f"{factory.partition(':')[0]}.py").write_text(source)
    return network(folder / f"source_{factory.rpartition(':')[2]}", factory, signature, folder)


def samples(*inputs: torch.Tensor) -> Splits:
    """Return `train` and `val` with the same inputs, all of class 0."""
    rows = [(tuple(x[i] for x in inputs), torch.tensor(0)) for i in range(len(inputs[0]))]
    return Splits({"train": rows, "val": rows}, batch_size=32)


def images(count: int = 64) -> torch.Tensor:
    """Return seeded images of :data:`IMAGE`."""
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
