"""Compare what a server prepares of a client's images and texts with the samples of `val`.

A mean, scale or tokenizer of another model gives a model other numbers than it was validated on,
and no answer shows that. Where the dataset holds the images and texts that its samples were made
of, a few are prepared as a request's are; elsewhere only ranges, and ids as texts, are compared.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.common.config import Settings
from compress.serve.packaging.request_forms import Forms, TextInput, form_settings
from compress.serve.worker.wire import audio_reader, image_reader, text_reader, upright

if TYPE_CHECKING:
    from compress.common.signature import Signature
    from compress.data.splits import Splits
    from compress.serve.worker.tensors import Array

    Inputs = list[Array]  # one sample's, in the signature's order, without the batch axis
    Tokens = list[tuple[int, int, int]]

ASKED = 16  # samples whose raw form is prepared, spread over `val`
LIKE = 0.5  # correlation of pixels, or share of ids, from which a column is the raw form
ROUNDINGS = 8  # roundings of the input's type by which scaled pixels may differ
MOST_LEVELS = 12.0
"""Mean difference, of 255 grey levels, up to which images are still served, with a warning. In two
photographs (scikit-learn's) another filter makes 1 to 9, exchanged channels 19 and 53, squashing
for cropping 41 and 45, another usual mean and std 89."""
SOUND_ROUNDING = 1e-4  # by which samples of sounds, from -1 to 1, may differ
SAMPLES = 128  # samples of `val` without raw forms, spread over it
OUTSIDE = 0.1  # share of the range of images by which samples may leave it: cubic filters overshoot
LEAST_COVERED, USUALLY_COVERED = 0.25, 0.75
"""Shares of the range that black to white pixels become: samples that cover less were certainly, or
perhaps, prepared in another way."""
SAME_TEXTS = 0.5  # share of ids, as texts, that a tokenizer gives again: not unknown words


class Preparation(Settings):
    """How images or texts of requests, once prepared, compare with the samples of `val`."""

    form: str
    column: str = ""
    """What of `val` was prepared, such as its dataset's attribute `samples`; empty where it holds
    no raw form, and ranges or ids were compared."""
    samples: int
    difference: str = ""
    is_wrong: bool = False
    """Whether it differs too much to be served."""


def compare_preparation(forms: Forms, signature: Signature, data: Splits) -> list[Preparation]:
    """Compare what images and texts of requests become with what `val` holds, which must exist."""
    from compress.data.dataloader import spread_indices
    from compress.data.raw_samples import raw_columns

    settings = form_settings(forms, signature)
    if not settings:
        return []
    dataset: Any = data.datasets["val"]
    indices = spread_indices(len(dataset), ASKED)
    batches = data.read("val", indices, batch_size=1)
    samples = {i: [x.numpy()[0] for x in b.inputs] for i, b in zip(indices, batches, strict=True)}
    columns, found = raw_columns(dataset, indices), []
    if "image" in settings:
        compared = _compare_images(settings["image"], signature, samples, columns)
        found.append(compared or _compare_ranges(settings["image"], signature, data))
    if "audio" in settings:
        found.append(_compare_sounds(settings["audio"], signature, samples, columns))
    if isinstance(text := forms.get("text"), TextInput):
        file = Path(text.tokenizer)
        found.append(_compare_texts(settings["text"], signature, file, samples, columns))
    return found


def _compare_images(
    settings: Mapping[str, Any],
    signature: Signature,
    samples: Mapping[int, Inputs],
    columns: Mapping[str, list[Any]],
) -> Preparation | None:
    """Compare images that `val` holds, once prepared, with its samples; None if it holds none."""
    spec = signature.input_descriptions()[0]
    read = image_reader(settings, spec)
    images = [inputs[0] for inputs in samples.values()]
    if len({image.shape for image in images}) > 1:  # requests become images of one size
        return None
    expected = np.stack(images)
    likeness, column, prepared = LIKE, "", expected
    for name, entries in columns.items():
        bodies = [body for entry in entries if (body := image_body(entry))]
        if len(bodies) < len(entries):
            continue
        with suppress(ValueError):  # of a kind, or a size, that requests are refused with
            own = np.stack([read(body)[0][0] for body in bodies])
            if own.shape == expected.shape:
                likeness_here = float(np.mean([*map(_correlation, own, expected)]))
                if likeness_here >= likeness:
                    likeness, column, prepared = likeness_here, name, own
    if not column:
        return None
    distance, allowed = np.abs(prepared.astype(np.float64) - expected), 0.0
    levels = distance
    if spec["dtype"] != "uint8":
        largest = max(float(np.abs(pixels).max()) for pixels in _range_of_pixels(settings))
        allowed = ROUNDINGS * float(np.finfo(spec["dtype"]).eps) * largest
        channels = (-1, 1, 1) if settings["layout"] == "chw" else (-1,)
        levels = 255 * distance * np.reshape(settings["std"], channels)
    result = Preparation(form="image", column=column, samples=len(samples))
    if (distance <= allowed).all():
        return result
    differing = int((distance > allowed).any(axis=(1, 2, 3)).sum())
    place = np.unravel_index(int(np.argmax(levels)), levels.shape)
    where = ", ".join(f"{axis} {i}" for axis, i in zip(settings["layout"], place[1:], strict=True))
    difference = (
        f"image: {differing} of {len(samples)} images of `val` ({column}), sent by a client, "
        f"become other numbers than their samples: by {levels.mean():.3g} of 255 grey levels on "
        f"average and {levels.max():.3g} at most (sample {[*samples][place[0]]} at {where}: "
        f"{prepared[place]:.4g}, expected {expected[place]:.4g}); prepare them as `val` does: "
        "size, filter, part of the image, orientation, mean, std"
    )
    is_wrong = bool(levels.mean() > MOST_LEVELS)
    return result.model_copy(update={"difference": difference, "is_wrong": is_wrong})


def _compare_sounds(
    settings: Mapping[str, Any],
    signature: Signature,
    samples: Mapping[int, Inputs],
    columns: Mapping[str, list[Any]],
) -> Preparation:
    """Compare files of sounds that `val` holds, once prepared, with its samples."""
    read = audio_reader(settings, signature.input_descriptions()[0])
    for name, entries in columns.items():
        with suppress(ValueError, OSError, TypeError):
            own = [read(sound_body(entry))[0][0] for entry in entries]
            result = Preparation(form="audio", column=name, samples=len(samples))
            for (index, (expected,)), prepared in zip(samples.items(), own, strict=True):
                alike = prepared.shape == expected.shape
                if not (alike and np.allclose(prepared, expected, rtol=0, atol=SOUND_ROUNDING)):
                    problem = f"audio: sample {index} of `val` ({name}), sent by a client, becomes "
                    problem += "other numbers; prepare it as `val` does: rate, length, scale"
                    return result.model_copy(update={"difference": problem, "is_wrong": True})
            return result
    return Preparation(form="audio", samples=0)


def sound_body(entry: Any) -> bytes:
    """Return a sound as a client sends it: the content of its file."""
    return entry.read_bytes() if isinstance(entry, Path) else bytes(memoryview(entry))


def image_body(entry: Any) -> bytes | None:
    """Return an image as a client sends it: a PNG or JPEG file as it is, others as PNG."""
    from PIL import Image

    with suppress(OSError, ValueError, TypeError, SyntaxError, Image.DecompressionBombError):
        entry = entry.read_bytes() if isinstance(entry, Path) else entry
        if isinstance(entry, bytes):
            image: Image.Image = Image.open(io.BytesIO(entry))
            if image.format in ("PNG", "JPEG", "MPO"):  # MPO: a phone's JPEG that holds others
                return entry
            image = upright(image)  # a PNG is written without its orientation
        elif isinstance(entry, Image.Image):
            image = entry
        else:
            pixels = np.asarray(entry)
            if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
                return None
            if pixels.ndim == 3 and pixels.shape[2] not in (1, 3):
                pixels = pixels.transpose(1, 2, 0)
            image = Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)
        body = io.BytesIO()
        image = image.convert("RGB") if image.mode in ("CMYK", "YCbCr", "LAB", "HSV") else image
        image.save(body, "PNG")
        return body.getvalue()
    return None


def _correlation(prepared: Array, expected: Array) -> float:
    a, b = (x.astype(np.float64).ravel() - x.mean(dtype=np.float64) for x in (prepared, expected))
    norm = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / norm if norm else float(np.array_equal(prepared, expected))


def _range_of_pixels(settings: Mapping[str, Any]) -> tuple[Array, Array]:
    black, white = ((pixel - np.array(settings["mean"])) / settings["std"] for pixel in (0.0, 1.0))
    return black, white


def _compare_ranges(settings: Mapping[str, Any], signature: Signature, data: Splits) -> Preparation:
    if signature.inputs[0].dtype == "uint8":
        return Preparation(form="image", samples=0)
    batches = [batch.inputs[0].double() for batch in data.batches("val", limit=SAMPLES)]
    channels = 1 if settings["layout"] == "chw" else 3
    others = [axis for axis in range(4) if axis != channels]
    low = np.min([x.amin(others).numpy() for x in batches], axis=0)
    high = np.max([x.amax(others).numpy() for x in batches], axis=0)
    black, white = _range_of_pixels(settings)
    width = white - black
    covered = float(np.max((high - low) / width))
    outside = float(np.max(np.maximum(black - low, high - white) / width))
    is_wrong, problem = outside > OUTSIDE or covered < LEAST_COVERED, ""
    if is_wrong or covered < USUALLY_COVERED:
        problem = (
            f"image: pixels from 0 to 1 become {float(np.min(black)):.4g} to "
            f"{float(np.max(white)):.4g} (mean {settings['mean']}, std {settings['std']}), and "
            f"samples of `val` range from {low.min():.4g} to {high.max():.4g}"
        )
        if is_wrong:
            problem += ": give the mean and std that the samples were scaled with"
        else:
            problem += f", {100 * covered:.0f} % of that; check that they were scaled in this way"
    samples = sum(map(len, batches))
    return Preparation(form="image", samples=samples, difference=problem, is_wrong=is_wrong)


def _compare_texts(
    settings: Mapping[str, Any],
    signature: Signature,
    tokenizer: Path,
    samples: Mapping[int, Inputs],
    columns: Mapping[str, list[Any]],
) -> Preparation:
    """Compare texts that `val` holds, tokenized, with its samples; else their ids as texts."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(tokenizer))
    added = backend.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special}
    specs = signature.input_descriptions()
    read = text_reader(settings, specs, Tokenizer.from_file(str(tokenizer)))

    def tokenize(texts: list[str]) -> list[Tokens]:
        return [_tokens([x[0] for x in read([text])], settings) for text in texts]

    expected = [_tokens(inputs, settings) for inputs in samples.values()]
    likeness, column, prepared = LIKE, "", expected
    for name, entries in columns.items():
        if all(isinstance(entry, str) for entry in entries):
            own = tokenize(entries)
            shares = []
            for tokens in zip(own, expected, strict=True):  # of ids without special ones
                a, b = (Counter(i for _, i, _ in each if i not in special) for each in tokens)
                # Texts of characters that the tokenizer does not know have none.
                shares.append(1.0 if a == b else (a & b).total() / max(a.total(), b.total()))
            if sum(shares) / len(shares) >= likeness:
                likeness, column, prepared = sum(shares) / len(shares), name, own
    if not column:
        prepared = tokenize([backend.decode([token[1] for token in each]) for each in expected])
    result = Preparation(form="text", column=column, samples=len(samples))
    pairs = zip(samples, prepared, expected, strict=True)
    differing = [(sample, a, b) for sample, a, b in pairs if a != b]
    if len(differing) <= (0 if column else (1 - SAME_TEXTS) * len(samples)):
        return result
    sample, found, wanted = differing[0]
    common = zip(found, wanted, strict=False)
    start = next((n for n, (a, b) in enumerate(common) if a != b), min(len(found), len(wanted)))
    shown = [[token[1] for token in each[start : start + 5]] for each in (found, wanted)]
    difference = (
        f"text: {len(differing)} of {len(samples)} texts of `val` "
        f"({column or 'its ids, written as texts'}), sent by a client, become other tokens than "
        f"their samples by {tokenizer.name}: sample {sample} has {len(found)} tokens, expected "
        f"{len(wanted)}; from token {start} on ids {shown[0]}, expected {shown[1]}; check special "
        "tokens, max_length, padding, and what `val` adds to texts"
    )
    return result.model_copy(update={"difference": difference})


def _tokens(inputs: Inputs, settings: Mapping[str, Any]) -> Tokens:
    """Return place, id and type of each token that is no padding."""
    named = dict(zip(settings["fields"].values(), inputs, strict=True))
    ids = named["ids"]
    mask = named.get("attention_mask", ids != settings["pad_id"])
    types = named.get("type_ids", 0 * ids)
    # Without a fixed length, a single text is not padded, and where it begins says nothing.
    is_padded = settings["length"] is not None
    places = map(int, mask.nonzero()[0])
    return [(i if is_padded else 0, int(ids[i]), int(types[i])) for i in places]
