"""The command line: parses options, calls `compress.pipelines.commands` and prints the results."""

from __future__ import annotations

import functools
import json
import os
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from compress.common.errors import PipelineInvalid
from compress.common.malloc import keep_freed_memory
from compress.pipelines.terminal import console
from compress.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from compress.artifacts.artifact import Artifact


class CommandGroup(TyperGroup):
    """The commands; absent flags of `compress` itself are False rather than None."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options that are parsed before the command's name.

        typer validates None with pydantic, whose import takes longer than all else that
        `compress run --help` does.
        """
        found = super().get_params(ctx)
        for option in found:
            if getattr(option, "is_flag", False) and option.default is None:
                option.default = False
        return found


def _examples(*lines: str) -> str:
    # Click keeps the lines of a paragraph that begins with \b.
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Take a trained PyTorch checkpoint to a small, fast, proven deployment artifact.",
    epilog=_examples("compress init", "compress check pipeline.yaml", "compress run pipeline.yaml"),
)


def command(*examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command with examples for its help; each takes --json, --quiet and --debug."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        wrapped = console.wrap_command(function, COMMON_OPTIONS)
        return app.command(epilog=_examples(*examples))(wrapped)

    return register


def stage_names(ctx: Any, incomplete: str) -> list[str]:
    """Complete a stage name of the command line's pipeline file, unvalidated, for speed."""
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
    """Complete the folder of a run below `runs/`, and show its status."""
    found = []
    for file in sorted(Path("runs").glob("*/report.json")):
        if str(file.parent).startswith(incomplete):
            status = ""
            with suppress(OSError, ValueError, LookupError, TypeError):
                status = str(json.loads(file.read_text(encoding="utf-8"))["status"])
            found.append((str(file.parent), status))
    return found


COMMON_OPTIONS = {
    "as_json": Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")],
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="Print errors alone.")],
    "debug": Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logs.")],
}
PipelineFile = Annotated[Path, typer.Argument(metavar="PIPELINE.YAML", help="The pipeline file.")]
MODEL_HELP = "A Hugging Face folder, timm:NAME, a .onnx, .pt2, .ts or .py file, module:callable."
ModelArguments = Annotated[
    list[str], typer.Option("--argument", help="Of the model, as classes=10.")
]
Checkpoint = Annotated[Path | None, typer.Option(help="Its weights.")]
ModelInputs = Annotated[list[str], typer.Option("--input", help="As x=batch,3,32,32:float32.")]
InitData = Annotated[
    str | None,
    typer.Option("--data", help="Your data: photos/, reviews.csv, digits.npz or module:callable."),
]
TaskOption = Annotated[str | None, typer.Option("--task", help="What it is for, as regression.")]
Out = Annotated[Path | None, typer.Option(help="Folder of results.", show_default="runs/<name>")]
Ratios = Annotated[list[float], typer.Option(help="Fraction of channels to cut; again for more.")]
RUN_ARGUMENT: dict[str, Any] = {
    "help": "A run's directory, its --out.",
    "autocompletion": run_names,
}
RunDirectory = Annotated[Path, typer.Argument(metavar="DIR", **RUN_ARGUMENT)]
STAGE_ARGUMENT: dict[str, Any] = {"metavar": "STAGE", "autocompletion": stage_names}
StageName = Annotated[str, typer.Argument(help="The stage's name, or `source`.", **STAGE_ARGUMENT)]
From = Annotated[
    str | None, typer.Option("--from", help="Run it and dependents again.", **STAGE_ARGUMENT)
]
Until = Annotated[str | None, typer.Option(help="Run it and what it needs.", **STAGE_ARGUMENT)]
ArtifactPath = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="An artifact's directory.")]
ArtifactOrMar = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="Its folder, or a .mar.")]
Quick = Annotated[bool, typer.Option("--quick", help="Leave out model and data.")]
Sha256 = Annotated[str | None, typer.Option(help="Its file's hash, or its digest.")]
ProofFile = Annotated[Path | None, typer.Option(help="Write the proof: .json, .md, .html.")]
Replay = Annotated[bool, typer.Option("--replay", help="Ask val again; runs its run's code.")]
StoreUrl = Annotated[str | None, typer.Option("--store", help="URL of a store to share, s3://…")]


def main() -> None:
    """Entry point of the `compress` command."""
    console.run_app(app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"compress {__version__}")
        raise typer.Exit


VERSION_OPTION: Any = {"callback": _version, "is_eager": True, "help": "Show the version."}


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", **VERSION_OPTION)] = False) -> None:
    pass


@command(
    "compress init my-bert",
    "compress init model.onnx",
    "compress init timm:resnet18 --checkpoint resnet.pt --data digits:splits",
    "compress init net.py pipeline.yaml --argument classes=10 --input x=batch,3,32,32",
    "compress init pipeline.yaml --slurm --nodes 2 --gpus-per-node 4",
)
def init(
    what: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None,
    file: Annotated[Path | None, typer.Argument(metavar="PIPELINE.YAML", help="To write.")] = None,
    model: Annotated[str | None, typer.Option(help="The same as MODEL.")] = None,
    argument: ModelArguments = [],  # noqa: B006
    checkpoint: Checkpoint = None,
    inputs: ModelInputs = [],  # noqa: B006
    data: InitData = None,
    target: Annotated[
        Literal["onnx", "torchscript", "aot"], typer.Option(help="Export format.")
    ] = "onnx",
    goal: Annotated[
        Literal["smaller", "faster", "both"], typer.Option(help="What to improve.")
    ] = "both",
    task: TaskOption = None,
    force: Annotated[bool, typer.Option(help="Overwrite an existing file.")] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write a batch script for Slurm.")] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the job.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="A process for each.")] = 0,
    cpus_per_node: Annotated[int | None, typer.Option(min=1, help="Cores; 8 for a GPU.")] = None,
    hours: Annotated[int, typer.Option(min=1, help="Time limit; the job is queued again.")] = 24,
    out: Out = None,
    script: Annotated[Path, typer.Option(help="The file to write.")] = Path("compress.sbatch"),
) -> None:
    """Write a pipeline file for your model."""
    if what is not None and file is None and what.endswith((".yaml", ".yml")):
        file, what = Path(what), None
    if what is not None and model is not None:
        raise PipelineInvalid(f"the model is given twice: {what} and --model {model}")
    model, file = model or what, file or Path("pipeline.yaml")
    if not slurm:
        from compress.pipelines.commands.init import InitOptions, write_draft

        options = InitOptions(model, argument, checkpoint, inputs, data, target, goal, task)
        draft = write_draft(file, options, force, console.get_prompter())
        console.print_result(draft.content(), draft.lines(), warnings=draft.warnings)
        return
    from compress.pipelines.executors.slurm import Cluster, write_script

    cluster = Cluster(
        nodes=nodes, gpus_per_node=gpus_per_node, cpus_per_node=cpus_per_node, hours=hours
    )
    to_do = write_script(script, file, out or Path("runs") / file.stem, cluster)
    lines = [f"{script}: submit it with `sbatch {script}`"]
    console.print_result({"file": str(script), "to_do": to_do}, lines, warnings=to_do)


@command("compress check pipeline.yaml")
def check(file: PipelineFile, quick: Quick = False) -> None:
    """Validate a pipeline without running its stages."""
    with console.fast_imports():
        from compress.pipelines.commands.check import check_pipeline

    content, lines, warnings = check_pipeline(file, models=not quick)
    console.print_result(content, lines, warnings=warnings)


@command(
    "compress run pipeline.yaml",
    "compress run pipeline.yaml --dry-run",
    "compress run pipeline.yaml --from quantize_static",
)
def run(
    file: PipelineFile,
    out: Out = None,
    start: From = None,
    until: Until = None,
    force: Annotated[bool, typer.Option(help="Run every stage again.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Branches at a time; 1.")] = None,
    engine: Annotated[Literal["local", "ray"], typer.Option(help="What runs branches.")] = "local",
    store: StoreUrl = None,
    dry_run: Annotated[bool, typer.Option(help="Show what would run, and run nothing.")] = False,
    repair: Annotated[bool, typer.Option(help="Try repairs where a gate refuses.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Judge quickly, and say so.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Count what each stage costs.")
    ] = False,
) -> None:
    """Run a pipeline; write the report and the artifacts."""
    with console.fast_imports():
        from compress.pipelines.api import Pipeline
        from compress.pipelines.executors.launched import joined_processes
    with joined_processes(file):
        pipeline = Pipeline.from_yaml(file)  # refused before torch is imported
        with console.fast_imports():
            from compress.pipelines.config.run_options import RunOptions
            from compress.pipelines.explain.command import repaired_on_refusal
            from compress.pipelines.runner.run import forked_measurement_process, preview_run
        directory = out or pipeline.default_out
        judge: Any = "quick" if quick else None
        options = RunOptions(start, until, force, jobs, engine, store, judge=judge, profile=profile)
        if dry_run:
            actions = preview_run(pipeline, directory, options)
            console.print_result(actions, (f"{name}: {action}" for name, action in actions.items()))
            return
        with (
            repaired_on_refusal(directory) if repair else nullcontext(),
            forked_measurement_process(pipeline, directory, options),
            console.show_progress() as (progress, announce),
        ):
            keep_freed_memory()
            pipeline.run(
                directory,
                options,
                progress=progress,
                announce=announce,
                finished=functools.partial(console.print_report, out=directory, error_follows=True),
            )


@command("compress report runs/pipeline --open")
def report(
    directory: RunDirectory,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show a run's report, and write its page again."""
    from compress.pipelines.reporting.html import rerender_report

    found = rerender_report(directory, console.notify)
    console.print_report(found, out=directory)
    if open_it:
        typer.launch(str((directory / "report.html").resolve()))


@command("compress explain runs/pipeline", "compress explain runs/pipeline --stage int8")
def explain(
    directory: RunDirectory,
    stage: Annotated[str | None, typer.Option(metavar="STAGE", help="Its gates alone.")] = None,
    gate: Annotated[str | None, typer.Option(help="This gate alone: max_drop.")] = None,
    time: Annotated[str, typer.Option(help="How long to search: 3m.")] = "3m",
) -> None:
    """Explain why a gate refused: the stage, its layers, the cause."""
    from compress.pipelines.explain.command import explain_and_print

    keep_freed_memory()
    explain_and_print(directory, stage, gate, time)


@command("compress repair runs/pipeline", "compress repair runs/pipeline --time 10m --best")
def repair(
    directory: RunDirectory,
    time: Annotated[str, typer.Option(help="How long to try: 10m.")] = "10m",
    best: Annotated[bool, typer.Option("--best", help="Go on for the fastest.")] = False,
    allow: Annotated[Literal["train"] | None, typer.Option(help="What else may be tried.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Change the pipeline file.")] = False,
) -> None:
    """Try what would make a refused run pass all of its gates."""
    from compress.pipelines.explain.command import repair_and_print

    keep_freed_memory()
    repair_and_print(directory, time, best, allow == "train", apply)


@command("compress why pipeline.yaml prune_channels")
def why(file: PipelineFile, stage: StageName, out: Out = None, store: StoreUrl = None) -> None:
    """Show why a stage runs, or comes from the cache."""
    from compress.pipelines.commands.cache_miss import why as explain
    from compress.pipelines.config.pipeline import PipelineConfig

    pipeline = PipelineConfig.from_yaml(file)
    reason = explain(pipeline, out or pipeline.default_out, stage, store)
    console.print_result(reason, reason.lines())


@command("compress diff runs/before runs/after", "compress diff before.json after.json")
def diff(before: RunDirectory, after: RunDirectory) -> None:
    """Show the differences between two runs, or attestations."""
    from compress.pipelines.reporting.terminal_table import difference_lines, difference_table
    from compress.pipelines.results.comparison import compare

    found = compare(before, after)
    console.print_result(found, difference_lines(found), lambda _: difference_table(found))


def describe_artifact(found: Artifact) -> list[str]:
    """Return lines for the signature, recipe, lineage and files of an artifact's manifest."""
    recipe, lineage, files = found.manifest.recipe, found.manifest.lineage, found.manifest.files
    signature = found.manifest.signature.model_dump(mode="json")
    lines = [f"{found.kind} artifact, digest {found.digest}"]
    for label in ("inputs", "outputs"):
        for spec in signature[label]:
            shape = f" {spec['dtype']} {spec['shape']}" if "shape" in spec else ""
            lines.append(f"  {label[:-1]} {spec['name']}{shape}")
    if recipe:
        lines.append(f"  built by {recipe.factory} {recipe.arguments}")
    lines += [f"  after {s.stage} {json.dumps(s.settings, default=str)}" for s in lineage]
    lines += [f"  file {n}  {f.bytes} bytes  sha256 {f.sha256}" for n, f in files.items()]
    # A name from an untrusted manifest could forge another line.
    return [line.replace("\n", r"\n") for line in lines]


@command("compress inspect runs/pipeline/artifacts/export_onnx")
def inspect(artifact: ArtifactPath) -> None:
    """Show an artifact's metadata."""
    from compress.artifacts.artifact import Artifact

    found = Artifact.from_directory(artifact)
    console.print_result(
        {"digest": found.digest} | found.manifest.model_dump(mode="json"), describe_artifact(found)
    )


@command(
    "compress verify model.mar",
    "compress verify runs/pipeline/artifacts/export_onnx --report proof.html",
)
def verify(
    artifact: ArtifactOrMar,
    sha256: Sha256 = None,
    attestation: Annotated[Path | None, typer.Option(help="An in-toto file that names it.")] = None,
    key: Annotated[Path | None, typer.Option(help="Public key that signed it, PEM.")] = None,
    attest: Annotated[Path | None, typer.Option(help="Write an in-toto attestation.")] = None,
    model_signature: Annotated[Path | None, typer.Option(help="Write OpenSSF's.")] = None,
    sign_key: Annotated[Path | None, typer.Option(help="Private key to sign them, PEM.")] = None,
    report: ProofFile = None,
    replay: Replay = False,
) -> None:
    """Check an artifact against its manifest and its run."""
    from compress.pipelines.commands.verify import VerifierInputs, verify_command

    options: Any = {"report": report, "attest": attest, "sign_key": sign_key, "replay": replay}
    options["model_signature"] = model_signature
    proof = verify_command(artifact, VerifierInputs(sha256, attestation, key), **options)
    found = {"artifact": str(artifact)} | proof.model_dump(mode="json")
    console.print_result(found, proof.summary_lines())


@command(
    "compress certify runs/pipeline/artifacts/onnx --data new_photos --attest certificate.json",
    "compress certify runs/pipeline/artifacts/onnx --on cortex-a72,web",
)
def certify(
    artifact: ArtifactPath,
    data: Annotated[str | None, typer.Option(help="New data, as `data:` names its own.")] = None,
    on: Annotated[str, typer.Option(help="Devices that answer, with commas.")] = "",
    attest: Annotated[Path | None, typer.Option(help="Write an in-toto attestation.")] = None,
    sign_key: Annotated[Path | None, typer.Option(help="Private key to sign it, PEM.")] = None,
) -> None:
    """Judge an artifact's answers by its gates again, on new data."""
    from compress.pipelines.commands.certify import certify as judge_again

    keep_freed_memory()
    devices = tuple(filter(None, on.split(",")))
    found = judge_again(artifact, data=data, on=devices, attest=attest, sign_key=sign_key)
    console.print_result(found, found.lines())


@command(
    "compress serve runs/pipeline/artifacts/export_onnx",
    "compress serve model.mar --port 8080",
    "compress serve net.onnx",
    "compress serve A=runs/a/artifacts/onnx A@2=runs/b/artifacts/onnx --canary A@2=5%",
    "compress serve --watch models --grpc-port 8001",
    "compress serve runs/pipeline/artifacts/export_onnx --shadow 1%",
)
def serve(
    artifacts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME[@VERSION]=]ARTIFACT...", help="Folders, .mar, .onnx."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080,
    token_file: Annotated[Path | None, typer.Option(help="File with the token.")] = None,
    sha256: Sha256 = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Concurrent calls; the cores.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that answer.")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of a call; 1.")] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Rows of a request, and a call.")] = 128,
    max_mib: Annotated[int, typer.Option(min=1, help="Mebibytes of a request.")] = 8,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 128,
    seconds: Annotated[float, typer.Option(min=0.001, help="Time for a request.")] = 30,
    report: Annotated[Path | None, typer.Option(help="The run's report.json.")] = None,
    watch: Annotated[Path | None, typer.Option(help="Folder of NAME/VERSION to follow.")] = None,
    canary: Annotated[
        list[str] | None, typer.Option(help="NAME@VERSION=5%: its share of requests.")
    ] = None,
    repository_api: Annotated[
        bool, typer.Option("--repository-api", help="Let clients load and unload models.")
    ] = False,
    grpc_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Answer over gRPC there, too.")
    ] = None,
    traces: Annotated[str, typer.Option(help="URL of an OTLP collector for traces.")] = "",
    shadow: Annotated[str | None, typer.Option(help="1%: share of answers to compare.")] = None,
    shadow_limit: Annotated[str | None, typer.Option(help="1%: other answers allowed.")] = None,
    shadow_model: Annotated[Path | None, typer.Option(help="The uncompressed model.")] = None,
    shadow_reference: Annotated[
        Path | None,
        typer.Option(help="Rows of val, .npz or pipeline file, in place of an uncompressed model."),
    ] = None,
    shadow_state: Annotated[Path | None, typer.Option(help="Keeps what was found.")] = None,
    shadow_readiness: Annotated[
        bool, typer.Option("--shadow-readiness", help="Not ready once it alarms.")
    ] = False,
) -> None:
    """Serve models over HTTP."""
    with console.fast_imports():
        from compress.serve.http.options import Limits, Options
        from compress.serve.serve_command import canary_shares, serve_artifacts, shadow_options
    from compress.pipelines.commands.reference_rows import reference_rows

    watched: Any = {"model": shadow_model, "state": shadow_state}
    watched |= {"decides_readiness": shadow_readiness}
    sizes: Any = {"workers": workers, "processes": processes, "threads": threads, "report": report}
    sizes |= {"sha256": sha256, "watch": watch, "canaries": canary_shares(canary or [])}
    sizes |= {"repository_api": repository_api, "grpc_port": grpc_port, "traces": traces}
    limits = Limits(max_mib * 2**20, max_rows, queue, seconds)
    with reference_rows(shadow_reference) as rows:
        watched |= {"reference": rows}
        sizes |= {"shadow": shadow_options(artifacts or [], shadow, shadow_limit, **watched)}
        serve_artifacts(
            artifacts or [],
            Options(host, port, limits=limits, **sizes),
            token_file,
            lambda p: console.print_result(asdict(p), p.lines(), indent=None),
        )


@command("compress monitor runs/pipeline/artifacts/export_onnx.shadow.json --html monitor.html")
def monitor(
    state: Annotated[Path, typer.Argument(metavar="STATE", help="ARTIFACT.shadow.json.")],
    html: Annotated[Path | None, typer.Option(help="Write a page with a plot.")] = None,
) -> None:
    """Show what a server's shadow has found; exit 3 if broken."""
    from compress.pipelines.commands.monitor import monitor_command

    monitor_command(state, html)


@command('compress generate runs/lm/artifacts/export_genai "The "')
def generate(
    artifact: ArtifactPath,
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Continue a text with a model of export_genai."""
    with console.fast_imports():
        from compress.export.genai.text import continue_text
    found = continue_text(artifact, prompt, tokens, threads)
    console.print_result(asdict(found), found.lines())


@command(
    "compress bench runs/pipeline/artifacts/onnx runs/pipeline/artifacts/torchscript",
    "compress bench runs/pipeline/artifacts/train --runtimes onnx,aot --html bench.html",
    "compress bench runs/pipeline/artifacts/onnx --web page.html",
)
def bench(
    artifacts: Annotated[
        list[Path], typer.Argument(metavar="ARTIFACT...", help="Directories of artifacts.")
    ],
    runtimes: Annotated[str, typer.Option(help="Export one artifact to these too: onnx,aot.")] = "",
    batch: Annotated[str, typer.Option(help="Rows of a call: by default 1,8,32.")] = "",
    threads: Annotated[str, typer.Option(help="CPU threads of a call.")] = "1",
    seconds: Annotated[float, typer.Option(min=0.01, help="Measured for each figure.")] = 0.6,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots.")] = None,
    web: Annotated[Path | None, typer.Option(help="Write a page for browsers.")] = None,
) -> None:
    """Measure artifacts in turn, and name the fastest."""
    with console.fast_imports():
        from compress.common.atomic_files import write_atomically
        from compress.pipelines.bench import bench as measure
        from compress.pipelines.bench import bench_page, parse_numbers
        from compress.pipelines.reporting.notebook import view_table

    found = measure(
        *artifacts,
        runtimes=[name.strip() for name in runtimes.split(",") if name.strip()],
        batch=parse_numbers("--batch", batch) if batch else None,
        threads=parse_numbers("--threads", threads),
        seconds=seconds,
        web=web,
    )
    if html is not None:
        write_atomically(html, bench_page(found))
    console.print_result(found, found.lines(), lambda _: view_table(found))


@command(
    "compress package runs/pipeline/artifacts/export_onnx --image build/image",
    "compress package runs/pipeline/artifacts/export_onnx --image build/oci --base python-slim",
    "compress package runs/pipeline/artifacts/prune_channels --transformers build/small",
)
def package(
    artifact: ArtifactPath,
    image: Annotated[Path | None, typer.Option(help="Folder of an image (onnx, openvino).")] = None,
    transformers: Annotated[Path | None, typer.Option(help="Folder for from_pretrained.")] = None,
    base: Annotated[Path | None, typer.Option(help="OCI layout to add a layer to.")] = None,
    sign_key: Annotated[Path | None, typer.Option(help="Signs the attestation, PEM.")] = None,
) -> None:
    """Write a container image, or a folder that transformers opens."""
    with console.fast_imports():
        from compress.pipelines.commands.verify import verify_command
        from compress.serve.image.container_image import write_build_folder, write_image_layout

    def attest(file: Path) -> None:
        verify_command(artifact, attest=file, sign_key=sign_key)

    packaged: Any
    if image is not None and transformers is None:
        if base is None:
            packaged = write_build_folder(artifact, image, attest)
        else:
            packaged = write_image_layout(artifact, image, base, attest)
    elif transformers is None or image is not None:
        raise PipelineInvalid("name one folder to write: --image DIR or --transformers DIR")
    elif base or sign_key:
        raise PipelineInvalid("--base and --sign-key are for --image")
    else:
        from compress.artifacts.libraries.transformers_folder import write_transformers_folder

        packaged = write_transformers_folder(artifact, transformers)
    console.print_result(asdict(packaged), packaged.lines())


@command("compress sensitivity pipeline.yaml --ratio 0.25 --ratio 0.5")
def sensitivity(
    file: PipelineFile,
    out: Out = None,
    ratio: Ratios = [0.25, 0.5, 0.75],  # noqa: B006 - typer copies it
    samples: Annotated[int, typer.Option(min=1, help="Samples of val to judge on.")] = 512,
    latency: Annotated[bool, typer.Option(help="Measure the latency of each cut.")] = True,
) -> None:
    """Measure what pruning each group of channels costs."""
    from compress.pipelines.commands import sensitivity as analysis

    keep_freed_memory()
    analysis.show(analysis, file, out, ratios=ratio, samples=samples, latency=latency)


@command("compress latency pipeline.yaml --batch 8")
def latency(
    file: PipelineFile,
    out: Out = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a call.")] = 1,
) -> None:
    """Predict a model's latency at other widths, by its kernels."""
    from compress.pipelines.commands import latency as analysis
    from compress.pipelines.commands.sensitivity import show

    show(analysis, file, out, batch=batch)


@command(
    "compress auto my-vit --data photos/ --max-drop 0.5 --latency 2ms",
    "compress auto pipeline.yaml --max-drop 0.5 --latency 2ms --time 10m",
    "compress auto pipeline.yaml --tables latency_tables.json",
)
def auto(
    what: Annotated[str, typer.Argument(metavar="MODEL|PIPELINE.YAML", help=MODEL_HELP)],
    data: InitData = None,
    argument: ModelArguments = [],  # noqa: B006
    checkpoint: Checkpoint = None,
    inputs: ModelInputs = [],  # noqa: B006
    task: TaskOption = None,
    out: Out = None,
    max_drop: Annotated[float | None, typer.Option(min=0, help="Points it may lose: 0.5.")] = None,
    latency: Annotated[str | None, typer.Option(help="Longest median call: 2ms, 500us.")] = None,
    p95: Annotated[str | None, typer.Option(help="Longest call but for 5 in 100: 3ms.")] = None,
    size: Annotated[str | None, typer.Option(help="Largest file: 1MB.")] = None,
    memory: Annotated[str | None, typer.Option(help="Most memory to open and call: 64MiB.")] = None,
    time: Annotated[str | None, typer.Option(help="How long to search: 10m.")] = None,
    points: Annotated[int | None, typer.Option(min=1, help="Pipelines written at most; 8.")] = None,
    tables: Annotated[Path | None, typer.Option(help="Latency tables of what will serve.")] = None,
    tables_only: Annotated[bool, typer.Option("--tables-only", help="Write such tables.")] = False,
) -> None:
    """Search the widths and formats that lose least under limits."""
    from compress.pipelines.auto.command import search_and_print
    from compress.pipelines.commands.init import InitOptions

    options = InitOptions(what, argument, checkpoint, inputs, data, task=task)
    limits: Any = {"max_drop": max_drop, "latency": latency, "p95": p95, "size": size}
    limits |= {"memory": memory, "time": time, "points": points}
    keep_freed_memory()
    search_and_print(options, out, tables, tables_only, **limits)


@command("compress doctor")
def doctor() -> None:
    """Show versions, hardware, and missing requirements."""
    with console.fast_imports():
        from compress.pipelines.commands.doctor import examine

    found = examine()
    console.print_result(found, found.lines())


@command("compress devices", "compress devices --prepare cortex-a72")
def devices(
    prepare: Annotated[list[str], typer.Option(help="Fetch what a device needs.")] = [],  # noqa: B006
    qemu: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Your own QEMU, version 10 or later; it is copied."
        ),
    ] = None,
) -> None:
    """List the devices that a gate can name in `on`."""
    with console.fast_imports():
        from compress.core import devices as registry

    for device in [registry.device_named(name) for name in prepare]:
        device.prepare(qemu, console.notify)
    lines, content = [], {}
    for name, device in registry.devices().items():
        missing = [need.problem for need in device.requirements if need.missing()]
        lines.append(f"{'✗' if missing else '✓'} {'; '.join((device.title, *missing))}")
        content[name] = {"device": device.title, "missing": missing}
    console.print_result(content, lines)


@command("compress gc runs/pipeline --older-than 8w --dry-run")
def gc(
    place: Annotated[str, typer.Argument(metavar="DIR|URL", **RUN_ARGUMENT)],
    older_than: Annotated[str, typer.Option(help="Unused for so long: 12h, 30d, 8w.")] = "30d",
    dry_run: Annotated[bool, typer.Option(help="Show what would go, and remove nothing.")] = False,
) -> None:
    """Delete cached results that were not used lately."""
    from compress.pipelines.store.gc import clean

    found = clean(place, older_than, dry_run, console.notify)
    console.print_result(found, found.lines())


@command("compress schema > pipeline.schema.json")
def schema() -> None:
    """Print the JSON Schema of the pipeline file, for editors."""
    from compress.pipelines.config.pipeline import json_schema

    content = json_schema()
    console.print_result(content, json.dumps(content, indent=1).splitlines())


if __name__ == "__main__":  # torchrun -m compress.cli
    main()
