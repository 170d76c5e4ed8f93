"""Models of the export zoo, exported to each format, give what docs/coverage.md says of them.

This is a part of the zoo that fits CI; `benchmarks/export.py coverage` exports all of it.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from compress.artifacts.eager_model import EagerModel
from tests.export.zoo.export_cell import (
    FORMATS,
    LARGEST_ERROR,
    LARGEST_SIZE,
    OPENING,
    Cell,
    export_cell,
    formats_here,
    import_case,
)
from tests.export.zoo.hard import HARD
from tests.export.zoo.models import ZOO

ROOT = Path(__file__).parents[3]
FEW_MODELS = ("ranker", "pooled", "cached")
IN_FEW_MODELS = ("AOTInductor", "OpenVINO", "ExecuTorch")
"""Formats that are exported here for these models alone: they take long, or share ONNX's way."""
LEAST_SHARE = {"AOTInductor": 0.9, "OpenVINO": 0.9, "ExecuTorch": 0.78}
"""Format → least share of the models that were tried; of the others 95 %."""
EXPORTED = (
    *(case.name for case in HARD),
    *("bert_classifier", "distilbert", "gpt2", "t5", "vit", "swin", "resnet", "wav2vec2"),
)
REPEATED = {
    *((name, kind) for name in ("tagger_gru", "forecaster", "dilated") for kind in FORMATS),
    *((name, kind) for name in ("distilbert", "gpt2", "swin", "t5") for kind in FORMATS),
    ("ranker", "AOTInductor"),
    ("cached", "AOTInductor"),
    ("pooled", "AOTInductor"),
    *((name, "ONNX") for name in ("bert_classifier", "vit", "resnet", "wav2vec2")),
    *((name, "torch.export") for name in EXPORTED if name not in ("early", "cond", "own_function")),
    *((name, "OpenVINO") for name in ("pooled", "cached")),
}
"""Cells that only `make soak` tries. ONNX files are made of what torch.export gives, CI has
decoders, a ResNet and layers of sound, and other tests compile for AOTInductor."""
HERE = formats_here()
CELLS = [
    pytest.param(
        name,
        kind,
        marks=[
            pytest.mark.skipif(kind not in HERE, reason=f"{kind} is not installed"),
            *[pytest.mark.soak] * ((name, kind) in REPEATED),
        ],
    )
    for name in EXPORTED
    for kind in FORMATS
    if kind not in IN_FEW_MODELS or name in FEW_MODELS
]

pytestmark = [
    pytest.mark.slow,
    # What torch and transformers say of models that are not ours, the tracer's warnings above all.
    pytest.mark.filterwarnings("ignore"),
]


def page() -> dict[str, list[str]]:
    """Return the table's cells by model: one for each format, and the reasons."""
    text = (ROOT / "docs" / "coverage.md").read_text()
    part = text.partition("# What can be exported\n")[2]
    rows = re.findall(r"^\| (\w+) \|(.*)\|$", part, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}


TABLE = page()
ON_PAGE = TABLE.pop("model")[:-1]  # the head, without reasons


@pytest.fixture(scope="module")
def artifacts() -> dict[tuple[str, str], tuple[Path, Cell]]:
    """Return what was exported so far; tests add to it."""
    return {}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], EagerModel]:
    """Return a function that gives a model of the zoo, imported once for formats that share it."""
    root = tmp_path_factory.mktemp("zoo")

    def get(name: str, kind: str) -> EagerModel:
        path = root / name / (f"source-{kind}" if kind in LARGEST_SIZE else "source")
        if path.exists():
            return EagerModel.from_directory(path)
        return import_case(ZOO[name], path, kind)

    return get


@pytest.mark.parametrize(("name", "kind"), CELLS)
def test_a_cell_is_what_the_page_says(name: str, kind: str, sources, artifacts) -> None:
    if kind not in ON_PAGE:
        pytest.skip(f"the page has no column for {kind}; write it anew")
    source = sources(name, kind)
    path = source.path.parent / kind
    cell = export_cell(source, kind, path)
    *cells, reasons = TABLE[name]
    if cells[ON_PAGE.index(kind)] == "**no**":
        assert cell.refusal, "it works now: write the page anew"
        # What a library's error adds to it may depend on what the process did before.
        assert f"{kind}: {cell.refusal.partition(': ')[0]}" in reasons
        assert "\n" not in cell.refusal
    else:
        assert not cell.refusal
        assert cell.error <= LARGEST_ERROR
        artifacts[name, kind] = path, cell


def test_outputs_in_a_fresh_process_are_the_same(
    artifacts, fresh_torch: Callable[[str], str]
) -> None:
    paths = [str(path) for path, _ in artifacts.values()]
    assert paths
    digests = fresh_torch(OPENING.format(folder=str(ROOT), paths=paths)).splitlines()
    for key, digest in zip(artifacts, digests, strict=True):
        assert digest == artifacts[key][1].digest, key


def test_the_goal_is_met() -> None:
    """At least 95 % of the models in each format, or what it is known for."""
    assert set(TABLE) == set(ZOO)
    assert len(ZOO) >= 25
    for i, kind in enumerate(ON_PAGE):
        tried = {name: row[i] for name, row in TABLE.items() if row[i]}
        share = sum(cell != "**no**" for cell in tried.values()) / len(tried)
        assert share >= LEAST_SHARE.get(kind, 0.95), kind
        assert len(tried) == len(TABLE) or kind in IN_FEW_MODELS, kind
    assert not [row for row in TABLE.values() if "traceback" in row[-1]]
