"""`compress auto` believes no figure of an earlier search that was edited since."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.common.sealed_json import load_sealed, write_sealed
from tests.pipelines.auto.test_auto import FILE, NETS, auto

WHOLE = "float-whole"


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("searched")
    (folder / "nets.py").write_text(NETS)
    (folder / "net.yaml").write_text(FILE)
    assert auto(folder / "net.yaml", "--out", folder / "out", "--time", "8s", "--quiet") == 0
    return folder


def figures(front: dict[str, Any]) -> dict[str, Any]:
    return next(model for model in front["checked"] if model["name"] == WHOLE)


def edited_by_hand(file: Path, latency_ms: float) -> None:
    front = json.loads(file.read_bytes())
    figures(front).update(latency_ms=latency_ms, latency_upper_ms=latency_ms)
    file.write_text(json.dumps(front, indent=1))


def edited_with_a_new_digest(file: Path, latency_ms: float) -> None:
    front = load_sealed(file.read_bytes())
    figures(front).update(latency_ms=latency_ms, latency_upper_ms=latency_ms)
    write_sealed(file, front)


@pytest.mark.slow
@pytest.mark.parametrize("edit", [edited_by_hand, edited_with_a_new_digest])
def test_a_forged_latency_makes_no_model_the_best(
    searched: Path, tmp_path: Path, capfd, caplog, edit: Callable[[Path, float], None]
) -> None:
    folder = shutil.copytree(searched, tmp_path / "user")
    front = folder / "out" / "front.json"
    latency_ms = figures(json.loads(front.read_bytes()))["latency_ms"]
    edit(front, latency_ms / 10)
    capfd.readouterr()
    arguments = (folder / "net.yaml", "--out", folder / "out", "--time", "1s")
    # Only the forged model keeps to a fifth of the float file's time.
    assert auto(*arguments, "--latency", f"{latency_ms / 5}ms") == 3
    printed = capfd.readouterr().err
    found = json.loads(front.read_bytes())
    assert found["best"] is None
    if edit is edited_by_hand:
        assert "front.json: is not as it was written" in caplog.text
        assert figures(found)["latency_ms"] > latency_ms / 2, "it is measured again"
    else:
        # Compared with the float file, which it is, it is about as fast.
        assert "export_onnx: min_speedup against float_onnx: speedup" in printed
