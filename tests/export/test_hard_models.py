"""What models of the zoo taught: each of these once failed, or failed with a traceback."""

from pathlib import Path

import pytest

from tests.export.zoo.hard import HARD
from tests.export.zoo.walk import LARGEST_ERROR, answers, imported, walk

CASES = {case.name: case for case in HARD}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("tagger_gru", id="a recurrent layer of any length"),
        pytest.param("tagger_lstm", id="an lstm of any length"),
        pytest.param("gate", id="strides over an open height and width"),
        pytest.param("cond", id="weights that branches alone read"),
        pytest.param("biased", id="attention with a learned mask"),
    ],
)
def test_it_has_an_onnx_form(name: str, tmp_path: Path) -> None:
    model = imported(CASES[name], tmp_path / "source")
    cell = walk(model, "ONNX", tmp_path / "onnx")
    assert not cell.refusal
    assert cell.error <= LARGEST_ERROR


def test_a_buffer_that_is_part_of_a_larger_tensor_is_loaded(tmp_path: Path) -> None:
    model = imported(CASES["spectral"], tmp_path / "source")  # a periodic window is a slice
    assert answers(model)


def test_what_torchscript_cannot_express_is_refused_in_one_line(tmp_path: Path) -> None:
    model = imported(CASES["cond"], tmp_path / "source")
    refusal = walk(model, "TorchScript", tmp_path / "ts").refusal
    assert "torch.jit.trace cannot express the model" in refusal
    assert "\n" not in refusal
    assert not (tmp_path / "ts").exists()
