"""Writes an eager model of transformers as a folder that transformers opens, pruned ones too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress.artifacts.artifact import Artifact, new_folder
from compress.artifacts.carried_files import CONFIG, TIED
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.edits.removal import COUNTS
from compress.artifacts.hf_folder import FACTORY, build, offline_transformers, recipe_from
from compress.artifacts.recipe import KeepBlocks, UntieWeights
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.common.forward import torch_predictor

if TYPE_CHECKING:
    Config = dict[str, Any]
    Shapes = dict[str, tuple[int, ...]]

WIDTH = re.compile(r"size|dim|head|inner|embd|channel|layer|block|d_model|d_ff|d_kv|groups")
"""In the name of an entry of a config that may be a width or a number of layers."""
NO_WIDTH = re.compile(r"vocab|position|token|image|patch|kernel|window|sequence")
HEAD_SIZE = "head_dim"
MOST_ENTRIES = 4
"""How many entries are changed: width, inner width, heads, and heads of keys and values."""
TRIES = 1000
"""How many changes of a config are tried, each by building the model without its weights."""


@dataclass(frozen=True)
class TransformersFolder:
    """A written folder, for the terminal."""

    path: str
    model: str
    changed: dict[str, Any]

    def lines(self) -> tuple[str, ...]:
        """Return the lines for the terminal."""
        changes = ", ".join(f"{name}: {value}" for name, value in self.changed.items())
        return (
            f"{self.path}: {self.model}, {changes or 'the config as it was'}; gives the artifact's "
            "outputs bit for bit",
            f'transformers.{self.model}.from_pretrained("{self.path}")',
        )


def write_transformers_folder(path: Path, out: Path) -> TransformersFolder:
    """Write an artifact's config, weights, tokenizer and preprocessing to the folder ``out``.

    What pruning made narrower or shorter is changed in the config. transformers opens the folder,
    and has to give the artifact's outputs bit for bit. Raises ArtifactInvalid: no `eager` artifact
    of a model of transformers, or not what was sealed; PipelineInvalid: `out` holds files;
    StageFailed: no config has the model's widths, or outputs differ.
    """
    artifact = Artifact.from_directory(path)
    with new_folder(out) as partial, offline_transformers(out):
        changed, whole = described_by_config(artifact)
        for name, content in artifact.carried_files().items():
            if name != CONFIG:
                (partial / name).write_bytes(content)
        whole.save_pretrained(partial)
        opened = type(whole).from_pretrained(partial, dtype="float32", local_files_only=True)
        opened.config.use_cache = False  # past_key_values would be further outputs
        if not _has_equal_outputs(opened, artifact):
            raise StageFailed(f"{out}: transformers gives other outputs than {artifact.path}")
    return TransformersFolder(str(out), type(whole).__name__, changed)


def described_by_config(artifact: Artifact) -> tuple[dict[str, Any], Any]:
    """Return the entries of a config that pruning changed, and transformers' model of the config.

    It gives the artifact's outputs bit for bit. Raises ArtifactInvalid: it is no eager model of a
    Hugging Face folder; StageFailed: widths differ between layers, or no config has them.
    """
    if not isinstance(artifact, EagerModel) or artifact.recipe.factory != FACTORY:
        raise ArtifactInvalid(
            f"{artifact.path}: is no PyTorch model of transformers, expected the artifact of a "
            "stage that trains or prunes a model from a Hugging Face folder"
        )
    arguments: Any = artifact.recipe.arguments
    architecture, config = arguments["architecture"], arguments["config"]
    if any(isinstance(edit, UntieWeights) for edit in artifact.recipe.edits):
        config = {**config, TIED: False}
    module: Any = artifact.load()
    state, cut = module.state_dict(), {}
    if any(isinstance(edit, KeepBlocks) for edit in artifact.recipe.edits):
        # Also lists with an entry for each layer, which shapes do not tell.
        own: Any = recipe_from(module).arguments["config"]
        cut = {
            key: own[key]
            for key, value in config.items()
            if own.get(key) != value and (COUNTS.match(key) or isinstance(value, list))
        }
        config = config | cut
    before, after = _shapes_of_config(architecture, config) or {}, _shapes(state)
    if _depth(before) == _depth(after):
        _refuse_unequal_layers(before, after, artifact.path)
    head_size = _unstated_head_dim(architecture, config, before)
    config = config | head_size
    for changed in islice(_possible_changes(config, before, after), TRIES):
        if _shapes_of_config(architecture, config | changed) == after:
            whole: Any = build(architecture, config | changed)
            whole.load_state_dict(state)
            # Fewer heads and narrower heads have the same shapes.
            if _has_equal_outputs(whole, artifact):
                return cut | (head_size | changed if changed else {}), whole
    other = next((name for name in before if after.get(name) != before[name]), "")
    was, found = (list(each.get(other, ())) for each in (before, after))
    raise StageFailed(
        f"{artifact.path}: no config of {architecture} has these widths ({other} was {was}, and is "
        f"{found}): it has one number for all layers, and often none for the heads; prune with "
        "`scope: uniform` and `include` inner widths alone, such as '*.intermediate.dense'"
    )


def _refuse_unequal_layers(before: Shapes, after: Shapes, path: Path) -> None:
    """Raise StageFailed for layers that had equal widths before pruning, and have others now."""
    firsts = dict[tuple[str, tuple[int, ...]], str]()
    for name in (name for name in after if name in before):
        alike = re.sub(r"\.\d+(?=\.)", ".*", name), before[name]
        first = firsts.setdefault(alike, name)
        if after[first] != after[name]:
            one, other = sorted((first, name))
            raise StageFailed(
                f"{path}: {one} is {list(after[one])} and {other} is {list(after[other])}, where a "
                "config has one number for all layers; prune with `scope: uniform`"
            )


def _unstated_head_dim(architecture: str, config: Config, before: Shapes) -> dict[str, int]:
    """Return `head_dim` where it is read but not stated: fewer heads would change it."""
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if config.get(HEAD_SIZE) or not (isinstance(width, int) and isinstance(heads, int)):
        return {}
    size = width // heads
    is_read = _shapes_of_config(architecture, config | {HEAD_SIZE: 2 * size}) not in (before, None)
    return {HEAD_SIZE: size} if is_read else {}


def _possible_changes(config: Config, before: Shapes, after: Shapes) -> Iterator[dict[str, int]]:
    """Yield changes of a config's widths and numbers of layers, the fewest first; none first."""
    shared = before.keys() & after.keys()
    widths = (pair for name in shared for pair in zip(before[name], after[name], strict=True))
    pairs = {(was, now) for was, now in widths if was != now}
    if depths := {(_depth(before), _depth(after))} - {(_depth(after),) * 2}:
        pairs |= depths
    entries = [
        (key, value * now // was)
        for key, value in config.items()
        if isinstance(value, int) and WIDTH.search(key) and not NO_WIDTH.search(key)
        for was, now in sorted(pairs)
        if value > 1 and value * now % was == 0
    ]
    for count in range(MOST_ENTRIES + 1):
        for chosen in combinations(dict.fromkeys(entries), count):
            if len({key for key, _ in chosen}) == count:
                yield dict(chosen)


def _depth(names: Iterable[str]) -> int:
    numbers = (re.search(r"\.(\d+)\.", name) for name in names)
    return 1 + max((int(number[1]) for number in numbers if number), default=0)


def _shapes_of_config(architecture: str, config: Config) -> Shapes | None:
    try:
        with torch.device("meta"):
            return _shapes(build(architecture, config).state_dict())
    except Exception:  # noqa: BLE001 - each architecture raises its own, such as of heads
        return None


def _shapes(state: dict[str, Any]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _has_equal_outputs(module: Any, artifact: Artifact) -> bool:
    inputs = artifact.signature.example()
    with artifact.open() as expected, torch_predictor(module.eval(), "cpu", 1) as predict:
        pairs = zip(expected(*inputs), predict(*inputs), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)
