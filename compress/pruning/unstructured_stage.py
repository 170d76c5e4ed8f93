"""The stage that sets single weights to zero."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from compress.artifacts.eager_model import EagerModel
from compress.common.config import Count, Ratio
from compress.common.errors import StageFailed
from compress.core.stage import Stage
from compress.pruning.finetune import AnyFinetune

if TYPE_CHECKING:
    import torch
    from pydantic import JsonValue

    from compress.checkpoint.state_dict import Weights
    from compress.core.context import Context
    from compress.core.loss import Loss
    from compress.pruning.finetune import Finetune
    from compress.pruning.unstructured.weight_layout import PrunableWeights
    from compress.training.objectives.weight_constraint import Constraint
    from compress.training.result import Fit

log = logging.getLogger(__name__)

UNSTRUCTURED = "unstructured"


class PruneWeights(Stage[EagerModel, EagerModel]):
    """Set single weights to zero, for a smaller compressed file or for sparse kernels of a GPU.

    Zeros alone make no dense kernel faster; to compute less, use `prune_channels` or
    `prune_layers`. What they do to the size of the compressed weights is measured and told among
    the facts.
    """

    stage: Literal["prune_weights"] = "prune_weights"
    amount: Ratio | None = None
    """Share of zeros; left out where `pattern` says it."""
    method: Literal["l1", "random", "wanda", "sparsegpt"] = "l1"
    """Which weights become zero: the smallest (`l1`), any (`random`), those that contribute least
    on calibration data (`wanda`), or the same with the others changed to make up for them
    (`sparsegpt`, by far the best without training)."""
    scope: Literal["layer", "global"] = "layer"
    """Whether each layer gets the same share of zeros, or all weights are ranked together, for `l1`
    and `random`."""
    pattern: Annotated[str, Field(pattern=r"^(unstructured|[1-9]\d*:[1-9]\d*)$")] = UNSTRUCTURED
    """Where zeros may be: anywhere, or n:m, so that of m neighbouring inputs n are left; 2:4 is
    what sparse kernels of CUDA devices take."""
    include: tuple[str, ...] = ()
    """Names of weights, or of modules around them, that get zeros; `*` matches any characters. By
    default all matrices and kernels of layers, embeddings not."""
    exclude: tuple[str, ...] = ()
    """Names of those that get none."""
    calibration_samples: Count = 128
    """Samples that `wanda` and `sparsegpt` look at."""
    finetune: AnyFinetune | None = None
    """How the other weights are trained. Zeros stay zero; the model stays as it was unless an epoch
    is better."""
    schedule: Literal["one_shot", "linear", "cubic"] = "one_shot"
    """When zeros are made: all before `finetune`, or in its course, the smallest weights first:
    evenly (`linear`), or fast at first (`cubic`). Only an epoch with all zeros is kept then."""
    until: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Share of the steps of `finetune` in which `linear` and `cubic` add zeros."""
    updates: Count = 50
    """How often `linear` and `cubic` add zeros, evenly spread."""

    @field_validator("pattern", mode="before")
    @classmethod
    def _not_a_time(cls, pattern: object) -> object:
        # YAML 1.1 reads 2:4 as minutes and seconds: 124.
        return "{}:{}".format(*divmod(pattern, 60)) if isinstance(pattern, int) else pattern

    @model_validator(mode="after")
    def _amount_or_pattern(self) -> Self:
        if self.n_of_m is None:
            if self.amount is None:
                raise ValueError("amount is missing: give the share of zeros, 0.5 say")
            return self
        n, m = self.n_of_m
        if n >= m:
            raise ValueError(f"pattern: {self.pattern} leaves {n} of {m}; fewer must be left, 2:4")
        if self.amount is not None:
            raise ValueError(f"pattern: {self.pattern} says how many zeros; leave out amount")
        for name in ("scope", "schedule"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: {getattr(self, name)} is for pattern: unstructured")
        return self

    @model_validator(mode="after")
    def _methods_can(self) -> Self:
        if self.scope == "global" and self.calibrates:
            raise ValueError(f"method: {self.method} ranks within layers; leave out scope: global")
        if self.schedule != "one_shot" and self.method != "l1":
            raise ValueError(
                f"schedule: {self.schedule} takes the smallest weights while they are trained; use "
                f"method: l1, or schedule: one_shot for {self.method}"
            )
        return self

    @model_validator(mode="after")
    def _training_can(self) -> Self:
        if self.schedule != "one_shot":
            if self.finetune is None:
                raise ValueError("schedule is for fine-tuning; add finetune, or leave it out")
            for name in ("ema_decay", "early_stopping"):
                if getattr(self.finetune, name) is not None:
                    raise ValueError(
                        f"finetune.{name} does not go with schedule: {self.schedule}, whose first "
                        "epochs lack zeros; leave it out, or use schedule: one_shot"
                    )
        return self

    @model_validator(mode="after")
    def _processes_hold_whole_weights(self) -> Self:
        parallel = self.finetune.parallel if self.finetune else None
        if parallel is None:
            return self
        found = {
            f"strategy: {parallel.strategy}": parallel.strategy not in ("ddp", "dp"),
            "tensor or pipeline": parallel.is_mesh,
            "communication: hierarchical": parallel.communication == "hierarchical",
        }
        for name, cannot in found.items():
            if cannot:
                raise ValueError(
                    "finetune keeps zeros only where every process holds the same, whole weights: "
                    f"found {name}, expected strategy: ddp"
                )
        return self

    @property
    def n_of_m(self) -> tuple[int, int] | None:
        """How many of how many neighbours are left, where the pattern says so."""
        if self.pattern == UNSTRUCTURED:
            return None
        n, m = self.pattern.split(":")
        return int(n), int(m)

    @property
    def calibrates(self) -> bool:
        """Whether the method looks at calibration data."""
        return self.method in ("wanda", "sparsegpt")

    @property
    def needs_data(self) -> bool:
        """Whether there is fine-tuning or calibration to do."""
        return self.finetune is not None or self.calibrates

    @property
    def uses_loss(self) -> bool:
        """Whether fine-tuning minimizes the loss on targets."""
        return self.finetune is not None and self.finetune.uses_targets

    def check_loss(self, loss: Loss) -> None:
        """Refuse settings that do not go with the task's loss."""
        if self.finetune is not None:
            self.finetune.check_loss(loss)

    def run(self, model: EagerModel, context: Context) -> EagerModel:
        """Set zeros, fine-tune, and measure what they bring.

        Raises:
            PipelineInvalid: a pattern of names matches nothing.
            StageFailed: there is nothing to prune, or no data for what is asked.
        """
        from compress.pruning.unstructured.sparsity_report import facts_of_zeros

        if self.needs_data:
            context.need_data(f"{self.title} with finetune or method: {self.method}")
        module = model.load()
        found = self._places(module, model, context)
        if self.schedule == "one_shot":
            found = self._set_zeros_(module, found, context)
        weights: torch.nn.Module | Weights = module
        training: dict[str, JsonValue] = {}
        if self.finetune is not None:
            start = model.derive(context.work / "zeros", module)
            fitted = self._finetune(start, model, self.finetune, found, context)
            weights, module, training = fitted.weights, fitted.module, fitted.facts()
        facts = {**facts_of_zeros(model.load(), module, found, self.n_of_m), **training}
        return model.derive(context.root, weights, lineage=self.lineage(model), facts=facts)

    def _places(
        self, module: torch.nn.Module, model: EagerModel, context: Context
    ) -> PrunableWeights:
        from compress.pruning.unstructured.weight_layout import places

        inputs = model.signature.example(seed=context.seed)
        found = places(module, inputs, self.include, self.exclude)
        if self.n_of_m or self.calibrates:
            found = found.readable(self.n_of_m)
        self._need_some(found)
        return found

    def _need_some(self, found: PrunableWeights) -> None:
        if not found.layouts:
            shown = [f"{name}: {reason}" for name, reason in list(found.left.items())[:3]]
            why = "; ".join(shown) or "it has no layer with a matrix"
            raise StageFailed(f"{self.title}: no weight can be set to zero ({why})")

    def _set_zeros_(
        self, module: torch.nn.Module, found: PrunableWeights, context: Context
    ) -> PrunableWeights:
        """Set zeros in place, and return where; calibration may find more to leave alone."""
        if not self.calibrates:
            self._set_uncalibrated_zeros_(module, found, context.seed)
            return found
        from compress.pruning.unstructured.obs_masks import set_calibrated_zeros_

        data = context.need_data(f"method: {self.method}")
        left = set_calibrated_zeros_(
            module,
            {name: layout for name, layout in found.layouts.items() if layout},
            list(data.calibration(self.calibration_samples, context.seed)),
            method=self.method,
            amount=self.amount or 0.0,
            n_of_m=self.n_of_m,
            device=context.device,
            progress=context.progress,
        )
        module.cpu()
        found = found.without(left)
        self._need_some(found)
        return found

    def _set_uncalibrated_zeros_(
        self, module: torch.nn.Module, found: PrunableWeights, seed: int
    ) -> None:
        import torch

        from compress.pruning.unstructured.masks import neighbours, unstructured
        from compress.pruning.unstructured.sparsity_schedule import set_zeros_

        parameters = dict(module.named_parameters())
        weights = {name: parameters[name] for name in found.layouts}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.n_of_m:
                zeros = neighbours(weights, found.layouts, self.n_of_m, self.method)
            else:
                whole = self.scope == "global"
                zeros = unstructured(weights, self.amount or 0.0, self.method, whole)
        set_zeros_(weights, zeros)

    def _finetune(
        self,
        start: EagerModel,
        unpruned: EagerModel,
        training: Finetune,
        found: PrunableWeights,
        context: Context,
    ) -> Fit:
        from compress.pruning.finetune import finetune
        from compress.pruning.unstructured.sparsity_schedule import AddZeros, KeepZeros

        names = tuple(found.layouts)
        zeros: Constraint = KeepZeros(names)
        if self.schedule != "one_shot":
            zeros = AddZeros(
                tensors=names,
                amount=self.amount or 0.0,
                whole=self.scope == "global",
                schedule=self.schedule,
                until=self.until,
                updates=self.updates,
            )
        return finetune(start, unpruned, training, context, self.title, zeros)
