"""Write docs/reference from the settings' classes and the command line: `make reference`."""

from pathlib import Path

from command_pages import commands_page, exit_codes_page
from gate_page import gates_page
from operator_page import operators_page
from stage_pages import pipeline_page, stage_pages


def reference() -> dict[str, str]:
    """Return the pages' Markdown by name."""
    return {
        "pipeline": pipeline_page(),
        **stage_pages(),
        "gates": gates_page(),
        "commands": commands_page(),
        "exit-codes": exit_codes_page(),
        "onnx-operators": operators_page(),
    }


if __name__ == "__main__":
    folder = Path(__file__).parents[1] / "reference"
    for name, text in reference().items():
        (folder / f"{name}.md").write_text(text + "\n")
