"""Every quantized artifact says how near it stays to its float model, and where it does not."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.recipe import Recipe
from compress.common.errors import StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import LabelAgreement
from compress.core.metrics import Metric
from compress.data.splits import Splits
from compress.graph.torch_export import export_program
from compress.quantization.numeric_debug.compare import compare
from compress.quantization.numeric_debug.fidelity_report import Fidelity
from compress.quantization.numeric_debug.sqnr import LARGEST_DB
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.quantization.stages.static import QuantizeStatic
from compress.quantization.stages.weight_only import QuantizeWeights
from tests.compress.quantization.builders import (
    IMAGE,
    NETWORKS,
    TOKENS,
    build_model,
    labelled_images,
)


def fidelity(artifact: GraphModel) -> Fidelity:
    return Fidelity.model_validate(artifact.manifest.facts["fidelity"])


def own(found: Fidelity) -> dict[str, float]:
    return {layer.module: layer.own_sqnr_db for layer in found.layers}


class Flat(nn.Linear):
    """Puts the outputs of all rows into one axis."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(-1)


def test_samples_are_counted_by_inputs(tmp_path: Path) -> None:
    x = torch.randn(20, 16)
    model = EagerModel.from_module(Flat(16, 4).eval(), example_inputs=(x,))
    context = Context(root=tmp_path / "int8", data=Splits({"val": TensorDataset(x)}))
    assert fidelity(QuantizeDynamic()(model, context)).samples == 20


def test_the_report_has_the_metrics_of_the_artifacts_outputs(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:mobilenet", random_batch_norm=True)
    context = Context(root=tmp_path / "int8", data=labelled_images())
    small = QuantizeStatic(calibration_samples=64)(model, context)
    found = fidelity(small)
    x = context.data.split("val").tensors[0]
    with model.open() as expected, small.open() as got:
        (a,), (b,) = expected(x), got(x)
    assert (found.samples, found.split) == (64, "val")
    assert found.label_agreement == pytest.approx(
        LabelAgreement().measure(model, small, context).value
    )
    assert found.metric.name == "accuracy"
    assert found.metric.before == pytest.approx(context.score(model))
    assert found.metric.after == pytest.approx(context.score(small))
    (logits,) = found.outputs
    assert logits.name == "logits"
    cosine = float(torch.cosine_similarity(a, b).mean())
    assert logits.cosine == pytest.approx(cosine, abs=1e-4)
    noise = float(20 * torch.log10(a.norm() / (a - b).norm()))
    assert logits.sqnr_db == pytest.approx(noise, abs=0.1)
    # The BatchNorms folded into the layers are on both sides.
    assert own(found).keys() == {"stem.0", "depthwise.0", "pointwise.0", "head.1"}
    assert all(30 < db < 60 for db in own(found).values())


def test_unfolded_batch_norms_do_not_count_to_a_layer(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:mobilenet", random_batch_norm=True)
    stage = QuantizeWeights(bits=8, group_size=32)
    found = fidelity(stage(model, Context(tmp_path / "int8", labelled_images())))
    assert own(found).pop("head.1") < 60
    assert {own(found)[name] for name in ("stem.0", "depthwise.0", "pointwise.0")} == {LARGEST_DB}


def test_the_layer_at_fault_is_named_and_not_those_after_it(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:mlp")
    state = model.load().state_dict()
    state["1.weight"][0] = 0
    state["1.weight"][0, 0], state["1.bias"][0] = 1e-3, 3e3
    state["3.weight"][:, 0] = 0  # one unit of 3000 that nobody reads, beside others of about 1
    ruined = EagerModel.create(tmp_path / "ruined", model.recipe, state, IMAGE, folder=NETWORKS)
    context = Context(tmp_path / "int8", labelled_images())
    found = fidelity(QuantizeStatic(calibration_samples=64)(ruined, context))
    assert found.worst[0].module == "3"
    assert own(found)["3"] < 5
    assert own(found)["1"] > 30
    last = next(layer for layer in found.layers if layer.module == "5")
    assert last.own_sqnr_db > 30
    assert last.sqnr_db < 15, "as the model runs, the last layer carries the noise"
    assert "worst layers by themselves: 3 " in found.line()


class Twice(nn.Module):
    """A layer called twice, with an activation that writes over its results."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.relu_(self.shared(x))
        return {"logits": self.head(torch.relu_(self.shared(x)))}


def test_shared_layers_and_in_place_activations_are_compared(tmp_path: Path) -> None:
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
    torch.manual_seed(0)
    recipe = Recipe(factory="numeric_debug.test_fidelity_report:Twice")
    model = EagerModel.create(
        tmp_path / "source", recipe, Twice().state_dict(), signature, folder=NETWORKS
    )
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    data = Splits({"train": TensorDataset(x, x[:, 0]), "val": TensorDataset(x, x[:, 0])})
    found = fidelity(QuantizeStatic(calibration_samples=64)(model, Context(tmp_path / "q", data)))
    assert own(found).keys() == {"shared", "head"}
    assert all(30 < db < 60 for db in own(found).values())
    assert found.label_agreement is None, "targets of floats are no labels"


@pytest.mark.parametrize("stage", [QuantizeDynamic(), QuantizeWeights(bits=8, group_size=16)])
def test_embeddings_are_compared_too_and_without_data_on_seeded_inputs(
    tmp_path: Path, stage: QuantizeDynamic | QuantizeWeights
) -> None:
    model = build_model(tmp_path / "source", "networks:sequence", TOKENS)
    found = fidelity(stage(model, Context(tmp_path / "int8")))
    assert own(found).keys() == {"embedding", "up", "down"}
    assert all(30 < db < 60 for db in own(found).values())
    assert found.split is None
    assert (found.label_agreement, found.metric) == (None, None)
    assert "32 seeded inputs" in found.line()


def test_a_fixed_batch_is_compared_in_its_own_size(tmp_path: Path) -> None:
    fixed = Signature(inputs=(TensorSpec(name="image", shape=(4, 1, 8, 8)),))
    model = build_model(tmp_path / "source", "networks:mlp", fixed)
    found = fidelity(QuantizeDynamic()(model, Context(tmp_path / "int8", labelled_images(6))))
    assert found.samples == 8, "two come twice, to fill the last batch"
    assert own(found).keys() == {"1", "3", "5"}


class Overflowing(nn.Module):
    """Its twin that is to be the quantized one divides by zero."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.flatten(1) / self.by


def test_outputs_that_are_not_finite_are_refused() -> None:
    graph = torch.fx.symbolic_trace(Overflowing(0.0))
    with pytest.raises(StageFailed, match="output logits of the quantized model is NaN or inf"):
        compare(Overflowing(1.0), graph, IMAGE, Context(Path(), labelled_images()))
    masked = torch.fx.symbolic_trace(Overflowing(0.0))
    same = compare(Overflowing(0.0), masked, IMAGE, Context(Path(), labelled_images()))
    assert same.outputs[0].sqnr_db == LARGEST_DB, "infinite in both is equal"


def test_layers_with_other_scales_are_not_compared(tmp_path: Path) -> None:
    module = build_model(tmp_path / "source", "networks:mlp").load()
    graph = export_program(module, IMAGE).module()
    context = Context(tmp_path, labelled_images())
    assert own(compare(module, graph, IMAGE, context)) == dict.fromkeys("135", LARGEST_DB)
    again = build_model(tmp_path / "again", "networks:mlp").load()
    assert own(compare(again, graph, IMAGE, context, rescaled=("1",))).keys() == {"3", "5"}


def test_labels_are_compared_where_the_metric_is_about_labels(tmp_path: Path) -> None:
    x = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    data = Splits({"val": list(x)}, 8)
    model = build_model(tmp_path / "source", "networks:mlp")
    context = Context(tmp_path / "int8", data, metric=Metric("fidelity"))
    assert fidelity(QuantizeDynamic()(model, context)).label_agreement is not None


def test_ranges_of_the_whole_call_are_compared_one_sample_at_a_time(tmp_path: Path) -> None:
    """Beside rows that are far larger small ones become zeros, and none of them is served so."""
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 16)),))
    recipe = Recipe(factory="sequences:rows")
    weights = recipe.build(NETWORKS).state_dict()
    model = EagerModel.create(tmp_path / "source", recipe, weights, signature, folder=NETWORKS)
    sizes = torch.tensor([1.0, 1000.0]).repeat(32)[:, None]
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) * sizes
    with model.open() as expected:
        labels = expected(x)[0].argmax(1)
    data = Splits({"val": TensorDataset(x, labels)})
    quantized = QuantizeDynamic()(model, Context(root=tmp_path / "int8", data=data))
    with quantized.open() as got:
        alone = torch.cat([got(row[None])[0].argmax(1) for row in x])
        together = got(x)[0].argmax(1)
    right, in_a_batch = (float((found == labels).double().mean()) for found in (alone, together))
    assert in_a_batch < right - 0.1  # and a batch is what is compared, with a range for each row
    assert quantized.manifest.facts["fidelity"]["label_agreement"] == pytest.approx(right)
