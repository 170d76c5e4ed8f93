"""The stage that trains a model while it rounds; settings only, no torch."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.config import Fraction, Positive
from compress.core.stage import Stage
from compress.quantization.config.backend_targets import Target
from compress.quantization.config.dtype_scheme import Observer, WeightBits, formats_of, one_backend
from compress.quantization.stages.graph_artifact import (
    check_exclude,
    need_free_batch,
    save_quantized,
)
from compress.training.config.training import DEFAULT_LEARNING_RATE, Training
from compress.training.objectives.teacher_objective import Teaching

if TYPE_CHECKING:
    from pydantic import JsonValue
    from torch.export import ExportedProgram

    from compress.core.context import Context
    from compress.core.loss import Loss
    from compress.quantization.ptq.prepare import FakeQuantization, Prepared
    from compress.quantization.qat.fake_model import FakeQuantized
    from compress.quantization.qat.freeze import Freezing
    from compress.training.objectives.objective import Objective
    from compress.training.result import Fit

log = logging.getLogger(__name__)

FINER = 10
"""The default learning rate of a training over that of this stage."""


def finer_rate(training: Training) -> float:
    """Return the learning rate of a training that rounds, a fine-tuning's where none is set."""
    return training.learning_rate or DEFAULT_LEARNING_RATE[training.optimizer] / FINER


class QuantizeAwareTraining(Stage[EagerModel, GraphModel], Training):
    """Train a model while it rounds to integers, for what `quantize_static` loses, at 4 bits say.

    Training begins with the model as `quantize_static` makes it, which stays where no epoch is
    better, and ends with an integer graph that gives the trained model's labels: how many differ is
    told among the facts. Dropout is off, and weights that are zero stay zero.
    """

    stage: Literal["quantize_aware_training"] = "quantize_aware_training"
    target: Target = "onnxruntime-cpu"
    """Runtime whose fused integer kernels decide which operators are quantized, and how."""
    weight_bits: WeightBits = 8
    """Bits of a weight; 4-bit ones are held in 8, so they make nothing smaller or faster here."""
    calibration_samples: Annotated[int, Field(ge=16)] = 512
    """Samples on which the ranges that training begins with are observed; fewer than 16 tell too
    little."""
    observer: Observer = "minmax"
    """How these ranges are estimated. Those of `minmax` and `moving_average` follow the extremes of
    batches in training; the others clip, and stay."""
    embeddings: bool = True
    """Whether tables of embeddings are rounded too, each row with its own scale."""
    learn_steps: bool = False
    """Whether the steps between rounded numbers are trained too, instead of following ranges."""
    learning_rate: Positive | None = None
    """Highest learning rate; by default a tenth of that of `train`: 0.01 for `sgd`, 0.0002 for
    `adamw`."""
    freeze_observers: Fraction = 0.5
    """Share of the training after which ranges of weights and activations stay as they are."""
    freeze_batch_norm: Fraction = 0.5
    """Share of the training in which a BatchNorm before rounding normalizes with the statistics of
    batches; later with those that the integer model has."""
    teaching: Teaching | None = None
    """How the model learns from the answers of the float model; without it from labels alone, or,
    where samples have none, from the answers with the defaults."""
    exclude: tuple[str, ...] = ()
    """Names of modules left in float; `*` and `?` stand for any characters."""

    _one_backend = model_validator(mode="before")(one_backend)

    @model_validator(mode="after")
    def _steps_are_learned_or_observed(self) -> Self:
        if self.learn_steps and "freeze_observers" in self.model_fields_set:
            raise ValueError(
                "freeze_observers is for ranges that follow what they observe, found learn_steps: "
                "true, which trains them; leave one out"
            )
        return self

    @model_validator(mode="after")
    def _processes_hold_one_graph(self) -> Self:
        parallel = self.parallel
        found = {
            f"strategy: {parallel.strategy}": parallel.strategy not in ("dp", "ddp", "zero1"),
            "tensor or pipeline": parallel.is_mesh,
            "communication: hierarchical": parallel.communication == "hierarchical",
            "static_graph: true": parallel.static_graph,
            f"compile: {self.compile}": self.compile != "none",
            "activation_checkpointing": self.activation_checkpointing != "none",
        }
        for name, cannot in found.items():
            if cannot:
                raise ValueError(
                    "the graph that rounds is trained whole, as it is, in each process: found "
                    f"{name}, expected strategy: ddp or zero1 without it"
                )
        return self

    @property
    def needs_data(self) -> bool:
        """Always."""
        return True

    @property
    def uses_loss(self) -> bool:
        """Whether the loss on targets is part of what is minimized."""
        return self.teaching is None or self.teaching.labels_weight > 0

    def check_loss(self, loss: Loss) -> None:
        """Refuse settings that do not go with the task's loss."""
        if self.uses_loss:
            self.check_targets_loss(loss)
        if self.teaching is not None:
            self.teaching.check_loss(loss)

    @property
    def activation_formats(self) -> frozenset[str]:
        """The target's integers."""
        return formats_of(self.target)

    def hyper_parameters(self) -> Training:
        """Return the settings of the training alone, its learning rate that of a fine-tuning."""
        rate = finer_rate(self)
        return super().hyper_parameters().model_copy(update={"learning_rate": rate})

    def run(self, model: EagerModel, context: Context) -> GraphModel:
        """Calibrate, train, and seal the integer graph.

        Raises:
            PipelineInvalid: `exclude` names nothing.
            StageFailed: nothing can be quantized, training failed, or the integer graph is another
                model than the trained one.
        """
        from compress.checkpoint.state_dict import load_state_
        from compress.quantization.ptq.prepare import Prepared

        check_exclude(self.exclude, model.load())
        need_free_batch(model.signature, self.title)
        prepared = Prepared.of(model, self._rounding)
        module = self._calibrated(prepared, context)
        trained = self._trained(prepared.sealed(module, context.work / "start"), model, context)
        load_state_(module, trained.weights, "the training")
        program, same = self._converted(prepared, module, context)
        quantizer = prepared.quantizer
        facts = {"float_modules": quantizer.float_modules, **same, **trained.facts()}
        return save_quantized(self, model, program, quantizer.quantized, facts, context)

    @property
    def _rounding(self) -> FakeQuantization:
        from compress.quantization.ptq.prepare import FakeQuantization

        return FakeQuantization(
            **{name: getattr(self, name) for name in FakeQuantization.model_fields}
        )

    @property
    def _freezing(self) -> Freezing:
        from compress.quantization.qat.freeze import Freezing

        return Freezing(self.freeze_observers, self.freeze_batch_norm)

    def _calibrated(self, prepared: Prepared, context: Context) -> FakeQuantized:
        """Return the model that training begins with."""
        from compress.quantization.config.calibration_data import Calibration

        def report(seen: int) -> None:
            context.progress("calibrate", seen, self.calibration_samples)

        signature = prepared.model.signature
        batches = Calibration.of(self.calibration_samples, signature, context)
        module = prepared.calibrated(batches, report)
        self._freezing.apply_(module, 0.0)
        return module

    def _trained(self, start: EagerModel, model: EagerModel, context: Context) -> Fit:
        from compress.data.splits import with_unlabelled
        from compress.training.fit import fit
        from compress.training.objectives.objective import TargetLoss

        teaching = self._lessons(context)
        targets = TargetLoss.for_training(self, context)
        objective: Objective = targets
        if teaching is not None:
            objective = teaching.objective(model, targets)
            context = replace(context, data=with_unlabelled(context.need_data(self.title)))
        return fit(
            start,
            self,
            objective,
            context,
            self.title,
            accept_start=True,
            constraint=self._freezing,
        )

    def _lessons(self, context: Context) -> Teaching | None:
        """Return how the float model teaches, if it does."""
        if self.teaching is not None:
            return self.teaching
        data = context.need_data(self.title)
        labelled = next(iter(data.read("train", range(1), 1, context.seed))).target is not None
        if not labelled:
            log.info("%s: samples have no labels; the float model's answers teach", self.title)
        return None if labelled else Teaching()

    def _converted(
        self, prepared: Prepared, module: FakeQuantized, context: Context
    ) -> tuple[ExportedProgram, dict[str, JsonValue]]:
        """Return the integer graph, and how nearly it answers as the trained model."""
        from compress.common.forward import torch_predictor
        from compress.quantization.qat.label_parity import compare_with_trained, last_step

        program = prepared.converted(module)
        with torch_predictor(program.module(), "cpu", context.threads) as predict:
            inputs = context.comparison_inputs(prepared.model.signature)
            same = compare_with_trained(module, predict, inputs, last_step(module))
        if same is None:
            return program, {}
        same.refuse_another_model()
        log.info("%s: %s", self.title, same.line())
        return program, {"same_as_trained": same.model_dump(mode="json")}
