"""`compress certify`: judge an artifact's answers by its gates again, on new data or a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from compress.artifacts.artifact import Artifact
from compress.common.config import Settings
from compress.common.errors import PipelineInvalid
from compress.common.requirements import require_all
from compress.core.context import Context
from compress.core.devices import device_named
from compress.core.gates.runtime import baseline_name
from compress.core.stage import evaluate_gates, refusal
from compress.core.verdict import Verdict, explain
from compress.pipelines.commands.verify import (
    VerifierInputs,
    check_anchors,
    check_options,
    find_enclosing_run,
    verify_command,
)
from compress.pipelines.config.data_spec import FileData
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.data.records import WHOLE, read_parts
from compress.pipelines.planning.loss_and_metric import infer_loss_and_metric
from compress.pipelines.planning.planner import build_plan
from compress.pipelines.runner.inputs import resolve_inputs
from compress.pipelines.system.temp_files import temporary_files
from compress.serve.attestation import Certificate

if TYPE_CHECKING:
    from compress.core.gates.gate import Gate
    from compress.data.splits import Splits


class Certified(Settings):
    """An artifact and the verdicts on its answers."""

    artifact: str
    digest: str
    certificate: Certificate

    def lines(self) -> Iterator[str]:
        """Yield each verdict, and what its bound promises."""
        for verdict in self.certificate.verdicts:
            yield f"{'✓' if verdict.passed else '✗'} {explain(verdict)}"
            if verdict.bound:
                yield f"  {verdict.bound.statement()}"


def certify(
    artifact: Path | str,
    *,
    data: str | None = None,
    on: Sequence[str] = (),
    attest: Path | str | None = None,
    sign_key: Path | str | None = None,
) -> Certified:
    """Judge an artifact by those of its stage's gates that look at answers, and make nothing anew.

        compress.certify("runs/digits/artifacts/onnx", data="new_photos/", attest="onnx.json")

    The gates are those that the pipeline file has now; its code runs.

    Args:
        artifact: its folder, in that of the run that made it.
        data: file or folder in place of the one that `data:` names, or `module:function` in place
            of its factory; of several splits `val` is judged. By default the run's own data.
        on: devices of `compress devices`, in place of those that the gates name.
        attest: file of an attestation with the verdicts, which `compress verify` reads.
        sign_key: private key that signs it.

    Raises:
        PipelineInvalid: the stage has no such gate, or the data are not as the file says.
        ArtifactInvalid: an artifact is not as the run made it.
        GateRefused: a gate did not pass; nothing is written.
    """
    path, file, key = (Path(p) if p is not None else None for p in (artifact, attest, sign_key))
    assert path is not None
    check_options(path, {"attest": file}, key)
    run = find_enclosing_run(path)
    if run is None:
        raise PipelineInvalid(
            f"{path}: expected an artifact in the folder of its run, runs/NAME/artifacts/STAGE"
        )
    judged = Artifact.from_directory(path)
    check_anchors(judged, VerifierInputs(), run)  # before the pipeline's code runs
    pipeline = PipelineConfig.from_yaml(run.lock["file"])
    with temporary_files(), TemporaryDirectory(prefix="compress-certify-") as folder:
        plan, spec = build_plan(pipeline), pipeline
        pipeline, splits, _ = resolve_inputs(pipeline)
        if splits is None:
            raise PipelineInvalid(f"{pipeline.file}: there is no `data:` to judge answers on")
        judging = splits
        if data is not None and (found := resolve_inputs(_with_data(spec, splits, data))[1]):
            judging = found
        val = {name: judging.datasets[name] for name in ("val",) if name in judging.datasets}
        # Gates say what they need of `val`, and other stages what they need of the rest.
        planning = splits.replaced(datasets={**splits.datasets, **val})
        plan, pipeline = infer_loss_and_metric(plan, pipeline, planning)
        planned = plan.stage(run.name)
        gates = [gate for gate in planned.stage.gates if gate.depends_on_batch]
        if on:
            gates = [gate.model_copy(update={"on": tuple(on)}) for gate in gates]
        if not gates:
            task = plan.loss.task
            more = "" if task is not None and task.has_labels else ", error: …"
            raise PipelineInvalid(
                f"{pipeline.place('stages', planned.index)}: {run.name} has no gate that looks at "
                f"answers; add one to it, such as {{gate: max_disagreement, percent: 1{more}}}"
            )
        for device in (device_named(name) for gate in gates for name in gate.on):
            require_all(device.requirements, device.name)
        made = {name: Artifact.from_directory(a.path) for name, a in run.artifacts.items()}
        context = Context(
            root=Path(folder),
            data=judging,
            loss=plan.loss,
            metric=plan.metric,
            device=pipeline.device,
            threads=pipeline.threads,
            seed=pipeline.seed,
            artifacts={**made, run.name: judged},
            baseline=plan.baseline,
            served_batch_size=pipeline.served_batch_size,
            val_chose_nothing=judging.fingerprint() != run.lock.get("data"),
        )

        def evaluate(gate: Gate, before: Artifact, after: Artifact, context: Context) -> Verdict:
            against = baseline_name(gate, after.kind, planned.input, plan.baseline)
            verdict = gate.evaluate(before, after, context)
            return verdict.model_copy(update={"against": against if gate.compares else None})

        missing = {planned.input, *planned.compared} - made.keys()
        if missing:
            raise PipelineInvalid(f"{path}: {min(missing)}, which it is compared with, is not here")
        verdicts = evaluate_gates(gates, made[planned.input], judged, context, evaluate)
        certificate = Certificate(data=judging.fingerprint(), verdicts=verdicts)
    if error := refusal(run.name, verdicts, path):
        raise error
    if file is not None:
        verify_command(path, attest=file, sign_key=key, certificates=(certificate,))
    return Certified(artifact=str(path), digest=judged.digest, certificate=certificate)


def _with_data(pipeline: PipelineConfig, known: Splits, given: str) -> PipelineConfig:
    """Return a pipeline that reads other data in the same way; `val` is all that is undivided."""
    spec = pipeline.data
    assert spec is not None
    if isinstance(spec, FileData):
        changed: dict[str, Any] = {spec.key: str(Path(given).absolute()), "split": {}}
        whole = WHOLE in read_parts(spec.model_copy(update=changed), pipeline.folder)
        # New files may lack a class, and would number the others otherwise.
        names = getattr(next(iter(known.datasets.values())), "class_names", ())
        changed |= {"split": {"val": 1.0} if whole else {}, "classes": spec.classes or names}
    else:
        changed = {"factory": given, "arguments": {}}
    return pipeline.model_copy(update={"data": spec.model_copy(update=changed)})
