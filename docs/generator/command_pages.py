"""Reference pages of the commands and exit codes, from the typer application."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer.main
from setting_text import code, prose

from compress import cli
from compress.common.errors import CompressError
from compress.pipelines.system.signals import SIGNALS

if TYPE_CHECKING:
    from collections.abc import Iterator

SHOWN_ONCE = ("help", "debug")


def commands_page() -> str:
    """Return the page of every command and its options."""
    commands: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    return "\n\n".join(
        [
            "# Commands",
            "Every command takes `--help`, and `--debug`, which shows tracebacks. See also "
            "[Exit codes](exit-codes.md).",
            *(part for name, command in commands.items() for part in _command(name, command)),
        ]
    )


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    yield f"## compress {name}"
    yield prose(command.help or "")
    line = " ".join(["compress", name, *(_written(argument) for argument in arguments)])
    yield f"```console\n$ {line}\n```"
    yield "\n".join(
        f"- `{_flags(option)}` {_default(option)}<br>\n  {prose(option.help or '')}"
        for option in options
        if option.name not in SHOWN_ONCE
    )


def _written(argument: Any) -> str:
    name = str(argument.metavar or argument.name.upper())
    return name if argument.required else f"[{name}]"


def _flags(option: Any) -> str:
    if option.is_flag:
        return ", ".join(option.secondary_opts if option.default else option.opts)
    return f"{', '.join(option.opts)} …"


def _default(option: Any) -> str:
    shown = option.show_default if isinstance(option.show_default, str) else option.default
    if option.is_flag or shown in (None, (), []):
        return ""
    values = ", ".join(map(str, shown)) if isinstance(shown, list | tuple) else str(shown)
    return f'<span class="kind">by default {code(values)}</span>'


def exit_codes_page() -> str:
    """Return the page of the exit codes."""
    rows = [(0, "every gate passed")]
    for error in sorted(CompressError.__subclasses__(), key=lambda error: error.exit_code):
        first = (error.__doc__ or "").partition("\n")[0]
        rows.append((error.exit_code, f"`{error.__name__}`: {prose(first)}"))
    for number in SIGNALS:
        rows.append(
            (128 + number, f"`{number.name}`: interrupted; run the same command to resume.")
        )
    return "\n\n".join(
        [
            "# Exit codes",
            "The exit codes of every command. From Python the same errors are raised; all are "
            "subclasses of `CompressError`. A message says where, what was found, what was "
            "expected and how to fix it.",
            "\n".join(["| code | |", "|---|---|", *(f"| {n} | {text} |" for n, text in rows)]),
            "Any other error is a bug, here or in code that the pipeline names: code 1, and "
            "`--debug` shows the traceback.",
        ]
    )
