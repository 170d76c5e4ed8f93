"""Changes a stage's settings in the text of a pipeline file, and leaves all other lines alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from compress.pipelines.system.yaml_core import dump, dump_on_one_line, load

if TYPE_CHECKING:
    from collections.abc import Mapping

KEPT = ("name", "input", "gates")
"""What a stage keeps that becomes another one."""


def changed_content(
    content: Mapping[str, Any], index: int, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a file's content with other settings of the stage at an index; None removes one."""
    stages = [dict(stage) for stage in content["stages"]]
    stage = stages[index]
    if "stage" in settings:
        # Others may name it by its kind.
        kept = {"name": stage["stage"], **{k: stage[k] for k in KEPT if k in stage}}
        stages[index] = {"stage": settings["stage"], **kept, **settings}
    else:
        stages[index] = {**stage, **settings}
    stages[index] = {name: value for name, value in stages[index].items() if value is not None}
    return {**content, "stages": stages}


def changed_text(text: str, index: int, settings: Mapping[str, Any]) -> str:
    """Return a file's text with other settings of the stage at an index.

    Comments and order stay; where the lines cannot be changed one by one, the file is written anew.
    """
    content = load(text)
    wanted = changed_content(content, index, settings)
    try:
        edited = _with_lines(text, index, settings)
        if load(edited) == wanted:
            return edited
    except (yaml.YAMLError, StopIteration, ValueError, KeyError):
        pass
    return dump(wanted)


def _with_lines(text: str, index: int, settings: Mapping[str, Any]) -> str:
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    stages = next(value for key, value in root.value if key.value == "stages")
    stage = stages.value[index]
    changes: list[tuple[int, int, str]] = []
    known = {key.value: value for key, value in stage.value}
    keys = {key.value: key for key, _ in stage.value}
    for name in settings.keys() & known.keys():
        start, end = known[name].start_mark.index, known[name].end_mark.index
        if settings[name] is not None:
            changes.append((start, end, dump_on_one_line(settings[name])))
        elif stage.flow_style:  # it is not the first: that is the stage's kind or name
            start = text.rindex(",", 0, keys[name].start_mark.index)
            changes.append((start, end, ""))
        else:  # its whole line
            start = text.rindex("\n", 0, keys[name].start_mark.index)
            changes.append((start, _line_end(text, end), ""))
    added = {
        name: dump_on_one_line(value)
        for name, value in settings.items()
        if name not in known and value is not None
    }
    if stage.flow_style:
        end = stage.end_mark.index - 1  # before the brace
        changes.append((end, end, "".join(f", {name}: {value}" for name, value in added.items())))
    elif added:
        # Behind the line of `stage:`, at the same indentation.
        kind = known["stage"]
        place = _line_end(text, kind.end_mark.index)
        indent = "\n" + " " * stage.value[0][0].start_mark.column
        changes.append(
            (place, place, "".join(f"{indent}{name}: {value}" for name, value in added.items()))
        )
    for start, end, replacement in sorted(changes, reverse=True):
        text = text[:start] + replacement + text[end:]
    return text


def _line_end(text: str, start: int) -> int:
    found = text.find("\n", start)
    return len(text) if found < 0 else found  # the last line may have no end
