"""What every stage that quantizes does before and after: names checked, the graph sealed."""

from __future__ import annotations

import logging
from difflib import get_close_matches
from fnmatch import fnmatchcase
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from compress.artifacts.graph_model import GraphModel
from compress.common.errors import PipelineInvalid, StageFailed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch
    from torch.export import ExportedProgram

    from compress.artifacts.eager_model import EagerModel
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.core.stage import Stage
    from compress.quantization.numeric_debug.fidelity_report import Fidelity

logger = logging.getLogger(__name__)
LONGEST_FACT = 300
"""Characters of a fact in the log; the manifest has it whole."""


def save_quantized(
    stage: Stage[Any, GraphModel],
    model: EagerModel,
    program: ExportedProgram,
    quantized: Mapping[str, int],
    facts: dict[str, Any],
    context: Context,
    rescaled: Collection[str] = (),
) -> GraphModel:
    """Seal a quantized graph, with what is known of how near it stays to the float model.

    Args:
        stage: the stage that made it.
        model: the float model.
        program: the quantized graph.
        quantized: number of quantized operators by kind.
        facts: what else the stage found out.
        context: where the stage runs.
        rescaled: modules whose results were given other scales before, as equalization does, and
            which are therefore not compared one by one.

    Raises:
        StageFailed: its answers are not finite where the float model's are.
    """
    from compress.quantization.numeric_debug.compare import compare

    graph = program.module(check_guards=False)
    fidelity = compare(model.load(), graph, model.signature, context, rescaled)
    target = getattr(stage, "target", None)
    facts = facts if target is None else {"target": target, **facts}
    facts = log_and_collect_facts(stage.title, quantized, facts, fidelity)
    lineage = stage.lineage(model)
    return GraphModel.create(context.root, program, model.signature, lineage=lineage, facts=facts)


def log_and_collect_facts(
    title: str, quantized: Mapping[str, int], facts: dict[str, Any], fidelity: Fidelity
) -> dict[str, Any]:
    """Log what was quantized and how near it stays to float, and return it as facts."""
    counts = dict(sorted(quantized.items()))
    line = "; ".join(
        shorten(f"{name.replace('_', ' ')}: {value or 'none'}", LONGEST_FACT)
        for name, value in facts.items()
    )
    logger.info("%s: quantized %s; %s", title, counts, line)
    logger.info("%s: %s", title, fidelity.line())
    return {
        "quantized_operators": counts,
        **facts,
        "fidelity": fidelity.model_dump(mode="json"),
    }


def need_free_batch(signature: Signature, title: str) -> None:
    """Refuse to train a model that takes batches of one size.

    Raises:
        StageFailed: so it does.
    """
    if signature.batch_axis is None:
        raise StageFailed(
            f"{title}: the model takes batches of one size only, and training and evaluation need "
            "others; name the first axis in model.inputs (`batch`)"
        )


def check_exclude(patterns: tuple[str, ...], module: torch.nn.Module) -> None:
    """Refuse a pattern that names no module.

    Raises:
        PipelineInvalid: so it is; the message names the closest module.
    """
    names = [name for name, _ in module.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = get_close_matches(pattern, names, n=1, cutoff=0)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise PipelineInvalid(f"exclude: no module is named {pattern!r}{hint}")
