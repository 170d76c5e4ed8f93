from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from compress.common.errors import StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.batch import Batch
from compress.quantization.pt2e.graph_capture import capture
from compress.quantization.ptq.calibrate import halves, search_corrections
from compress.quantization.stages.static import QuantizeStatic
from tests.compress.padded_encoder import Padded
from tests.compress.quantization.builders import answer, build_model, images, labelled_images


def batches(count: int, size: int = 4) -> list[Batch]:
    return [Batch((torch.full((size, 2), float(n + 1)),), None) for n in range(count)]


class Off(torch.nn.Module):
    """Twice its input, wrong by a share."""

    def __init__(self, share: float = 0.0) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 * (1 + self.share)


def test_noise_is_measured_on_batches_that_no_range_was_found_on() -> None:
    seen, held_out = halves(batches(5), rows=8)
    assert [float(b.inputs[0][0, 0]) for b in seen] == [1, 3]
    assert [float(b.inputs[0][0, 0]) for b in held_out] == [2, 4]
    with pytest.raises(StageFailed, match=r"all 4 are one batch .* at least two batches"):
        halves(batches(1))


def test_a_correction_stays_only_where_it_gains_upon_those_before() -> None:
    noise = {"a": -0.05, "b": 0.02, "c": -0.04, "d": -0.0001}

    def quantized(settings: dict[str, bool], seen: list[Batch]) -> torch.nn.Module:
        assert len(seen) == 2
        return Off(0.1 + sum(noise[name] for name in settings))

    candidates = [{name: True} for name in noise]
    chosen, tried = search_corrections(Off(), batches(4), quantized, candidates)
    assert chosen == {"a": True, "c": True}
    # 20 dB for a tenth, 26 for a twentieth, 40 for a hundredth.
    assert tried == {
        "none": 20,
        "a: True": 26.02,
        "a: True, b: True": 23.1,
        "a: True, c: True": 40,
        "a: True, c: True, d: True": 40.09,
    }


def test_noise_at_padded_places_is_that_of_quantization_alone() -> None:
    module, padding = Padded().eval(), torch.arange(6).expand(4, 6) > 3
    samples = [Batch((torch.randn(4, 6, 8), padding), None) for _ in range(2)]
    specs = (
        TensorSpec(name="x", shape=("batch", 6, 8)),
        TensorSpec(name="padding", shape=("batch", 6), dtype="bool"),
    )
    graph = capture(module, Signature(inputs=specs))
    _, tried = search_corrections(module, samples, lambda *_: graph, [])
    assert tried["none"] > 100


class LoadedLater:
    """Stands for splits, as what a run remembers of them does."""

    def __getattr__(self, name: str) -> object:
        return getattr(labelled_images(), name)


def test_auto_finds_the_correction_that_a_network_needs(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:depthwise", random_batch_norm=True)
    stage = QuantizeStatic(corrections="auto", calibration_samples=32)
    graph = stage(model, Context(root=tmp_path / "auto", data=LoadedLater()))
    facts, x = graph.manifest.facts, images()
    tried = facts["corrections_tried_db"]
    assert facts["corrections"]["bias_correction"]
    # By the samples that no range was found on, and by all.
    assert max(tried.values()) > tried["none"] + 1
    error = (answer(graph, x) - answer(model, x)).square().mean() / answer(model, x).square().mean()
    assert -10 * float(error.log10()) > tried["none"]
    assert "smooth" not in " ".join(tried)  # it has no linear layer of sequences


def test_a_given_rounding_is_kept(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:depthwise", random_batch_norm=True)
    stage = QuantizeStatic(corrections="auto", rounding="gptq", calibration_samples=32)
    facts = stage(model, Context(root=tmp_path / "auto", data=labelled_images())).manifest.facts
    assert not any("rounding" in settings for settings in facts["corrections_tried_db"])
    assert facts["rounded_away"] > 0
    plain = QuantizeStatic(corrections="auto", calibration_samples=32)
    others = plain(model, Context(root=tmp_path / "plain", data=labelled_images())).manifest.facts
    # What is tried is rounded so, too.
    assert facts["corrections_tried_db"]["none"] != others["corrections_tried_db"]["none"]


def test_corrections_are_searched_or_set_by_hand() -> None:
    with pytest.raises(ValidationError, match="auto chooses equalize itself, found both"):
        QuantizeStatic(corrections="auto", equalize=True)
    assert QuantizeStatic(corrections=False) == QuantizeStatic()
