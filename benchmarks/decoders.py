"""What 4 bits cost a decoder and what they gain: `python benchmarks/decoders.py [FOLDER]`.

Trains a Llama of 24 million weights on Python's manual and sources, which takes most of the time,
unless FOLDER (build/decoders) has it from an earlier run. Then prints perplexity and KL divergence
of the next token by method, and size and speed of the folders of `export_genai`, measured in one
process; with `--speed` the speed of the folders of an earlier run alone. With `--architectures` it
prints which decoders of transformers become proven folders instead, tiny ones made from configs.
With `--rotations` it gives that Llama outliers without changing its scores, and prints what 4 bits
cost it with and without a rotation. With `--stream` (and `--gptq`) it makes a folder of 1.01
billion random weights, and prints peak memory and time of quantizing it with `stream: true`; 8 GB
of disk. With `--llama-cpp` it opens files of `export_gguf` in llama.cpp, and takes `pip install
llama-cpp-python`. With `--serve` it prints the speed of an earlier run's int4 folder by `compress
generate` and by `compress serve`. With `--peers` (and `--speed`) it compares perplexity and speed
with llm-compressor's, torchao's and onnxruntime-genai's builder's, whose environments are in
build/peers or the folder of `--environments=`; it says how to make what is missing. With `--large`
it prints the speed of 124 million random weights.
It needs the extras `transformers` and `genai`. One thread.
"""

import logging
import os
import sys
from importlib import import_module
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    here = Path(__file__).parent
    sys.path[:1] = [str(here.parent), str(here)]  # `export` is the package, not a file beside this
    logging.disable(logging.WARNING)
    if "--architectures" in sys.argv:
        import_module("decoder.architectures").main()
        return
    if "--llama-cpp" in sys.argv:
        import_module("decoder.llama_cpp").main()
        return
    folder = next((a for a in sys.argv[1:] if not a.startswith("-")), "build/decoders")
    if "--rotations" in sys.argv:
        import_module("decoder.rotations").main(Path(folder))
        return
    if "--stream" in sys.argv:
        import_module("decoder.streaming").main(Path(folder), sys.argv[1:])
        return
    if "--large" in sys.argv:
        import_module("decoder.large").main(Path(folder) / "large")
        return
    if "--serve" in sys.argv:
        import_module("decoder.serving").main(Path(folder) / "genai-int4")
        return
    if "--peers" in sys.argv:
        given = (a.partition("=")[2] for a in sys.argv if a.startswith("--environments="))
        environments = Path(next(given, "build/peers"))
        peers = import_module("decoder.peers")
        peers.main(Path(folder), environments, speed_alone="--speed" in sys.argv)
        return
    benchmark = import_module("decoder.compression")
    benchmark.main(Path(folder), speed_alone="--speed" in sys.argv)


if __name__ == "__main__":
    main()
