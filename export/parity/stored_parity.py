"""How an export stage checks a cached file against its source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context


class ComparesStoredFile:
    """Mixin of export stages: a file of an earlier run is compared on the data of this one."""

    keeps_outputs: ClassVar[bool] = True

    def rounding_error(self, model: Artifact) -> float:
        """Return the largest error of an export that is taken for a right one."""
        from compress.export.parity.sample_parity import tolerance_for

        return tolerance_for(model).spread

    def check_parity(self, model: Artifact, artifact: Artifact, context: Context) -> None:
        """Raise StageFailed where the artifact's outputs differ from the model's."""
        from compress.export.parity.compare import check_parity

        facts: Any = artifact.manifest.facts
        limits, operators = facts.get("axis_limits"), facts.get("operators", ())
        with artifact.open(threads=context.threads) as exported:
            check_parity(model, exported, context, limits, operators)
