"""Compare what a package prepares of a client's images and texts with the samples of `val`.

The model was validated on `val`; a mean, scale or tokenizer of another model gives it other numbers
when it is served, and no answer shows that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from compress.common.signature import Signature
    from compress.data.splits import Splits

SAMPLES = 128
"""Samples of `val`, spread over it."""
OUTSIDE = 0.1
"""Share of the range of images by which samples may leave it: cubic filters overshoot."""
LEAST_COVERED, USUALLY_COVERED = 0.25, 0.75
"""Shares of the range that black to white pixels become: samples that cover less were certainly, or
perhaps, prepared in another way."""
SAME_TEXTS = 0.5
"""Share of texts that a tokenizer gives the same ids again: unknown words do not come back."""


def preparation_warnings(
    settings: dict[str, Any], signature: Signature, tokenizer: Path | None, data: Splits
) -> Iterator[str]:
    """Yield why requests may become other inputs than `val` holds.

    Args:
        settings: the handler's, with its preparation of images and texts.
        signature: the model's.
        tokenizer: the file of the handler's tokenizer, where it reads texts.
        data: has a split `val`.

    Raises:
        StageFailed: no image can become what `val` holds, or images become far larger numbers.
    """
    if settings.get("image") and signature.inputs[0].dtype != "uint8":
        yield from _image_warnings(settings["image"], data)
    if settings.get("text") and tokenizer is not None:
        yield from _text_warnings(settings["text"], signature, tokenizer, data)


def _image_warnings(settings: dict[str, Any], data: Splits) -> Iterator[str]:
    batches = [batch.inputs[0].double() for batch in data.batches("val", limit=SAMPLES)]
    channels = 1 if settings["layout"] == "chw" else 3
    others = [axis for axis in range(4) if axis != channels]
    low = np.min([x.amin(others).numpy() for x in batches], axis=0)
    high = np.max([x.amax(others).numpy() for x in batches], axis=0)
    black, white = ((pixel - np.array(settings["mean"])) / settings["std"] for pixel in (0.0, 1.0))
    width = white - black
    covered = float(np.max((high - low) / width))
    outside = float(np.max(np.maximum(black - low, high - white) / width))
    problem = (
        f"image: pixels from 0 to 1 become {float(np.min(black)):.4g} to "
        f"{float(np.max(white)):.4g} (mean {settings['mean']}, std {settings['std']}), and samples "
        f"of `val` range from {low.min():.4g} to {high.max():.4g}"
    )
    if outside > OUTSIDE or covered < LEAST_COVERED:
        raise StageFailed(f"{problem}: give the mean and std that the samples were scaled with")
    if covered < USUALLY_COVERED:
        yield f"{problem}, {100 * covered:.0f} % of that; check that they were scaled in this way"


def _text_warnings(
    settings: dict[str, Any], signature: Signature, tokenizer: Path, data: Splits
) -> Iterator[str]:
    from tokenizers import Tokenizer

    from serve.worker.preprocess import text_reader

    backend = Tokenizer.from_file(str(tokenizer))
    specs = signature.input_descriptions()
    read = text_reader({**settings, "tokenizer": tokenizer.name}, specs, tokenizer.parent)
    place = [*settings["fields"].values()].index("ids")
    equal = total = 0
    for batch in data.batches("val", limit=SAMPLES):
        for row in batch.inputs[place].tolist():
            ids = [token for token in row if token != settings["pad_id"]]
            again = read([backend.decode(ids)])[place][0].tolist()
            equal += [token for token in again if token != settings["pad_id"]] == ids
            total += 1
    if equal < SAME_TEXTS * total:
        yield (
            f"text: {total - equal} of {total} samples of `val`, written as texts, become other "
            f"ids by {tokenizer.name}; check that they were made with this tokenizer, special "
            "tokens and length included"
        )
