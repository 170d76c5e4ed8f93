"""What a run's report says of an artifact, for servers, which have no data to measure it again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import ConfigDict, ValidationError

from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid
from compress.common.sealed_json import read_report
from compress.profiling.batch_dependence import BatchDependence
from compress.serve.packaging.request_forms import forms_of
from compress.serve.packaging.val_preparation import Preparation

if TYPE_CHECKING:
    from pathlib import Path

    from compress.artifacts.artifact import Artifact
    from compress.serve.packaging.request_forms import RequestForms

REPORT = "report.json"


class RecordedMeasurements(Settings):
    """Those of an artifact's measurements in a report that a server needs."""

    model_config = ConfigDict(extra="ignore")

    batch_dependence: BatchDependence | None = None
    """None where it was not measured, or nothing is known of the artifact."""
    preparation: tuple[Preparation, ...] = ()
    """Of images and texts."""


def read_recorded(artifact: Artifact, report: Path | None) -> RecordedMeasurements:
    """Return what a report measured of an artifact; by default that in its run's folder, if any.

    Raises:
        ArtifactInvalid: `report` is no run's report, or does not measure this artifact.
    """
    file = report or artifact.path.resolve().parent.parent / REPORT
    try:
        content, _ = read_report(file)
        for stage in content["stages"]:
            if stage["artifact"]["digest"] == artifact.digest:
                measured = RecordedMeasurements.model_validate(stage["measurements"])
                if measured.batch_dependence is not None:
                    return measured
        why = f"says nothing of {artifact.path} (digest {artifact.digest[:12]})"
    except ArtifactInvalid as error:
        why = str(error).removeprefix(f"{file}: ")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ValidationError) as error:
        why = f"is not a report of a run ({type(error).__name__})"
    if report is not None:
        raise ArtifactInvalid(f"{report}: {why}; expected the {REPORT} of the run that made it")
    return RecordedMeasurements()


def served_forms(artifact: Artifact, report: Path | None) -> tuple[RequestForms, list[str]]:
    """Return the images, texts and class names that a server takes, and notes for its user.

    Images that become other inputs than those that the model was validated on are not taken.

    Raises:
        ArtifactInvalid: as :func:`read_recorded`, or a carried file was changed after sealing.
    """
    forms, notes = forms_of(artifact), []
    measured = {each.form: each for each in read_recorded(artifact, report).preparation}
    taken = [name for name, form in (("image", forms.image), ("text", forms.text)) if form]
    for name in taken:
        if (found := measured.get(name)) is None:
            notes.append(f"no run's report shows that {name}s become inputs like those of `val`")
        elif found.is_wrong:
            forms = replace(forms, image=None)
            notes.append(f"{name}s are not taken: {found.difference}")
        elif found.difference:
            notes.append(found.difference)
    return forms, notes
