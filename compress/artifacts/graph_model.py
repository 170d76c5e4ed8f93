"""GraphModel: a torch.export program as an artifact; quantization writes it, exporters read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from compress.artifacts.artifact import Artifact, Details
from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed
from compress.common.forward import (
    Predictor,
    flatten_outputs,
    opened_model,
    run_in_eval,
    torch_predictor,
)
from compress.common.lazy_modules import torch

if TYPE_CHECKING:
    from compress.common.signature import Signature


class GraphModel(Artifact):
    """An ATen graph with its weights, quantize and dequantize operators included."""

    kind: ClassVar[str] = "graph"
    payload: ClassVar[str] = "model.pt2"
    opened_with: ClassVar[tuple[str, ...]] = (
        "compress.graph.torch_export",
        *("torch._dynamo", "torch._inductor.sizevars", "torch.export._trace"),
        *("torch.fx.experimental.validator", "sympy.assumptions.wrapper", "sympy.tensor.tensor"),
    )

    @classmethod
    def create(
        cls,
        path: Path,
        program: torch.export.ExportedProgram,
        signature: Signature,
        **details: Unpack[Details],
    ) -> GraphModel:
        """Write a program's artifact."""
        from compress.graph.torch_export import save_program

        with cls.atomic_write(path, signature, **details) as partial:
            save_program(program, partial / cls.payload)
        return cls.from_directory(path)

    @classmethod
    def from_eager(cls, model: EagerModel, path: Path) -> GraphModel:
        """Trace an eager model to one `.pt2` file, which loads without the model's class.

        Its outputs are compared at two sizes of every named axis. Raises StageFailed: the model
        cannot be traced, or its graph has other outputs.
        """
        from compress.graph.torch_export import export_program

        signature, lineage = model.signature, model.manifest.lineage
        program = export_program(model.load(), signature)
        refuse_other_answers(model.load(), program, signature)
        facts, carried = dict(model.manifest.facts), model.carried_files()
        return cls.create(path, program, signature, lineage=lineage, facts=facts, carried=carried)

    def program(self, device: str = "cpu") -> torch.export.ExportedProgram:
        """Return the program; raise ArtifactInvalid for anything but tensors and a graph."""
        from compress.graph.torch_export import load_program, move_program

        self.verify_cached()
        program = load_program(self.payload_path)
        # A module that is moved would still make its constants where they were traced: on the CPU.
        return program if device == "cpu" else move_program(program, device)

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Load the graph as a predictor for a ``with`` block; PyTorch runs it."""
        from compress.graph.constant_folding import fold_constants_, fuse_rounding_

        module: Any = self.load(device)
        fold_constants_(module)
        fuse_rounding_(module)
        with torch_predictor(module, device, threads) as predict:
            yield predict

    def load(self, device: str = "cpu") -> torch.nn.Module:
        """Return the graph as a new module; it computes as in eval mode."""
        import torch.ao.quantization.fx._decomposed  # registers choose_qparams

        choose = torch.ops.quantized_decomposed.choose_qparams.tensor

        # torch's (2.13) raises for an empty batch; onnxruntime and torch's integer kernels do not.
        def choose_range(x: torch.Tensor, *limits: Any) -> Any:
            return choose(x if x.numel() else x.new_zeros(1), *limits)

        module: Any = self.program(device).module()
        for node in module.graph.find_nodes(op="call_function", target=choose):
            node.target = choose_range
        module.recompile()
        return module  # type: ignore[no-any-return]

    def parameters(self) -> int:
        """Count the weights; scales and zero points are not weights."""
        if not self._counted:
            self._counts(())
        return next(iter(self._counted.values()))[0]  # the same at any sizes

    def macs(self, sizes: Mapping[str, int] | None = None) -> int:
        """Count multiply-accumulates for one sample."""
        return self._counts(tuple((sizes or {}).items()))[1]

    def count(self, program: torch.export.ExportedProgram, *sizes: Mapping[str, int]) -> None:
        """Count weights and multiply-accumulates of the program, which need not be read for it.

        At each of some sizes of the inputs' axes.
        """
        from compress.graph.flops import count_graph_weights, count_macs
        from compress.graph.torch_export import reshape_views_

        module = program.module()
        reshape_views_(module)
        weights = count_graph_weights(program)
        for key in dict.fromkeys(tuple(each.items()) for each in sizes):
            inputs = self.signature.example(batch=1, sizes=dict(key))
            self._counted[key] = weights, count_macs(module, inputs)

    def _counts(self, sizes: tuple[tuple[str, int], ...]) -> tuple[int, int]:
        if sizes not in self._counted:
            self.count(self.program(), dict(sizes))
        return self._counted[sizes]

    @cached_property
    def _counted(self) -> dict[tuple[tuple[str, int], ...], tuple[int, int]]:
        return {}


def program_of(model: Artifact) -> torch.export.ExportedProgram:
    """Return the stored graph, or a trace of an eager model; raise StageFailed without either."""
    from compress.graph.torch_export import export_program

    if isinstance(model, GraphModel):
        return model.program()
    if isinstance(model, EagerModel):
        return export_program(model.load(), model.signature)
    raise StageFailed(f"{model.kind} artifacts have no graph")


def refuse_other_answers(
    module: torch.nn.Module, program: torch.export.ExportedProgram, signature: Signature
) -> None:
    """Raise StageFailed if a program's outputs differ, by more than rounding, from its module's."""
    from compress.common.tensor_difference import largest_difference

    graph = program.module()
    for size in (2, 5):  # tracing bakes in sizes that the code depends on: one would not show it
        sizes = {axis: signature.bounds(axis).nearest(size) for axis in signature.dynamic_axes}
        inputs = signature.example(seed=size, sizes=sizes)
        expected, found = run_in_eval(module, inputs), flatten_outputs(graph(*inputs))
        for a, b in zip(expected, found, strict=True):
            same = a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-5, equal_nan=True)
            if not same:
                raise StageFailed(
                    f"the traced graph answers otherwise than the model, by up to "
                    f"{largest_difference(a, b):.3g}; the model's code may draw random numbers or "
                    "depend on values"
                )
