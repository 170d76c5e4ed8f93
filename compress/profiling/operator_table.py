"""The operators that took most time in some traced training steps, as the report shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compress.common.config import Settings
from compress.common.sealed_json import read_sealed

OPERATORS_FILE = "operators.json"  # written beside the trace of rank 0
LISTED_OPERATORS = 20


class OperatorCost(Settings):
    """Cost of one operator in the traced steps, all of its calls together."""

    name: str
    shapes: str = ""
    """Shapes of its inputs, if they were recorded; then each combination is listed by itself."""
    calls: int
    self_cpu_ms: float
    """CPU time without that of operators it calls, milliseconds."""
    cpu_ms: float
    """CPU time with them."""
    self_device_ms: float | None = None
    """Time of its kernels on the CUDA device, milliseconds; None where there is none."""
    self_mebibytes: float | None = None
    """Memory that it allocated less what it freed, on the device that is trained on; None if it was
    not recorded."""


class OperatorTable(Settings):
    """The most expensive operators of a training, on rank 0."""

    task: str
    """Stage, or fine-tuning within it, that was traced."""
    steps: int
    """Number of steps that were traced."""
    total_ms: float
    """Time of all operators, listed or not: on the CUDA device where there is one, else on CPU."""
    operators: tuple[OperatorCost, ...]
    """At most 20, the most expensive first."""

    @classmethod
    def from_profiler(
        cls, profiler: Any, task: str, steps: int, *, on_cuda: bool, shapes: bool, memory: bool
    ) -> OperatorTable:
        """Sum up what a ``torch.profiler.profile`` has recorded in its active steps."""
        # The events of torch 2.11 lack the attribute, and none of them is a Python function.
        python_functions = {
            e.name for e in profiler.events() if getattr(e, "is_python_function", False)
        }
        costs = []
        for event in profiler.key_averages(group_by_input_shape=shapes):
            # Kernels on the device are part of the operators that launch them, and annotations,
            # such as those of the profiler's steps, span operators.
            if event.device_type.name != "CPU" or event.is_user_annotation:
                continue
            if event.key in python_functions:  # of `stack`
                continue
            size = event.self_device_memory_usage if on_cuda else event.self_cpu_memory_usage
            costs.append(
                OperatorCost(
                    name=event.key,
                    shapes=str(event.input_shapes) if shapes else "",
                    calls=event.count,
                    self_cpu_ms=event.self_cpu_time_total / 1e3,
                    cpu_ms=event.cpu_time_total / 1e3,
                    self_device_ms=event.self_device_time_total / 1e3 if on_cuda else None,
                    self_mebibytes=size / 2**20 if memory else None,
                )
            )
        costs.sort(key=_own_ms, reverse=True)
        return cls(
            task=task,
            steps=steps,
            total_ms=sum(map(_own_ms, costs)),
            operators=tuple(costs[:LISTED_OPERATORS]),
        )

    @property
    def shares(self) -> list[float]:
        """Each listed operator's share of the total time, from 0 to 1."""
        return [_own_ms(cost) / (self.total_ms or 1.0) for cost in self.operators]


def read_operator_tables(profiles: Path, stage: str) -> tuple[OperatorTable, ...]:
    """Read the tables of a stage's trainings from the folder of all profiles."""
    return tuple(
        read_sealed(file, OperatorTable) for file in sorted((profiles / stage).glob(OPERATORS_FILE))
    )


def _own_ms(cost: OperatorCost) -> float:
    return cost.self_cpu_ms if cost.self_device_ms is None else cost.self_device_ms
