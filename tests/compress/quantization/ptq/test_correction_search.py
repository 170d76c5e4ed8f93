import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from compress.common.errors import StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.batch import Batch
from compress.quantization.config.dtype_scheme import scheme_for
from compress.quantization.pt2e.graph_capture import capture, fake_quantized
from compress.quantization.pt2e.observer_ranges import (
    layers_of,
    observer_of,
    set_weight_,
    weight_of,
)
from compress.quantization.pt2e.quantizer import OnnxRuntimeQuantizer
from compress.quantization.ptq import calibrate
from compress.quantization.ptq.calibrate import (
    Corrections,
    RoundedWeight,
    TrialSamples,
    prepare,
    search_corrections,
)
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


def test_noise_is_measured_on_batches_that_nothing_was_found_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibrate, "MEAN_SAMPLES", 20)
    monkeypatch.setattr(calibrate, "MEAN_VALUES", 0)
    monkeypatch.setattr(calibrate, "ROWS", 8)

    def parts(count: int) -> list[list[float]]:
        samples = TrialSamples.from_batches(batches(count), 4 * count)
        parts = (samples.seen, samples.rounding, samples.held_out)
        return [[float(b.inputs[0][0, 0]) for b in part] for part in parts]

    # As many as a quarter at most are held out, however few there are.
    assert parts(20) == [[1, 3], [1, 3, 5, 6, 7], [2, 4]]
    assert parts(5) == [[1, 3], [1, 3, 5], [2, 4]]
    assert parts(4) == [[1, 3], [1, 3, 4], [2]]
    assert parts(2) == [[1], [1], [2]]
    with pytest.raises(StageFailed, match=r"all 4 are one batch .* at least two batches"):
        parts(1)


def test_a_correction_stays_only_where_it_gains_upon_those_before() -> None:
    noise = {"a": -0.05, "b": 0.02, "c": -0.04, "d": -0.0001}

    def quantized(settings: dict[str, bool]) -> torch.nn.Module:
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


def test_what_was_found_before_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(tmp_path / "source", "networks:depthwise", random_batch_norm=True)
    calls: Counter[str] = Counter()
    for name in ("calibrate_", "gptq_"):
        function = getattr(calibrate, name)

        def counted(*given: object, name=name, function=function, **named: object) -> object:
            calls[name] += 1
            return function(*given, **named)

        monkeypatch.setattr(calibrate, name, counted)
    monkeypatch.setattr(calibrate, "LEAST_GAIN_DB", -100)  # all of them are chosen
    candidates = [{"bias_correction": True}, {"observer": "l3"}, {"rounding": "gptq"}]
    monkeypatch.setattr(calibrate, "useful_candidates", lambda graph: candidates)
    context = Context(root=tmp_path / "auto", data=labelled_images())
    facts = QuantizeStatic(corrections="auto", calibration_samples=32)(
        model, context
    ).manifest.facts
    assert facts["corrections"] == {"bias_correction": True, "observer": "l3", "rounding": "gptq"}
    # Rounding changes no range, and what it did for the trial is what is saved.
    assert calls == {"calibrate_": 3, "gptq_": 4}
    assert 0 < facts["rounded_away"] < 0.5


class Strided(torch.nn.Module):
    """Reads the memory of an image, whose channels come first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).contiguous().as_strided((4, 8, 8), (8 * 64, 8, 1))


def test_a_graph_that_reads_strides_is_measured_as_it_was_traced() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(4, 3, 8, 8), Strided().eval()
    signature = Signature(inputs=(TensorSpec(name="x", shape=(4, 3, 8, 8)),))
    quantizer = OnnxRuntimeQuantizer(scheme_for("onnxruntime-cpu"), "minmax")
    graph = prepare(capture(model, signature), quantizer)
    with torch.no_grad():
        graph(x)
        torch.testing.assert_close(fake_quantized(graph)(x), model(x), rtol=0, atol=0.1)


def test_gptq_takes_a_known_weight_only_of_the_same_weight_and_scale() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 8)),))
    quantizer = OnnxRuntimeQuantizer(scheme_for("onnxruntime-cpu"), "minmax")
    graph = prepare(capture(torch.nn.Linear(8, 8), signature), quantizer)
    graph(x)
    (layer,), corrections = layers_of(graph), Corrections(rounding="gptq")
    given, observer = weight_of(graph, layer), observer_of(graph, layer.args[1])
    known: dict[str, RoundedWeight] = {}

    def found(weight: torch.Tensor, scale: float, seen: torch.Tensor) -> torch.Tensor:
        set_weight_(graph, layer, weight)
        observer.max_val.mul_(scale)
        corrections.round_(graph, [Batch((seen,), None)], known)
        return weight_of(graph, layer)

    first, other = found(given, 1, x), x @ torch.randn(8, 8)
    assert torch.equal(found(given, 1, other), first), "known"
    changed = found(given * 0.9, 1, other)
    steps = changed / observer.calculate_qparams()[0][:, None]
    assert not torch.equal(changed, first) and torch.allclose(steps, steps.round(), atol=1e-4)
    coarse = found(given * 0.9, 2, other)
    assert not torch.equal(coarse, changed)
    kept = weakref.ref(*known.values())
    known.clear()
    assert kept() is None, "kept in memory until the graph is written"


def test_corrections_are_searched_or_set_by_hand() -> None:
    with pytest.raises(ValidationError, match="auto chooses equalize itself, found both"):
        QuantizeStatic(corrections="auto", equalize=True)
    assert QuantizeStatic(corrections=False) == QuantizeStatic()
