"""Request bodies of the Open Inference Protocol and the other formats, as a model's inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from compress.serve.http.responses import HttpError
from compress.serve.worker import wire
from compress.serve.worker.tensors import TOO_LARGE, check, describe_error
from compress.serve.worker.wire import HEADER_LENGTH, MAX_PIXELS, create_readers, requested_outputs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from compress.serve.http.options import Limits
    from compress.serve.http.responses import Headers
    from compress.serve.worker.tensors import Array, Named, Specs
    from compress.serve.worker.wire import Readers

UNSPECIFIED = ("", "application/x-www-form-urlencoded")
"""The Content-Type of bodies where none is given, and curl's -d."""
BODY_COPIES = 3
"""A body, and a text that it holds, of two bytes for each character."""
TOKEN_BYTES = 2048
"""Memory of a token while a text is tokenized that has more of them, and of the text."""
PIXEL_BYTES = 10
"""Memory of a pixel: Pillow takes 4 bytes for each, twice while it converts an image."""
LONGEST_TEXT = 512
"""Tokens of a text, on average, of a model that takes any number."""
EXTRA_COMMAS = 1024
"""Commas of a JSON request besides those between numbers, at most."""


@dataclass(frozen=True)
class RequestDecoder:
    """Reads and checks what requests to one model hold."""

    specs: Specs
    outputs: Sequence[str]
    labels: Sequence[str]
    """Outputs that an answer holds if they are requested by name."""
    max_rows: int
    readers: Readers = field(default_factory=dict)

    def decode(self, headers: Headers, body: bytes | bytearray) -> tuple[list[Array], Named]:
        """Return the model's inputs, and which outputs an Open Inference Protocol request wants."""
        content_type = content_type_of(headers)
        if content_type in UNSPECIFIED:
            content_type = wire.JSON  # as the protocol has it; NVIDIA's client sends no type
        json_bytes = headers.get(HEADER_LENGTH, "")
        if json_bytes or content_type == wire.JSON:
            # Counted before it is parsed: numbers take many times their text in memory.
            is_size = json_bytes.isdecimal() and len(json_bytes) < 20
            end = int(json_bytes) if is_size else None
            most = EXTRA_COMMAS + most_numbers(self.specs, self.max_rows)
            if wire.TEXT in self.readers:
                most += EXTRA_COMMAS * self.max_rows  # within texts
            if body.count(b",", 0, end) > most:
                message = f"the body holds more values than {self.max_rows} rows of the inputs have"
                raise HttpError(TOO_LARGE, message)
        try:
            arrays, asked = wire.decode(body, content_type, headers, self.specs, self.readers)
            check(arrays, self.specs, self.max_rows)
            if not asked:
                return arrays, {}
            labels = self.labels if asked.get("outputs") else ()
            return arrays, requested_outputs(asked, [*self.outputs, *labels])
        except MemoryError:  # numpy tries to make an array as large as a header says
            raise HttpError(TOO_LARGE, "the body takes too much memory to read") from None
        except Exception as error:
            raise HttpError(*describe_error(error)) from error


def with_readers(decoder: RequestDecoder, forms: Named, folder: Path) -> RequestDecoder:
    """Return a decoder that takes texts and images, too, by settings and files of a folder."""
    readers = create_readers({**forms, "max_rows": decoder.max_rows}, decoder.specs, folder)
    return replace(decoder, readers=readers)


def memory_needed(forms: Named, limits: Limits) -> int:
    """Return the bytes that reading the largest texts and images takes."""
    image = MAX_PIXELS * PIXEL_BYTES if forms.get("image") else 0
    most_tokens = forms["text"]["max_length"] or LONGEST_TEXT if forms.get("text") else 0
    return BODY_COPIES * limits.body_bytes + max(image, limits.rows * most_tokens * TOKEN_BYTES)


def content_type_of(headers: Headers) -> str:
    """Return the Content-Type without parameters, in lower case."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def most_numbers(specs: Specs, rows: int) -> float:
    """Return the most numbers that the inputs of `rows` rows hold; infinite for unbounded axes."""
    # Rows are counted on the first input's first axis, where it has a name.
    row_axis = next(iter(specs[0]["shape"]), None)
    total = 0.0
    for spec in specs:
        bounds = {axis: most or math.inf for axis, (_, most) in spec.get("bounds", {}).items()}
        bounds |= {row_axis: rows}
        sizes = [d if isinstance(d, int) else bounds.get(d, math.inf) for d in spec["shape"]]
        total += math.prod(sizes)
    return total
