"""Masks are known by the data's values, and not by their names, wherever inputs are made up."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from compress import Context
from compress.artifacts.eager_model import EagerModel
from compress.common.signature import Signature, TensorSpec
from compress.core.gates import LabelAgreement, MinCosine, MinEqualTokens, Parity
from compress.data.infer_signature import inputs_of, with_values_seen
from compress.data.splits import Splits
from compress.export import ExportOnnx
from compress.export.parity.compare import adversarial_inputs
from compress.profiling.batch_dependence import extreme_rows, seeded_rows
from compress.quantization.stages.static import QuantizeStatic
from compress.serve.http.loaded_model import warm_up

LENGTH, WORDS = 6, 20


class Attention(nn.Module):
    """Classifies tokens by attention, of which a mask leaves out padding."""

    def __init__(self, *, true_is_padding: bool) -> None:
        super().__init__()
        self.true_is_padding = true_is_padding
        self.embedding = nn.Embedding(WORDS, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        is_padding = mask.bool() if self.true_is_padding else ~mask.bool()
        x = self.embedding(ids)
        x, _ = self.attention(x, x, x, key_padding_mask=is_padding)
        keep = (~is_padding).to(x.dtype)[..., None]
        return self.head((x * keep).sum(1) / keep.sum(1))  # 0 / 0 where a row is masked whole


class Counts(nn.Module):
    """Looks up integers of an input that is called a mask and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.linear = nn.Linear(4 + 8, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.cat([x, self.embedding(mask).mean(1)], 1))


def samples(kind: str, count: int = 24) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        label = {"labels": torch.tensor(i % 3)}
        if kind == "mask":
            numbers = torch.randint(0, 10, (LENGTH,), generator=generator)
            numbers[i % LENGTH] = (0, 9)[i % 2]
            made.append({"x": torch.randn(4, generator=generator), "mask": numbers} | label)
            continue
        is_real = torch.arange(LENGTH) < 1 + i % LENGTH
        ids = torch.randint(1, WORDS, (LENGTH,), generator=generator) * is_real
        values = ~is_real if kind == "padding" else is_real.long()
        made.append({"ids": ids, kind: values} | label)
    return made


class Named(nn.Module):
    """Calls a model by the names that its data have."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = Counts() if kind == "mask" else Attention(true_is_padding=kind == "padding")

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return self.model(first, second)


def model_and_context(kind: str, folder) -> tuple[EagerModel, Context]:
    torch.manual_seed(0)
    data = Splits({"train": samples(kind), "val": samples(kind), "calibration": samples(kind)})
    signature = Signature(inputs=inputs_of(data, list))
    artifact = EagerModel.from_module(Named(kind), signature=signature)
    names = tuple(spec.name for spec in signature.inputs)
    splits = Splits(data.datasets, batch_size=8, input_names=names)
    return artifact, Context(root=folder / "artifact", data=splits)


@pytest.mark.parametrize(
    ("kind", "unmasked", "values"), [("padding", 0, None), ("xyz", 1, None), ("mask", None, (0, 9))]
)
def test_samples_say_what_is_a_mask(kind, unmasked, values, tmp_path) -> None:
    model, _ = model_and_context(kind, tmp_path)
    spec = model.signature.inputs[1]
    assert (spec.unmasked_value, spec.values) == (unmasked, values)
    reloaded = Signature.model_validate_json(model.signature.model_dump_json())
    assert reloaded.inputs[1].unmasked_value == unmasked, "later stages and servers read it"


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("padding", marks=pytest.mark.slow),
        # The other polarity, of which the tests of made-up rows below are too.
        pytest.param("xyz", marks=pytest.mark.soak),
        "mask",
    ],
)
def test_models_export_and_quantize_as_their_data_say(kind, tmp_path) -> None:
    model, context = model_and_context(kind, tmp_path)
    gates = (Parity(atol=1e-4),)
    ExportOnnx(gates=gates).run_checked(model, context.with_root(tmp_path / "float"))
    quantized = QuantizeStatic().run_checked(model, context.with_root(tmp_path / "int8"))
    ExportOnnx().run_checked(quantized, context.with_root(tmp_path / "int8.onnx"))


@pytest.mark.parametrize("kind", ["padding", "xyz"])
def test_made_up_rows_keep_some_elements_and_mask_some(kind, tmp_path) -> None:
    model, _ = model_and_context(kind, tmp_path)
    signature = model.signature
    unmasked = signature.inputs[1].unmasked_value
    made = [signature.example(batch=16)[1], torch.from_numpy(seeded_rows(signature, 16)[1])]
    for rows in made:
        kept = (rows == unmasked).sum(1)
        assert kept.min() >= 1
        assert kept.max() < LENGTH
        assert (rows[:, 0] == unmasked).all(), "the first element counts"
    extreme = extreme_rows(seeded_rows(signature, 8), signature.inputs)[1]
    assert {int((row == unmasked).sum()) for row in extreme} == {0, 1, LENGTH}
    cases = dict(adversarial_inputs(signature, [signature.example()]))
    for name, counts in {
        "rows of every length": {1, LENGTH},
        "masks that let everything through": {LENGTH},
        "masks that let nothing through": {0},
    }.items():
        assert counts <= {int((row == unmasked).sum()) for row in cases[name][1]}, name
    with model.open() as predict:  # a row that is masked whole would be NaN
        warm_up(lambda *x: [t.numpy() for t in predict(*map(torch.from_numpy, x))], signature)


def spec(name: str = "ids", dtype: str = "int64", *sizes: int, **values) -> TensorSpec:
    shape = ("batch", *(sizes or (4,)))
    return TensorSpec.model_validate({"name": name, "shape": shape, "dtype": dtype, **values})


def test_names_are_the_last_resort() -> None:
    assert spec("attention_mask").unmasked_value == 1
    assert spec("key_padding_mask", "bool").unmasked_value == 0
    assert spec("padding", "bool").unmasked_value is None
    assert spec("mask", values=(0, 9)).unmasked_value is None
    assert spec("attention_mask", unmasked=0).unmasked_value == 0
    assert spec("mask", "float32").unmasked_value is None


@pytest.mark.parametrize(
    ("rows", "unmasked"),
    [
        ([[1, 1, 0], [1, 0, 0]], 1),
        ([[0, 0, 1], [0, 1, 1]], 0),
        ([[0, 0, 1], [1, 1, 1]], 1),
        ([[1, 1, 1], [1, 1, 1]], 1),
        ([[0, 1, 0], [1, 0, 1]], None),
        ([[0, 0, 0], [0, 0, 0]], None),
        ([[1, 1, 0], [1, 2, 0]], None),
        ([[-1, 0, 0], [1, 0, 0]], None),
    ],
    ids=["right", "true is padding", "left", "ones", "no end", "zeros", "twos", "negative"],
)
def test_polarity_follows_from_the_first_element(rows, unmasked) -> None:
    found = spec("tokens", "int64", 3).with_seen([torch.tensor(rows)])
    assert found.unmasked == unmasked
    if unmasked is None and rows[0] == [0, 0, 0]:
        assert found.values == (0, 0), "1 may be outside of a table"
        assert not Signature(inputs=(found,)).example()[0].any()


def test_attention_masks_padded_on_the_left_everywhere_keep_transformers_meaning() -> None:
    rows = torch.tensor([[0, 0, 1], [0, 1, 1]])
    assert spec("attention_mask", "int64", 3).with_seen([rows]).unmasked == 1


def test_only_integers_of_several_elements_are_masks() -> None:
    with pytest.raises(ValueError, match="unmasked: 'flag' is no mask, which has integers or bool"):
        TensorSpec(name="flag", shape=("batch",), dtype="bool", unmasked=1)
    flags = TensorSpec(name="flag", shape=("batch",), dtype="bool")
    assert flags.with_seen([torch.tensor([True, False])]) == flags


def test_declared_inputs_learn_from_samples_what_they_do_not_say() -> None:
    data = Splits({"val": samples("padding")})
    declared = (spec("ids", "int64", LENGTH), spec("padding", "bool", LENGTH))
    assert with_values_seen(declared, data)[1].unmasked == 0
    said = spec("padding", "bool", LENGTH, unmasked=1)
    assert with_values_seen((declared[0], said), data)[1] == said
    others = (declared[0], spec("mask", "bool", LENGTH))
    assert with_values_seen(others, data) == others, "stages report that the names differ"


class Encoder(nn.Module):
    """torch's own encoder, whose fused path fails where a row is masked whole."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding))


def encoder(folder, shortest: int) -> tuple[EagerModel, Context]:
    torch.manual_seed(0)
    lengths = [shortest + i % (LENGTH - shortest) for i in range(16)]
    val = [
        {"x": torch.randn(LENGTH, 8), "padding": torch.arange(LENGTH) >= n, "labels": n % 3}
        for n in lengths
    ]
    inputs = (spec("x", "float32", LENGTH, 8), spec("padding", "bool", LENGTH, unmasked=0))
    model = EagerModel.from_module(Encoder(), signature=Signature(inputs=inputs))
    splits = Splits({"val": val, "train": val}, batch_size=8, input_names=("x", "padding"))
    return model, Context(root=folder / "artifact", data=splits)


@pytest.mark.parametrize(
    "shortest",
    [
        pytest.param(0, id="rows masked whole"),
        pytest.param(1, id="no full row", marks=pytest.mark.soak),
    ],
)
def test_torchs_encoder_is_compared_as_it_was_trained(shortest, tmp_path) -> None:
    model, context = encoder(tmp_path, shortest)
    exported = ExportOnnx().run_checked(model, context)
    for gate in (Parity(atol=1e-5), LabelAgreement(), MinCosine(minimum=0.999)):
        verdict = gate.evaluate(model, exported, context)
        assert verdict.passed, verdict
    assert not context.batch_dependence(model).depends
    QuantizeStatic().run_checked(model, context.with_root(tmp_path / "int8"))


def test_torchs_encoder_is_timed_as_pytorch_runs_it(tmp_path) -> None:
    model, context = encoder(tmp_path, 1)
    (batch,) = context.data.batches("val", 1, limit=1)
    with warnings.catch_warnings(), model.open_anew() as timed:
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        fused = timed(*batch.inputs)[0][0]
    with model.open() as predict:
        plain = predict(*batch.inputs)[0][0]
    assert torch.equal(fused[1:], fused[1:2].expand(LENGTH - 1, 3)), "zeros at padded places"
    assert not torch.allclose(plain[1], plain[2])


class Divided(nn.Module):
    """Is NaN where nothing is let through; broken, it is 0 there, or NaN elsewhere."""

    def __init__(self, broken: str = "") -> None:
        super().__init__()
        self.broken = broken

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        keep = (~padding).float()
        mean = (x * keep).sum(1, keepdim=True) / keep.sum(1, keepdim=True)
        if self.broken == "zeros":
            return mean.nan_to_num()
        return mean * 0 / 0 if self.broken == "all" else mean


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("", "", ""),
        ("", "zeros", "an output is NaN or infinite in one of the models alone"),
        ("zeros", "", "an output is NaN or infinite in one of the models alone"),
        ("all", "all", "all outputs of the model compared with are infinite or NaN"),
    ],
)
def test_nan_equals_nan_and_no_number(before, after, reason, tmp_path) -> None:
    inputs = (spec("x", "float32", LENGTH), spec("padding", "bool", LENGTH, unmasked=0))
    models = [
        EagerModel.from_module(
            Divided(broken), arguments={"broken": broken}, signature=Signature(inputs=inputs)
        )
        for broken in (before, after)
    ]
    val = [{"x": torch.randn(LENGTH), "padding": torch.arange(LENGTH) >= n} for n in range(LENGTH)]
    splits = Splits({"val": val}, batch_size=4, input_names=("x", "padding"))
    verdict = Parity(atol=1e-6).evaluate(*models, Context(root=tmp_path, data=splits))
    assert verdict.reason == reason
    assert verdict.passed == (not reason)


class Decoder(nn.Module):
    """Scores of next tokens that are NaN where a row is masked whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        keep = (~padding).float()[..., None]
        x = self.embedding(ids) * keep
        return self.head(x.cumsum(1) / keep.cumsum(1))


def test_generated_text_masks_nothing(tmp_path) -> None:
    torch.manual_seed(0)
    ids = spec("ids").model_copy(update={"shape": ("batch", "length")})
    padding = TensorSpec(name="padding", shape=("batch", "length"), dtype="bool", unmasked=0)
    model = EagerModel.from_module(Decoder(), signature=Signature(inputs=(ids, padding)))
    assert MinEqualTokens(at=5, tokens=5).measure(model, model, Context(root=tmp_path)) == 5
