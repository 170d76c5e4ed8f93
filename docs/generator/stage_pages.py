"""Reference pages of the stages and of the pipeline file, from their classes and JSON Schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml
from groups import (
    DEFS,
    OF_THE_FILE,
    SCHEMA,
    STAGE_PAGES,
    TRAIN,
    group_sections,
    link_from,
    stages_of,
)
from setting_text import definitions, paragraphs, prose

from compress.artifacts.kinds import LOADED
from compress.core.stage import Stage, members_of
from compress.training.config.training import Training

if TYPE_CHECKING:
    from collections.abc import Iterator

    AnyStage = type[Stage[Any, Any]]

EXAMPLES: dict[str, dict[str, Any]] = {
    "train": {"epochs": 12},
    "prune_channels": {"ratio": 0.5},
    "prune_layers": {"remove": 1},
    "prune_weights": {"amount": 0.5},
    "distill": {"teacher": "source", "epochs": 6},
    "quantize_aware_training": {"epochs": 3},
    "quantize_mixed": {"max_drop_points": 0.5},
    "cascade": {"fallback": "float_onnx", "percent": 0.2},
    "convert_precision": {"dtype": "float16"},
    "package_kserve": {"storage_uri": "s3://models/digits"},
}
"""Required settings of each stage, for its example."""


def pipeline_page() -> str:
    """Return the page of the pipeline file."""
    page = "pipeline"
    return "\n\n".join(
        [
            "# Pipeline file",
            "The keys of `pipeline.yaml`. An unknown key is an error, which suggests the nearest "
            "known one. `compress schema` prints the same as a JSON Schema, for editors.",
            definitions(SCHEMA["properties"], SCHEMA["required"], "file", link_from(page)),
            *group_sections(page),
        ]
    )


def stage_pages() -> dict[str, str]:
    """Return the overview of all stages, and a page for each kind of stage."""
    pages = {page: _stage_page(page, *texts) for page, texts in STAGE_PAGES.items()}
    return {"stages": _overview(), **pages}


def _overview() -> str:
    stages = [
        f"- [`{name}`]({page}.md#{name}) "
        f'<span class="kind">{_kinds(stage)}</span><br>\n  {next(paragraphs(stage))}'
        for page in STAGE_PAGES
        for name, stage in stages_of(page).items()
    ]
    kinds = [
        f"| `{name}` | {next(paragraphs(kind))} |"  # type: ignore[arg-type]
        for name, kind in sorted(LOADED.items())
    ]
    every = {name: DEFS["Train"]["properties"][name] for name in Stage.model_fields}
    every |= OF_THE_FILE
    every["stage"] = {"type": "string", "description": "Which stage this is."}
    return "\n\n".join(
        [
            "# Stages",
            "A stage reads one kind of artifact and writes one. `compress check` refuses an order "
            "in which they do not fit.",
            "\n".join(stages),
            "## Settings of every stage",
            definitions(every, ["stage"], "every", link_from("stages")),
            "## Kinds of artifacts",
            "\n".join(["| kind | |", "|---|---|", *kinds]),
            "Other packages can add stages: [Add a stage](../add-a-stage.md).",
        ]
    )


def _stage_page(page: str, title: str, _package: str, guide: str) -> str:
    sections = [part for item in stages_of(page).items() for part in _stage(page, *item)]
    groups = group_sections(page)
    return "\n\n".join(
        [
            f"# {title}",
            f"Every setting of these stages. How to use them: [the guide]({guide}). Settings that "
            "all stages have, such as `gates`: [settings of every stage]"
            "(stages.md#settings-of-every-stage).",
            *sections,
            *(["## Groups of settings", *groups] if groups else []),
        ]
    )


def _stage(page: str, name: str, stage: AnyStage) -> Iterator[str]:
    example = {"stage": name, **EXAMPLES.get(name, {})}
    usual = stage.model_validate(example)
    yield f"## {name}"
    text = [*paragraphs(stage)]
    yield from text
    yield " ".join(
        [f"Reads → writes: [{_kinds(stage)}](stages.md#kinds-of-artifacts).", *_needs(usual)]
    )
    if not any(paragraph.startswith("```yaml") for paragraph in text):
        yield f"```yaml\n{yaml.safe_dump([example], sort_keys=False)}```"
    schema = DEFS[stage.__name__]
    inherits = issubclass(stage, Training) and name != "train"
    own = {
        setting: described
        for setting, described in schema["properties"].items()
        if _is_own(setting, described) and not (inherits and TRAIN.get(setting) == described)
    }
    yield definitions(own, schema.get("required", ()), name, link_from(page))
    if inherits:
        yield "And every other setting of [`train`](training.md#train)."
    if not own and not inherits:
        yield "No settings of its own."


def _is_own(setting: str, schema: dict[str, Any]) -> bool:
    if setting == "gates":
        return bool(schema["default"])
    return setting not in Stage.model_fields


def _kinds(stage: AnyStage) -> str:
    read, written = (members_of(kinds) for kinds in (stage.reads(), stage.writes()))
    return " → ".join(", ".join(kind.kind for kind in kinds) for kinds in (read, written))


def _needs(stage: Stage[Any, Any]) -> Iterator[str]:
    """Yield the data, modules and programs that the stage of the example requires."""
    if stage.needs_data:
        yield "Needs `data:`."
    elif stage.uses_data:
        yield "Uses `data:` if given."
    for need in stage.all_requirements():
        yield f"Needs {prose(need.what)} ({prose(need.install)})."
