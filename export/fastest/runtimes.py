"""Runtimes by name, and the stage with default settings that exports to each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from compress.common.errors import StageFailed, Unavailable
from compress.core.stage import members_of
from compress.export.exporter import EXPORTERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.export.exporter import Exporter

Runtime = Literal["onnx", "torchscript", "aot", "openvino"]
RUNTIMES: dict[Runtime, Callable[[], Exporter[Any, Any]]] = {
    name: cast("Any", EXPORTERS[name]) for name in get_args(Runtime)
}


def export_to(
    runtimes: tuple[Runtime, ...], model: Artifact, context: Context
) -> tuple[dict[str, Artifact], dict[str, str]]:
    """Export a model to runtimes, each into a folder of the context's; each file is checked.

    Returns:
        The artifacts by runtime, and the reasons for those that could not be written, such as a
        missing compiler or an operator that the runtime lacks.
    """
    exported: dict[str, Artifact] = {}
    failures: dict[str, str] = {}
    for runtime in runtimes:
        stage = RUNTIMES[runtime]()
        reads = members_of(stage.reads())
        if not isinstance(model, reads):
            kinds = " or ".join(kind.kind for kind in reads)
            failures[runtime] = f"{stage.stage} reads {kinds}, and the model is {model.kind}"
            continue
        try:
            exported[runtime] = stage.run_checked(model, context.with_root(context.root / runtime))
        except (StageFailed, Unavailable) as error:
            failures[runtime] = str(error)
    return exported, failures
