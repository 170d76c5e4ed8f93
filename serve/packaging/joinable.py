"""Whether a server may answer requests together: only where rows of `val` have shown it.

One decision for the built-in server, TorchServe, Triton and KServe. Packaging stages measure what
they pack, on rows of `val`. ``compress serve``, which has no data, takes what a run's report says
of the same artifact, and asks the model seeded rows on this machine besides.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from compress.common.atomic_files import open_regular
from compress.common.errors import ArtifactInvalid
from compress.common.strict_json import refuse_changed_run
from compress.profiling.batch_dependence import BatchDependence, measure, rounding_tolerance
from compress.profiling.probe_rows import ROWS, seeded_rows

if TYPE_CHECKING:
    from pathlib import Path

    from compress.artifacts.artifact import Artifact
    from compress.profiling.batch_dependence import Call

REPORT, LOCK = "report.json", "lock.json"
OTHER_AXES = "axis 0 of the inputs and outputs does not count the rows of a batch"
NO_REPORT = (
    "no run's report shows that rows leave each other's answers alone; serve the artifact in its "
    f"run's folder, or give that run's {REPORT} with --report"
)


def why_not_joined(rows_stay_first: bool, dependence: BatchDependence) -> str:
    """Return why a server must not answer requests together; empty where it may.

    Args:
        rows_stay_first: whether axis 0 of every tensor counts the same rows.
        dependence: what rows of `val` have shown.
    """
    return dependence.why_not_joined if rows_stay_first else OTHER_AXES


def why_not_joined_here(
    artifact: Artifact, call: Call, rows_stay_first: bool, report: Path | None
) -> str:
    """Return the same for an artifact that is served without data.

    Args:
        artifact: what is served.
        call: its model as a function of arrays.
        rows_stay_first: whether axis 0 of every tensor counts the same rows.
        report: a run's report.json; by default that of the folder in which the artifact lies.

    Raises:
        ArtifactInvalid: the report that was given is none, or says nothing of this artifact.
    """
    recorded = recorded_dependence(artifact, report)
    if not rows_stay_first:
        return OTHER_AXES
    if recorded is None or recorded.why_not_joined:
        return NO_REPORT if recorded is None else recorded.why_not_joined
    rows = seeded_rows(artifact.signature, 2 * ROWS)
    rounding = rounding_tolerance(artifact)
    here = measure(call, artifact.signature, rows, source="seeded", rounding=rounding)
    return here.why_not_joined if here.depends else ""


def recorded_dependence(artifact: Artifact, report: Path | None) -> BatchDependence | None:
    """Return what a run's report says of an artifact; None where none lies around it.

    Raises:
        ArtifactInvalid: the report that was given is none, or says nothing of this artifact.
    """
    file = report or artifact.path.resolve().parent.parent / REPORT
    try:
        content = _json_in(file)
        if (lock := file.parent / LOCK).is_file():  # a copy of the report may lie alone
            refuse_changed_run(content, _json_in(lock))
        for stage in content["stages"]:
            if stage["artifact"]["digest"] == artifact.digest:
                found = stage["measurements"].get("batch_dependence")
                if found is not None:
                    return BatchDependence.model_validate(found)
        why = f"says nothing of {artifact.path} (digest {artifact.digest[:12]})"
    except ArtifactInvalid as error:
        why = str(error).removeprefix(f"{file}: ")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ValidationError) as error:
        why = f"is no report of a run ({type(error).__name__})"
    if report is not None:
        raise ArtifactInvalid(f"{report}: {why}; expected the {REPORT} of the run that made it")
    return None


def _json_in(file: Path) -> Any:
    with open_regular(file) as stream:
        return json.load(stream)
