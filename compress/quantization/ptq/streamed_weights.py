"""Weight-only quantization of a model whose weights stay on disk, block by block.

A block's weights are read, its inputs, which the blocks before it gave, run through it, its weights
are rounded, packed and written, and it is let go. What was written is not computed again after an
interruption. The integers are those of :func:`~.weight_only_graph.quantize_weights`: the pieces of
the graph have the same operators, and calibration runs in the float model in both.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from compress.artifacts.streaming.packed_model import FACTOR, PARTS, TABLE
from compress.checkpoint.safetensors_io import read_safetensors, write_safetensors
from compress.checkpoint.state_dict import in_memory
from compress.common.atomic_files import sha256_of
from compress.common.config import Settings
from compress.common.errors import StageFailed
from compress.common.sealed_json import read_if_unchanged, read_state, write_sealed, write_state
from compress.data.batch import Batch
from compress.profiling.rss import release_memory, trim_memory
from compress.quantization.pt2e.graph_capture import module_of, remove_unread_tensors_
from compress.quantization.pt2e.quantizer import LINEAR
from compress.quantization.ptq.block_graphs import BlockGraphs
from compress.quantization.ptq.weight_only_graph import input_second_moments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from torch.fx import GraphModule, Node

    from compress.artifacts.eager_model import EagerModel
    from compress.checkpoint.state_dict import StoredTensor
    from compress.quantization.ptq.weight_only_graph import WeightQuantizer

logger = logging.getLogger(__name__)
KEY = "key.json"
RECORDED = ("quantized", "left_float", "rescaled", "scaled")
"""What a quantizer records, written with each piece."""


class Piece(Settings):
    """What was written of one quantized piece."""

    recorded: dict[str, Any]
    """What the quantizer has recorded so far."""
    files: dict[str, str]
    """File of its weights, and of what it gives to the next piece → its SHA-256."""


@dataclass
class StreamedQuantization:
    """Quantizes a model piece by piece, into files of a work folder."""

    model: EagerModel
    quantizer: WeightQuantizer
    batches: Iterable[Batch]
    """The calibration sample, of which one batch is in memory; empty where the method needs none.
    """
    work: Path

    def run(self, progress: Callable[[str, int, int], None]) -> dict[str, StoredTensor]:
        """Quantize the pieces that are not written yet, and return all tensors, on disk.

        Raises:
            StageFailed: the model is no chain of blocks, or nothing can be quantized.
        """
        self._claim_work()
        self.quantizer.after_weight = trim_memory
        blocks = BlockGraphs(self.model)
        done = self._resume(len(blocks))
        if done:
            logger.info("goes on at %s, piece %d of %d", blocks.name(done), done + 1, len(blocks))
        for index in range(done, len(blocks)):
            began = time.monotonic()
            self._quantize_piece(blocks, index)
            release_memory()  # graphs hold themselves in cycles, and glibc keeps what is freed
            logger.info("%s: %.1f s", blocks.name(index), time.monotonic() - began)
            progress("quantize", index + 1, len(blocks))
        if not self.quantizer.quantized:
            reasons = "; ".join(f"{k}: {why}" for k, why in self.quantizer.left_float.items())
            raise StageFailed(
                f"no weight could be quantized ({reasons or 'there is no linear layer'}); expected "
                "a linear layer or an embedding that `exclude` does not name"
            )
        module, weights = self.model.stored_weights()
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        # Tensors that no piece reads stay as they are.
        state: dict[str, StoredTensor] = {k: x for k, x in weights.items() if k not in parameters}  # type: ignore[misc]
        for index in range(len(blocks)):
            state |= read_safetensors(self._file(index))
        return state

    def _quantize_piece(self, blocks: BlockGraphs, index: int) -> None:
        graph = blocks.capture(index)
        release_memory()  # of tracing, which allocates much and keeps little
        weights = {str(n.target) for n in graph.graph.find_nodes(op="get_attr")}
        moments: dict[str, torch.Tensor] = {}
        if self._calibrates:
            following = self._carried(index + 1)
            partial = following.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            numbers = count()

            def keep(outputs: Any) -> None:
                tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
                state = {str(place): tensor for place, tensor in enumerate(tensors)}
                write_safetensors(partial / f"{next(numbers)}.safetensors", state)

            is_last = index == len(blocks) - 1
            inputs = self._inputs(blocks, index)
            moments = input_second_moments(graph, inputs, None if is_last else keep)
            shutil.rmtree(following, ignore_errors=True)
            partial.replace(following)
        trim_memory()
        self.quantizer.quantize_(graph, moments, blocks.tied)
        remove_unread_tensors_(graph)
        recorded = {k: getattr(self.quantizer, k) for k in RECORDED}
        recorded["rescaled"] = sorted(recorded["rescaled"])
        write_safetensors(self._file(index), _state_of(graph, weights))
        written = [self._file(index), *self._carried(index + 1).glob("*")]
        files = {file.relative_to(self.work).as_posix(): sha256_of(file) for file in written}
        write_sealed(self._record(index), Piece(recorded=recorded, files=files))
        if self._calibrates and index > 1:  # what the first piece gave is read by all blocks
            shutil.rmtree(self._carried(index), ignore_errors=True)

    def _inputs(self, blocks: BlockGraphs, index: int) -> Iterator[Batch]:
        """Yield the inputs of a piece for each batch of the calibration sample."""
        for number, batch in enumerate(self.batches):
            if index == 0:
                yield batch
                continue
            name = f"{number}.safetensors"
            carried = in_memory(read_safetensors(self._carried(index) / name)["0"])
            if index == len(blocks) - 1:
                yield Batch((*batch.inputs, carried), None)
                continue
            more = read_safetensors(self._carried(1) / name)
            places = blocks.arguments[index - 1].places
            yield Batch((carried, *(in_memory(more[str(place)]) for place in places)), None)

    @property
    def _calibrates(self) -> bool:
        return self.quantizer.method in ("gptq", "awq")

    def _record(self, index: int) -> Path:
        """Return the file of what was recorded of a piece, the last one that is written of it."""
        return self._file(index).with_suffix(".json")

    def _file(self, index: int) -> Path:
        """Return the file of a piece's weights."""
        return self.work / f"piece-{index:04d}.safetensors"

    def _carried(self, index: int) -> Path:
        """Return the folder of a piece's inputs, which the one before gave: a file a batch."""
        return self.work / f"carried-{index:04d}"

    def _resume(self, pieces: int) -> int:
        """Return how many pieces are written, and restore what the quantizer recorded of them."""
        done, recorded = 0, dict[str, Any]()
        while done < pieces and (piece := self._written(done)):
            done, recorded = done + 1, piece.recorded
        if done and self._calibrates and done < pieces and not self._carried(done).is_dir():
            return 0
        for name, value in recorded.items():
            kind = type(getattr(self.quantizer, name))
            setattr(self.quantizer, name, kind(value))
        return done

    def _written(self, index: int) -> Piece | None:
        """Return what was recorded of a piece; None where one of its files is not as written."""
        piece = read_if_unchanged(self._record(index), Piece)
        for name, digest in piece.files.items() if piece else ():
            file = self.work / name
            # What it gives to the next piece is removed once that has read it.
            is_needed = file.exists() or file == self._file(index)
            if is_needed and not (file.exists() and sha256_of(file) == digest):
                logger.warning("%s is not as it was written; it is quantized again", file)
                return None
        return piece

    def _claim_work(self) -> None:
        """Empty the work folder where it is of another model, other settings or other data."""
        left_out = (*RECORDED, "after_weight")
        settings = {
            k: v for k, v in vars(self.quantizer).items() if k not in left_out and k[0] != "_"
        }
        parts = {"model": self.model.digest, "settings": settings, "torch": torch.__version__}
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=list).encode())
        for batch in self.batches:
            for tensor in batch.inputs:
                digest.update(tensor.contiguous().numpy().tobytes())
        file, key = self.work / KEY, digest.hexdigest()
        if read_state(file, key, bool) is None:
            shutil.rmtree(self.work, ignore_errors=True)
            write_state(file, key, True)


def _state_of(graph: GraphModule, weights: set[str]) -> dict[str, torch.Tensor]:
    """Return a quantized graph's tensors by the names of the module's parameters.

    `weights` are the names that the graph read before.
    """
    own = {k: x.detach() for k, x in [*graph.named_parameters(), *graph.named_buffers()]}
    state = {name: own[name] for name in weights if name in own}
    for name in weights:
        stem = name.replace(".", "_")
        for suffix, kind in (("", ""), ("_rows", TABLE)):
            for part in PARTS:
                if (tensor := own.get(f"{stem}{suffix}{part.replace('.', '_')}")) is not None:
                    state[f"{name}{kind}{part}"] = tensor
    for node in graph.graph.find_nodes(op="get_attr"):
        if str(node.target).endswith("_smoothing"):
            for layer in _linear_readers(node):
                state[f"{layer}{FACTOR}"] = own[str(node.target)]
    return {name: tensor.contiguous() for name, tensor in state.items()}


def _linear_readers(node: Node) -> set[str]:
    """Return the modules of the linear layers that a node's result reaches first."""
    found, pending = set[str](), list(node.users)
    while pending:
        reader = pending.pop()
        if reader.target is LINEAR:
            found.add(module_of(reader))
        else:
            pending += reader.users
    return found
