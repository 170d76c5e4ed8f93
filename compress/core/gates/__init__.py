"""Gates: what must be true of a stage's result. A gate that cannot be measured fails."""

from compress.core.gates.cost import (
    MaxFileSize,
    MaxFirstToken,
    MaxLatency,
    MaxMemory,
    MaxParameters,
    MaxSize,
    MinSpeedup,
    MinTokensPerSecond,
)
from compress.core.gates.gate import AnyGate, Gate, gate_class, rule_in_words, value_in_words
from compress.core.gates.quality import (
    LabelAgreement,
    MaxDivergence,
    MaxDrop,
    MaxRelativeDrop,
    MinCosine,
    MinEqualTokens,
    MinMetric,
    Parity,
)
from compress.core.gates.runtime import MinDelegated, MinIntegerMacs, RunsIn

__all__ = [
    "AnyGate",
    "Gate",
    "LabelAgreement",
    "MaxDivergence",
    "MaxDrop",
    "MaxFileSize",
    "MaxFirstToken",
    "MaxLatency",
    "MaxMemory",
    "MaxParameters",
    "MaxRelativeDrop",
    "MaxSize",
    "MinCosine",
    "MinDelegated",
    "MinEqualTokens",
    "MinIntegerMacs",
    "MinMetric",
    "MinSpeedup",
    "MinTokensPerSecond",
    "Parity",
    "RunsIn",
    "gate_class",
    "rule_in_words",
    "value_in_words",
]
