"""`compress auto` believes no figure of an earlier search that was edited since."""

import json
import math
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.attack import forgeries
from compress.common.sealed_json import is_sealed, write_sealed
from compress.core.context import Context
from compress.pipelines.auto import candidate_evaluator, search_state
from compress.pipelines.auto import search as auto_search
from compress.pipelines.auto.candidate_evaluator import CandidateEvaluator
from tests.pipelines.auto.test_auto import FILE, NETS, auto
from tests.pipelines.conftest import measured_briefly

WHOLE = "float-whole"


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("searched")
    (folder / "nets.py").write_text(NETS)
    # What is believed depends on no format, and these are searched in a third of the time.
    (folder / "net.yaml").write_text(FILE.replace("[float, int8_static]", "[float]"))
    with measured_briefly():
        assert auto(folder / "net.yaml", "--out", folder / "out", "--time", "20s", "--quiet") == 0
    return folder


def figures(front: dict[str, Any]) -> dict[str, Any]:
    return next(model for model in front["checked"] if model["name"] == WHOLE)


def edited_with_a_new_digest(out: Path) -> None:
    forgeries.float_model_ten_times_as_fast(out)
    content = json.loads((out / "front.json").read_bytes())
    del content["sha256"]
    write_sealed(out / "front.json", content)


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit", [forgeries.float_model_ten_times_as_fast, edited_with_a_new_digest]
)
def test_a_forged_latency_makes_no_model_the_best(
    searched: Path, tmp_path: Path, capfd, caplog, edit: Callable[[Path], None]
) -> None:
    folder = shutil.copytree(searched, tmp_path / "user")
    front = folder / "out" / "front.json"
    latency_ms = figures(json.loads(front.read_bytes()))["latency_ms"]
    edit(folder / "out")
    capfd.readouterr()
    arguments = (folder / "net.yaml", "--out", folder / "out", "--time", "1s")
    # Only the forged model keeps to a fifth of the float file's time.
    assert auto(*arguments, "--latency", f"{latency_ms / 5}ms") == 3
    printed = capfd.readouterr().err
    found = json.loads(front.read_bytes())
    assert found["best"] is None
    if edit is not edited_with_a_new_digest:
        assert "front.json: is not as it was written" in caplog.text
        assert figures(found)["latency_ms"] > latency_ms / 5, "it is measured again"
    else:
        # Compared with the float file, which it is, it is about as fast.
        assert "export_onnx: max_latency: p50 at batch 1 <= " in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "forge",
    # The same hash tells; test_forged_files.py edits figures.
    [pytest.param(forgeries.flip_a_byte, marks=pytest.mark.soak), forgeries.edit_a_figure],
)
def test_all_state_of_a_search_is_measured_again_where_it_was_changed(
    searched: Path, tmp_path: Path, caplog, forge: Callable[[Path], object]
) -> None:
    folder = shutil.copytree(searched, tmp_path / "user")
    out = folder / "out"
    state = [*out.glob("*.json"), *out.glob(".store/latency/*.json")]
    names = {file.name.partition("-")[0] for file in state}
    assert names >= {"front.json", "whole_models.json", "kernels"}
    before = {file: file.read_bytes() for file in state}
    for file in state:
        forge(file)
        assert file.read_bytes() != before[file]
    auto(folder / "net.yaml", "--out", out, "--time", "20s", "--quiet")
    for file in state:
        assert f"{file}: is not as it was written" in caplog.text
        assert is_sealed(file.read_bytes())


def test_the_order_of_blocks_is_searched_again_where_it_was_changed(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    searched: list[int] = []

    def search(evaluator: object, deadline: float) -> list[str]:
        searched.append(1)
        return ["2.3", "2.1"]

    monkeypatch.setattr(auto_search, "_measured_order", search)
    evaluator: Any = SimpleNamespace(out=tmp_path, model=SimpleNamespace(digest="0" * 64))
    state: Any = SimpleNamespace(evaluator=evaluator, settings=SimpleNamespace(time=0.0))
    variants = auto_search.BlockVariants(state, None)  # type: ignore[arg-type]
    for count in (1, 1):
        variants.find_order(0.0)
        assert variants.shallower == [("2.3",), ("2.3", "2.1")]
        assert len(searched) == count
    file = tmp_path / auto_search.BLOCKS_FILE
    forgeries.replace(file, file.read_bytes().replace(b"2.3", b"2.5"))
    variants.find_order(0.0)
    assert variants.shallower == [("2.3",), ("2.3", "2.1")]
    assert len(searched) == 2 and "blocks.json: is not as it was written" in caplog.text


def test_what_single_cuts_and_layers_lose_is_measured_again_where_it_was_changed(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    found: list[dict[str, float]] = []

    def measure(*arguments: Any) -> None:
        known, save = next(
            (a, b) for a, b in pairwise(arguments) if isinstance(a, dict) and callable(b)
        )
        found.append(dict(known))
        known["0:16"] = 0.5
        save()

    monkeypatch.setattr(search_state, "measure_loss_increases", measure)
    model = SimpleNamespace(digest="0" * 64)
    settings, context = SimpleNamespace(space=SimpleNamespace(widths=None)), SimpleNamespace()
    context.progress = context.device = None
    evaluator: Any = SimpleNamespace(out=tmp_path, model=model, settings=settings, context=context)
    space: Any = SimpleNamespace(grid={})
    variant = search_state.BlockVariant((), evaluator.model, space)
    for _ in range(2):
        variant.measure_loss_increases(evaluator, 0.0)
    assert found == [{}, {"0:16": 0.5}]
    forgeries.cuts_that_lose_nothing(tmp_path)
    variant.measure_loss_increases(evaluator, 0.0)
    assert found[-1] == {} and "harms.json: is not as it was written" in caplog.text


def test_what_layers_lose_is_measured_again_where_it_was_changed(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    """Two layers, of which the first is read from the file unless that was edited."""
    layers = [SimpleNamespace(name=name, weight=torch.ones(1)) for name in ("0", "1")]
    for name, value in (
        ("read", lambda file, weights=False: [0, 1]),
        ("weighted_layers", lambda model: model),
        ("layers_of_module", lambda module, signature: layers),
        ("is_float", lambda node: False),
        ("leave_float", lambda model, others, weights: others),
        ("write", lambda model, file: measured.append(1 - model[0])),
        ("session_predictor", lambda *_: None),
        ("accept_any_batch", lambda *_: None),
        ("OutputErrorMeter", lambda *_: meter),
    ):
        monkeypatch.setattr(candidate_evaluator, name, value)
    measured: list[int] = []
    error = SimpleNamespace(distance=0.5)
    meter = SimpleNamespace(measure_predictor=lambda predict: error)
    model = SimpleNamespace(digest="0" * 64, signature=None, load=lambda: None)
    evaluator: Any = SimpleNamespace(
        out=tmp_path,
        model=model,
        context=Context(root=tmp_path),
        decided_on=SimpleNamespace(data=None),
        artifact=lambda candidate: SimpleNamespace(payload_path=tmp_path / "model.onnx"),
    )
    monkeypatch.setattr(Context, "judged_batch_size", lambda *_: None)
    whole: Any = SimpleNamespace(format="int8_static", loss=0.5)
    sensitivity = CandidateEvaluator.layer_sensitivity
    for _ in range(2):
        found = sensitivity(evaluator, whole, math.inf)
        assert measured == [0, 1] and found.loss_increases == {"0": 0.25, "1": 0.25}
    forgeries.cuts_that_lose_nothing(tmp_path)
    sensitivity(evaluator, whole, math.inf)
    assert measured == [0, 1, 0, 1] and "layers.json: is not as it was written" in caplog.text
