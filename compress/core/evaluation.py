"""Evaluates a stage's gates: the one way, for a stage alone and for a whole pipeline."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from compress.common.errors import GateRefused
from compress.core.gates.baselines import baseline_for, baseline_name
from compress.core.verdict import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.gates.gate import Gate
    from compress.core.verdict import Verdict


def _evaluate(gate: Gate, before: Artifact, after: Artifact, context: Context) -> Verdict:
    verdict = gate.evaluate(before, after, context)
    if not gate.compares:
        return verdict
    name = baseline_name(gate, after.kind, "input", context.baseline)
    return verdict.model_copy(update={"against": name})


def evaluate_gates(
    gates: Sequence[Gate],
    model: Artifact,
    artifact: Artifact,
    context: Context,
    evaluate: Callable[[Gate, Artifact, Artifact, Context], Verdict] = _evaluate,
) -> tuple[Verdict, ...]:
    """Evaluate a stage's gates on its input and its result, in their order.

    A gate that could not be measured has failed, with the reason. ``evaluate`` gets a gate, the
    artifact compared with and the result; a run looks up what it has measured before.
    """
    with artifact.keep_loaded():
        return tuple(
            evaluate(gate, baseline_for(gate, model, artifact, context), artifact, context)
            for gate in gates
        )


def refusal(
    stage: str, verdicts: Iterable[Verdict], kept_at: Path, run: Path | None = None
) -> GateRefused | None:
    """Return the error that names the gates that refused a stage's result; None if all passed.

    With the folder of a run it says how to learn why.
    """
    refused = [explain(verdict) for verdict in verdicts if not verdict.passed]
    if not refused:
        return None
    why = f"; why: compress explain {shlex.quote(str(run))}" if run else ""
    return GateRefused(f"{stage}: {'; '.join(refused)} (artifact kept in {kept_at}{why})")
