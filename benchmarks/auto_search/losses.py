"""What every model of a space loses: each cut once, refitted on 128 samples and not trained."""

from __future__ import annotations

import copy
import json
import math
import random
from fnmatch import fnmatch
from functools import cache, cached_property
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from auto_search.requantize import requantized
from compress.common.atomic_files import write_atomically
from compress.common.forward import accept_any_batch, run_in_eval, split_batches
from compress.export.latency.resizing import is_float, leave_float, weighted_layers
from compress.export.onnx.lowering import lower
from compress.export.onnx.proto_io import read, write
from compress.export.onnx.session import session_predictor
from compress.graph.torch_export import export_program
from compress.pruning.dependency.channel_groups import SlicePlan
from compress.pruning.recovery.recovery import recover_
from compress.pruning.verification.masked_equivalence import sliced_copy
from compress.quantization.mixed_precision.bit_search import weighted_layers as layers_of_module
from compress.quantization.ptq.calibrate import convert
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.quantization.stages.static import QuantizeStatic

if TYPE_CHECKING:
    from auto_search.spaces import Built
    from compress import Context
    from compress.artifacts.eager_model import EagerModel
    from compress.pipelines.config.auto_settings import Format

CALIBRATED_ON = 128
"""Samples."""


class Loss(NamedTuple):
    """What a model loses on `val`."""

    cross_entropy: float
    distance: float
    """Squared distance of the outputs from the float model's, relative to these."""


def measure_losses(built: Built) -> None:
    """Make the models that are missing; several processes may do so at once."""
    folder = built.work / "losses"
    folder.mkdir(parents=True, exist_ok=True)
    missing = [
        (name, widths)
        for name, space in built.widths.items()
        for widths in product(*space.grid.values())
        if not loss_file(folder, name, widths).exists()
    ]
    random.shuffle(missing)
    meter = LossMeter(built)
    if missing:
        meter.check_stages()
    for name, widths in missing:
        file = loss_file(folder, name, widths)
        if not file.exists():
            write_atomically(file, json.dumps(meter.losses(name, widths)))


def static_graph(model: EagerModel, context: Context):
    """Quantize a model as `quantize_static` does, and return its ONNX graph without saving it."""
    stage = QuantizeStatic(calibration_samples=CALIBRATED_ON)
    prepared, _, _ = stage.prepare(model, context)
    program = export_program(convert(prepared), model.signature)
    return lower(program, model.signature, None)


def loss_file(folder: Path, name: str, widths: tuple[int, ...]) -> Path:
    """Return where the losses at some widths are kept."""
    return folder / f"{name.replace(' ', '-')}-{'-'.join(map(str, widths))}.json"


class LossMeter:
    """Cuts, quantizes and judges models."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.samples, self.labels = built.context.data.datasets["val"].tensors
        self.expected = run_in_eval(built.whole.load(), (self.samples,))[0]

    def losses(self, name: str, widths: tuple[int, ...]) -> dict[str, list[Loss]]:
        """Cut a model to some widths; return its loss by format, one for each set of layers."""
        module = self.cut(name, widths)
        return {format: self.losses_in(format, module) for format in self.built.space.formats}

    def losses_in(self, format: Format, module) -> list[Loss]:
        """Return the losses of a module in a format, one for each set of layers in float."""
        if format == "float":
            return [self.loss(lambda *x: module.eval()(*x))]
        if format == "int8_dynamic":
            dynamic = with_dynamic_integers(module).eval()
            return [self.loss(dynamic)]
        layers = self.folded_layers(module)
        graph = requantized(self.whole_graph, layers, self.calibration)
        weights = {number: weight for number, (weight, _) in layers.items()}
        changeable = ChangeableLayers(graph, weights, self.names)
        choices = self.built.layer_choices(format)
        return [self.onnx_loss(changeable.with_floats(patterns)) for patterns in choices]

    def cut(self, name: str, widths: tuple[int, ...]):
        """Return a module at some widths, refitted."""
        space = self.built.widths[name]
        ranking = space.ranking
        # Each is verified once, as verifying takes longer than cutting.
        slices = [
            self.slice_of(name, group, width)
            for (group, own), width in zip(space.grid.items(), widths, strict=True)
            if width != own[0]
        ]
        plan = SlicePlan.combine(slices, ranking.pinned, ranking.graph)
        module = copy.deepcopy(sliced_copy(ranking.module, plan))
        if plan.groups:
            recover_(module, copy.deepcopy(ranking.module), plan.kept, space.batches)
        return module

    @cache  # noqa: B019 - lives as long as the process
    def slice_of(self, name: str, group: str, width: int):
        """Return the channels of one group that are cut, with the attributes that change."""
        ranking = self.built.widths[name].ranking
        keep = [width if one.group.name == group else len(one.scores) for one in ranking.ranked]
        (found,) = ranking.verify(keep, "error").groups
        return found

    @cached_property
    def names(self) -> dict[int, str]:
        """The layers of the quantized graphs, in their order."""
        content = (self.built.work / "int8_static-layers.json").read_text()
        return {int(number): name for number, name in json.loads(content)["names"].items()}

    @cached_property
    def whole_graph(self):
        """The quantized graph of the whole model."""
        return read(self.built.work / "int8_static.onnx", weights=True)

    @cached_property
    def calibration(self):
        """Samples on which activations are observed."""
        data, seed = self.built.context.data, self.built.context.seed
        batches = data.calibration(CALIBRATED_ON, seed)
        return torch.cat([batch.inputs[0] for batch in batches]).numpy()

    @torch.no_grad()
    def folded_layers(self, module):
        """Return the weight and bias of each layer, BatchNorms folded in, by number."""
        parts = [*module.named_modules()]
        after = {name: part for (name, _), (_, part) in pairwise(parts)}
        folded = {}
        for number, name in self.names.items():
            layer, norm = module.get_submodule(name), after.get(name)
            weight, bias = layer.weight, layer.bias
            if isinstance(norm, nn.BatchNorm2d):
                factor = norm.weight / (norm.running_var + norm.eps).sqrt()
                weight = weight * factor.reshape(-1, 1, 1, 1)
                bias = norm.bias + ((0 if bias is None else bias) - norm.running_mean) * factor
            folded[number] = weight.numpy(), bias.numpy()
        return folded

    def loss(self, predict) -> Loss:
        """Judge a model on `val`."""
        with torch.inference_mode():
            outputs = predict(self.samples)
            outputs = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
            distance = (outputs - self.expected).square().sum() / self.expected.square().sum()
            return Loss(float(F.cross_entropy(outputs, self.labels)), float(distance))

    def onnx_loss(self, graph) -> Loss:
        """Judge an ONNX graph on `val`."""
        with TemporaryDirectory(prefix="compress-space-") as folder:
            file = Path(folder) / "model.onnx"
            write(graph, file)
            signature = self.built.whole.signature
            return self.loss(accept_any_batch(session_predictor(file, 1), signature))

    def check_stages(self) -> None:
        """Compare the losses of a quantized model with those of the stage that a search runs.

        Raises:
            AssertionError: they are not close.
        """
        built = self.built
        for format in built.space.formats[1:]:
            own, *_ = self.losses_in(format, built.whole.load())
            with TemporaryDirectory(prefix="compress-space-") as folder:
                context = built.context.with_root(Path(folder) / "x")
                if format == "int8_static":
                    by_stage = self.onnx_loss(static_graph(built.whole, context))
                else:
                    with built.context.predictor(QuantizeDynamic()(built.whole, context)) as model:
                        by_stage = self.loss(split_batches(model, 1))
            print(f"{format}, by its stage and here: {by_stage}, {own}")
            assert math.isclose(own.cross_entropy, by_stage.cross_entropy, rel_tol=1e-3)
            assert math.isclose(own.distance, by_stage.distance, rel_tol=0.05)


class DynamicLinear(nn.Module):
    """A linear layer as `quantize_dynamic` makes it, for samples that are called one by one.

    The stage takes seconds for each model; that both lose the same is checked for the whole one.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = rounded_rows(linear.weight)
        self.bias = linear.bias

    def forward(self, x):
        inner = tuple(range(1, x.dim()))
        low = x.amin(inner, keepdim=True).clamp(max=0)
        scale = (x.amax(inner, keepdim=True).clamp(min=0) - low) / 255
        zero = (-low / scale).round()
        rounded = ((x / scale).round() + zero).clamp(0, 255) - zero
        return F.linear(rounded * scale, self.weight, self.bias)


def rounded_rows(weight: torch.Tensor) -> torch.Tensor:
    """Round a weight to 8 bits, each row in its own range."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


def with_dynamic_integers(module):
    """Return a copy of a module that computes in dynamic integers, of embeddings rounded too."""
    module = copy.deepcopy(module)
    for parent in [*module.modules()]:
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, DynamicLinear(child))
            elif isinstance(child, nn.Embedding):
                child.weight.data = rounded_rows(child.weight.data)
    return module


class ChangeableLayers(NamedTuple):
    """A quantized graph, of which layers are put back to float."""

    graph: object
    weights: dict[int, object]
    """Number of an integer layer → its float weight."""
    names: dict[int, str]

    @classmethod
    def of_whole(cls, graph, model: EagerModel):
        """Match the layers of a graph with those of its float model."""
        nodes = weighted_layers(graph)
        layers = layers_of_module(model.load(), model.signature)
        integers = [i for i, node in enumerate(nodes) if not is_float(node)]
        weights = {i: layers[i].weight.numpy() for i in integers}
        return cls(graph, weights, {i: layers[i].name for i in integers})

    def numbers(self, pattern: str) -> tuple[int, ...]:
        """Return the numbers of the integer layers of a pattern."""
        return tuple(i for i, name in self.names.items() if fnmatch(name, pattern))

    def with_floats(self, patterns: tuple[str, ...]):
        """Return the graph with the layers of some patterns in float."""
        numbers = [i for pattern in patterns for i in self.numbers(pattern)]
        return leave_float(self.graph, numbers, self.weights) if numbers else self.graph

    def alone(self, pattern: str):
        """Return the graph with all layers in float but those of a pattern."""
        own = self.numbers(pattern)
        return leave_float(self.graph, [i for i in self.weights if i not in own], self.weights)
