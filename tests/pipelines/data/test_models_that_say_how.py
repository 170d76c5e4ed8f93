"""A Hugging Face folder and timm say how texts and images become inputs."""

import csv
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from compress.artifacts.carried_files import IMAGES
from compress.common.errors import PipelineInvalid
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.data.describe import describe_files
from compress.pipelines.runner.inputs import resolve_inputs
from compress.pipelines.runner.source_model import import_source
from compress.serve.packaging.request_forms import forms_of
from compress.serve.packaging.val_preparation import compare_preparation
from tests.serve.test_carried_files import LONGEST, TEXTS, WORDS, tokenizer

transformers = pytest.importorskip("transformers")


def bert(folder: Path, names: tuple[str, ...]) -> Path:
    """Write a tiny text classifier with its tokenizer."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        vocab_size=len(WORDS),
        max_position_embeddings=LONGEST,
        **({"id2label": dict(enumerate(names))} if names else {"num_labels": 3}),
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer(model_max_length=LONGEST).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("names", [(), ("so so", "good", "bad")])
def test_a_table_of_texts_is_tokenized_as_a_server_does(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    bert(tmp_path / "bert", names)
    texts = [text for text in TEXTS if "\0" not in text and text]
    labels = [("bad", "good", "so so")[i % 3] for i in range(len(texts))]
    with (tmp_path / "reviews.tsv").open("w", newline="") as file:
        rows = csv.writer(file, delimiter="\t")
        rows.writerow(("review", "stars"))
        rows.writerows(zip(texts, labels, strict=True))
    data = {"table": "reviews.tsv", "text": "review", "label": "stars", "split": {"val": 0.4}}
    model = {"huggingface": "bert", "task": "text-classification"}
    content = {"version": 1, "model": model, "data": data, "stages": [{"stage": "export_onnx"}]}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(content))
    pipeline, splits, _ = resolve_inputs(PipelineConfig.from_yaml(tmp_path / "p.yaml"))

    assert splits is not None
    order = names or ("bad", "good", "so so")
    own = transformers.AutoTokenizer.from_pretrained(tmp_path / "bert")
    for batch in splits.batches("val"):
        ids, mask = batch.inputs[:2]
        dataset: object = splits.datasets["val"]
        given = dataset.raw  # type: ignore[attr-defined]
        expected = own(given, padding=True, truncation=True, return_tensors="pt")
        assert torch.equal(ids, expected["input_ids"])
        assert torch.equal(mask, expected["attention_mask"])
        assert batch.target.tolist() == [order.index(labels[texts.index(t)]) for t in given]
    source = import_source(pipeline, tmp_path / "source", splits)
    assert source.class_names == order
    (compared,) = compare_preparation(forms_of(source), source.signature, splits)
    assert (compared.form, compared.column, compared.difference) == ("text", "raw", "")


def test_texts_alone_are_what_a_language_model_continues(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        vocab_size=len(WORDS), max_position_embeddings=LONGEST,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    tokenizer(model_max_length=LONGEST).save_pretrained(tmp_path / "llama")
    texts = [text for text in TEXTS if "\0" not in text and text]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in texts))
    described = describe_files(tmp_path / "t.jsonl")
    assert described["text"] == "body" and "label" not in described

    content = {"version": 1, "stages": [{"stage": "export_onnx"}]}
    content |= {"model": {"huggingface": "llama"}, "data": described}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(content))
    _, splits, _ = resolve_inputs(PipelineConfig.from_yaml(tmp_path / "p.yaml"))
    assert splits is not None
    (batch,) = splits.batches("train")
    ids, mask = batch.inputs[:2]
    assert not mask.all() and torch.equal(batch.target, ids.where(mask.bool(), -100))


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
def test_images_are_prepared_as_timm_evaluates(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (200, 300, 3), np.uint8)
    for name in ("train/a/1.png", "train/b/2.png", "val/a/3.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "photos" / name)
    content = {
        "version": 1,
        "model": {"timm": "resnet18", "arguments": {"num_classes": 2}},
        "data": {"images": "photos"},
        "stages": [{"stage": "export_onnx"}],
    }
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(content))
    pipeline, splits, _ = resolve_inputs(PipelineConfig.from_yaml(tmp_path / "p.yaml"))
    assert splits is not None and pipeline.model.inputs is not None
    (batch,) = splits.batches("val")
    # resnet18 of timm: 0.95 of the image, 224 / 0.95 = 235.8, bicubic, ImageNet's mean and std.
    scaled = Image.fromarray(pixels).resize((352, 235), Image.Resampling.BICUBIC)
    crop = np.asarray(scaled.crop((64, 6, 288, 230)), np.float32) / 255
    expected = (crop - [0.485, 0.456, 0.406]) / np.array([0.229, 0.224, 0.225])
    assert batch.inputs[0].shape == (1, 3, 224, 224)
    assert np.allclose(batch.inputs[0][0].permute(1, 2, 0), expected, atol=1e-5)


def test_the_models_own_file_of_images_stays_as_it_is(tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        id2label={0: "b", 1: "a"},
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "vit")
    for name in ("train/a/1.png", "train/b/2.png", "val/a/3.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (50, 100, 200)).save(tmp_path / "photos" / name)

    def source(name: str, **data: object) -> tuple[bytes, list[int]]:
        content = {
            "version": 1,
            "model": {"huggingface": "vit", "task": "image-classification"},
            "data": {"images": "photos", **data},
            "stages": [{"stage": "export_onnx"}],
        }
        (tmp_path / "p.yaml").write_text(yaml.safe_dump(content))
        pipeline, splits, _ = resolve_inputs(PipelineConfig.from_yaml(tmp_path / "p.yaml"))
        assert splits is not None
        artifact = import_source(pipeline, tmp_path / name, splits)
        return artifact.carried_files()[IMAGES], next(splits.batches("train")).target.tolist()

    own = (tmp_path / "vit" / IMAGES).read_bytes()
    found, labels = source("own")
    assert (found, labels) == (own, [1, 0])
    assert source("given", prepare={"size": 8, "mean": [0.1]})[0] != own


def test_a_model_that_says_nothing_asks_for_the_preparation(tmp_path: Path) -> None:
    (tmp_path / "photos/train/a").mkdir(parents=True)
    content = {
        "version": 1,
        "model": {"factory": "net:net"},
        "data": {"images": "photos"},
        "stages": [{"stage": "export_onnx"}],
    }
    (tmp_path / "p.yaml").write_text(json.dumps(content))
    with pytest.raises(PipelineInvalid, match=r"data.images: data.prepare: nothing says how"):
        resolve_inputs(PipelineConfig.from_yaml(tmp_path / "p.yaml"))
