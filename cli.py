"""The command line: reads arguments, shows what the packages say, turns errors into exit codes."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress import __version__
from compress.core.errors import CompressError, StageFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from compress.core.stage import Progress
    from pipelines.report import Report

INTERRUPTED = 130
SECONDS_BETWEEN_LINES = 3.0
"""Between progress lines where there is no terminal to draw bars on."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Take a trained PyTorch checkpoint to a small, fast, proven deployment artifact.",
)
PipelineFile = Annotated[Path, typer.Argument(metavar="PIPELINE.YAML", help="The pipeline file.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


def main() -> None:
    """Entry point of the `compress` command."""
    app()


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """Turn the toolkit's errors into one line on standard error and an exit code."""

    @functools.wraps(function)
    def wrapped(*args: Any, debug: bool = False, **kwargs: Any) -> None:
        logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, format="%(message)s")
        try:
            function(*args, debug=debug, **kwargs)
        except CompressError as error:
            _fail(error, error.exit_code, debug)
        except KeyboardInterrupt:
            typer.echo("interrupted; run the same command again to resume", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except typer.Exit:
            raise
        except Exception as error:  # noqa: BLE001 - a newcomer gets one line, not a traceback
            if debug or isinstance(error, OSError):
                _fail(error, StageFailed.exit_code, debug)
            internal = f"internal error, {type(error).__name__}: {error} (--debug shows where)"
            _fail(StageFailed(internal), StageFailed.exit_code, debug)

    return wrapped


def _fail(error: Exception, code: int, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    for line in str(error).splitlines():
        typer.secho(f"error: {line}", fg="red", err=True)
    raise typer.Exit(code) from None


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
    out: Annotated[
        Path | None, typer.Option(help="Directory of the results.", show_default="runs/<name>")
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", help="Run this stage and those after it again.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Stop after this stage.")] = None,
    force: Annotated[bool, typer.Option(help="Run every stage again.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Show what would run, and run nothing.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Walk a pipeline, and write report.json, report.html and the artifacts."""
    from pipelines.pipeline import Pipeline

    pipeline = Pipeline.from_yaml(file)
    directory = out or Path("runs") / pipeline.name
    if dry_run:
        from pipelines.run import foresee

        foreseen = foresee(pipeline, directory, start=start, until=until, force=force)
        if as_json:
            typer.echo(json.dumps(foreseen, indent=1))
        for name, what in () if as_json else foreseen.items():
            typer.echo(f"{name}: {what}")
        return
    with _progress(quiet=as_json) as (progress, announce):
        pipeline.run(
            directory,
            start=start,
            until=until,
            force=force,
            progress=progress,
            announce=announce,
            finished=functools.partial(_show, out=directory, as_json=as_json),
        )


@app.command()
@_command
def check(file: PipelineFile, as_json: AsJson = False, debug: Debug = False) -> None:
    """Refuse everything that can be refused without running anything."""
    from pipelines.pipeline import Pipeline
    from pipelines.plan import make_plan

    pipeline = Pipeline.from_yaml(file)
    plan = make_plan(pipeline)
    from pipelines.inputs import check_model, load_data

    check_model(pipeline)
    load_data(pipeline)
    stages = [{"name": p.name, "stage": p.stage.stage, "input": p.input} for p in plan.stages]
    if as_json:
        typer.echo(json.dumps({"valid": True, "stages": stages, "warnings": plan.warnings}))
        return
    for warning in plan.warnings:
        typer.secho(f"warning: {warning}", fg="yellow", err=True)
    road = " → ".join(p.name for p in plan.stages)
    typer.echo(f"{file}: valid ({road})")


@app.command()
@_command
def schema(debug: Debug = False) -> None:
    """Print the JSON Schema of the pipeline file, for editors."""
    from pipelines.pipeline import json_schema

    typer.echo(json.dumps(json_schema(), indent=1))


ArtifactPath = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="An artifact's directory.")]


@app.command()
@_command
def inspect(artifact: ArtifactPath, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show what an artifact says about itself."""
    from compress.core.artifact import Artifact
    from pipelines import catalog  # noqa: F401 - importing it makes every kind known

    found = Artifact.at(artifact)
    manifest = found.manifest.model_dump(mode="json")
    if as_json:
        typer.echo(json.dumps({"digest": found.digest, **manifest}, indent=1))
        return
    typer.echo(f"{found.kind} artifact, digest {found.digest}")
    for label in ("inputs", "outputs"):
        for spec in manifest["signature"][label]:
            shape = f" {spec['dtype']} {spec['shape']}" if "shape" in spec else ""
            typer.echo(f"  {label[:-1]} {spec['name']}{shape}")
    if found.manifest.recipe:
        typer.echo(f"  built by {found.manifest.recipe.factory} {found.manifest.recipe.arguments}")
    for step in found.manifest.lineage:
        typer.echo(f"  after {step.stage} {json.dumps(step.settings, default=str)}")
    for name, file in found.manifest.files.items():
        typer.echo(f"  file {name}  {file.bytes} bytes  sha256 {file.sha256}")


@app.command()
@_command
def verify(
    artifact: Annotated[
        Path, typer.Argument(metavar="ARTIFACT", help="An artifact's directory, or a .mar file.")
    ],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Prove that an artifact is what was sealed; a .mar is really served and asked."""
    from pipelines import catalog  # noqa: F401 - importing it makes every kind known
    from serve.verify import verify as prove

    proven = prove(artifact)
    if as_json:
        typer.echo(json.dumps({"artifact": str(artifact), "proven": list(proven)}, indent=1))
        return
    for line in proven:
        typer.echo(f"proven: {line}")


def _show(report: Report, out: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(report.model_dump_json(indent=1))
        return
    from rich.console import Console

    from pipelines.table import gate_lines, stage_table

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(stage_table(report))
    for line in gate_lines(report):
        console.print(line, highlight=False, soft_wrap=True)
    if report.test:
        values = ", ".join(f"{name} {value:.4f}" for name, value in report.test.values.items())
        console.print(f"test {report.test.metric}: {values}", highlight=False)
    cached = sum(stage.cached for stage in report.stages)
    summary = f"{cached} of {len(report.stages)} stages cached; report: {out / 'report.html'}"
    console.print(summary, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _progress(quiet: bool) -> Iterator[tuple[Progress, Callable[[str], None]]]:
    """Give a progress function and an announcer: bars on a terminal, plain lines elsewhere."""
    if quiet:
        yield (lambda task, done, total, note="": None), (lambda line: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_progress(), lambda line: typer.echo(line, err=True)
        return
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}")
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:

        def progress(task: str, done: int, total: int, note: str = "") -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total, note=note)
            bars.update(tasks[task], completed=done, total=total, note=note)
            if done >= total:
                bars.remove_task(tasks.pop(task))

        yield progress, lambda line: bars.console.print(line, highlight=False, markup=False)


def _plain_progress() -> Progress:
    """Return a progress function that writes a line per new note, or every few seconds."""
    shown: dict[str, tuple[float, str]] = {}

    def progress(task: str, done: int, total: int, note: str = "") -> None:
        now = time.monotonic()
        last_time, last_note = shown.setdefault(task, (now, ""))
        if (note and note != last_note) or now - last_time > SECONDS_BETWEEN_LINES:
            shown[task] = (now, note)
            typer.echo(f"  {task} {done}/{total}{f': {note}' if note else ''}", err=True)
        if done >= total:
            del shown[task]

    return progress
