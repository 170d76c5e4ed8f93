"""What the search predicts of a space's latencies, and the latency of every model of it."""

from __future__ import annotations

import json
import pickle
import time
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from auto_search.losses import ChangeableLayers, static_graph
from compress.export.latency.kernels import KernelTable
from compress.export.latency.resizing import MixedModel, ResizableModel, weighted_layers
from compress.export.onnx.lowering import translate
from compress.export.onnx.proto_io import read, write
from compress.export.onnx.session import opened_session, session_predictor
from compress.pipelines.auto import cost_models
from compress.pipelines.auto.cost_models import LayerSensitivity, decision_of
from compress.pipelines.system.machine_info import machine
from compress.profiling.benchmark import compare_latency
from compress.pruning.depth.block_search import OutputErrorMeter

if TYPE_CHECKING:
    from auto_search.spaces import Built
    from compress.pipelines.auto.cost_models import FormatModel
    from compress.pipelines.config.auto_settings import Format

SECONDS = 0.08
"""For which each model is measured."""


def prepare_layers(built: Built) -> None:
    """Quantize the whole model, and measure what each set of layers alone loses in integers."""
    for format in built.space.formats:
        if len(built.layer_choices(format)) == 1 or (built.work / f"{format}.onnx").exists():
            continue
        context = built.context.with_root(built.work / f"whole-{format}")
        graph = static_graph(built.whole, context)
        changeable = ChangeableLayers.of_whole(graph, built.whole)
        signature = built.whole.signature
        meter = OutputErrorMeter(built.whole.load(), signature, built.context, "outputs")

        def loss(graph, meter=meter) -> float:
            file = built.work / "judged.onnx"
            write(graph, file)
            return meter.measure_predictor(session_predictor(file, 1)).distance ** 2

        alone = {p: loss(changeable.alone(p)) for p in built.space.float_layers}
        # As in a search, where all layers together lose what the whole model does.
        numbers = {pattern: changeable.numbers(pattern) for pattern in alone}
        decided = {number for own in numbers.values() for number in own}
        others = [name for number, name in changeable.names.items() if number not in decided]
        rest = sum(loss(changeable.alone(name)) for name in others)
        scale = loss(graph) / (sum(alone.values()) + rest)
        content = {
            "names": changeable.names,
            "numbers": numbers,
            "harms": {p: scale * loss_increase for p, loss_increase in alone.items()},
        }
        write(graph, built.work / f"{format}.onnx")
        (built.work / f"{format}-layers.json").write_text(json.dumps(content))


def layer_sensitivity(built: Built, format: Format) -> LayerSensitivity | None:
    """Return what was measured of layers."""
    if len(built.layer_choices(format)) == 1:
        return None
    content = json.loads((built.work / f"{format}-layers.json").read_text())
    numbers = {pattern: tuple(own) for pattern, own in content["numbers"].items()}
    return LayerSensitivity(built.work / f"{format}.onnx", numbers, content["harms"])


def prepare_files(built: Built, name: str, format: Format) -> None:
    """Export a model of which all others are made by other sizes of weights, and keep it."""
    file = resizable_file(built, name, format)
    if file.exists():
        return
    with TemporaryDirectory(prefix="compress-space-") as folder:
        whole, exports = cost_models.export_at_random_widths(
            format, built.models[name], built.context, built.settings, Path(folder)
        )
        model: Any = ResizableModel.fit(exports)
    layers = layer_sensitivity(built, format)
    if layers is not None:
        model = MixedModel(model, {decision_of(n): own for n, own in layers.numbers.items()})
        if len(weighted_layers(model.model.model)) != len(weighted_layers(read(layers.file))):
            raise SystemExit(f"{format}: the resized model has other layers")
    file.write_bytes(pickle.dumps((whole, model)))


def resizable_file(built: Built, name: str, format: Format) -> Path:
    """Return where what :func:`prepare_files` makes is kept."""
    return built.work / f"resizable-{format}-{name.replace(' ', '-')}.pickle"


def model_file(built: Built, name: str, format: Format) -> Path:
    """Return where what :func:`measure_models` makes is kept."""
    return built.work / f"model-{format}-{name.replace(' ', '-')}.pickle"


def measure_models(built: Built, deadline: float) -> bool:
    """Build what the search predicts latencies by; return whether there was time for all."""
    table = KernelTable(built.work, machine(), 1)
    signature = built.whole.signature
    batches = built.context.measured_batches(signature, 1)
    whole = partial(opened_session, whole_file(built), 1)

    def measure_ms(file) -> float:
        compared = compare_latency(whole, file, batches, seconds=0.3, threads=1)
        return whole_ms(built, compared.before.p50) / compared.speedup

    for name, model in built.models.items():
        for format in built.space.formats:
            file = model_file(built, name, format)
            if file.exists():
                continue
            if time.monotonic() > deadline:
                return False
            (found,) = cost_models.build_format_models(
                format,
                ["onnx"],
                grid=built.widths[name].grid,
                model=model,
                context=built.context,
                settings=built.settings,
                table=table,
                measure_ms=measure_ms,
                layers=layer_sensitivity(built, format),
            )
            file.write_bytes(pickle.dumps(found))
    return True


def whole_ms(built: Built, measured_ms: float) -> float:
    """Return the latency of the whole float model, in whose times all others are given."""
    file = built.work / "base_ms.json"
    if not file.exists():
        file.write_text(json.dumps(measured_ms))
    return json.loads(file.read_text())


def whole_file(built: Built) -> Path:
    """Return the float ONNX file of the whole model."""
    file = built.work / "whole.onnx"
    if not file.exists():
        write(translate(built.whole, None, "auto")[0], file)
    return file


def points(built: Built):
    """Yield each model of the space: which one, format, widths, and the layers in float."""
    for name in built.models:
        for format in built.space.formats:
            for widths in product(*built.widths[name].grid.values()):
                for patterns in built.layer_choices(format):
                    yield name, format, widths, patterns


def measure_points(built: Built, deadline: float) -> bool:
    """Measure the models that are missing; return whether there was time for all."""
    file = built.work / "latencies.jsonl"
    known = {_key(*json.loads(line)[0]) for line in _lines(file)}
    missing = [point for point in points(built) if _key(*point) not in known]
    batches = built.context.measured_batches(built.whole.signature, 1)
    whole = partial(opened_session, whole_file(built), 1)
    resizable: dict[tuple[str, str], Any] = {}
    with file.open("a") as out:
        for name, format, widths, patterns in missing:
            if time.monotonic() > deadline:
                return False
            key = name, format
            if key not in resizable:
                resizable[key] = pickle.loads(resizable_file(built, *key).read_bytes())
            own, model = resizable[key]
            choice = own | dict(zip(built.widths[name].grid, widths, strict=True))
            choice |= {decision_of(pattern): "float" for pattern in patterns}
            write(model.resize(choice), built.work / "point.onnx")
            point = partial(opened_session, built.work / "point.onnx", 1)
            # As a share of the whole model's time, since the machine's speed drifts.
            compared = compare_latency(whole, point, batches, seconds=SECONDS, threads=1)
            latency_ms = whole_ms(built, 0.0) / compared.speedup
            out.write(json.dumps([[*key, widths, patterns], latency_ms]) + "\n")
            out.flush()
    return True


def known_latencies(built: Built) -> dict[tuple, float]:
    """Return the latency of each model that was measured, by what :func:`points` yields."""
    lines = map(json.loads, _lines(built.work / "latencies.jsonl"))
    return {_key(*point): latency_ms for point, latency_ms in lines}


def _key(name, format, widths, patterns):
    return name, format, tuple(widths), tuple(patterns)


def _lines(file) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def read_model(built: Built, name: str, format: Format) -> FormatModel:
    """Return what the search predicts latencies by."""
    return pickle.loads(model_file(built, name, format).read_bytes())
