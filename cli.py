"""The command line: reads arguments, shows what the packages say, turns errors into exit codes."""

from __future__ import annotations

import functools
import io
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from compress import __version__
from compress.core.errors import PipelineInvalid
from pipelines import importing, interruption
from pipelines.terminal import command, say, show, tell, warn

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Take a trained PyTorch checkpoint to a small, fast, proven deployment artifact.",
)
PipelineFile = Annotated[Path, typer.Argument(metavar="PIPELINE.YAML", help="The pipeline file.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logs.")]
Out = Annotated[Path | None, typer.Option(help="Folder of results.", show_default="runs/<name>")]
Ratios = Annotated[list[float], typer.Option(help="Fraction of channels to cut; again for more.")]
RunDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="A run's directory, its --out.")]
ArtifactPath = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="An artifact's directory.")]
OrMar = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="Its directory, or a bare .mar.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


def main() -> None:
    """Entry point of the `compress` command."""
    interruption.listen()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a lesser encoding must not end a run
    try:
        app()
    except SystemExit as end:
        raise SystemExit(interruption.exit_code() or end.code) from None
    finally:
        interruption.ignore()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"compress {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
@command
def run(
    file: PipelineFile,
    out: Out = None,
    start: Annotated[str | None, typer.Option("--from", help="Run from here on again.")] = None,
    until: Annotated[str | None, typer.Option(help="Stop after this stage.")] = None,
    force: Annotated[bool, typer.Option(help="Run every stage again.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Show what would run, and run nothing.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors alone.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Walk a pipeline; write the report and the artifacts."""
    with importing.quickly():
        from pipelines.pipeline import Pipeline
        from pipelines.progress import shown
        from pipelines.run import foresee

    pipeline = Pipeline.from_yaml(file)
    directory = out or Path("runs") / pipeline.name
    options: dict[str, Any] = {"start": start, "until": until, "force": force}
    if dry_run:
        foreseen = foresee(pipeline, directory, **options)
        tell(as_json, foreseen, (f"{name}: {what}" for name, what in foreseen.items()))
        return
    finished = functools.partial(show, out=directory, as_json=as_json, quiet=quiet)
    with shown(quiet=as_json or quiet) as (progress, announce):
        pipeline.run(directory, **options, progress=progress, announce=announce, finished=finished)


@app.command()
@command
def join(
    directory: RunDirectory,
    wait: Annotated[float, typer.Option(min=0, help="Seconds within which the run begins.")] = 600,
    silence: Annotated[float, typer.Option(min=5, help="Seconds until it counts as dead.")] = 60,
    debug: Debug = False,
) -> None:
    """Take part in a run's trainings on another node."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a run that ended is no stack trace
    from pipelines.joining import join as take_part

    take_part(directory, say, wait=wait, silence=silence)


@app.command()
@command
def check(file: PipelineFile, as_json: AsJson = False, debug: Debug = False) -> None:
    """Refuse what can be refused without running a stage."""
    from pipelines.pipeline import Pipeline
    from pipelines.plan import make_plan

    pipeline = Pipeline.from_yaml(file)
    plan = make_plan(pipeline)
    from pipelines.inputs import check_model

    signature, told = check_model(pipeline)
    for warning in () if as_json else plan.warnings:
        warn(f"warning: {warning}", "yellow")
    content = {"valid": True, **plan.described(), "signature": signature.model_dump(mode="json")}
    tell(as_json, content, [*filter(None, [told]), f"{file}: valid ({plan.road})"])


@app.command()
@command
def sensitivity(
    file: PipelineFile,
    out: Out = None,
    ratio: Ratios = [0.25, 0.5, 0.75],  # noqa: B006 - typer copies it
    samples: Annotated[int, typer.Option(min=1, help="Samples of val to judge on.")] = 512,
    latency: Annotated[bool, typer.Option(help="Measure the latency of each cut.")] = True,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what cutting each family of channels does."""
    from pipelines.pipeline import Pipeline
    from pipelines.progress import shown
    from pipelines.sensitivity import lines_below, measure, table

    pipeline = Pipeline.from_yaml(file)
    directory = out or Path("runs") / pipeline.name
    with shown(quiet=as_json) as (progress, _):
        found = measure(pipeline, directory, ratio, samples, latency, progress)
    tell(as_json, found, lines_below(found, directory), lambda _: table(found))


@app.command()
@command
def schema(debug: Debug = False) -> None:
    """Print the JSON Schema of the pipeline file, for editors."""
    from pipelines.pipeline import json_schema

    typer.echo(json.dumps(json_schema(), indent=1))


@app.command()
@command
def inspect(artifact: ArtifactPath, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show what an artifact says about itself."""
    from compress.core.artifact import Artifact
    from pipelines import catalog  # noqa: F401 - importing it makes every kind known
    from pipelines.inspection import described

    found = Artifact.at(artifact)
    content = found.manifest.model_dump(mode="json")
    tell(as_json, {"digest": found.digest, **content}, described(found))


@app.command()
@command
def verify(
    artifact: OrMar,
    sha256: Annotated[str | None, typer.Option(help="What its file must hash to.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write what was proven, as JSON.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Prove an artifact is what was sealed; serve a .mar."""
    from pipelines.evidence import prove

    proof = prove(artifact, sha256, report)
    content = {"artifact": str(artifact), **proof.model_dump(mode="json")}
    tell(as_json, content, proof.told())


@app.command()
@command
def why(
    file: PipelineFile,
    stage: Annotated[str, typer.Argument(metavar="STAGE", help="The stage's name, or `source`.")],
    out: Out = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what decides a stage, and why it is cached or runs."""
    from pipelines.pipeline import Pipeline
    from pipelines.why import why as explain

    pipeline = Pipeline.from_yaml(file)
    reason = explain(pipeline, out or Path("runs") / pipeline.name, stage)
    tell(as_json, reason, reason.lines())


@app.command()
@command
def diff(
    before: RunDirectory, after: RunDirectory, as_json: AsJson = False, debug: Debug = False
) -> None:
    """Show two runs side by side, as far as they differ."""
    from pipelines.diff import compare
    from pipelines.table import difference_lines, difference_table

    found = compare(before, after)
    tell(as_json, found, difference_lines(found), lambda _: difference_table(found))


@app.command()
@command
def report(
    directory: RunDirectory,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show a run's report again, and write its page anew."""
    from pipelines.report import Report

    found = Report.read(directory)
    found.write(directory)
    show(found, out=directory, as_json=as_json)
    if open_it:
        typer.launch(str((directory / "report.html").resolve()))


@app.command()
@command
def doctor(as_json: AsJson = False, debug: Debug = False) -> None:
    """Show what this machine has, and what each stage lacks."""
    from pipelines.doctor import examine

    found = examine()
    tell(as_json, found, found.lines())


@app.command()
@command
def serve(
    artifact: OrMar,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080,
    token_file: Annotated[Path | None, typer.Option(help="File with the token.")] = None,
    sha256: Annotated[str | None, typer.Option(help="What its file must hash to.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Concurrent calls; the cores.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that answer.")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of a call; 1.")] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Rows of a request, and a call.")] = 128,
    max_mib: Annotated[int, typer.Option(min=1, help="Mebibytes of a request.")] = 8,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 128,
    seconds: Annotated[float, typer.Option(min=0.001, help="Time for a request.")] = 30,
    debug: Debug = False,
) -> None:
    """Answer over HTTP until a signal; a .mar by TorchServe."""
    from pipelines import catalog  # noqa: F401 - importing it makes every kind known
    from serve.foreground import serve_artifact
    from serve.options import Limits, Options

    sizes: Any = {"workers": workers, "processes": processes, "threads": threads, "sha256": sha256}
    options = Options(host, port, limits=Limits(max_mib * 2**20, max_rows, queue, seconds), **sizes)
    serve_artifact(artifact, options, token_file, typer.echo)


@app.command()
@command
def init(
    file: PipelineFile = Path("pipeline.yaml"),
    slurm: Annotated[bool, typer.Option("--slurm", help="Write a batch script for Slurm.")] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the job.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="One process for each.")] = 0,
    cpus_per_node: Annotated[int | None, typer.Option(min=1, help="Cores; 8 for a GPU.")] = None,
    hours: Annotated[int, typer.Option(min=1, help="Time limit; the job is queued again.")] = 24,
    out: Out = None,
    script: Annotated[Path, typer.Option(help="The file to write.")] = Path("compress.sbatch"),
    debug: Debug = False,
) -> None:
    """Write what a run on a cluster begins with."""
    from pipelines.slurm import Cluster, write_script

    if not slurm:
        raise PipelineInvalid("compress init writes a batch script: say for what, with --slurm")
    cluster = Cluster(
        nodes=nodes, gpus_per_node=gpus_per_node, cpus_per_node=cpus_per_node, hours=hours
    )
    for line in write_script(script, file, out or Path("runs") / file.stem, cluster):
        warn(f"to do: {line}", "yellow")
    typer.echo(f"{script}: submit it with `sbatch {script}`")
