from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch.utils.data import TensorDataset

from compress.core.artifact import Artifact
from compress.core.data import Splits
from compress.core.eager import EagerModel
from compress.core.errors import ArtifactInvalid, PipelineInvalid, StageFailed, Unavailable
from compress.core.gates import Parity
from compress.core.native import Native, NativeModel
from compress.core.packed import pack_, unpacked
from compress.core.recipe import Recipe
from compress.core.signature import Signature, TensorSpec
from compress.core.stage import Context
from compress.core.torch_ao import computing_with, prepared
from compress.quantization.native_stage import QuantizeNative
from compress.training.settings import Training
from export.torchscript import ExportTorchScript
from export.torchscript_file import load
from pipelines.catalog import stages
from pipelines.pipeline import Pipeline
from pipelines.plan import make_plan

HERE = Path(__file__).parent
DIGITS = Path(__file__).parents[3] / "examples" / "digits"
IMAGE = Signature(inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),))
ROWS = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
TOKENS = Signature(inputs=(TensorSpec(name="tokens", shape=("batch", "time"), dtype="int64"),))
ENGINES = torch.backends.quantized.supported_engines


def source(
    path: Path, factory: str, signature: Signature = IMAGE, folder: Path = HERE, **arguments: Any
) -> EagerModel:
    torch.manual_seed(0)
    recipe = Recipe(factory=factory, arguments=arguments)
    module = recipe.build(folder)
    for layer in module.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(layer.running_mean, -0.5, 0.5)
            torch.nn.init.uniform_(layer.weight, 0.5, 1.5)
    return EagerModel.create(path, recipe, module.state_dict(), signature, folder=folder)


def rows(*shapes: tuple[int, ...], scale: float = 1.0) -> Splits:
    generator = torch.Generator().manual_seed(1)
    tensors = [scale * torch.randn(64, *shape, generator=generator) for shape in shapes]
    found = [(tuple(x[i] for x in tensors), torch.tensor(0)) for i in range(64)]
    return Splits({"train": found, "val": found}, batch_size=32)


def answers(model: Artifact, *inputs: torch.Tensor) -> torch.Tensor:
    with model.open() as predict:
        return predict(*inputs)[0]


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory, digits: Splits) -> tuple[EagerModel, Context]:
    folder = tmp_path_factory.mktemp("resnet")
    model = source(folder / "source", "models:resnet20", folder=DIGITS, width=8)
    return model, Context(root=folder / "int8", data=digits)


@pytest.fixture(scope="module")
def quantized(resnet: tuple[EagerModel, Context]) -> NativeModel:
    return QuantizeNative(calibration_samples=120)(*resnet)


def test_a_resnet_computes_in_integers(
    resnet: tuple[EagerModel, Context], quantized: NativeModel
) -> None:
    facts: Any = quantized.manifest.facts
    counts = {"Conv2d": 11, "ConvReLU2d": 10, "Linear": 1, "add_relu": 9}
    assert facts["quantized_operators"] == counts
    assert facts["float_modules"] == []
    assert facts["engine"] == "x86"
    assert "deprecated" in facts["warnings"][0]
    assert quantized.payload_bytes < 0.45 * resnet[0].payload_bytes  # scales weigh, it is small
    dtypes = {
        t.dtype for name, t in load_file(quantized.payload_path).items() if "integers" in name
    }
    assert dtypes == {torch.int8}
    assert quantized.macs() == resnet[0].macs()


def test_it_is_compared_with_the_float_model_layer_by_layer(
    resnet: tuple[EagerModel, Context], quantized: NativeModel
) -> None:
    fidelity: Any = quantized.manifest.facts["fidelity"]
    assert fidelity["outputs"][0]["cosine"] > 0.99
    layers = {layer["module"]: layer for layer in fidelity["layers"]}
    convolutions = {n for n, m in resnet[0].load().named_modules() if hasattr(m, "stride")}
    assert layers.keys() == {*convolutions, "head"}
    assert all(layer["own_sqnr_db"] > 15 for layer in layers.values())  # BatchNorm, relu included
    assert layers["head"]["own_sqnr_db"] > layers["head"]["sqnr_db"]


def test_a_fresh_process_answers_alike(
    quantized: NativeModel, tmp_path: Path, fresh_torch: Callable[[str], str]
) -> None:
    (image,) = IMAGE.example(5)
    torch.save({"image": image, "expected": answers(quantized, image)}, tmp_path / "answer.pt")
    assert (
        fresh_torch(f"""
import torch
from compress import NativeModel
saved = torch.load({str(tmp_path / "answer.pt")!r})
with NativeModel.at({str(quantized.path)!r}).open() as predict:
    print(torch.equal(predict(saved["image"])[0], saved["expected"]))
""")
        == "True"
    )


def test_torchscript_computes_the_same_integers(
    resnet: tuple[EagerModel, Context], quantized: NativeModel, tmp_path: Path
) -> None:
    context = replace(resnet[1], root=tmp_path / "ts")
    script = ExportTorchScript(gates=(Parity(atol=0.0),))(quantized, context)
    assert script.parameters() == quantized.parameters()
    assert script.macs() == quantized.macs()
    assert script.manifest.facts["engine"] == "x86"
    assert len(script.manifest.facts["warnings"]) == 1  # scales that are kept are no guess
    assert "quantized::" in str(load(script.payload_path).inlined_graph)


@pytest.mark.parametrize("backend", ["fx", "eager"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_take_ranges_in_each_call(tmp_path: Path, backend: Any, kind: str) -> None:
    model = source(tmp_path / "source", "recurrences:classifier", TOKENS, kind=kind, both_ways=True)
    stage = QuantizeNative(backend=backend, method="dynamic")
    native = stage(model, Context(root=tmp_path / "int8"))
    facts: Any = native.manifest.facts
    assert facts["quantized_operators"] == {kind: 1, "Linear": 1}
    assert facts["float_modules"] == ["embedding"]
    assert facts["fidelity"]["outputs"][0]["cosine"] > 0.99
    assert native.parameters() == model.parameters()
    again = stage(model, Context(root=tmp_path / "again"))
    assert again.digest == native.digest
    script = ExportTorchScript()(native, Context(root=tmp_path / "ts"))
    for batch, time in ((1, 3), (4, 9)):
        (tokens,) = TOKENS.example(sizes={"batch": batch, "time": time})
        assert torch.equal(answers(script, tokens), answers(native, tokens))


def test_eager_mode_rounds_between_stubs(tmp_path: Path) -> None:
    model = source(tmp_path / "source", "native_nets:stubs")
    context = Context(root=tmp_path / "int8", data=rows((1, 8, 8)))
    native = QuantizeNative(backend="eager", calibration_samples=32)(model, context)
    facts: Any = native.manifest.facts
    assert facts["quantized_operators"] == {"Conv2d": 1, "ConvReLU2d": 1, "Linear": 1}
    assert {layer["module"] for layer in facts["fidelity"]["layers"]} == {"conv", "tail", "head"}
    assert all(layer["own_sqnr_db"] > 20 for layer in facts["fidelity"]["layers"])
    script = ExportTorchScript()(native, Context(root=tmp_path / "ts"))
    assert torch.equal(answers(script, *IMAGE.example(3)), answers(native, *IMAGE.example(3)))


# Eager mode averages integers where training averages floats: some more labels differ.
@pytest.mark.parametrize(
    ("backend", "unlike"), [("fx", 4), pytest.param("eager", 20, marks=pytest.mark.slow)]
)
def test_trained_integers_give_the_labels_they_were_trained_for(
    tmp_path: Path, digits: Splits, backend: Any, unlike: int
) -> None:
    model = source(tmp_path / "source", "native_nets:stubs")
    context = Context(root=tmp_path / "int8", data=digits)
    training = Training(epochs=3, optimizer="adamw", learning_rate=0.03)
    stage = QuantizeNative(
        backend=backend, method="qat", calibration_samples=120, finetune=training
    )
    native = stage(model, context)
    facts: Any = native.manifest.facts
    assert len(facts["history"]) == 4
    assert facts["kept_epoch"] > 0
    assert facts["same_as_trained"]["differing"] <= unlike  # of 360
    assert context.score(native) > context.score(model) + 0.1
    (image,) = IMAGE.example(3)
    assert torch.equal(answers(native, image), answers(NativeModel.at(context.root), image))


def test_training_begins_with_the_ranges_of_the_data_alone(tmp_path: Path) -> None:
    model = source(tmp_path / "source", "native_nets:stubs")
    context = Context(root=tmp_path / "int8", data=rows((1, 8, 8), scale=0.001))
    training = Training(epochs=1, learning_rate=1e-6)
    stage = QuantizeNative(method="qat", calibration_samples=64, finetune=training)
    state = load_file(stage(model, context).payload_path)
    assert float(state["conv_input_scale_0"]) < 0.0002  # 10 spreads in 127 steps


@pytest.mark.skipif("qnnpack" not in ENGINES, reason="this torch lacks qnnpack")
def test_another_engine_is_remembered(tmp_path: Path) -> None:
    model = source(tmp_path / "source", "native_nets:stubs")
    context = Context(root=tmp_path / "int8", data=rows((1, 8, 8)))
    before = torch.backends.quantized.engine
    native = QuantizeNative(engine="qnnpack", calibration_samples=32)(model, context)
    script = ExportTorchScript()(native, Context(root=tmp_path / "ts"))
    (image,) = IMAGE.example(3)
    expected = answers(native, image)
    assert torch.equal(answers(script, image), expected)
    assert script.manifest.facts["engine"] == "qnnpack"
    assert torch.backends.quantized.engine == before
    with computing_with("onednn" if "onednn" in ENGINES else before):
        assert torch.equal(answers(native, image), expected)


def test_an_engine_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"no engine 'abacus'.*it has"), computing_with("abacus"):
        pass


def test_functional_layers_and_several_inputs(tmp_path: Path) -> None:
    signature = Signature(
        inputs=tuple(TensorSpec(name=name, shape=("batch", 4)) for name in ("a", "b"))
    )
    model = source(tmp_path / "source", "native_nets:inputs", signature)
    context = Context(root=tmp_path / "int8", data=rows((4,), (4,)))
    native = QuantizeNative(calibration_samples=32)(model, context)
    found: Any = native.manifest.facts["quantized_operators"]
    assert {"Linear": 1, "linear": 1, "add": 1}.items() <= found.items()
    inputs = signature.example(7)
    assert torch.equal(answers(native, *inputs), answers(NativeModel.at(native.path), *inputs))


def test_what_is_excluded_stays_float(tmp_path: Path) -> None:
    model = source(tmp_path / "source", "networks:mlp")
    context = Context(root=tmp_path / "int8", data=rows((1, 8, 8)))
    native = QuantizeNative(exclude=("3",), calibration_samples=32)(model, context)
    assert native.manifest.facts["float_modules"] == ["3"]
    (image,) = IMAGE.example(3)
    assert torch.equal(answers(native, image), answers(NativeModel.at(native.path), image))
    with pytest.raises(PipelineInvalid, match="no module is named 'tree'"):
        QuantizeNative(exclude=("tree",))(model, context)
    with pytest.raises(StageFailed, match="no operator could be quantized"):
        QuantizeNative(exclude=("*",), calibration_samples=32)(model, context)


@pytest.mark.parametrize(
    ("factory", "signature", "settings", "told"),
    [
        ("networks:mlp", IMAGE, {"backend": "eager"}, "no torch.ao.quantization.QuantStub; add"),
        ("native_nets:plain_addition", IMAGE, {"backend": "eager"}, "FloatFunctional"),
        ("networks:aliases", IMAGE, {}, "reads the model as another one"),
        ("networks:aliases", IMAGE, {"method": "dynamic"}, "reads the model as another one"),
        ("native_nets:subtraction", ROWS, {}, "ignores alpha=-3"),
        ("networks:attention", ROWS, {}, "fx mode cannot read the model: .*use quantize_static"),
        ("networks:mobilenet", IMAGE, {}, "fx mode cannot convert the model: .*`exclude`"),
    ],
)
def test_what_torch_ao_would_get_wrong_is_refused(
    tmp_path: Path, factory: str, signature: Signature, settings: dict[str, Any], told: str
) -> None:
    model = source(tmp_path / "source", factory, signature)
    shape = signature.inputs[0].shape[1:]
    context = Context(root=tmp_path / "int8", data=rows(shape))  # type: ignore[arg-type]
    static = {} if "method" in settings else {"calibration_samples": 32}
    with pytest.raises(StageFailed, match=told):
        QuantizeNative(**settings, **static)(model, context)
    assert not (tmp_path / "int8").exists()


@pytest.mark.parametrize(
    ("images", "told"),
    [
        (torch.ones(64, 1, 8, 8), "all 64 samples are equal"),
        (torch.randn(64, 1, 8, 8).index_fill_(0, torch.tensor([40]), torch.nan), "input image is"),
        (torch.randn(64, 1, 6, 6), "a batch of the data is"),
    ],
)
def test_samples_that_tell_nothing_are_refused(
    tmp_path: Path, images: torch.Tensor, told: str
) -> None:
    model = source(tmp_path / "source", "networks:residual")
    data = Splits({"train": TensorDataset(images, torch.zeros(64).long())}, batch_size=32)
    with pytest.raises(StageFailed, match=told):
        QuantizeNative(calibration_samples=64)(model, Context(root=tmp_path / "int8", data=data))


def test_an_input_that_never_changes_is_refused_by_name(tmp_path: Path) -> None:
    specs = tuple(TensorSpec(name=name, shape=("batch", 4)) for name in ("a", "b"))
    model = source(tmp_path / "source", "native_nets:inputs", Signature(inputs=specs))
    found = [((torch.randn(4), torch.ones(4)), torch.tensor(0)) for _ in range(32)]
    context = Context(root=tmp_path / "int8", data=Splits({"train": found}))
    with pytest.raises(StageFailed, match="input b is 1 in every sample"):
        QuantizeNative(calibration_samples=32)(model, context)


def test_activations_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    model = source(tmp_path / "source", "networks:diverging", ROWS)
    context = Context(root=tmp_path / "int8", data=rows((4,)))
    with pytest.raises(StageFailed, match="activation truediv is NaN or infinite"):
        QuantizeNative(calibration_samples=32)(model, context)


def test_another_models_integers_are_refused(quantized: NativeModel, tmp_path: Path) -> None:
    state = load_file(quantized.payload_path)
    name = next(n for n in state if n.endswith("weight.integers"))
    state.pop(name)
    save_file(state, tmp_path / "less.safetensors")
    module = quantized.load()
    assert unpacked(module).keys() == {*state, name}
    with pytest.raises(ArtifactInvalid, match=f"less.safetensors .*missing {name}"):
        pack_(module, load_file(tmp_path / "less.safetensors"), "less.safetensors")


def test_a_functional_dropout_is_off_in_training() -> None:
    class Dropping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.nn.functional.dropout(x, 0.5, self.training))

    native = Native(backend="fx", method="qat", engine="x86")
    module = prepared(Dropping().eval(), native, ROWS).eval()
    (x,) = ROWS.example(8)
    assert torch.equal(module(x), module(x))


@pytest.mark.parametrize(
    "stage", ["quantize_static", "quantize_dynamic", "quantize_aware_training"]
)
def test_other_stages_say_where_the_backends_are(stage: str) -> None:
    with pytest.raises(ValidationError, match="are `stage: quantize_native`"):
        stages()[stage].model_validate({"backend": "fx"})


def test_other_exports_are_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "pipeline.yaml").write_text("""
version: 1
model: {factory: "models:resnet20", inputs: [{name: image, shape: [batch, 1, 8, 8]}]}
stages:
  - {stage: quantize_native, backend: fx, method: dynamic, name: int8}
  - {stage: export_torchscript}
  - {stage: export_onnx, input: int8}
""")
    with pytest.raises(PipelineInvalid, match=r"reads eager or graph, and 'int8' writes native"):
        make_plan(Pipeline.from_yaml(tmp_path / "pipeline.yaml"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"method": "qat"}, "add `finetune"),
        ({"finetune": {"epochs": 1}}, "finetune is for method: qat"),
        ({"method": "dynamic", "calibration_samples": 32}, "leave it out"),
        (
            {"method": "qat", "finetune": {"epochs": 1, "parallel": {"processes": 2}}},
            "several processes; quantize_aware_training takes more",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        QuantizeNative.model_validate(settings)
