"""Quantization-aware training of torch.ao's modes, through the bundled trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.ao import quantization as ao
from torch.ao.quantization.observer import MovingAverageMinMaxObserver

from compress.core.eager import EagerModel, predicting
from compress.core.native import Native
from compress.core.recipe import Recipe
from compress.core.torch_ao import computing_with, prepared, quiet
from compress.core.weights import load_state_
from compress.quantization.freezing import Freezing
from compress.quantization.native import integers_of, observe_
from compress.quantization.qat_stage import finer_rate
from compress.quantization.trained import compare_with_trained
from compress.training.fit import fit
from compress.training.objective import TargetLoss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from compress.core.batch import Batch
    from compress.core.stage import Context
    from compress.training.settings import Training

log = logging.getLogger(__name__)

FACTORY = f"{__name__}:watched"
NEVER = Freezing(ranges=1.0, batch_norm=1.0)
"""Keeps zeros where they are, and nothing else."""


class Watched(nn.Module):
    """A module that rounds, and follows the ranges of batches while it trains, and only then."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return the module's outputs."""
        return self.module(*inputs)

    def train(self, mode: bool = True) -> Watched:
        """Let ranges follow batches, or stay."""
        super().train(mode)
        self.apply(ao.enable_observer if mode else ao.disable_observer)
        return self


def train(
    model: EagerModel,
    native: Native,
    batches: Iterable[Batch],
    report: Callable[[int], None],
    training: Training,
    context: Context,
    title: str,
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model in integer layers that was trained while it rounded, and what is to be told.

    Args:
        model: the float model.
        native: how it is quantized.
        batches: inputs on which the ranges that training begins with are observed.
        report: called with the number of samples seen so far.
        training: the hyper-parameters.
        context: data, metric and seed.
        title: what the progress is shown as.

    Raises:
        StageFailed: as of `quantize_static`, or the training failed.
    """
    module = watched(str(model.path.absolute()), native.model_dump(mode="json")).eval()
    module.apply(_forget_range_)
    module.apply(ao.enable_observer)
    module.apply(ao.disable_fake_quant)
    observe_(module.module, model, batches, report)
    module.apply(ao.enable_fake_quant)
    start = _sealed(module.eval(), model, native, context.work / "start")
    training = training.model_copy(update={"learning_rate": finer_rate(training)})
    objective = TargetLoss.for_training(training, context)
    trained = fit(start, training, objective, context, title, accept_start=True, constraint=NEVER)
    load_state_(module, trained.weights, "the training")
    return _converted(module, model, native, context, title, trained.facts())


def watched(model: str, native: dict[str, Any]) -> Watched:
    """Return an eager model with torch.ao's rounding, its ranges not yet known.

    Args:
        model: directory of the eager model.
        native: how it is quantized.
    """
    source, how = EagerModel.at(Path(model)), Native.model_validate(native)
    module = prepared(source.load(), how, source.signature).eval()
    with torch.no_grad(), quiet():
        module(*source.signature.example())  # what observers hold has its shape from then on
    return Watched(module)


def _forget_range_(part: nn.Module) -> None:
    """Let an observer begin anew: the inputs that gave it its shape were none of the data's."""
    if isinstance(part, MovingAverageMinMaxObserver):
        part.reset_min_max_vals()


def _sealed(module: Watched, model: EagerModel, native: Native, path: Path) -> EagerModel:
    arguments: dict[str, Any] = {
        "model": str(model.path.absolute()),
        "native": native.model_dump(mode="json"),
    }
    recipe = Recipe(factory=FACTORY, arguments=arguments)
    return EagerModel.create(path, recipe, module.state_dict(), model.signature)


def _converted(
    module: Watched,
    model: EagerModel,
    native: Native,
    context: Context,
    title: str,
    facts: dict[str, Any],
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the integer layers, and how nearly they answer as the trained module."""
    again = watched(str(model.path.absolute()), native.model_dump(mode="json"))
    load_state_(again, module.state_dict(), "the training")
    integers = integers_of(module.eval().module, model, native)
    inputs = context.comparison_inputs(model.signature)
    with computing_with(native.engine), predicting(integers, "cpu", context.threads) as predict:
        same = compare_with_trained(again.eval(), predict, inputs, None)
    if same is not None:
        log.info("%s: %s", title, same.line())
        facts = {"same_as_trained": same.model_dump(mode="json"), **facts}
    return integers, facts
