"""Samples with known labels for the fetched ONNX files, by split.

Every function takes the packages' folder and the rows by split, and returns inputs and, where the
label is known, targets. No text, file or voice of one split is in another.
"""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import numpy as np
import torch

from onnx_files import texts

Rows = dict[str, tuple[tuple[torch.Tensor, ...], torch.Tensor | None]]
"""Split → inputs and targets."""
SUFFIXES = {
    "c": "c",
    "cpp": "cpp",
    "css": "css",
    "elf": "so",
    "gif": "gif",
    "gzip": "gz",
    "html": "html",
    "javascript": "js",
    "json": "json",
    "markdown": "md",
    "perl": "pl",
    "png": "png",
    "python": "py",
    "pythonbytecode": "pyc",
    "rst": "rst",
    "shell": "sh",
    "tex": "tex",
    "toml": "toml",
    "ttf": "ttf",
    "xml": "xml",
    "yaml": "yaml",
    "zip": "whl",
}
"""Magika's label → suffix of files that have it."""
FOLDERS = (sysconfig.get_path("stdlib"), "/usr/share", "/usr/lib", "/usr/include")
FILES_A_LABEL = 400
CHUNK, CONTEXT, RATE = 512, 64, 16_000


def recognition(packages: Path, sizes: dict[str, int]) -> Rows:
    """Return drawn lines `[3, 48, 320]`, and their characters by number, padded by 0."""
    alphabet = characters(packages)
    lines, made = texts.words(), {}
    for seed, (split, count) in enumerate(sizes.items()):
        generator = np.random.default_rng(seed)
        pixels, targets = [], np.zeros((count, texts.LONGEST), np.int64)
        for number in range(count):
            text = lines[split][number % len(lines[split])]
            pixels.append(texts.as_input(texts.line(text, generator), 48, 320))
            targets[number, : len(text)] = [alphabet.index(letter) for letter in text]
        made[split] = ((_stack(pixels),), torch.from_numpy(targets))
    return made


def characters(packages: Path) -> list[str]:
    """Return the classes of the recognition file: nothing, those in its metadata, and a space."""
    import onnx

    model = onnx.load(packages / "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx")
    (entry,) = (p.value for p in model.metadata_props if p.key == "character")
    return ["", *entry.splitlines(), " "]


def orientation(packages: Path, sizes: dict[str, int]) -> Rows:
    """Return drawn lines `[3, 48, 192]`, every other one upside down, and whether it is."""
    lines, made = texts.words(), {}
    for seed, (split, count) in enumerate(sizes.items()):
        generator = np.random.default_rng(10 + seed)
        pixels = []
        for number in range(count):
            drawing = texts.line(lines[split][number % len(lines[split])], generator)
            drawing = drawing[::-1, ::-1] if number % 2 else drawing
            pixels.append(texts.as_input(np.ascontiguousarray(drawing), 48, 192))
        made[split] = ((_stack(pixels),), torch.arange(count) % 2)
    return made


def detection(packages: Path, sizes: dict[str, int], side: int = 320) -> Rows:
    """Return drawn pages `[3, 320, 320]`; what is compared is the float file's answer."""
    lines, made = texts.words(), {}
    for seed, (split, count) in enumerate(sizes.items()):
        generator = np.random.default_rng(20 + seed)
        pixels = []
        for _ in range(count):
            chosen = generator.choice(lines[split], 12)
            drawing = texts.page([str(text) for text in chosen], side, generator)
            pixels.append(texts.as_input(drawing, side, side))
        made[split] = ((_stack(pixels),), None)
    return made


def file_types(packages: Path, sizes: dict[str, int]) -> Rows:
    """Return bytes `[2048]` of this machine's files as magika takes them, and their labels."""
    import json

    config = packages / "magika/models/standard_v3_3/config.min.json"
    labels = json.loads(config.read_text())["target_labels_space"]
    found: dict[str, dict[str, list[Path]]] = {split: {} for split in sizes}
    known = {f".{suffix}": label for label, suffix in SUFFIXES.items() if label in labels}
    for file in sorted(f for folder in FOLDERS for f in Path(folder).rglob("*")):
        label = known.get(file.suffix)
        if label and file.is_file() and not file.is_symlink() and file.stat().st_size > 200:
            split = list(sizes)[zlib.crc32(str(file).encode()) % len(sizes)]
            found[split].setdefault(label, []).append(file)
    made: Rows = {}
    for seed, (split, count) in enumerate(sizes.items()):
        generator = np.random.default_rng(seed)
        chosen = [
            (file, labels.index(label))
            for label, files in sorted(found[split].items())
            for file in generator.permutation(np.array(files, object))[:FILES_A_LABEL]
        ]
        # Labels in turn, so that a common one does not fill the split.
        order = sorted(range(len(chosen)), key=lambda n: (_rank(chosen, n), n))[:count]
        rows = np.stack([_features(chosen[n][0].read_bytes()) for n in order])
        targets = torch.tensor([chosen[n][1] for n in order])
        made[split] = ((torch.from_numpy(rows),), targets)
    return made


def _rank(chosen: list, number: int) -> int:
    """Return how many files of the same label stand before one."""
    rank = 0
    while number - rank - 1 >= 0 and chosen[number - rank - 1][1] == chosen[number][1]:
        rank += 1
    return rank


def _features(content: bytes) -> np.ndarray:
    """Return the first and last 1,024 bytes without white space around, padded by 256."""
    row = np.full(2048, 256, np.int32)
    start = np.frombuffer(content[:4096].lstrip()[:1024], np.uint8)
    end = np.frombuffer(content[-4096:].rstrip()[-1024:], np.uint8)
    row[: len(start)] = start
    row[2048 - len(end) :] = end
    return row


def speech(packages: Path, sizes: dict[str, int]) -> Rows:
    """Return chunks `[576]` of recordings with silence and noise between sentences.

    Rows follow one another: the state of a stateful file goes from one to the next.
    """
    from real_models import samples

    spoken, made = samples.sentences(dict.fromkeys(sizes, 400)), {}
    voices = [f"{voice}+{variant}" for voice in samples.VOICES for variant in samples.VARIANTS]
    own = samples.split_of(voices)
    for seed, (split, count) in enumerate(sizes.items()):
        generator, sound = np.random.default_rng(30 + seed), []
        for number, text in enumerate(spoken[split]):
            voice = own[split][number % len(own[split])]
            clip = samples.speech(text[:80], voice) * generator.uniform(0.5, 4)
            pause = np.zeros(int(RATE * generator.uniform(0.3, 2)))
            sound += [clip, pause]
            if sum(map(len, sound)) > count * CHUNK:
                break
        whole = np.concatenate(sound)[: count * CHUNK]
        whole += generator.normal(0, 0.003, len(whole))
        padded = np.concatenate([np.zeros(CONTEXT), whole]).astype(np.float32)
        rows = np.lib.stride_tricks.sliding_window_view(padded, CHUNK + CONTEXT)[::CHUNK]
        made[split] = ((torch.from_numpy(rows.copy()),), None)
    return made


def _stack(pixels: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(pixels))
