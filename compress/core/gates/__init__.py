"""Gates: what must be true of a stage's result. A gate that cannot be measured fails."""

from compress.core.gates.cost import MaxFileSize as MaxFileSize
from compress.core.gates.cost import MaxFirstToken as MaxFirstToken
from compress.core.gates.cost import MaxLatency as MaxLatency
from compress.core.gates.cost import MaxMemory as MaxMemory
from compress.core.gates.cost import MaxParameters as MaxParameters
from compress.core.gates.cost import MaxSize as MaxSize
from compress.core.gates.cost import MinSpeedup as MinSpeedup
from compress.core.gates.cost import MinTokensPerSecond as MinTokensPerSecond
from compress.core.gates.disagreement import MaxDisagreement as MaxDisagreement
from compress.core.gates.gate import AnyGate as AnyGate
from compress.core.gates.gate import Gate as Gate
from compress.core.gates.gate import gate_class as gate_class
from compress.core.gates.gate import rule_in_words as rule_in_words
from compress.core.gates.gate import value_in_words as value_in_words
from compress.core.gates.quality import LabelAgreement as LabelAgreement
from compress.core.gates.quality import MaxDivergence as MaxDivergence
from compress.core.gates.quality import MaxDrop as MaxDrop
from compress.core.gates.quality import MaxRelativeDrop as MaxRelativeDrop
from compress.core.gates.quality import MinCosine as MinCosine
from compress.core.gates.quality import MinEqualTokens as MinEqualTokens
from compress.core.gates.quality import MinMetric as MinMetric
from compress.core.gates.quality import Parity as Parity
from compress.core.gates.runtime import MinDelegated as MinDelegated
from compress.core.gates.runtime import MinIntegerMacs as MinIntegerMacs
