"""The stage of quantization-aware training; settings only, no torch."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import model_validator

from compress.common.config import Fraction, Positive
from compress.common.errors import StageFailed
from compress.quantization.config.dtype_scheme import Observer, WeightBits
from compress.quantization.stages.base import CalibratedStage
from compress.training.config.training import DEFAULT_LEARNING_RATE, Training
from compress.training.objectives.objective import Objective, Teaching

if TYPE_CHECKING:
    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.core.context import Context
    from compress.core.objectives.loss import Loss
    from compress.quantization.qat.fake_model import FreezeSchedule
    from compress.training.fit import Fit

logger = logging.getLogger(__name__)

FINER = 10  # default learning rate of `train` over that of this stage


class QuantizeAwareTraining(CalibratedStage, Training):
    """Train a model while it rounds to integers, for what `quantize_static` loses, at 4 bits say.

    Training begins with the model as `quantize_static` makes it, which stays where no epoch is
    better, and ends with an integer graph that gives the trained model's labels; the manifest
    records how many differ. Dropout is off, and weights that are zero stay zero.

        - stage: quantize_aware_training
          epochs: 3
          weight_bits: 4
          teaching: {temperature: 2}
    """

    stage: Literal["quantize_aware_training"] = "quantize_aware_training"
    weight_bits: WeightBits = 8
    """Bits of a weight. 4 are stored so by `export_onnx` and `export_openvino`, and computed as 8;
    in other files they take 8. With 4 or 7 the products are exact in every runtime on x86
    processors without VNNI, which add pairs of them in 16 bits."""
    observer: Observer = "minmax"
    """How these ranges are estimated. Those of `minmax` and `moving_average` follow the extremes of
    batches in training; the others clip, and stay."""
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
    """How the model learns from the outputs of the float model; without it from labels alone, or,
    where samples have none, from the outputs with the defaults."""

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if self.learn_steps and not self.has_default("freeze_observers"):
            raise ValueError(
                "freeze_observers is for ranges that follow what they observe, found learn_steps: "
                "true, which trains them; leave one out"
            )
        parallel = self.parallel
        unsupported = {
            # With `dp` ranges would follow the first device's share: other replicas are discarded.
            f"strategy: {parallel.strategy}": parallel.strategy not in ("ddp", "zero1"),
            "tensor or pipeline": parallel.is_mesh,
            "communication: hierarchical": parallel.communication == "hierarchical",
            "static_graph: true": parallel.static_graph,
            f"compile: {self.compiled_part}": self.compile != "none",
            "activation_checkpointing": self.activation_checkpointing != "none",
            # Exported graphs call `view` for sizes with channels in the second place.
            "channels_last: true": self.channels_last,
        }
        for name, is_set in unsupported.items():
            if is_set:
                raise ValueError(
                    "each process trains the whole fake-quantized graph, uncompiled: found "
                    f"{name}, expected strategy: ddp or zero1 without it"
                )
        return self

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

    def hyper_parameters(self) -> Training:
        """Return the training settings; the default learning rate is that of a fine-tuning."""
        rate = self.learning_rate or DEFAULT_LEARNING_RATE[self.optimizer] / FINER
        return super().hyper_parameters().model_copy(update={"learning_rate": rate})

    def run(self, model: EagerModel | GraphModel, context: Context) -> GraphModel:
        """Calibrate, train with fake quantization, convert, and save the integer graph."""
        from compress.checkpoint.state_dict import load_state_
        from compress.common.forward import torch_predictor
        from compress.quantization.ptq.prepare import ROUNDING, PreparedModel
        from compress.quantization.qat.fake_model import (
            FreezeSchedule,
            compare_with_trained,
            last_step,
        )

        self.load_float(model)  # checks `exclude`
        if model.signature.batch_axis is None:
            raise StageFailed(
                f"{self.title}: the model takes batches of one size only, and training and "
                "evaluation need others; name the first axis in model.inputs (`batch`)"
            )
        dumped = self.model_dump(mode="json", include={*ROUNDING})
        prepared = PreparedModel.from_artifact(model, {name: dumped[name] for name in ROUNDING})
        prepared, module = prepared.calibrated(
            self.calibration_data(model, context), self.calibration_progress(context)
        )
        freezing = FreezeSchedule(self.freeze_observers, self.freeze_batch_norm)
        freezing.apply_(module, 0.0)
        start = prepared.save(module, context.work / "start")
        trained = self._train(start, model, freezing, context)
        load_state_(module, trained.weights, "the training")
        program = prepared.convert(module)
        with torch_predictor(program.module(), "cpu", context.threads) as predict:
            inputs = context.comparison_inputs(model.signature)
            parity = compare_with_trained(module, predict, inputs, last_step(module), context.task)
        facts: dict[str, Any] = {}
        if parity is not None:
            parity.require_same_model()
            logger.info("%s: %s", self.title, parity.line())
            facts["same_as_trained"] = parity.model_dump(mode="json")
        facts |= trained.facts()
        return self.save_integers(model, program, prepared.quantizer, facts, context)

    def _train(
        self,
        start: EagerModel,
        model: EagerModel | GraphModel,
        freezing: FreezeSchedule,
        context: Context,
    ) -> Fit:
        from compress.data.splits import with_unlabelled
        from compress.distillation.distillation_objective import DistillationObjective
        from compress.training.fit import fit
        from compress.training.objectives.objective import TargetLoss

        teaching, data = self.teaching, context.need_data(self.title)
        if teaching is None:
            sample = next(iter(data.read("train", range(1), 1, context.seed)))
            if sample.target is None:
                logger.info(
                    "%s: samples have no labels; the float model's outputs are the targets",
                    self.title,
                )
                teaching = Teaching()
        targets = TargetLoss.for_training(self, context, model.signature)
        objective: Objective = targets
        if teaching is not None:
            objective = DistillationObjective.from_teaching(teaching, model, targets)
            context = replace(context, data=with_unlabelled(data))
        return fit(
            start, self, objective, context, self.title, accept_start=True, constraint=freezing
        )
