"""Drawings of text whose content is known: lines, and pages of several lines."""

import math
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

FONTS = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "LiberationSans", "LiberationSerif")
FOLDERS = ("/usr/share/fonts/truetype/dejavu", "/usr/share/fonts/truetype/liberation")
WORDS_A_LINE = (1, 4)
LONGEST = 26  # characters: about what 320 columns of a line 48 rows high hold


def fonts() -> list[str]:
    """Return the fonts of this machine that are drawn with; one of PIL's own if there are none."""
    files = [
        Path(folder) / f"{name}-{style}.ttf"
        for folder in FOLDERS
        for name in FONTS
        for style in ("Regular", "Bold")
    ]
    files += [Path(FOLDERS[0]) / f"{name}.ttf" for name in FONTS]
    return [str(file) for file in files if file.exists()]


@cache
def words() -> dict[str, list[str]]:
    """Return short lines of words and numbers from the standard library's docstrings, by split."""
    from real_models.samples import SPLITS, sentences

    generator = np.random.default_rng(0)
    lines: dict[str, list[str]] = {}
    for split, texts in sentences(dict.fromkeys(SPLITS, 2000)).items():
        found = []
        for text in texts:
            parts = [p for p in text.split() if p.isascii() and p.isprintable()]
            line = " ".join(parts[: generator.integers(*WORDS_A_LINE) + 1])[:LONGEST].strip()
            if len(line) > 2 and line not in found:
                found.append(line)
        lines[split] = found
    return lines


def _colours(generator: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a background and a text colour, apart by at least 90 levels of brightness."""
    while True:
        ground, ink = generator.integers(0, 256, (2, 3))
        if abs(float(ground.mean() - ink.mean())) > 90:
            return tuple(map(int, ground)), tuple(map(int, ink))


def _noisy(image: Image.Image, generator: np.random.Generator) -> np.ndarray:
    if generator.random() < 0.4:
        image = image.filter(ImageFilter.GaussianBlur(generator.uniform(0.3, 1.0)))
    pixels = np.asarray(image).astype(np.float32)
    pixels += generator.normal(0, generator.uniform(0, 12), pixels.shape)
    return pixels.clip(0, 255).astype(np.uint8)


def line(text: str, generator: np.random.Generator) -> np.ndarray:
    """Return a drawing of a line of text, `[height, width, 3]` in uint8."""
    names = fonts()
    size = int(generator.integers(20, 44))
    name = names[generator.integers(len(names))] if names else None
    font = ImageFont.truetype(name, size) if name else ImageFont.load_default(size)
    left, top, right, bottom = font.getbbox(text)
    pad = generator.integers(2, max(3, size // 4), 4)
    ground, ink = _colours(generator)
    shape = (int(right - left + pad[0] + pad[1]), int(bottom - top + pad[2] + pad[3]))
    image = Image.new("RGB", shape, ground)
    ImageDraw.Draw(image).text((int(pad[0]) - left, int(pad[2]) - top), text, ink, font)
    return _noisy(image, generator)


def page(texts: list[str], side: int, generator: np.random.Generator) -> np.ndarray:
    """Return a drawing of lines of text on a photograph-like ground, `[side, side, 3]` in uint8."""
    ground, ink = _colours(generator)
    slope = generator.uniform(-40, 40, (2, 3))
    grid = np.linspace(-0.5, 0.5, side)[:, None]
    base = np.array(ground) + grid[:, :, None] * slope[0] + grid.T[:, :, None] * slope[1]
    image = Image.fromarray(base.clip(0, 255).astype(np.uint8))
    names, top = fonts(), int(generator.integers(4, 24))
    for text in texts:
        size = int(generator.integers(14, 34))
        name = names[generator.integers(len(names))] if names else None
        font = ImageFont.truetype(name, size) if name else ImageFont.load_default(size)
        box = font.getbbox(text)
        if top + box[3] + 4 > side:
            break
        room = max(1, side - int(box[2]) - 4)
        ImageDraw.Draw(image).text((int(generator.integers(0, room)), top), text, ink, font)
        top += int(box[3]) + int(generator.integers(4, 30))
    return _noisy(image, generator)


def as_input(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return a drawing `[3, height, width]` in -1…1, BGR, resized to the height and padded by 0."""
    share = height / pixels.shape[0]
    columns = min(width, math.ceil(pixels.shape[1] * share))
    resized = Image.fromarray(pixels).resize((columns, height), Image.Resampling.BILINEAR)
    padded = np.zeros((3, height, width), np.float32)
    padded[:, :, :columns] = np.asarray(resized)[:, :, ::-1].transpose(2, 0, 1) / 127.5 - 1
    return padded
