"""Reads a local Hugging Face folder: nothing is downloaded, and no code in the folder is run."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

from compress.artifacts.carried_files import CONFIG, IMAGES, TOKENIZER, TOKENIZER_SETTINGS
from compress.artifacts.recipe import Recipe
from compress.checkpoint.loading import INDEX, INSTEAD, checkpoint_digest
from compress.common.atomic_files import (
    file_beside,
    open_regular,
    refuse_irregular,
    sha256_while_unchanged,
)
from compress.common.errors import ArtifactInvalid, first_few, first_line, raised_as
from compress.common.foreign.child_process import MEMORY, read_in_child, stored_bytes
from compress.common.lazy_modules import torch, transformers

Task = Literal[
    "audio-classification",
    "automatic-speech-recognition",
    "feature-extraction",
    "fill-mask",
    "image-classification",
    "image-segmentation",
    "multiple-choice",
    "object-detection",
    "question-answering",
    "text-classification",
    "text-generation",
    "text2text-generation",
    "token-classification",
    "video-classification",
]
"""A task, by its name in transformers' pipelines."""
OTHER_CLASSES = {
    "automatic-speech-recognition": "AutoModelForCTC",
    "feature-extraction": "AutoModel",
    "fill-mask": "AutoModelForMaskedLM",
    "image-segmentation": "AutoModelForSemanticSegmentation",
    "text-classification": "AutoModelForSequenceClassification",
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
}
"""Of tasks whose class is not named as they are, such as `AutoModelForImageClassification`."""
OUTPUTS: dict[str | None, tuple[str, ...]] = {"object-detection": ("logits", "pred_boxes")}
"""Outputs of the tasks that need more than `logits`."""
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
VOCABULARIES = (TOKENIZER, "vocab.txt", "vocab.json", "merges.txt", "added_tokens.json")
PROCESSOR_SUFFIXES = (".json", ".txt", ".model", ".jinja")
"""Of the files that a tokenizer or a preprocessing may be read from."""
CONFIG_BYTES, PROCESSOR_BYTES = 2**24, 2**27
"""Several times the largest config and tokenizer that are known; larger ones are not read."""
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
LARGEST_GROWTH = 4  # float32 weights in memory by those stored in 8 bits
LONGEST_TEXT = 10**6
"""A larger `model_max_length` is what transformers writes where the length is not known."""
TEMPLATES = "additional_chat_templates"
ADAPTER = "adapter_config.json"
FACTORY = "compress.artifacts.hf_folder:build"
WITHOUT_EFFECT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "auto_map")
"""Entries of a config that do not change the outputs of a float32 model."""
LOOKUPS = ("socket.getaddrinfo", "socket.gethostbyname")
"""Python's audit events whose first argument is another machine's name."""
CONNECTIONS = ("socket.connect", "socket.sendto")
"""Those whose second one is an address: a pair, or the path of a socket on this machine."""
WEIGHTS_FILE = "checkpoint_path"
"""Argument of timm's: weights to read, whatever their path looks like."""
LOOKED_UP = (
    *("architecture", "attn_implementation", "_attn_implementation", "backbone"),
    *(WEIGHTS_FILE, "experts_implementation"),
)
"""Entries of a config, and of those in it, by which transformers and timm find code or weights."""
_reading: ContextVar[object] = ContextVar("_reading", default=None)
logger = logging.getLogger(__name__)


def build(architecture: str, config: dict[str, Any]) -> torch.nn.Module:
    """Build a transformers model, such as `BertModel`, with random weights; recipes name it."""
    refuse_lookups(config, architecture)
    model_class = _model_class(architecture)
    if model_class is None:
        version = transformers.__version__
        raise ArtifactInvalid(f"transformers {version} has no model {architecture!r}")
    config_class: Any = model_class.config_class
    with offline(architecture):
        module: torch.nn.Module = model_class(config_class.from_dict(config))
    return module


def read_folder(
    folder: Path, task: Task | None, labels: Sequence[str] = (), *, untrained_head: bool
) -> tuple[Recipe, Any]:
    """Return the recipe of a folder's model, and the model with the folder's weights in float32.

    Without a task the config names the model's class, and without ``labels`` its classes. With
    ``untrained_head`` weights may be missing: torch's generator draws them. Raises ArtifactInvalid
    where files or weights are missing, the folder needs code of its own or is quantized, or has no
    model for the task.
    """
    content = refuse_foreign_folder(folder)
    with reading_by_transformers(folder):
        _refuse_larger_than_stored(folder, task, labels, content)
        config, kind = _class_of(folder, task, labels)
        config.use_cache = False  # past_key_values would be further outputs
        # transformers itself reads the weights: it maps parameter names of older versions.
        # Every stage computes and compares in float32, also for models saved in half precision.
        module, loaded = kind.from_pretrained(
            folder,
            config=config,
            dtype="float32",
            use_safetensors=True,
            output_loading_info=True,
            **LOCAL,
        )
    missing = sorted(loaded["missing_keys"])
    if missing and not untrained_head:
        raise ArtifactInvalid(
            f"{folder}: has no weights for {first_few(missing)} of {kind.__name__}; name "
            "the task that it was trained for, or begin with a stage `train`"
        )
    return recipe_from(module), module.eval()


def files_to_carry(folder: Path, module: Any) -> dict[str, bytes]:
    """Return what a model's artifacts carry of its folder: config, tokenizer, image preprocessing.

    `tokenizer.json` holds the padding and longest text of transformers' AutoTokenizer. What
    transformers cannot read is left out, with a warning.
    """
    settings: Any = recipe_from(module).arguments["config"]
    content = {**settings, "architectures": [type(module).__name__]}
    files = {CONFIG: _json_bytes(content)}
    readers: list[tuple[str, Callable[[Path, dict[str, Any]], dict[str, bytes]]]] = []
    if any((folder / name).is_file() for name in VOCABULARIES):
        readers.append(("tokenizer", _tokenizer_files))
    if (folder / IMAGES).is_file():
        readers.append(("preprocessing of images or sounds", _image_files))
    processors = [f for f in folder.iterdir() if f.suffix in PROCESSOR_SUFFIXES]
    for kind, read in readers:
        try:
            if sum(map(stored_bytes, processors)) > PROCESSOR_BYTES:
                raise ArtifactInvalid(f"{folder}: has more than {PROCESSOR_BYTES} bytes of it")
            with offline_transformers(folder):
                files |= read_in_child(str(folder), partial(read, folder, content), *processors)
        except Exception as error:  # noqa: BLE001 - of any library that the folder's class needs
            reason = f"{type(error).__name__}: {first_line(error)}"
            logger.warning("%s: its %s is not carried: %s", folder, kind, reason)
    return files


def _tokenizer_files(folder: Path, config: dict[str, Any]) -> dict[str, bytes]:
    import tokenizers

    loaded: Any = transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)
    if not loaded.is_fast:
        raise ArtifactInvalid(f"{type(loaded).__name__} has no tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    longest = loaded.model_max_length
    if longest > LONGEST_TEXT:
        longest = config.get("max_position_embeddings")
    tokenizer.no_truncation()
    if longest:
        tokenizer.enable_truncation(int(longest), direction=loaded.truncation_side)
    tokenizer.no_padding()
    if loaded.pad_token is not None:
        tokenizer.enable_padding(
            direction=loaded.padding_side,
            pad_id=loaded.pad_token_id,
            pad_type_id=loaded.pad_token_type_id,
            pad_token=loaded.pad_token,
        )
    files = {TOKENIZER: tokenizer.to_str(pretty=True).encode()}
    for name in TOKENIZER_SETTINGS:
        if (folder / name).is_file():
            with open_regular(folder / name) as stream:
                # transformers 5 renamed the class; transformers 4, which optimum needs, lacks it.
                settings = stream.read()
                files[name] = settings.replace(b'"TokenizersBackend"', b'"PreTrainedTokenizerFast"')
    return files


def _image_files(folder: Path, _config: dict[str, Any]) -> dict[str, bytes]:
    """Return preprocessor_config.json with every setting, also where the folder leaves one out."""
    is_sound = "sampling_rate" in json.loads((folder / IMAGES).read_bytes())
    processors: Any = transformers.AutoImageProcessor
    processors = transformers.AutoFeatureExtractor if is_sound else processors
    loaded = processors.from_pretrained(folder, **LOCAL)
    return {IMAGES: _json_bytes(json.loads(loaded.to_json_string()))}


def _json_bytes(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def read_architecture(folder: Path, task: Task | None, labels: Sequence[str] = ()) -> Any:
    """Return a folder's model on the meta device, without weights; raises as `read_folder`."""
    content = refuse_foreign_folder(folder)
    with reading_by_transformers(folder):
        _refuse_larger_than_stored(folder, task, labels, content)
        return _build_on_meta(folder, task, labels)


def import_classes(folder: Path) -> None:
    """Import what defines the model of a folder, ahead of its use."""
    content = refuse_foreign_folder(folder)
    with reading_by_transformers(folder):
        _import_classes(content)


def _import_classes(content: dict[str, Any]) -> None:
    for name in content.get("architectures") or ():
        getattr(transformers, str(name), None)


def _refuse_larger_than_stored(
    folder: Path, task: Task | None, labels: Sequence[str], content: dict[str, Any]
) -> None:
    """Raise ArtifactInvalid if a config describes a larger model than the folder holds."""
    _import_classes(content)  # in this process, too, which will need them

    def bytes_of_model() -> int:
        with suppress(Exception):  # what it raises, transformers itself reports
            module = _build_on_meta(folder, task, labels)
            return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
        return 0

    # A config may ask for ten million layers or a billion labels.
    needed = read_in_child(str(folder), bytes_of_model, folder)
    stored = stored_bytes(folder)
    if needed > MEMORY + LARGEST_GROWTH * stored:
        raise ArtifactInvalid(
            f"{folder / CONFIG}: describes a model of {needed / 2**30:.3g} GiB, and the folder's "
            f"files have {stored / 2**30:.3g} GiB; they do not belong together"
        )


def _build_on_meta(folder: Path, task: Task | None, labels: Sequence[str]) -> Any:
    with torch.device("meta"):
        config, kind = _class_of(folder, task, labels)
        config.use_cache = False
        return kind(config)


def recipe_from(module: Any) -> Recipe:
    """Return the recipe of a transformers model, from its class and its config."""
    content = json.loads(module.config.to_json_string(use_diff=False))
    for name in WITHOUT_EFFECT:
        content.pop(name, None)
    arguments = {"architecture": type(module).__name__, "config": content}
    return Recipe(factory=FACTORY, arguments=arguments)


def refuse_foreign_folder(folder: Path) -> dict[str, Any]:
    """Return a folder's config; raise ArtifactInvalid unless it has float weights alone."""
    from compress.checkpoint.safetensors_io import read_header, weight_map

    if not folder.is_dir():
        raise ArtifactInvalid(f"{folder}: no such folder; models are never downloaded")
    files = own_files(folder)
    config = read_json(folder / CONFIG)
    if "model_type" not in config:
        raise ArtifactInvalid(f"{folder / CONFIG}: names no model_type of transformers")
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise ArtifactInvalid(
            f"{folder}: holds no {' or '.join(WEIGHTS)}; save it with "
            "model.save_pretrained(…), which writes safetensors"
        )
    if (folder / ADAPTER).is_file():
        raise ArtifactInvalid(f"{folder}: {ADAPTER}: {INSTEAD['adapter_model.*']}")
    for file in files:
        if file.name.endswith(INDEX):
            weight_map(file)
        elif file.suffix == ".safetensors":
            with open_regular(file) as stream:
                read_header(stream)
    if "quantization_config" in config:
        raise ArtifactInvalid(f"{folder}: is quantized already; give the float model")
    refuse_lookups(config, folder / CONFIG)
    return config


def own_files(folder: Path) -> list[Path]:
    """Return the files that libraries may read in a folder; refuse links to elsewhere."""
    templates = file_beside(folder / TEMPLATES, TEMPLATES)
    entries = [*folder.iterdir(), *(templates.iterdir() if templates.is_dir() else ())]
    files = [file_beside(entry, entry.name) for entry in sorted(entries) if not entry.is_dir()]
    for file in files:
        refuse_irregular(file)
    return files


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a folder, or raise ArtifactInvalid."""
    try:
        with open_regular(file_beside(file, file.name)) as stream:
            raw = stream.read(CONFIG_BYTES + 1)
        if len(raw) > CONFIG_BYTES:
            raise ArtifactInvalid(f"{file}: has more than {CONFIG_BYTES} bytes")
        content = json.loads(raw)
    except FileNotFoundError:
        raise ArtifactInvalid(f"{file.parent}: holds no {file.name}") from None
    except OSError as error:
        raise ArtifactInvalid(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactInvalid(f"{file}: not JSON: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise ArtifactInvalid(f"{file}: is no JSON object")
    return content


def folder_digest(folder: Path) -> str | None:
    """Return a SHA-256 over a folder's config, weights and processors; None without a model."""
    weights, config = checkpoint_digest(folder), folder / CONFIG
    if weights is None or not config.is_file():
        return None
    files = own_files(folder)
    digest = hashlib.sha256(config.read_bytes() + weights.encode())
    for file in files:  # a tokenizer's may have any name
        if file.suffix in PROCESSOR_SUFFIXES and file.name not in (CONFIG, *WEIGHTS):
            content = sha256_while_unchanged(file)
            digest.update(f"{file.name}\0{content}\0".encode())
    return digest.hexdigest()


def _class_of(folder: Path, task: Task | None, labels: Sequence[str]) -> tuple[Any, Any]:
    config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: i for i, label in enumerate(labels)}
    if task is None:
        names = config.architectures or ["none"]
        model_class = _model_class(names[0])
        if model_class is None:
            raise ArtifactInvalid(
                f"{folder / CONFIG}: names {names[0]!r}, which transformers "
                f"{transformers.__version__} does not have; code of the folder is never run; "
                f"name a `task:` ({', '.join(get_args(Task))})"
            )
        return config, model_class
    usual = f"AutoModelFor{task.title().replace('-', '')}"
    auto: Any = getattr(transformers, OTHER_CLASSES.get(task, usual))
    try:
        classes = auto._model_mapping[type(config)]
    except KeyError:
        raise ArtifactInvalid(
            f"{folder}: transformers has no {config.model_type} for {task}"
        ) from None
    if not isinstance(classes, tuple):
        return config, classes
    named = (c for c in classes if c.__name__ in (config.architectures or ()))
    return config, next(named, classes[0])


def _model_class(name: str) -> Any:
    found = getattr(transformers, name, None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model else None


@contextmanager
def reading_by_transformers(source: Path) -> Iterator[None]:
    """Turn errors of :func:`offline_transformers`'s block into ArtifactInvalid, as a line."""
    what = f"{source}: transformers cannot read it"
    with raised_as(ArtifactInvalid, what), offline_transformers(source):
        yield


@contextmanager
def offline_transformers(source: Path) -> Iterator[None]:
    """Let transformers read a file or folder :func:`offline`, without bars and warnings."""
    from transformers.utils import logging as verbosity

    level, bars = verbosity.get_verbosity(), verbosity.is_progress_bar_enabled()
    verbosity.set_verbosity(logging.CRITICAL)
    verbosity.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers
    try:
        with offline(source):
            yield
    finally:
        verbosity.set_verbosity(level)
        if bars:
            verbosity.enable_progress_bar()  # type: ignore[no-untyped-call]  # transformers


@contextmanager
def offline(source: object) -> Iterator[None]:
    """Refuse connections to other machines in a block and its thread; errors name the `source`."""
    _watch_connections()
    token = _reading.set(source)
    try:
        yield
    finally:
        _reading.reset(token)


@cache
def _watch_connections() -> None:
    # Each library reads variables such as HF_HUB_OFFLINE when it is imported, and some read none.
    # Asked thousands of times a second, and until after the end of this module.
    watched, lookups, reading = frozenset(LOOKUPS + CONNECTIONS), LOOKUPS, _reading

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in watched or reading.get() is None:
            return
        address = arguments if event in lookups else arguments[1]
        if isinstance(address, tuple):
            raise ArtifactInvalid(
                f"{reading.get()}: asks for {address[0]}, and nothing is downloaded; save the "
                "model with all that it needs (save_pretrained)"
            )

    sys.addaudithook(audit)


def refuse_lookups(config: dict[str, Any], where: object) -> None:
    """Raise ArtifactInvalid for an entry, at any depth, that names a path or a place on a hub."""
    parts: list[Any] = [config]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        for key, value in part.items() if isinstance(part, dict) else ():
            is_place = isinstance(value, str) and bool({*":/\\"} & {*value})
            if key in LOOKED_UP and (is_place or (value and key == WEIGHTS_FILE)):
                raise ArtifactInvalid(
                    f"{where}: {key}: names {value!r}, which is not read: only names that the "
                    "installed libraries know are; remove that entry"
                )
            parts.append(value)
