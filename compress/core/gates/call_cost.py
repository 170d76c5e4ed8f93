"""Gates on what a call costs on this machine: time, memory, and time for each generated token."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from compress.common.config import Count, Positive
from compress.common.errors import StageFailed
from compress.core.gates.gate import Gate
from compress.profiling.benchmark import unmeasurable

if TYPE_CHECKING:
    from pydantic import JsonValue

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context


class MeasuredOnVal(Gate):
    """A gate on latency or memory: measured on samples of `val`, or seeded inputs without data."""

    may_vary: ClassVar[bool] = True

    def measurement_key(self) -> dict[str, JsonValue]:
        """Return what changes the value."""
        # Sets it apart from what earlier versions measured, on seeded inputs or by wall time alone.
        return {**super().measurement_key(), "measured on": "val", "timed": "by call_timer"}


class MinSpeedup(MeasuredOnVal):
    """Faster than the uncompressed model in the same runtime, both measured in turn on `val`."""

    gate: Literal["min_speedup"] = "min_speedup"
    ratio: Positive
    """How many times faster at least, by the lower end of the speedup's 95 % interval."""
    batch: Count = 1
    """Samples per call."""
    against: str | None = None
    """Earlier stage compared with, `source`, or a runtime that runs the uncompressed model: `eager`
    (PyTorch), `compiled` (torch.compile), `onnxruntime`, `openvino`, `torchscript`, `aot` … (plain
    exports). By default the uncompressed model in the result's own runtime, so that the speedup is
    what compression gains, and not what the runtime does; for a package, its input."""

    limit_field: ClassVar[str] = "ratio"
    rule_template: ClassVar[str] = "speedup at batch {batch} >= {ratio:g} with 95 % confidence"
    higher_passes: ClassVar[bool] = True
    allows_runtime: ClassVar[bool] = True

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the lower end of the interval in which the ratio of median latencies lies."""
        compared = context.compare_latency(before, after, self.batch)
        if compared.speedup_doubt:
            raise StageFailed(unmeasurable("the speedup", compared.speedup_doubt))
        return compared.interval.low


class MaxLatency(MeasuredOnVal):
    """The 95th percentile of the latency on `val` stays under a bound, on this machine."""

    gate: Literal["max_latency"] = "max_latency"
    p95_ms: Positive
    """Largest 95th percentile, in milliseconds."""
    batch: Count = 1
    """Samples per call."""

    limit_field: ClassVar[str] = "p95_ms"
    rule_template: ClassVar[str] = "p95 at batch {batch} <= {p95_ms:g} ms"
    compares: ClassVar[bool] = False

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the p95 latency in milliseconds."""
        latency = context.compare_latency(before, after, self.batch).after
        if latency.p95_doubt:
            raise StageFailed(unmeasurable("p95 in ms", latency.p95_doubt))
        return latency.p95


class MaxMemory(MeasuredOnVal):
    """Opening the file and answering calls take at most so much memory, on this machine.

    Counted in a process of its own, beyond what the libraries take there.
    """

    gate: Literal["max_memory"] = "max_memory"
    mebibytes: Positive
    """Most memory that may be taken at the same time, in MiB."""
    batch: Count = 1
    """Samples per call."""

    limit_field: ClassVar[str] = "mebibytes"
    rule_template: ClassVar[str] = "peak memory at batch {batch} <= {mebibytes:g} MiB"
    compares: ClassVar[bool] = False

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the peak memory in mebibytes."""
        return context.peak_memory(after, self.batch)

    def unsuitable_artifact(self, written: type[Artifact]) -> str:
        """Return why the memory of such a result cannot be measured in a process."""
        elsewhere = written.memory_elsewhere
        return elsewhere and f"cannot be measured: {elsewhere}"


class _GenerationGate(Gate):
    """A gate on a folder that generates text by itself, with a cache of keys and values."""

    prompt_tokens: Count = 128
    """Tokens of the prompt, drawn at random."""
    tokens: Count = 64
    """Tokens generated after it."""

    compares: ClassVar[bool] = False
    may_vary: ClassVar[bool] = True

    def _speed(self, after: Artifact, context: Context) -> tuple[float, float]:
        """Return milliseconds to the first token, and tokens a second after it."""
        if problem := self.unsuitable_artifact(type(after)):
            raise StageFailed(problem)
        return after.generation_speed(self.prompt_tokens, self.tokens, context.threads)

    def unsuitable_artifact(self, written: type[Artifact]) -> str:
        """Return why such a result does not generate."""
        return "" if written.generates else f"is for export_genai, found {written.kind}"


class MinTokensPerSecond(_GenerationGate):
    """A language model generates so many tokens a second, one at a time after a prompt."""

    gate: Literal["min_tokens_per_second"] = "min_tokens_per_second"
    at: Positive
    """Least tokens a second, by the median time of a token."""

    limit_field: ClassVar[str] = "at"
    rule_template: ClassVar[str] = "tokens a second after {prompt_tokens} >= {at:g}"
    higher_passes: ClassVar[bool] = True

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the tokens a second after the first."""
        return self._speed(after, context)[1]


class MaxFirstToken(_GenerationGate):
    """The first token comes soon: a prompt is read in little time."""

    gate: Literal["max_first_token"] = "max_first_token"
    ms: Positive
    """Largest median time from the prompt to the first token, in milliseconds."""

    limit_field: ClassVar[str] = "ms"
    rule_template: ClassVar[str] = "first token after {prompt_tokens} <= {ms:g} ms"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the milliseconds to the first token."""
        return self._speed(after, context)[0]
