"""How servers call a model: its tensors, by calling it, and what was measured of it on `val`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, ValidationError

from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.common.sealed_json import read_report
from compress.profiling.batch_dependence import (
    ROWS,
    UNBOUNDED,
    BatchDependence,
    measure,
    rounding_tolerance,
    seeded_rows,
)
from compress.serve.packaging.request_forms import Forms, forms_of
from compress.serve.packaging.val_preparation import Preparation

if TYPE_CHECKING:
    import torch

    from compress.artifacts.artifact import Artifact
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.profiling.batch_dependence import Call
    from compress.serve.worker.tensors import Array

ANY = -1  # size of an axis that varies
PROBE_SIZES = (2, 3)  # rows of two calls; other named axes are EXTRA_LENGTH longer, to differ
EXTRA_LENGTH = 6
PROBE_ROWS = 4
REPORT = "report.json"
NOT_ON_AXIS_0 = "axis 0 of the inputs and outputs does not count the rows of a batch"
NO_BFLOAT16 = (
    "{} is bfloat16, which requests cannot carry; expected a model with float32 inputs and outputs"
)
NO_REPORT = (
    "no run's report shows that the rows of a batch do not influence each other; serve the "
    f"artifact in its run's folder, or give that run's {REPORT} with --report"
)


@dataclass(frozen=True)
class Tensor:
    """An input or output in a server's metadata."""

    name: str
    dtype: str
    """numpy's name."""
    shape: tuple[int, ...]
    """Sizes; ANY for an axis that varies."""


@dataclass(frozen=True)
class Interface:
    """A model's tensors."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    rows_stay_first: bool
    """Whether axis 0 of every tensor counts the same rows."""


def infer_interface(call: Call, signature: Signature) -> Interface:
    """Call a model with two sizes of every named axis; return its inputs and outputs.

    An output's axis is fixed if its size is the same in both calls; if the second call fails, every
    axis counts as varying.
    """
    refuse_bfloat16(signature)
    arrays: Any = [seeded_rows(signature, n, length=n + EXTRA_LENGTH) for n in PROBE_SIZES]
    answers: Any = _call_model(call, arrays[0], signature)
    second: Any = [None] * len(signature.outputs)
    with suppress(Exception):  # a model may refuse other sizes in any way
        second = _call_model(call, arrays[1], signature)
    outputs = []
    for spec, a, b in zip(signature.outputs, answers, second, strict=True):
        other = b.shape if b is not None and b.ndim == a.ndim else (None,) * a.ndim
        shape = tuple(n if n == m else ANY for n, m in zip(a.shape, other, strict=True))
        outputs.append(Tensor(spec.name, str(a.dtype), shape))
    # numpy's arrays have all that rows_stay_first uses of tensors.
    stays = rows_stay_first(call, signature, arrays[0], answers)
    inputs = tuple(
        Tensor(spec.name, spec.dtype, tuple(d if isinstance(d, int) else ANY for d in spec.shape))
        for spec in signature.inputs
    )
    return Interface(inputs, tuple(outputs), stays)


def rows_stay_first(
    predict: Callable[..., Iterable[Any]],
    signature: Signature,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> bool:
    """Return whether axis 0 of every output counts the same rows as axis 0 of every input."""
    # The model is called with another number of rows, because an axis of the same size may be
    # another one, like the layers of a recurrent state.
    first_axes = {next(iter(spec.shape), None) for spec in signature.inputs}
    if first_axes != {signature.batch_axis} or first_axes == {None}:
        return False
    rows = len(inputs[0])
    other = rows - 1 or 2
    indices = [i % rows for i in range(other)]
    try:
        others = predict(*(tensor[indices] for tensor in inputs))
    except Exception:  # noqa: BLE001 - a model may refuse other sizes in any way
        return False
    sizes = {(tuple(a.shape[:1]), tuple(b.shape[:1])) for a, b in zip(outputs, others, strict=True)}
    return sizes == {((rows,), (other,))}


def refuse_bfloat16(signature: Signature) -> None:
    """Raise StageFailed for a bfloat16 input, which no client could send."""
    for spec in signature.inputs:
        if spec.dtype == "bfloat16":
            raise StageFailed(NO_BFLOAT16.format(spec.name))


def refuse_code_for_gpu(model: Artifact, title: str, where: str) -> None:
    """Raise StageFailed for native code of another device than the CPU, which `where` names."""
    built_for: Any = model.manifest.facts.get("built_for", {"device": "cpu"})
    if built_for["device"] != "cpu":
        raise StageFailed(
            f"{title}: the package was compiled for {built_for['device']}, and {where}; compile it "
            "with `device: cpu`"
        )


def _call_model(call: Call, arrays: list[Array], signature: Signature) -> list[Array]:
    answers = list(call(*arrays))
    if len(answers) != len(signature.outputs):
        names = [output.name for output in signature.outputs]
        raise StageFailed(f"the model gives {len(answers)} outputs, its signature names {names}")
    return answers


class RecordedMeasurements(Settings):
    """Those of an artifact's measurements in a report that a server needs."""

    model_config = ConfigDict(extra="ignore")

    batch_dependence: BatchDependence | None = None
    """None where it was not measured, or nothing is known of the artifact."""
    preparation: tuple[Preparation, ...] = ()
    """Of images and texts."""

    def why_not_joined(self, artifact: Artifact, call: Call, *, rows_stay_first: bool) -> str:
        """Return why requests must not be batched, checked on seeded random rows, too."""
        if not rows_stay_first:
            return NOT_ON_AXIS_0
        if self.batch_dependence is None:
            return NO_REPORT
        if self.batch_dependence.why_not_joined:
            return self.batch_dependence.why_not_joined
        rows = seeded_rows(artifact.signature, 2 * ROWS)
        rounding = rounding_tolerance(artifact)
        if any(spec.holds_integers for spec in artifact.signature.inputs):
            # Made-up integers are 0 and 1. How far another batch size moves answers to such rows,
            # unlike those of `val`, says nothing, unless one is refused or infinite; that
            # neighbours change them does.
            rounding = UNBOUNDED / 2
        here = measure(call, artifact.signature, rows, source="seeded", rounding=rounding)
        return here.why_not_joined if here.depends else ""

    def served_forms(self, artifact: Artifact) -> tuple[Forms, list[str]]:
        """Return what a server takes (no images unlike those of `val`), and notes for its user."""
        forms, notes = dict(forms_of(artifact)), []
        measured = {each.form: each for each in self.preparation}
        for name in [*forms]:
            if (found := measured.get(name)) is None:
                notes.append(
                    f"no run's report shows that {name}s become inputs like those of `val`"
                )
            elif found.is_wrong:
                del forms[name]
                notes.append(f"{name}s are not taken: {found.difference}")
            elif found.difference:
                notes.append(found.difference)
        return forms, notes


def read_recorded(artifact: Artifact, report: Path | None) -> RecordedMeasurements:
    """Return what a report (by default in the run's folder) has measured of an artifact."""
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


@dataclass(frozen=True)
class Probe:
    """A few inputs, a model's outputs for them, and whether its requests may be batched."""

    arrays: Mapping[str, Array]
    signature: Signature
    """The model's, with which of NaN and infinities the inputs hold."""
    rows_stay_first: bool
    """Whether axis 0 of every tensor counts the same rows, whose number is variable."""
    not_joined: str
    """Why requests must not be batched; empty if they may."""


def record_probe(model: Artifact, context: Context, max_rows: int) -> Probe:
    """Run a model on a few rows of `val`, or on random inputs without data."""
    import torch

    signature = model.signature
    rows = min(PROBE_ROWS, max_rows)
    first_axis = signature.inputs[0].shape[:1]
    if first_axis and isinstance(first_axis[0], int):
        rows = first_axis[0]
    if context.data is not None and "val" in context.data.datasets:
        inputs = next(iter(context.data.batches("val", batch_size=rows, limit=rows))).inputs
    else:
        inputs = signature.example(batch=rows, seed=context.seed)
    with model.open("cpu", context.threads) as predict:
        outputs = predict(*inputs)
        stay_first = rows_stay_first(predict, signature, inputs, outputs)
    not_joined = why_not_joined(stay_first, context.batch_dependence(model))
    names = [*(spec.name for spec in signature.inputs), *(o.name for o in signature.outputs)]
    arrays: dict[str, Array] = {}
    for name, tensor in zip(names, (*inputs, *outputs), strict=True):
        if tensor.dtype == torch.bfloat16:
            raise StageFailed(f"package_torchserve: {NO_BFLOAT16.format(name)}")
        arrays[name] = tensor.detach().cpu().numpy()
    pairs = zip(signature.inputs, inputs, strict=True)
    specs = tuple(s.with_not_finite([x]) if s.dtype.startswith("float") else s for s, x in pairs)
    signature = signature.model_copy(update={"inputs": specs})
    return Probe(arrays, signature, stay_first, not_joined)


def why_not_joined(rows_stay_first: bool, dependence: BatchDependence) -> str:
    """Return why a server must not batch requests; empty if it may."""
    return dependence.why_not_joined if rows_stay_first else NOT_ON_AXIS_0
