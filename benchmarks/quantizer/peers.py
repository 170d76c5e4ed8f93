"""Quantize a float ONNX file with other tools: same samples, unsigned activations, signed weights.

Tools that cannot be imported are left out; their versions are printed. Olive's static quantization
calls ONNX Runtime's tool, so it is not listed itself.
"""

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType
from onnxruntime.quantization import quantize_static as ort_quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

Sample = list[dict[str, np.ndarray]]


class Reader(CalibrationDataReader):
    """Feeds the batches of a sample to ONNX Runtime's calibration."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.batches = iter(sample)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.batches, None)

    def rewind(self) -> None:
        self.batches = iter(self.sample)


def peers(source: Path, sample: Sample, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield each tool's name with version, and the file that it wrote."""
    tools: dict[str, Callable[[Path, Sample, Path], None]] = {
        "onnxruntime": _onnxruntime,
        "nncf": _nncf,
        "onnx-neural-compressor": _neural_compressor,
    }
    for name, quantize in tools.items():
        file = folder / f"{name}.onnx"
        logging.disable(logging.WARNING)
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                quantize(source, sample, file)
        except ImportError as error:
            print(f"  {name}: not compared ({error})")
            continue
        except Exception as error:  # noqa: BLE001 - what a tool raises is its result
            print(f"  {name}: {type(error).__name__}: {' '.join(str(error).split())[:90]}")
            continue
        finally:
            logging.disable(logging.NOTSET)
        yield f"{name} {version(name)}", file


def _onnxruntime(source: Path, sample: Sample, file: Path) -> None:
    prepared = file.with_suffix(".prepared.onnx")
    quant_pre_process(source, prepared, skip_symbolic_shape=True)
    ort_quantize_static(
        prepared,
        file,
        Reader(sample),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )


def _nncf(source: Path, sample: Sample, file: Path) -> None:
    import nncf

    samples = nncf.Dataset(sample)
    quantized = nncf.quantize(
        onnx.load(source),
        samples,
        subset_size=len(sample),
        fast_bias_correction=True,
    )
    onnx.save(quantized, file)


def _neural_compressor(source: Path, sample: Sample, file: Path) -> None:
    from onnx_neural_compressor import data_reader
    from onnx_neural_compressor.quantization import config, quantize

    class IncReader(Reader, data_reader.CalibrationDataReader):
        """The same reader as a subclass of the tool's base class."""

    settings = config.StaticQuantConfig(
        IncReader(sample),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        calibration_sampling_size=len(sample),
    )
    graph = onnx.load(source)
    for i, node in enumerate(graph.graph.node):
        node.name = f"{node.op_type}_{i}"  # the tool identifies nodes by name
    named = file.with_suffix(".named.onnx")
    onnx.save(graph, named)
    quantize(named, file, settings)
