"""Preprocess images and texts to model inputs, with the settings recorded in the archive."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.serve.worker.http_errors import TOO_LARGE, UNREADABLE
from compress.serve.worker.wire import IMAGES, TEXT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from compress.serve.worker.tensors import Array, Named, Specs
    from compress.serve.worker.wire import Readers

MAX_PIXELS = 64_000_000
"""Largest decoded image: a small file can decompress to any size."""
MOST_TOKENS_OF_CHARACTER = 4
"""Usually: of the bytes of an emoji."""
SPARE_TOKENS = 256
"""Tokens at the end of a text's part that may be others than in the text. A word of WordPiece is
one unknown token if it has more than 100 characters, and up to 100 tokens if not."""
DEEP_MODES = ("I", "F")
"""First letters of Pillow's modes with more than 8 bits per channel."""


def create_readers(settings: Named, specs: Specs, folder: Path) -> Readers:
    """Return the preprocessing function of each content type that the archive accepts."""
    readers: dict[str, Callable[[Any], list[Array]]] = {}
    if settings.get("image"):
        readers |= dict.fromkeys(IMAGES, image_reader(settings["image"], specs[0]))
    if settings.get("text"):
        readers[TEXT] = text_reader(settings["text"], specs, folder, settings.get("max_rows"))
    return readers


def image_reader(settings: Named, spec: Named) -> Callable[[bytes], list[Array]]:
    """Return a function that decodes a PNG or JPEG to one row of the model's only input."""
    from PIL import Image, ImageOps

    def read(body: bytes) -> list[Array]:
        try:
            with Image.open(io.BytesIO(body), formats=("PNG", "JPEG")) as image:
                pixels = image.width * image.height
                if pixels > MAX_PIXELS:
                    message = f"the image has {pixels} pixels, at most {MAX_PIXELS}"
                    raise ValueError(TOO_LARGE, message)
                if image.mode.startswith(DEEP_MODES):
                    message = f"the image's mode is {image.mode}, expected 8 bits"
                    raise ValueError(UNREADABLE, message)
                # Upright, as cameras store how they were held, and as transformers reads images.
                image.getexif()
                image.info.pop("exif", None)  # Pillow would write it anew, odd entries too
                upright = ImageOps.exif_transpose(image)
                fitted = fit(upright.convert(settings["mode"]), settings)
        except (OSError, SyntaxError, Image.DecompressionBombError):
            raise ValueError(UNREADABLE, "the body is no PNG or JPEG image, or truncated") from None
        return [normalized(np.asarray(fitted), settings, spec["dtype"])]

    return read


def fit(image: Any, settings: Named) -> Any:
    """Resize a Pillow image to an exact size, or its shorter side, and cut out the center."""
    from PIL import Image

    height, width = settings["size"]
    shorter = settings["shorter_side"]
    sides = [*reversed(settings.get("squashed_to") or (height, width))]
    if shorter is not None:  # as torchvision's Resize(shorter) does
        sides = [shorter * side // min(image.size) for side in image.size]
    if sides[0] * sides[1] > MAX_PIXELS:
        message = f"the image would be scaled to {sides}, at most {MAX_PIXELS} pixels"
        raise ValueError(TOO_LARGE, message)
    scaled = image.resize(sides, Image.Resampling[settings.get("resample", "bilinear").upper()])
    cut = sides[0] - width, sides[1] - height
    if settings.get("crop_rounding") == "down":
        left, top = cut[0] // 2, cut[1] // 2
    else:
        left, top = round(cut[0] / 2), round(cut[1] / 2)
    return scaled.crop((left, top, left + width, top + height))


def normalized(pixels: Array, settings: Named, dtype: str) -> Array:
    """Normalize pixels to one row of the model's input, (1, C, H, W) or (1, H, W, C).

    uint8 inputs stay as they are; others are scaled to 0..1, minus mean, divided by std.
    """
    row = pixels.reshape(1, *pixels.shape[:2], -1)
    if dtype != "uint8":
        row = (row / 255 - np.asarray(settings["mean"])) / np.asarray(settings["std"])
    if settings["layout"] == "chw":
        row = row.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(row, dtype)


def text_reader(
    settings: Named, specs: Specs, folder: Path, max_rows: int | None = None
) -> Callable[[list[str]], list[Array]]:
    """Return a function that tokenizes texts to the model's inputs, one row per text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / settings["tokenizer"]))
    most = settings["max_length"]
    cut_side = (tokenizer.truncation or {}).get("direction", "right")
    padding = tokenizer.padding or {}

    def count_tokens(text: str) -> int:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return len(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def read(texts: list[str]) -> list[Array]:
        if max_rows is not None and len(texts) > max_rows:
            raise ValueError(TOO_LARGE, f"{len(texts)} rows, at most {max_rows} in one request")
        if most:
            texts = [clipped(text, most, count_tokens, cut_side) for text in texts]
            tokenizer.enable_truncation(most, direction=cut_side)
        tokenizer.enable_padding(
            direction=padding.get("direction", "right"),
            pad_id=settings["pad_id"],
            pad_type_id=padding.get("pad_type_id", 0),
            pad_token=settings["pad_token"],
            length=settings["length"],
        )
        encodings = tokenizer.encode_batch(texts)
        fields = [settings["fields"][spec["name"]] for spec in specs]
        columns = [[getattr(each, field) for each in encodings] for field in fields]
        return [np.array(c, spec["dtype"]) for c, spec in zip(columns, specs, strict=True)]

    return read


def clipped(text: str, most: int, count_tokens: Callable[[str], int], side: str = "right") -> str:
    """Return a text without characters that lie far behind its first `most` tokens.

    What tokenizing costs then depends on `most`, not on the text. Longer parts are tried until one
    has clearly more tokens than that: those near its end may be others than the text's. With the
    side `left` the end is kept.
    """
    enough = most + most // 8 + SPARE_TOKENS
    size = enough // MOST_TOKENS_OF_CHARACTER
    while size < len(text):
        part = text[-size:] if side == "left" else text[:size]
        count = count_tokens(part)
        if count > enough:
            return part
        # Not far beyond what it will take, if the text goes on like that.
        size = max(size * 5 // 4, min(2 * size, size * enough * 9 // (8 * max(1, count))))
    return text
