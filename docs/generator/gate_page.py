"""Reference page of the gates, from their classes and JSON Schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml
from groups import DEFS, link_from
from setting_text import code, definitions, paragraphs

from compress.core.gates.gate import Gate, gate_classes
from compress.core.verdict import explain

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMITS = {
    "parity": 1e-4,
    "label_agreement": 0.99,
    "max_disagreement": 1.0,
    "min_cosine": 0.99,
    "max_divergence": 0.05,
    "min_equal_tokens": 16.0,
    "max_drop": 1.0,
    "max_relative_drop": 2.0,
    "min_metric": 0.975,
    "max_size": 0.25,
    "max_file_size": 10.0,
    "max_parameters": 0.5,
    "min_speedup": 2.0,
    "max_latency": 5.0,
    "max_memory": 64.0,
    "min_delegated": 0.99,
    "min_integer_macs": 0.9,
    "min_tokens_per_second": 30.0,
    "max_first_token": 500.0,
}
"""The limit in each gate's example."""


def gates_page() -> str:
    """Return the page of all gates."""
    return "\n\n".join(
        [
            "# Gates",
            "A gate measures one number and compares it with a limit. How to choose gates, and "
            "what a refusal looks like: [the guide](../gates.md).",
            *(part for name in LIMITS for part in _gate(gate_classes()[name])),
            "## Settings of every gate",
            definitions(
                {name: DEFS["Parity"]["properties"][name] for name in ("against", "on")},
                (),
                "every",
                link_from("gates"),
            ),
        ]
    )


def _gate(gate: type[Gate]) -> Iterator[str]:
    schema: dict[str, Any] = DEFS[gate.__name__]
    name = schema["properties"]["gate"]["const"]
    example = {"gate": name, gate.limit_field: LIMITS[name]}
    refused = explain(gate.model_validate(example).verdict(None, "found …"))
    own = {
        setting: described
        for setting, described in schema["properties"].items()
        if setting not in Gate.model_fields
    }
    yield f"## {name}"
    yield from paragraphs(gate)
    yield "Compares with " + (
        "the stage's input, or with the stage that `against` names."
        if gate.compares
        else "nothing."
    )
    yield f"```yaml\ngates:\n{yaml.safe_dump([example], sort_keys=False)}```"
    yield f"A refusal: {code(refused)}."
    yield definitions(own, schema.get("required", ()), name, link_from("gates"))
