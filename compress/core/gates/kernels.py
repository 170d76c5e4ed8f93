"""Gates on which kernels compute an exported file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from compress.common.errors import StageFailed
from compress.core.gates.gate import Gate

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context


class _ShareGate(Gate):
    """A gate on a share of the work that the exporter counted."""

    limit_field: ClassVar[str] = "share"
    higher_passes: ClassVar[bool] = True
    compares: ClassVar[bool] = False
    fact: ClassVar[str]
    """The artifact's fact that has the share."""

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the share that the exporter counted."""
        if problem := self.unsuitable_artifact(type(after)):
            raise StageFailed(problem)
        share: Any = after.fact(self.fact)
        if share is None:
            raise StageFailed(
                "the multiply-accumulates of this file cannot be counted: it has none, or an "
                "operator that multiplies in ways that are not counted, such as a loop"
            )
        return float(share)


class MinDelegated(_ShareGate):
    """The backend that a file was lowered for computes nearly all of the model."""

    gate: Literal["min_delegated"] = "min_delegated"
    share: Annotated[float, Field(gt=0, le=1)]
    """Least share of the multiply-accumulates that is in the backend's own kernels; of the
    operators where nothing is multiplied."""

    rule_template: ClassVar[str] = "delegated share >= {share:g}"
    report_template: ClassVar[str] = (
        "the backend computes at least {percent:g} % of the multiply-accumulates"
    )
    fact: ClassVar[str] = "delegated_share"

    def unsuitable_artifact(self, written: type[Artifact]) -> str:
        """Return why nothing of such a result is delegated."""
        if written.reports_delegation:
            return ""
        return (
            f"is for the results of export_executorch, found {written.kind}: its runtime has "
            "kernels of its own alone, and leaves nothing to others; how much of it is computed in "
            "integers is judged by min_integer_macs"
        )


class MinIntegerMacs(_ShareGate):
    """The runtime computes nearly all of a quantized model with integer kernels."""

    gate: Literal["min_integer_macs"] = "min_integer_macs"
    share: Annotated[float, Field(gt=0, le=1)]
    """Least share of the multiply-accumulates that integer kernels do, of those of convolutions,
    matrix products and recurrent layers, the products of attention included."""

    rule_template: ClassVar[str] = "share of integer multiply-accumulates >= {share:g}"
    report_template: ClassVar[str] = (
        "integer kernels do at least {percent:g} % of the multiply-accumulates"
    )
    fact: ClassVar[str] = "integer_share"

    def unsuitable_artifact(self, written: type[Artifact]) -> str:
        """Return why integer kernels are not counted in such a result."""
        if written.reports_integer_share:
            return ""
        return (
            "is for the results of export_onnx, export_aot and export_executorch, found "
            f"{written.kind}: what its kernels multiply is not counted"
        )
