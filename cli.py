"""The command line: reads arguments, shows what the packages say, turns errors into exit codes."""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from compress import __version__
from compress.core.errors import PipelineInvalid, StageFailed, told_of
from pipelines import answers, interruption

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


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
ArtifactPath = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="An artifact's directory.")]
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


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """Turn the toolkit's errors into one line on standard error and an exit code."""

    @functools.wraps(function)
    def wrapped(*args: Any, debug: bool = False, **kwargs: Any) -> None:
        logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, format="%(message)s")
        try:
            with answers.only_json() if kwargs.get("as_json") else nullcontext():
                function(*args, debug=debug, **kwargs)
        except typer.Exit:
            raise
        except BaseException as error:  # noqa: BLE001 - a newcomer gets one line, not a traceback
            _end(error, debug, resumes=function.__name__ != "serve")

    return wrapped


def _end(error: BaseException, debug: bool, resumes: bool) -> NoReturn:
    if debug:
        traceback.print_exception(error)
    if interruption.exit_code() or isinstance(error, KeyboardInterrupt):
        how = "interrupted; run the same command again to resume" if resumes else "stopped"
        typer.echo(how, err=True)
        raise typer.Exit(interruption.exit_code() or 130) from None
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    if not isinstance(error, Exception):
        raise error
    for line in told_of(error):
        _warn(f"error: {line}", "red")
    raise typer.Exit(getattr(error, "exit_code", StageFailed.exit_code)) from None


def _warn(line: str, colour: str) -> None:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    typer.echo(line if plain else typer.style(line, fg=colour), err=True)


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
@_command
def run(
    file: PipelineFile,
    out: Out = None,
    start: Annotated[str | None, typer.Option("--from", help="Run from here on again.")] = None,
    until: Annotated[str | None, typer.Option(help="Stop after this stage.")] = None,
    force: Annotated[bool, typer.Option(help="Run every stage again.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Show what would run, and run nothing.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Walk a pipeline; write the report and the artifacts."""
    from pipelines.pipeline import Pipeline
    from pipelines.progress import shown
    from pipelines.run import foresee
    from pipelines.table import show_report

    pipeline = Pipeline.from_yaml(file)
    directory = out or Path("runs") / pipeline.name
    options: dict[str, Any] = {"start": start, "until": until, "force": force}
    if dry_run:
        foreseen = foresee(pipeline, directory, **options)
        _tell(as_json, foreseen, (f"{name}: {what}" for name, what in foreseen.items()))
        return
    finished = functools.partial(show_report, out=directory, as_json=as_json)
    with shown(quiet=as_json) as (progress, announce):
        pipeline.run(directory, **options, progress=progress, announce=announce, finished=finished)


@app.command()
@_command
def join(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run's --out.")],
    wait: Annotated[float, typer.Option(min=0, help="Seconds within which the run begins.")] = 600,
    silence: Annotated[float, typer.Option(min=5, help="Seconds until it counts as dead.")] = 60,
    debug: Debug = False,
) -> None:
    """Take part in a run's trainings on another node."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a run that ended is no stack trace
    from pipelines.joining import join as take_part

    take_part(directory, lambda line: typer.echo(line, err=True), wait=wait, silence=silence)


@app.command()
@_command
def check(file: PipelineFile, as_json: AsJson = False, debug: Debug = False) -> None:
    """Refuse what can be refused without running a stage."""
    from pipelines.pipeline import Pipeline
    from pipelines.plan import make_plan

    pipeline = Pipeline.from_yaml(file)
    plan = make_plan(pipeline)
    from pipelines.inputs import check_model

    signature, told = check_model(pipeline)
    for warning in () if as_json else plan.warnings:
        _warn(f"warning: {warning}", "yellow")
    content = {"valid": True, **plan.described(), "signature": signature.model_dump(mode="json")}
    _tell(as_json, content, [*filter(None, [told]), f"{file}: valid ({plan.road})"])


@app.command()
@_command
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
    from pipelines.table import printed

    pipeline = Pipeline.from_yaml(file)
    directory = out or Path("runs") / pipeline.name
    with shown(quiet=as_json) as (progress, _):
        found = measure(pipeline, directory, ratio, samples, latency, progress)
    if as_json:
        answers.give(found.model_dump(mode="json"))
    else:
        printed(lambda _: table(found), lines_below(found, directory))


@app.command()
@_command
def schema(debug: Debug = False) -> None:
    """Print the JSON Schema of the pipeline file, for editors."""
    from pipelines.pipeline import json_schema

    typer.echo(json.dumps(json_schema(), indent=1))


@app.command()
@_command
def inspect(artifact: ArtifactPath, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show what an artifact says about itself."""
    from compress.core.artifact import Artifact
    from pipelines import catalog  # noqa: F401 - importing it makes every kind known
    from pipelines.inspection import described

    found = Artifact.at(artifact)
    content = found.manifest.model_dump(mode="json")
    _tell(as_json, {"digest": found.digest, **content}, described(found))


@app.command()
@_command
def verify(
    artifact: ArtifactPath,
    sha256: Annotated[str | None, typer.Option(help="What its file must hash to.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write what was proven, as JSON.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Prove an artifact is what was sealed; serve a .mar."""
    from pipelines.evidence import prove

    proof = prove(artifact, sha256, report)
    content = {"artifact": str(artifact), **proof.model_dump(mode="json")}
    _tell(as_json, content, proof.told())


@app.command()
@_command
def serve(
    artifact: ArtifactPath,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080,
    token_file: Annotated[Path | None, typer.Option(help="File with the token.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Concurrent calls; the cores.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that answer.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of a call.")] = 1,
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

    limits = Limits(body_bytes=max_mib * 2**20, rows=max_rows, queue=queue, seconds=seconds)
    sizes: Any = {"workers": workers, "processes": processes, "threads": threads}
    options = Options(host=host, port=port, limits=limits, **sizes)
    serve_artifact(artifact, options, token_file, typer.echo)


@app.command()
@_command
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
        _warn(f"to do: {line}", "yellow")
    typer.echo(f"{script}: submit it with `sbatch {script}`")


def _tell(as_json: bool, content: object, lines: Iterable[str]) -> None:
    """Print JSON, or lines for people."""
    if as_json:
        answers.give(content)
    for line in () if as_json else lines:
        typer.echo(line)
