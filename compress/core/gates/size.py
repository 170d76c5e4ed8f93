"""Gates on the size of a result: bytes and weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from compress.common.config import Positive
from compress.common.errors import StageFailed
from compress.core.gates.gate import Gate

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context

LARGEST_RATIO = 5
"""Of sizes: who writes 25 means 25 %, not that the result may become 25 times as large."""


class _RatioGate(Gate):
    """A gate on how much of something is left."""

    limit_field: ClassVar[str] = "ratio"

    def unsuitable_artifact(self, written: type[Artifact]) -> str:
        """Return why so large a ratio cannot be meant."""
        if self.limit < LARGEST_RATIO:
            return ""
        return (
            f"ratio: {self.limit:g} would let it become {self.limit:g} times as large; "
            f"for {self.limit:g} % write {self.limit / 100:g}"
        )


class MaxSize(_RatioGate):
    """The deployed file is at most this fraction of the size compared with."""

    gate: Literal["max_size"] = "max_size"
    ratio: Positive
    """Largest ratio of the deployed file's bytes to those of the artifact compared with."""

    rule_template: ClassVar[str] = "size ratio <= {ratio:.4g}"
    report_template: ClassVar[str] = "the file has at most {percent:.4g} % of the bytes"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the ratio of bytes."""
        return after.payload_bytes / before.payload_bytes


class MaxFileSize(Gate):
    """The deployed file has at most so many mebibytes."""

    gate: Literal["max_file_size"] = "max_file_size"
    mebibytes: Positive
    """Largest size of the deployed file, in mebibytes (1,048,576 bytes)."""

    limit_field: ClassVar[str] = "mebibytes"
    rule_template: ClassVar[str] = "size <= {mebibytes:g} MiB"
    report_template: ClassVar[str] = "the file has at most {limit:g} MiB"
    compares: ClassVar[bool] = False

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the mebibytes of the deployed file."""
        return after.payload_bytes / 2**20


class MaxParameters(_RatioGate):
    """At most this fraction of the weights is left."""

    gate: Literal["max_parameters"] = "max_parameters"
    ratio: Positive
    """Largest ratio of weights left."""

    rule_template: ClassVar[str] = "parameter ratio <= {ratio:g}"
    report_template: ClassVar[str] = "at most {percent:g} % of the weights are left"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the ratio of weights."""
        weights_left, weights_before = after.parameters(), before.parameters()
        if weights_left is None or not weights_before:
            raise StageFailed(f"parameters of {after.kind} or {before.kind} cannot be counted")
        return weights_left / weights_before
