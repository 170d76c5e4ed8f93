"""Causes of accuracy lost by pruning: what they measure, and what mends them.

Thresholds were set on half of the injected faults of `benchmarks/explain.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from compress.core.diagnosis.cause import Cause, RefusedStage, Repair, changing, excluding
from compress.core.diagnosis.layer_diagnosis import UNLIKE

if TYPE_CHECKING:
    from compress.pruning.diagnosis.diagnosis import CutChannels

    Refused = RefusedStage[Any]
    Own = dict[str, Any]
    """A stage's settings."""

EPOCHS = 4  # of the fine-tuning that is tried where training is allowed
PARTS_OF_CUT = (0.75, 0.5)  # shares of the channels or zeros that are removed in their place


def _cause(
    key: str,
    stages: tuple[str, ...],
    limit: float,
    text: str,
    *,
    part: Callable[[Any, str], float | None] | None = None,
    stage: Callable[[Refused], float | None] | None = None,
    settings: tuple[tuple[dict[str, Any], int], ...] = (),
    more: Callable[[Refused, Own, Sequence[str]], list[Repair]] | None = None,
) -> Cause:
    """Return a cause whose remedy the diagnosis tries after those that come before it.

    `part` measures a guilty part, `stage` the stage as a whole.
    """

    def measure(refused: Refused, layer: str) -> float | None:
        measured = refused.measured
        # Of a stage that was to recover a loss, the training alone is tested.
        if measured is None or key not in measured.shares(refused.layers):
            return None
        if layer:
            return part(measured, layer) if part else None
        return stage(refused) if stage else None

    def repairs(refused: Refused, layers: Sequence[str]) -> tuple[Repair, ...]:
        own = refused.stage.own_settings()
        found = [Repair(change, cost) for change, cost in settings]
        found += more(refused, own, layers) if more else []
        if own.get("finetune") is None:
            found.append(Repair({"finetune": {"epochs": EPOCHS}}, 4))
        return changing(own, found)

    def recovered_share(refused: Refused, layers: Sequence[str]) -> float | None:
        share: float | None = refused.measured.shares(refused.layers).get(key)
        return share

    return Cause(key, stages, limit, text, measure, recovered_share, repairs)


def _new_statistics(refused: Refused, own: Own, layers: Sequence[str]) -> list[Repair]:
    if refused.stage.stage == "prune_weights":
        return [Repair({"batch_norm": "reestimate"}, 0)]
    if refused.stage.stage == "prune_layers":
        return [Repair({"refit": True}, 0)]
    # With samples they are re-estimated, and layers refitted unless that is turned off.
    return [Repair({"calibration_samples": None, "refit": refit}, 0) for refit in (False, None)]


def _with_samples(own: Own) -> dict[str, Any]:
    return {"calibration_samples": None} if own["calibration_samples"] == 0 else {}


def _better_criteria(refused: Refused, own: Own, layers: Sequence[str]) -> list[Repair]:
    """Return criteria that look at data, the best one first."""
    refit = {"refit": True} if own["refit"] is False else {}
    return [
        Repair({"importance": criterion, **_with_samples(own), **refit}, 0)
        for criterion in ("obs", "wanda", "taylor")
    ]


def _wider_groups(refused: Refused, own: Own, layers: Sequence[str]) -> list[Repair]:
    """Return half of the cut of some groups, then none, and the others' share of it."""
    before = {group: channels for group, (channels, _) in refused.measured.widths.items()}
    if own["widths"] is not None:
        halfway: Own = _halfway(refused.measured, own["widths"].keys() & {*layers}, own)
        rest = {g: width for g, width in own["widths"].items() if g not in layers}
        found = [Repair({"widths": {**own["widths"], **halfway}}, 1)]
        return [*found, Repair({"widths": rest}, 2)] if rest else found
    excluded = excluding(own, layers, 2)
    if own["ratio"] is not None:
        others = sum(n for group, n in before.items() if group not in layers)
        ratio = round(own["ratio"] * sum(before.values()) / max(1, others), 3)
        if ratio < 1 and (own["scope"] == "uniform" or ratio <= own["max_ratio"]):
            return [Repair({**excluded.settings, "ratio": ratio}, 1), excluded]
    return [excluded]


def _smaller_cut(refused: Refused, own: Own, layers: Sequence[str]) -> list[Repair]:
    if own["ratio"] is not None:
        return [Repair({"ratio": round(own["ratio"] * part, 3)}, 3) for part in PARTS_OF_CUT]
    if own["widths"] is not None:
        return [Repair({"widths": _halfway(refused.measured, own["widths"], own)}, 3)]
    return []


def _halfway(measured: CutChannels, groups: Collection[str], own: Own) -> Own:
    """Return the widths of groups that lose half of the channels that settings remove."""
    return {
        group: (measured.widths[group][0] + width + 1) // 2
        for group, width in own["widths"].items()
        if group in groups
    }


def _fewer_zeros(refused: Refused, own: Own, layers: Sequence[str]) -> list[Repair]:
    if own["amount"] is None:  # a `pattern` says how many there are
        return []
    found = [Repair({"amount": round(own["amount"] * part, 3)}, 3) for part in PARTS_OF_CUT]
    # Where zeros cost least, which other methods cannot compare between layers.
    return [Repair({"scope": "global"}, 0), *found] if own["method"] in ("l1", "random") else found


def _other_blocks(refused: Refused, own: Own, layers: Sequence[str]) -> list[Repair]:
    found = [excluding(own, layers, 1)] if layers else []
    if fewer := len(refused.measured.pruned_parts) - 1:
        found.append(Repair({"remove": fewer, "keep": None, "ratio": None, "blocks": None}, 3))
    return found


CAUSES = (
    # Layers are refitted to samples that are scaled otherwise than those of use.
    _cause(
        "calibration_unlike_val",
        ("prune_channels",),
        UNLIKE,
        "calibration sample unlike val (inputs are {value:.3g} times as wide, as narrow or "
        "shifted; limit {limit:g})",
        stage=lambda refused: refused.measured.sample_unlikeness,
        settings=(({"refit": False}, 0), ({"calibration_samples": 0, "refit": None}, 0)),
    ),
    # Statistics are those from before channels, weights or blocks were removed.
    _cause(
        "stale_batch_norm",
        ("prune_channels", "prune_weights", "prune_layers"),
        0.1,
        "BatchNorm statistics are stale (means are {value:.2g} deviations off; limit {limit:g})",
        stage=lambda refused: refused.measured.statistics_shift(),
        more=_new_statistics,
    ),
    # Layers were not refitted to their earlier outputs.
    _cause(
        "no_refit",
        ("prune_channels", "prune_layers"),
        1.25,
        "layers are not refitted (the outputs' error is {value:.3g} times that of refitted ones; "
        "limit {limit:g})",
        stage=lambda refused: refused.measured.refit_gain(),
        more=lambda _, own, __: [Repair({"refit": True, **_with_samples(own)}, 0)],
    ),
    # Layers are refitted, and channels ranked, on fewer samples than the default draws.
    _cause(
        "few_calibration_samples",
        ("prune_channels",),
        2.0,
        "too few calibration samples ({value:.3g} times as many are there; limit {limit:g})",
        stage=lambda refused: refused.measured.usual_samples / max(1, refused.measured.own.samples),
        settings=(({"calibration_samples": None}, 0),),
    ),
    # The criterion removes channels that matter, and keeps others that do not.
    _cause(
        "poor_criterion",
        ("prune_channels",),
        0.1,
        "poor importance criterion ({value:.0%} of the removed channels are kept by obs; "
        "limit {limit:.0%})",
        part=lambda measured, group: measured.unlike_best(group),
        more=_better_criteria,
    ),
    # One group of channels, or a few, lost more than the model can do without.
    _cause(
        "group_too_narrow",
        ("prune_channels",),
        0.2,
        "too narrow a group ({value:.0%} of its channels are removed; limit {limit:.0%})",
        part=lambda measured, group: measured.removed_share(group),
        more=_wider_groups,
    ),
    # All groups together lost more channels than the model can do without.
    _cause(
        "ratio_too_high",
        ("prune_channels",),
        0.2,
        "too many channels ({value:.0%} are removed; limit {limit:.0%})",
        stage=lambda refused: refused.measured.removed_share(),
        more=_smaller_cut,
    ),
    # The other weights do not compensate those that are zero.
    _cause(
        "poor_method",
        ("prune_weights",),
        0.3,
        "nothing compensates the zeros (sparsegpt returns {value:.0%} of the loss; "
        "limit {limit:.0%})",
        stage=lambda refused: refused.measured.shares(refused.layers)["poor_method"],
        settings=(
            ({"method": "sparsegpt", "scope": None}, 0),
            ({"method": "wanda", "scope": None}, 0),
        ),
    ),
    # One layer, or a few, have more zeros than the model can do with.
    _cause(
        "layer_too_sparse",
        ("prune_weights",),
        0.2,
        "too many zeros in a layer ({value:.0%}; limit {limit:.0%})",
        part=lambda measured, tensor: measured.zeros[tensor],
        more=lambda _, own, layers: [excluding(own, layers, 2)],
    ),
    # All layers together have more zeros than the model can do with.
    _cause(
        "amount_too_high",
        ("prune_weights",),
        0.2,
        "too many zeros ({value:.0%} of the weights; limit {limit:.0%})",
        stage=lambda refused: refused.measured.stage.amount,
        more=_fewer_zeros,
    ),
    # A block was removed that the model cannot do without.
    _cause(
        "block_needed",
        ("prune_layers",),
        0.25,
        "blocks are needed (back, they return {value:.0%} of the loss; limit {limit:.0%})",
        stage=lambda refused: refused.measured.shares(refused.layers)["block_needed"],
        more=_other_blocks,
    ),
)
"""Where two of them explain as much, the one that stands first is named first."""
