"""The command line: reads arguments, shows what the packages say, turns errors into exit codes."""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import sys
import traceback
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import typer

from compress import __version__
from compress.core.errors import CompressError, StageFailed
from pipelines import interruption

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipelines.report import Report


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Take a trained PyTorch checkpoint to a small, fast, proven deployment artifact.",
)
PipelineFile = Annotated[Path, typer.Argument(metavar="PIPELINE.YAML", help="The pipeline file.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


_answers: ContextVar[TextIO] = ContextVar("_answers")
"""Standard output, while `--json` keeps everything else away from it."""


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
            with _only_json() if kwargs.get("as_json") else nullcontext():
                function(*args, debug=debug, **kwargs)
        except typer.Exit:
            raise
        except BaseException as error:  # noqa: BLE001 - a newcomer gets one line, not a traceback
            _end(error, debug)

    return wrapped


def _end(error: BaseException, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exception(error)
    if interruption.exit_code() or isinstance(error, KeyboardInterrupt):
        typer.echo("interrupted; run the same command again to resume", err=True)
        raise typer.Exit(interruption.exit_code() or 130) from None
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    if not isinstance(error, Exception):
        raise error
    code, message = StageFailed.exit_code, str(error)
    if isinstance(error, CompressError):
        code = error.exit_code
    elif not isinstance(error, OSError):
        message = f"internal error, {type(error).__name__}: {error} (--debug shows where)"
    for line in _problems(message):
        _warn(f"error: {line}", "red")
    raise typer.Exit(code) from None


def _problems(message: str) -> list[str]:
    """Return a line per problem of a file; any other message is one line, whatever it holds."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    file = message.partition(":")[0]
    if all(line.startswith(f"{file}:") for line in lines):
        return lines
    return [" ".join(lines)]


def _warn(line: str, colour: str) -> None:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    typer.echo(line if plain else typer.style(line, fg=colour), err=True)


@contextmanager
def _only_json() -> Iterator[None]:
    """Keep standard output for the answer: what user code writes there goes to standard error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        token = _answers.set(answers)
        os.dup2(2, 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(answers.fileno(), 1)
            _answers.reset(token)


def _answer(content: object) -> None:
    """Write JSON where `--json` promised it."""
    typer.echo(json.dumps(content, indent=1), file=_answers.get())


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
    """Walk a pipeline; write the report and the artifacts."""
    from pipelines.pipeline import Pipeline

    pipeline = Pipeline.from_yaml(file)
    directory = out or Path("runs") / pipeline.name
    if dry_run:
        from pipelines.run import foresee

        foreseen = foresee(pipeline, directory, start=start, until=until, force=force)
        if as_json:
            _answer(foreseen)
        for name, what in () if as_json else foreseen.items():
            typer.echo(f"{name}: {what}")
        return
    from pipelines.progress import shown

    with shown(quiet=as_json) as (progress, announce):
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
    """Refuse what can be refused without running a stage."""
    from pipelines.pipeline import Pipeline
    from pipelines.plan import make_plan

    pipeline = Pipeline.from_yaml(file)
    plan = make_plan(pipeline)
    from pipelines.inputs import check_model, load_data

    check_model(pipeline)
    load_data(pipeline)
    stages = [{"name": p.name, "stage": p.stage.stage, "input": p.input} for p in plan.stages]
    if as_json:
        _answer({"valid": True, "stages": stages, "warnings": plan.warnings})
        return
    for warning in plan.warnings:
        _warn(f"warning: {warning}", "yellow")
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
        _answer({"digest": found.digest, **manifest})
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
    """Prove an artifact is what was sealed; serve a .mar."""
    from pipelines import catalog  # noqa: F401 - importing it makes every kind known
    from serve.verify import verify as prove

    proven = prove(artifact)
    if as_json:
        _answer({"artifact": str(artifact), "proven": list(proven)})
        return
    for line in proven:
        typer.echo(f"proven: {line}")


def _show(report: Report, out: Path, as_json: bool) -> None:
    if as_json:
        _answer(report.model_dump(mode="json"))
        return
    from rich.console import Console

    from pipelines.table import gate_lines, stage_table

    if not report.stages and report.failed_stage and report.failed_stage.name == "source":
        return  # nothing to show beside the error
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(stage_table(report, console))
    for line in gate_lines(report):
        console.print(line, highlight=False, soft_wrap=True)
    if report.test:
        values = ", ".join(f"{name} {value:.4f}" for name, value in report.test.values.items())
        console.print(f"test {report.test.metric}: {values}", highlight=False, soft_wrap=True)
    cached = sum(stage.cached for stage in report.stages)
    counted = f"{cached} of {len(report.stages)} stages cached; "
    summary = f"{'' if report.failed_stage else counted}report: {out / 'report.html'}"
    console.print(summary, markup=False, highlight=False, soft_wrap=True)
