"""Gates: what must be true of a stage's result. A gate that cannot be measured fails."""

from compress.core.gates.accuracy import MaxDrop, MaxRelativeDrop, MinMetric
from compress.core.gates.call_cost import (
    MaxFirstToken,
    MaxLatency,
    MaxMemory,
    MinSpeedup,
    MinTokensPerSecond,
)
from compress.core.gates.gate import AnyGate, Gate, gate_class, rule_in_words, value_in_words
from compress.core.gates.kernels import MinDelegated, MinIntegerMacs
from compress.core.gates.next_tokens import MaxDivergence, MinEqualTokens
from compress.core.gates.other_runtime import RunsIn
from compress.core.gates.outputs import LabelAgreement, MinCosine, Parity
from compress.core.gates.size import MaxFileSize, MaxParameters, MaxSize

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
