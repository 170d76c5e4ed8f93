"""Where the time of a call goes: onnxruntime's own profile of a file, by module."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

from compress.export.diagnosis.profile import SEPARATOR, modules_by_node, named_copy
from compress.export.onnx.kernels import KERNEL_TIME, is_kernel_call, kernel_macs
from compress.export.onnx.proto_io import read, write
from compress.export.onnx.session import exact_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir
    import torch

CALLS, WARM_UP = 60, 10
"""Profiled calls, and those before them that are not counted."""
COUNTED = 0.75
"""Share of an operator's calls, the shortest ones, of which the mean is taken: other load on the
machine only ever makes a call longer."""
IN_BLOCKS = ("_nchwc", "_bn_nchwc")
"""What onnxruntime adds to a value's name for the kernel that computes it in blocks of channels."""
CUT_OFF_MS = 0.5e-3
"""onnxruntime writes whole microseconds, cut off."""


@dataclass(frozen=True, eq=False)
class ProfiledNode:
    """An operator that onnxruntime ran."""

    node: ir.Node
    """Of the model as onnxruntime rewrote it."""
    origin: ir.Node | None
    """The file's operator that it has its name of; None where it was put in."""
    module: str
    ms: float
    """Of one call."""
    written: str
    """Type of what it writes, as onnxruntime calls it: `float`, `uint8` …; empty without one."""
    written_bytes: int
    """What it writes in one call."""
    macs: int
    """Multiply-accumulates of one call."""
    in_integers: bool
    """Whether its kernel computes in integers."""


@dataclass(frozen=True)
class Profile:
    """The operators of one call, in the order in which they ran."""

    model: ir.Model
    """The file's model, with names that begin with modules."""
    optimized: ir.Model
    """As onnxruntime rewrote it; without the weights."""
    nodes: tuple[ProfiledNode, ...]

    @classmethod
    def measure(
        cls,
        model: ir.Model,
        names: Sequence[str],
        inputs: Sequence[torch.Tensor],
        threads: int,
    ) -> Self:
        """Profile a model on some inputs.

        Args:
            model: a model with its weights.
            names: modules of its layers, in the order of `layers_of`.
            inputs: what it is called with.
            threads: CPU threads of the session.
        """
        named = named_copy(model, modules_by_node(model, names))
        with TemporaryDirectory(prefix="compress-profile-") as folder:
            file, optimized = Path(folder) / "model.onnx", Path(folder) / "optimized.onnx"
            write(named, file)
            session = exact_session(file, threads, optimized, profiled=True)
            feed = {
                value.name: x.detach().cpu().numpy()
                for value, x in zip(session.get_inputs(), inputs, strict=True)
            }
            for _ in range(WARM_UP + CALLS):
                session.run(None, feed)
            events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
            rewritten = read(optimized)
        times, written = defaultdict[str, list[float]](list), dict[str, tuple[str, int]]()
        arguments = dict[str, dict[str, Any]]()
        for event in filter(is_kernel_call, events):
            name = event["name"].removesuffix(KERNEL_TIME)
            times[name].append(1e-3 * event["dur"] + CUT_OFF_MS)
            types = [kind for value in event["args"]["output_type_shape"] for kind in value]
            size = int(event["args"].get("output_size", 0))
            written[name] = (types[0] if types else "", size)
            arguments[name] = event["args"]
        origins = {key: n for n in named.graph for key in (*(v.name for v in n.outputs), n.name)}
        nodes = tuple(
            ProfiledNode(
                node,
                _origin(name, origins),
                _module_of(node),
                _mean(times[name]),
                *written[name],
                *kernel_macs(node, arguments[name]),
            )
            for node in rewritten.graph
            if (name := str(node.name)) in times
        )
        return cls(named, rewritten, nodes)

    @cached_property
    def ms(self) -> float:
        """Time of all kernels, without what a call takes besides."""
        return sum(node.ms for node in self.nodes)

    @cached_property
    def by_module(self) -> dict[str, float]:
        """Module → milliseconds of its operators, the longest first."""
        found = defaultdict[str, float](float)
        for node in self.nodes:
            found[node.module] += node.ms
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @cached_property
    def macs(self) -> int:
        """Multiply-accumulates of a call."""
        return sum(node.macs for node in self.nodes)

    @cached_property
    def float_macs(self) -> dict[str, int]:
        """Module → multiply-accumulates of a call in float kernels, the most first."""
        found = Counter[str]()
        for node in self.nodes:
            found[node.module] += 0 if node.in_integers else node.macs
        return dict(found.most_common())

    @property
    def float_share(self) -> float:
        """Share of the multiply-accumulates that float kernels do."""
        return sum(self.float_macs.values()) / self.macs if self.macs else 0.0


def _mean(times: list[float]) -> float:
    shortest = sorted(times[WARM_UP:])
    counted = shortest[: max(1, int(COUNTED * len(shortest)))]
    return sum(counted) / len(counted)


def _origin(name: str, origins: dict[str | None, ir.Node]) -> ir.Node | None:
    names = (name, *(name.removesuffix(ending) for ending in IN_BLOCKS))
    return next((origins[key] for key in names if key in origins), None)


def _module_of(node: ir.Node) -> str:
    """Return the module in an operator's name; where it was put in, that of what it reads."""
    for name in (node.name, *(value.name for value in node.outputs)):
        if name and SEPARATOR in name:
            return name.partition(SEPARATOR)[0]
    return next(map(_module_of, node.predecessors()), "")
