"""Shell completion of stage and run names; files are read unvalidated, for speed."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def stage_names(ctx: Any, incomplete: str) -> list[str]:
    """Return the stage names of the command line's pipeline file that start with `incomplete`."""
    import yaml

    from compress.pipelines.system import yaml_core

    # An option that still lacks its value ends the parsing before the file is found.
    words = (os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or "").split()
    files = [ctx.params.get("file"), *(word for word in words if word.endswith((".yaml", ".yml")))]
    file = next(Path(file) for file in (*files, "pipeline.yaml") if file)
    try:
        stages = yaml_core.load(file.read_text(encoding="utf-8"))["stages"]
        names = [str(stage.get("name") or stage["stage"]) for stage in stages]
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError, AttributeError):
        return []
    return [name for name in names if name.startswith(incomplete)]


def run_names(incomplete: str) -> list[tuple[str, str]]:
    """Return the runs below `runs/` that start with `incomplete`, each with its status."""
    found = []
    for file in sorted(Path("runs").glob("*/report.json")):
        if str(file.parent).startswith(incomplete):
            status = ""
            with suppress(OSError, ValueError, LookupError, TypeError):
                status = str(json.loads(file.read_text(encoding="utf-8"))["status"])
            found.append((str(file.parent), status))
    return found
