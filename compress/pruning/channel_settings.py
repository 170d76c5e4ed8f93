"""Settings of the stage `prune_channels`."""

from __future__ import annotations

from typing import Literal, Self, TypeAlias

from pydantic import model_validator

from compress.common.config import Count, Ratio, Settings
from compress.core.objectives.loss import Loss, refuse_without_curvature
from compress.core.stage import CalibrationSamples
from compress.pruning.pruning_stage import AnyFinetune, PruningStage

Criterion: TypeAlias = Literal[
    "l1", "l2", "taylor", "hessian", "fpgm", "lamp", "bn_scale", "wanda", "obs", "random"
]
FROM_DATA: tuple[Criterion, ...] = ("taylor", "hessian", "wanda", "obs")
"""Criteria that need samples: they use activations or gradients."""
OF_GRADIENTS: tuple[Criterion, ...] = ("taylor", "hessian")
"""Criteria that use derivatives of the loss."""
COMPARABLE: tuple[Criterion, ...] = ("taylor", "hessian", "lamp", "obs")
"""Criteria whose scores of different groups can be compared; others are divided by their mean."""


class Target(Settings):
    """The share of the model's cost that remains after pruning; exactly one quantity."""

    macs: Ratio | None = None
    """Share of the multiply-accumulates that remains: 0.5 leaves at most half of them."""
    parameters: Ratio | None = None
    """Share of the weights that remains."""
    latency: Ratio | None = None
    """Share of the latency of a call that remains. Where a later stage exports the model to ONNX
    Runtime or OpenVINO for the CPU, it is the latency there: the widths that lose least are solved
    from the times of single kernels, whatever the `scope`, and the result is measured, alternating
    with the unpruned model. Without such a stage, candidates are measured in PyTorch. The same
    tables of kernels in the store lead to the same widths."""
    batch: Count = 1
    """Samples per call when `latency` is measured."""

    @model_validator(mode="after")
    def _one_quantity(self) -> Self:
        given = [name for name in ("macs", "parameters", "latency") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                f"target needs exactly one of macs, parameters and latency, found "
                f"{' and '.join(given) or 'none'}; write target: {{macs: 0.5}}"
            )
        if not self.has_default("batch") and self.latency is None:
            raise ValueError("target.batch is for latency; leave it out")
        return self

    @property
    def undisturbed(self) -> bool:
        """Whether latency is measured, so that nothing else may run at the same time."""
        return self.latency is not None

    @property
    def share(self) -> float:
        """The share of it that remains."""
        return self.macs or self.parameters or self.latency or 1.0


class PruningAmount(PruningStage):
    """How many channels `prune_channels` removes."""

    # Base classes come first in the settings, whose order is part of the JSON schema and of the
    # recorded settings: so these are a class of their own, before those of ChannelSelection.
    ratio: Ratio | None = None
    """Fraction of the channels to remove from every group of coupled channels."""
    target: Target | None = None
    """Instead of `ratio`: the share of the model's cost that remains."""
    widths: dict[str, Count] | None = None
    """Instead of `ratio`: group of coupled channels → how many stay; all of the other groups do.
    Groups have the names that `compress sensitivity` and `compress auto` show."""

    @model_validator(mode="after")
    def _exactly_one_of_ratio_target_and_widths(self) -> Self:
        given = [name for name in ("ratio", "target", "widths") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                "prune_channels needs one of ratio, target and widths, found "
                f"{' and '.join(given) or 'none'}; keep one"
            )
        return self


class ChannelSelection(Settings):
    """Which channels may be removed, how they are ranked, and how many stay in any case."""

    importance: Criterion = "l2"
    """How channels are ranked. By weights: `l1` or `l2` norm, `fpgm` (distance to the others),
    `lamp`, `bn_scale`, `random`. By calibration samples: `taylor` and `hessian` (change of the
    loss, or of the outputs without labels), `wanda` (weight times activation), `obs` (change
    of the outputs that the next layers cannot compensate)."""
    scope: Literal["uniform", "global", "isomorphic"] = "uniform"
    """Among which channels the least important are selected: within each group of coupled channels
    (`uniform`), among all (`global`), or among groups of the same structure (`isomorphic`). With a
    `target` of MACs or parameters, `taylor`, `hessian`, `lamp` and `obs` compare groups by what is
    lost for each of these that is saved."""
    max_ratio: Ratio = 0.8
    """Largest fraction of a group that is removed with scope `global` or `isomorphic`."""
    round_to: Count = 16
    """Keep a multiple of this many channels; in layers narrower than twice as many, of a half, a
    quarter … of it."""
    min_channels: Count = 1
    """Channels of a group that stay in any case."""
    include: tuple[str, ...] = ()
    """Names of modules; if given, only channels that they produce are removed."""
    exclude: tuple[str, ...] = ()
    """Names of modules whose channels all stay; `*` matches any characters."""
    across_norms: bool = False
    """Whether channels are removed over which normalisations take statistics, such as the hidden
    width of a transformer: LayerNorm, RMSNorm, GRN. Their statistics are then those of the channels
    that stay, so that outputs change more than by the channels' values; `refit` and `finetune`
    compensate."""
    on_unverified: Literal["pin", "error"] = "pin"
    """Whether channels whose removal cannot be verified stay, or fail the stage."""


class ChannelSettings(ChannelSelection, PruningAmount):
    """What `prune_channels` removes, and how the rest recovers."""

    iterations: Count = 1
    """Pruning steps, each removing about as many channels; before each, importance is measured
    again, and after each, layers are refitted and the model is fine-tuned."""
    refit: bool | None = None
    """Whether layers that lost inputs are refitted by least squares to their earlier outputs: no
    training and no labels. By default they are where there is data."""
    calibration_samples: CalibrationSamples | Literal[0] = None
    """Samples on which importance is measured, layers are refitted and BatchNorm statistics are
    re-estimated. By default 512, or all there are; 0 skips all of this, and slices are still
    verified on a few samples."""
    finetune: AnyFinetune | None = None
    """How the smaller model is trained; its weights change only if an epoch improves the metric."""

    @model_validator(mode="after")
    def _max_ratio_fits_scope(self) -> Self:
        self.refuse_settings_of_others("scope", {"max_ratio": ("global", "isomorphic")})
        if self.scope != "uniform" and self.ratio and self.ratio > self.max_ratio:
            raise ValueError(
                f"ratio {self.ratio:g} is above max_ratio {self.max_ratio:g}, the most that any "
                "group of channels may lose; raise max_ratio"
            )
        return self

    @model_validator(mode="after")
    def _samples_for_data_settings(self) -> Self:
        if self.calibration_samples == 0 and self.needs_samples:
            raise ValueError(
                f"{self._needing_data[0]} needs samples, found calibration_samples: 0; leave it out"
            )
        return self

    @property
    def refits(self) -> bool:
        """Whether layers are refitted if there are samples."""
        return self.refit is not False

    @property
    def needs_samples(self) -> bool:
        """Whether a setting requires calibration samples; else they are used if there are any."""
        return bool(set(self._needing_data) - {"finetune"})

    @property
    def needs_data(self) -> bool:
        """Whether a setting requires data."""
        return bool(self._needing_data)

    @property
    def uses_loss(self) -> bool:
        """Whether channels are ranked by derivatives of the loss, or fine-tuning minimizes it."""
        return super().uses_loss or self.uses_calibration_labels

    @property
    def uses_calibration_labels(self) -> bool:
        """Whether channels are ranked by derivatives of the loss."""
        return self.importance in OF_GRADIENTS

    def check_loss(self, loss: Loss) -> None:
        """Refuse settings that cannot be combined with the task's loss."""
        if self.importance == "hessian":
            refuse_without_curvature(loss)
        super().check_loss(loss)

    @property
    def _needing_data(self) -> list[str]:
        """The settings that require data."""
        required = {
            f"importance: {self.importance}": self.importance in FROM_DATA,
            "refit": bool(self.refit),
            "calibration_samples": bool(self.calibration_samples),
            "finetune": self.finetune is not None,
        }
        return [name for name, needs_data in required.items() if needs_data]

    @property
    def uses_data(self) -> bool:
        """Always: slices are verified on data if there is any, which can change the result."""
        return True
