"""Gates on what a result costs: bytes, weights, and the time and memory of a call here."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import model_validator

from compress.common.config import Count, Positive
from compress.common.errors import StageFailed
from compress.core.gates.gate import Gate
from compress.profiling.benchmark import NotMeasurable, unmeasurable

if TYPE_CHECKING:
    from pydantic import JsonValue

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context

LATENCIES: tuple[Literal["p50", "p95", "p99", "mean"], ...] = ("p50", "p95", "p99", "mean")


class _RatioGate(Gate):
    limit_field = "ratio"

    def unsuitable_artifact(self, written: type[Artifact]) -> str:
        # Who writes 25 means 25 %, not that the result may become 25 times as large.
        if self.limit < 5:
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

    rule_template = "size ratio <= {ratio:.4g}"
    report_template = "the file has at most {percent:.4g} % of the bytes"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the ratio of bytes."""
        return after.payload_bytes / before.payload_bytes


class MaxFileSize(Gate):
    """The deployed file has at most so many mebibytes."""

    gate: Literal["max_file_size"] = "max_file_size"
    mebibytes: Positive
    """Largest size of the deployed file, in mebibytes (1,048,576 bytes)."""

    limit_field = "mebibytes"
    rule_template = "size <= {mebibytes:g} MiB"
    report_template = "the file has at most {limit:g} MiB"
    compares = False

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the mebibytes of the deployed file."""
        return after.payload_bytes / 2**20


class MaxParameters(_RatioGate):
    """At most this fraction of the weights is left."""

    gate: Literal["max_parameters"] = "max_parameters"
    ratio: Positive
    """Largest ratio of weights left."""

    rule_template = "parameter ratio <= {ratio:g}"
    report_template = "at most {percent:g} % of the weights are left"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the ratio of weights."""
        weights_left, weights_before = after.parameters(), before.parameters()
        if weights_left is None or not weights_before:
            raise StageFailed(f"parameters of {after.kind} or {before.kind} cannot be counted")
        return weights_left / weights_before


class MeasuredOnVal(Gate):
    """A gate on latency or memory: measured on samples of `val`, or seeded inputs without data."""

    batch: Count = 1
    """Samples per call."""

    may_vary = True
    # Earlier versions measured on seeded inputs, or by wall time alone.
    measured_as: ClassVar = {"measured on": "val", "timed": "by call_timer"}


class MinSpeedup(MeasuredOnVal):
    """Faster than the uncompressed model in the same runtime, both measured in turn on `val`."""

    gate: Literal["min_speedup"] = "min_speedup"
    ratio: Positive
    """How many times faster at least, by the lower end of the speedup's 95 % interval."""
    against: str | None = None
    """Earlier stage compared with, `source`, or a runtime that runs the uncompressed model: `eager`
    (PyTorch), `compiled` (torch.compile), `onnxruntime`, `openvino`, `torchscript`, `aot` … (plain
    exports). By default the uncompressed model in the result's own runtime, so that the speedup is
    what compression gains, and not what the runtime does; for a package, its input."""

    limit_field = "ratio"
    rule_template = "speedup at batch {batch} >= {ratio:g} with 95 % confidence"
    higher_passes = allows_runtime = True

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the lower end of the interval in which the ratio of median latencies lies."""
        compared = context.compare_latency(before, after, self.batch)
        if compared.speedup_doubt:
            raise NotMeasurable(unmeasurable("the speedup", compared.speedup_doubt))
        return compared.interval.low


class MaxLatency(MeasuredOnVal):
    """A percentile or the mean of the latency on `val` stays under a bound, on this machine.

    One of `p50_ms`, `p95_ms`, `p99_ms` and `mean_ms`. It is measured in turn with what `against`
    names, by default the stage's input.
    """

    gate: Literal["max_latency"] = "max_latency"
    p50_ms: Positive | None = None
    """Largest median, in milliseconds."""
    p95_ms: Positive | None = None
    """Largest 95th percentile, in milliseconds."""
    p99_ms: Positive | None = None
    """Largest 99th percentile."""
    mean_ms: Positive | None = None
    """Largest mean, by which a `cascade` costs: a percentile may leave out what falls back."""

    limit_field = "p95_ms"
    compares = False

    @model_validator(mode="after")
    def _limits_one_figure(self) -> Self:
        given = [name for name in LATENCIES if getattr(self, f"{name}_ms") is not None]
        if len(given) != 1:
            raise ValueError(
                f"expected one of p50_ms, p95_ms, p99_ms and mean_ms, found {len(given)}"
            )
        return self

    @property
    def figure(self) -> Literal["p50", "p95", "p99", "mean"]:
        """Which figure is limited."""
        return next(name for name in LATENCIES if getattr(self, f"{name}_ms") is not None)

    @property
    def limit(self) -> float:
        """The milliseconds that are not to be exceeded."""
        return float(getattr(self, f"{self.figure}_ms"))

    @property
    def rule(self) -> str:
        """The rule, with the figure."""
        return f"{self.figure} at batch {self.batch} <= {self.limit:g} ms"

    def measurement_key(self) -> dict[str, JsonValue]:
        """Return what changes the value: the figure, and not its limit."""
        key = {n: v for n, v in super().measurement_key().items() if not n.endswith("_ms")}
        return key | {"figure": self.figure}

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the figure in milliseconds."""
        latency = context.compare_latency(before, after, self.batch).after
        if doubt := latency.doubt_of(self.figure):
            raise NotMeasurable(unmeasurable(f"{self.figure} in ms", doubt))
        return float(getattr(latency, self.figure))


class MaxMemory(MeasuredOnVal):
    """Opening the file and answering calls take at most so much memory, on this machine.

    Counted in a process of its own, beyond what the libraries take there.
    """

    gate: Literal["max_memory"] = "max_memory"
    mebibytes: Positive
    """Most memory that may be taken at the same time, in MiB."""

    limit_field = "mebibytes"
    rule_template = "peak memory at batch {batch} <= {mebibytes:g} MiB"
    compares = False

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the peak memory in mebibytes."""
        return context.peak_memory(after, self.batch)

    def unsuitable_artifact(self, written: type[Artifact]) -> str:
        """Return why the memory of such a result cannot be measured in a process."""
        elsewhere = written.memory_elsewhere
        return elsewhere and f"cannot be measured: {elsewhere}"


class _GenerationGate(Gate):
    # For a folder that generates text by itself, with a cache of keys and values.

    prompt_tokens: Count = 128
    """Tokens of the prompt, drawn at random."""
    tokens: Count = 64
    """Tokens generated after it."""

    compares = False
    may_vary = True

    def _speed(self, after: Artifact, context: Context) -> tuple[float, float]:
        if problem := self.unsuitable_artifact(type(after)):
            raise StageFailed(problem)
        return after.generation_speed(self.prompt_tokens, self.tokens, context.threads)

    def unsuitable_artifact(self, written: type[Artifact]) -> str:
        return "" if written.generates else f"is for export_genai, found {written.kind}"


class MinTokensPerSecond(_GenerationGate):
    """A language model generates so many tokens a second, one at a time after a prompt."""

    gate: Literal["min_tokens_per_second"] = "min_tokens_per_second"
    at: Positive
    """Least tokens a second, by the median time of a token."""

    limit_field = "at"
    rule_template = "tokens a second after {prompt_tokens} >= {at:g}"
    higher_passes = True

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the tokens a second after the first."""
        return self._speed(after, context)[1]


class MaxFirstToken(_GenerationGate):
    """The first token comes soon: a prompt is read in little time."""

    gate: Literal["max_first_token"] = "max_first_token"
    ms: Positive
    """Largest median time from the prompt to the first token, in milliseconds."""

    limit_field = "ms"
    rule_template = "first token after {prompt_tokens} <= {ms:g} ms"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the milliseconds to the first token."""
        return self._speed(after, context)[0]
