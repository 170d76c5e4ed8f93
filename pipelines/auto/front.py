"""The models that a search found, and which of them no other one beats."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from compress.common.config import Settings
from compress.common.sealed_json import read_if_unchanged, write_sealed
from compress.pipelines.auto.candidates import CheckedModel
from compress.pipelines.config.auto_settings import AutoLimits, LatencyLimit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FILE = "front.json"


def missed_limits(limits: AutoLimits, model: CheckedModel, but: str = "") -> tuple[str, ...]:
    """Return the limits that a model misses, of `max_drop`, `latency`, `size`, `memory`, but one.

    One whose figure could not be measured is missed.
    """
    drops = (model.drop, model.confirmed_drop or 0.0)
    lost = max(drop or 0.0 for drop in drops)
    is_lost = model.drop is None or (limits.max_drop is not None and lost > limits.max_drop)
    missed = ["max_drop"] if is_lost else []
    missed += [name for name, share in shares_of_limits(limits, model).items() if share > 1]
    return tuple(name for name in missed if name != but)


def shares_of_limits(limits: AutoLimits, model: CheckedModel) -> dict[str, float]:
    """Return what a model takes of each limit of cost; infinity where it was not measured."""
    latency = limits.latency or LatencyLimit.model_construct()
    peak = None if model.peak_mebibytes is None else 2**20 * model.peak_mebibytes
    figures = [
        ("latency", model.surely_ms, latency.p50_ms),
        ("latency", model.p95_ms, latency.p95_ms),
        ("size", model.bytes, limits.size),
        ("memory", peak, limits.memory),
    ]
    shares: dict[str, float] = {}
    for name, value, most in figures:
        if most is not None:
            share = math.inf if value is None else value / most
            shares[name] = max(share, shares.get(name, 0.0))
    return shares


class Front(Settings):
    """All models that were checked, and the best of them."""

    limits: AutoLimits
    checked: tuple[CheckedModel, ...]
    """In the order in which they were checked."""
    failed: dict[str, str] = {}
    """Name of a candidate that could not be built → why."""
    points: tuple[str, ...]
    """Names of the models that no other one beats in latency, drop and size, the fastest first."""
    folders: dict[str, str] = {}
    """Name of a point → its folder below that of the results, with the pipeline that makes it."""
    is_infeasible: bool = False
    """Whether even the smallest models miss limits, so that nothing was searched."""
    not_searched: tuple[str, ...] = ()
    """What was left out of the search, and why."""
    conditions: str
    """Hash of the model and of what figures depend on besides; a search with the same goes on."""
    base_ms: float
    """Median time of a call of the float ONNX file, with which others were measured in turn."""
    predicted_for: str | None = None
    """The machine whose latency tables all latencies follow from; None where they were measured."""
    best: str | None = None
    """The model that meets all limits, confirmed on samples that the search did not decide by; None
    where there is none."""

    @property
    def by_name(self) -> dict[str, CheckedModel]:
        """The checked models by name."""
        return {model.name: model for model in self.checked}

    @staticmethod
    def pareto(models: Sequence[CheckedModel]) -> list[CheckedModel]:
        """Return the models that no other one beats in latency, drop and size."""

        def figures(model: CheckedModel) -> tuple[float, float, float]:
            drop = float("inf") if model.drop is None else model.drop
            return model.latency_ms, drop, model.bytes

        def beaten(model: CheckedModel) -> bool:
            own = figures(model)
            return any(
                figures(other) != own
                and all(a <= b for a, b in zip(figures(other), own, strict=True))
                for other in models
            )

        return sorted((m for m in models if not beaten(m)), key=lambda model: model.latency_ms)

    @staticmethod
    def line(model: CheckedModel, limits: AutoLimits | None = None) -> str:
        """Describe a checked model in a line, with figures for the limits that there are."""
        drop = "no finite metric" if model.drop is None else f"drop {model.drop:.3g} points"
        removed = len(model.removed_blocks)
        cut = f", {removed} block{'s' if removed > 1 else ''} removed" if removed else ""
        cut += f", {len(model.widths)} groups cut" if model.widths else ""
        cut += f", {len(model.float_layers)} layers in float" if model.float_layers else ""
        trained = f", trained for {model.trained} epochs" if model.trained else ""
        is_beside = model.predicted_ms is not None and not model.is_predicted
        predicted = f" (predicted {model.predicted_ms:.3g})" if is_beside else ""
        size = f"{model.bytes / 1e6:.3g} MB"
        if limits is not None and limits.latency is not None and limits.latency.p95_ms is not None:
            predicted += f", p95 {_figure(model.p95_ms)} ms"
        if limits is not None and limits.memory is not None:
            size += f", {_figure(model.peak_mebibytes)} MiB of memory"
        kind = model.format if model.runtime == "onnx" else f"{model.format} in {model.runtime}"
        return f"{kind}{cut}{trained}: {model.latency}{predicted}, {size}, {drop}"

    @classmethod
    def read(cls, out: Path) -> Front | None:
        """Read `front.json` back; None where there is none, or it was changed."""
        return read_if_unchanged(out / FILE, cls)

    def write(self, out: Path) -> None:
        """Write `front.json` into the results' folder."""
        write_sealed(out / FILE, self)


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"
