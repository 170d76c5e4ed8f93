"""The stage `prune_weights`: set single weights to zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from compress.common.config import Count, Ratio
from compress.common.errors import StageFailed
from compress.core.stage import DEFAULT_CALIBRATION_SAMPLES, CalibrationSamples
from compress.pruning.pruning_stage import AnyFinetune, PruningStage, finetune

if TYPE_CHECKING:
    import torch

    from compress.artifacts.eager_model import EagerModel
    from compress.checkpoint.state_dict import Weights
    from compress.core.context import Context
    from compress.pruning.unstructured.masks import PrunableWeights
    from compress.training.objectives.objective import Constraint

UNSTRUCTURED = "unstructured"


class PruneWeights(PruningStage):
    """Set single weights to zero, for a smaller compressed file or for sparse kernels of a GPU.

        - stage: prune_weights
          method: sparsegpt
          pattern: "2:4"

    Zeros alone make no dense kernel faster; to compute less, use `prune_channels` or
    `prune_layers`. The artifact's facts contain the measured size of the compressed weights.
    """

    stage: Literal["prune_weights"] = "prune_weights"
    default_samples: ClassVar[int] = 128
    amount: Ratio | None = None
    """Share of zeros; omit it if `pattern` determines the share."""
    method: Literal["l1", "random", "wanda", "sparsegpt"] = "l1"
    """Which weights become zero: the smallest (`l1`), random ones (`random`), those that contribute
    least on calibration data (`wanda`), or the same with the others changed to compensate
    (`sparsegpt`, by far the best without training)."""
    scope: Literal["layer", "global"] = "layer"
    """Whether each layer gets the same share of zeros, or all weights are ranked together, for `l1`
    and `random`."""
    pattern: Annotated[str, Field(pattern=r"^(unstructured|[1-9]\d*:[1-9]\d*)$")] = UNSTRUCTURED
    """Where zeros may be: anywhere, or n:m, so that of m neighbouring inputs n are nonzero; sparse
    kernels of CUDA devices require 2:4."""
    include: tuple[str, ...] = ()
    """Names of weights, or of modules around them, that get zeros; `*` matches any characters. By
    default all matrices and kernels of layers, except embeddings."""
    exclude: tuple[str, ...] = ()
    """Names of those that get none."""
    calibration_samples: CalibrationSamples = None
    """Calibration samples of `wanda` and `sparsegpt`. By default 128, or all there are."""
    # Excluded, so that the default changes no cache key.
    batch_norm: Annotated[
        Literal["keep", "reestimate"], Field(exclude_if=lambda value: value == "keep")
    ] = "keep"
    """Whether BatchNorm statistics are those of the model before (`keep`), or are re-estimated over
    up to 512 calibration samples (`reestimate`): zeros shift what later layers read."""
    finetune: AnyFinetune | None = None
    """How the other weights are trained. Zeros stay zero; the weights change only if an epoch
    improves the metric."""
    schedule: Literal["one_shot", "linear", "cubic"] = "one_shot"
    """When zeros are set: all before `finetune` (`one_shot`), or during it, the smallest weights
    first: evenly (`linear`), or fast at first (`cubic`). Then only an epoch with all zeros is
    accepted."""
    until: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Share of the steps of `finetune` in which `linear` and `cubic` add zeros."""
    updates: Count = 50
    """How often `linear` and `cubic` add zeros, evenly spread."""

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
    def _method_fits_scope_and_schedule(self) -> Self:
        if self.scope == "global" and self.calibrates:
            raise ValueError(f"method: {self.method} ranks within layers; leave out scope: global")
        if self.schedule == "one_shot":
            return self
        if self.method != "l1":
            raise ValueError(
                f"schedule: {self.schedule} takes the smallest weights while they are trained; use "
                f"method: l1, or schedule: one_shot for {self.method}"
            )
        if self.batch_norm == "reestimate":
            raise ValueError(
                f"batch_norm: reestimate is for zeros that are set before finetune, and schedule: "
                f"{self.schedule} sets them in it, which re-estimates them too; leave it out"
            )
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
    def _processes_hold_unsharded_weights(self) -> Self:
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
        """N and m of an n:m pattern, or None if zeros may be anywhere."""
        if self.pattern == UNSTRUCTURED:
            return None
        n, m = self.pattern.split(":")
        return int(n), int(m)

    @property
    def calibrates(self) -> bool:
        """Whether the method uses calibration data."""
        return self.method in ("wanda", "sparsegpt")

    @property
    def drawn_samples(self) -> int:
        """Upper bound of the calibration samples, with those for BatchNorm statistics."""
        own = super().drawn_samples
        return own if self.batch_norm == "keep" else max(own, DEFAULT_CALIBRATION_SAMPLES)

    @property
    def needs_data(self) -> bool:
        """Whether there is fine-tuning or calibration."""
        return self.finetune is not None or self.calibrates or self.batch_norm == "reestimate"

    def run(self, model: EagerModel, context: Context) -> EagerModel:
        """Select weights, set zeros, fine-tune, and measure the compressed size.

        Raises:
            PipelineInvalid: a pattern of names matches nothing.
            StageFailed: there is nothing to prune, or a setting requires data and there is none.
        """
        # Imported here, because settings are validated without loading torch.
        from compress.pruning.recovery.recovery import reestimate_batch_norms_, usual_calibration
        from compress.pruning.unstructured.masks import AddZeros, prunable_weights, sparsity_facts
        from compress.training.objectives.objective import KeepZeros

        module = model.load()
        prunable = prunable_weights(
            module, model.signature.example(seed=context.seed), self.include, self.exclude
        )
        if self.n_of_m or self.calibrates:
            prunable = prunable.with_known_layout(self.n_of_m)
        self._require_weights(prunable)
        if self.schedule == "one_shot":
            prunable = self._set_zeros_(model, module, prunable, context)
        if self.batch_norm == "reestimate":
            reestimate_batch_norms_(module, usual_calibration(context), context.device)
        weights: torch.nn.Module | Weights = module
        training: dict[str, JsonValue] = {}
        if self.finetune is not None:
            start = model.derive(context.work / "zeros", module)
            names = tuple(prunable.layouts)
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
            fitted = finetune(start, model, self.finetune, context, self.title, zeros)
            weights, module, training = fitted.weights, fitted.module, fitted.facts()
        facts = {**sparsity_facts(model.load(), module, prunable, self.n_of_m), **training}
        return model.derive(context.root, weights, lineage=self.lineage(model), facts=facts)

    def _set_zeros_(
        self,
        model: EagerModel,
        module: torch.nn.Module,
        prunable: PrunableWeights,
        context: Context,
    ) -> PrunableWeights:
        """Set all zeros at once, in place, and return the pruned weights."""
        from compress.pruning.recovery.recovery import calibration_batches
        from compress.pruning.unstructured.masks import (
            set_calibrated_zeros_,
            set_uncalibrated_zeros_,
        )

        amount = self.amount or 0.0
        if self.calibrates:
            context.need_data(f"method: {self.method}")
            left = set_calibrated_zeros_(
                module,
                {name: layout for name, layout in prunable.layouts.items() if layout},
                calibration_batches(self, model, module, context),
                method=self.method,
                amount=amount,
                n_of_m=self.n_of_m,
                device=context.device,
                progress=context.progress,
            )
            prunable = prunable.without(left)  # calibration may exclude more
            self._require_weights(prunable)
        else:
            set_uncalibrated_zeros_(
                module,
                prunable.layouts,
                method=self.method,
                amount=amount,
                n_of_m=self.n_of_m,
                is_global=self.scope == "global",
                seed=context.seed,
            )
        return prunable

    def _require_weights(self, prunable: PrunableWeights) -> None:
        if not prunable.layouts:
            shown = [f"{name}: {reason}" for name, reason in list(prunable.left.items())[:3]]
            why = "; ".join(shown) or "it has no layer with a matrix"
            raise StageFailed(f"{self.title}: no weight can be set to zero ({why})")
