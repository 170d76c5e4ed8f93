"""An InferenceService for KServe: its fields, and that the packaged model answers."""

import ast
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError

from benchmarks.attack import cases_folders
from compress.artifacts.artifact import Artifact
from compress.common.errors import ArtifactInvalid
from compress.core.context import Context
from compress.serve.repository import (
    NOT_DEPLOYED,
    KServeService,
    PackageKServe,
    PackageTriton,
    TritonRepository,
)
from tests.forging import forge
from tests.serve.served_here import SIGNATURE, sealed

PUBLISHED = Path(__file__).with_name("kserve_models.json")
"""Fields of KServe's models and their types, as its package kserve 0.21.0 declares them."""
MODELS = {
    "V1beta1InferenceService": "v1beta1_inference_service",
    "V1beta1InferenceServiceSpec": "v1beta1_inference_service_spec",
    "V1beta1PredictorSpec": "v1beta1_predictor_spec",
    "V1beta1ModelSpec": "v1beta1_model_spec",
    "V1beta1ModelFormat": "v1beta1_model_format",
}
PLAIN = {"str": str, "int": int, "bool": bool}


@pytest.fixture
def repository(tmp_path: Path) -> TritonRepository:
    model = sealed(tmp_path / "onnx")
    return PackageTriton(model_name="rows", gates=()).run(model, Context(root=tmp_path / "triton"))


def packaged(repository: TritonRepository, **settings: Any) -> KServeService:
    stage = PackageKServe(storage_uri="s3://models/rows", **settings)
    return stage(repository, Context(root=repository.path.with_name("kserve")))


def problems(value: Any, kind: str, models: dict[str, dict[str, str]], place: str) -> list[str]:
    """Return where a value is not what KServe's models say; Kubernetes' own are not followed."""
    if kind in PLAIN:
        return [] if type(value) is PLAIN[kind] else [f"{place}: {value!r} is no {kind}"]
    if kind not in models:
        return [] if isinstance(value, dict) else [f"{place}: {value!r} is no {kind}"]
    found = [f"{place}.{key}: unknown" for key in value if key not in models[kind]]
    for key in value.keys() & models[kind].keys():
        found += problems(value[key], models[kind][key], models, f"{place}.{key}")
    return found


def test_every_field_is_one_of_kserves(repository: TritonRepository) -> None:
    models = json.loads(PUBLISHED.read_text())
    service = packaged(repository, namespace="vision", cpu="500m", max_replicas=3)
    manifest = yaml.safe_load(service.payload_path.read_text())
    assert problems(manifest, "V1beta1InferenceService", models, "service") == []
    wrong = json.loads(json.dumps(manifest).replace("storageUri", "storageURL"))
    assert problems(wrong, "V1beta1InferenceService", models, "service") == [
        "service.spec.predictor.model.storageURL: unknown"
    ]


def test_the_manifest_says_what_was_set(repository: TritonRepository) -> None:
    service = packaged(repository, service_name="rows-1", memory="512Mi", min_replicas=0)
    manifest = yaml.safe_load(service.payload_path.read_text())
    assert manifest["apiVersion"] == "serving.kserve.io/v1beta1"
    assert manifest["metadata"] == {"name": "rows-1"}
    limits = {"cpu": "1", "memory": "512Mi"}
    assert manifest["spec"]["predictor"] == {
        "minReplicas": 0,
        "maxReplicas": 1,
        "model": {
            "modelFormat": {"name": "onnx"},
            "protocolVersion": "v2",
            "runtime": "kserve-tritonserver",
            "storageUri": "s3://models/rows",
            "resources": {"requests": limits, "limits": limits},
        },
    }


def test_the_repository_is_carried_and_its_model_answers(repository: TritonRepository) -> None:
    service = Artifact.from_directory(packaged(repository).path)
    service.verify()
    for name in ("rows/config.pbtxt", "rows/1/model.onnx"):
        carried = service.path / "model_repository" / name
        assert carried.read_bytes() == (repository.path / name).read_bytes()
    assert service.manifest.facts["warnings"] == [NOT_DEPLOYED]
    inputs = SIGNATURE.example(batch=3)
    with repository.open() as expected, service.open() as got:
        for a, b in zip(expected(*inputs), got(*inputs), strict=True):
            assert torch.equal(a, b)


FORGED = {
    "rows/config.pbtxt": [
        (b'backend: "onnxruntime"', b'backend: "python"'),
        (b'key: "inter_op_thread_count"', b'key: "EXECUTION_ENV_PATH"'),
        (b'string_value: "1"', b'string_value: "/env.tar.gz"'),
        (b"instance_group {", b"model_warmup {"),
        (b'name: "rows"', b'name: "rows" parameters {'),
        (b'name: "rows"', b"name: 'rows'"),
    ],
    "evil/config.pbtxt": [(b"rows", b"evil")],
    "rows/model.py": [(b"", b"a")],
}


def test_code_for_tritons_python_backend_is_refused(tmp_path: Path) -> None:
    made = cases_folders.triton_with_the_python_backend(tmp_path)
    with pytest.raises(ArtifactInvalid, match=r"config\.pbtxt:2: .*python.*: unknown entry"):
        Artifact.from_directory(made)


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("served_by", ["triton", "kserve"])
def test_a_repository_with_more_than_was_written_is_refused(
    repository: TritonRepository, name: str, served_by: str
) -> None:
    made: Artifact = packaged(repository) if served_by == "kserve" else repository
    within = "" if served_by == "triton" else "model_repository/"
    content = (made.path / within / "rows/config.pbtxt").read_bytes()
    for i, (entry, forged) in enumerate(FORGED[name]):
        assert entry in content
        copy = repository.path.parent / f"copy {i}"
        shutil.copytree(made.path, copy)
        forge(copy, within + name, content.replace(entry, forged, 1))
        with pytest.raises(ArtifactInvalid, match=r"unknown entry|is not of model rows"):
            Artifact.from_directory(copy)


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"storage_uri": "/models/rows"}, "storage_uri"),
        ({"service_name": "Rows_1"}, "service_name"),
        ({"cpu": "two"}, "cpu"),
        ({"memory": "2 GB"}, "memory"),
        ({"min_replicas": 2}, "min_replicas"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_here(settings: dict, place: str) -> None:
    with pytest.raises(ValidationError, match=place):
        PackageKServe(**{"storage_uri": "s3://models/rows"} | settings)


def test_the_models_are_those_of_kserves_package() -> None:
    found = importlib.util.find_spec("kserve")
    if found is None:
        pytest.skip("kserve is not installed; its requirements clash with ours")
    folder = Path(next(iter(found.submodule_search_locations or ()))) / "models"
    assert json.loads(PUBLISHED.read_text()) == read(folder)


def read(folder: Path) -> dict[str, dict[str, str]]:
    """Return each model's fields, as JSON calls them, and their types; nothing is imported."""
    models = {}
    for name, module in MODELS.items():
        tree = ast.parse((folder / f"{module}.py").read_text())
        (model,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
        tables = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in model.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        types, names = tables["openapi_types"], tables["attribute_map"]
        models[name] = {names[key]: types[key] for key in sorted(types)}
    return models
