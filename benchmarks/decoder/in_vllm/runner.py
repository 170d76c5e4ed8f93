"""Opens folders in vLLM, in vLLM's environment: `DTYPE [--compile]`.

Answers each line of JSON that it reads with one:
`{"open": FOLDER}` opens a folder, and closes the one before, with `{}` or `{"refused": REASON}`,
`{"scores": TOKENS, "to": FILE}` writes the logits after each token as safetensors, with `{}`, and
`{"speed": TOKENS, "count": N}` gives milliseconds to the first token and tokens a second.

On a processor without AVX-512, weights of 4 bits need `VLLM_SOURCE`, a folder with vLLM 0.29's
source distribution, whose kernel is compiled for AVX2.
"""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
sys.path.insert(0, str(Path(__file__).parent))
import torch
from avx2_kernel import register
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

LONGEST = 512
"""Tokens of a prompt and its continuation."""


def scores(llm: LLM, tokens: list[int]) -> torch.Tensor:
    """Return the logits after each token, `(tokens, vocabulary)`."""
    every = SamplingParams(max_tokens=1, temperature=0, logprobs=-1, prompt_logprobs=-1)
    (answer,) = llm.generate({"prompt_token_ids": tokens}, every, use_tqdm=False)
    rows = [*answer.prompt_logprobs[1:], answer.outputs[0].logprobs[0]]
    return torch.tensor([[row[i].logprob for i in range(len(row))] for row in rows])


def speed(llm: LLM, tokens: list[int], count: int) -> tuple[float, float]:
    """Return milliseconds to the first token, and tokens a second after it."""
    engine = llm.llm_engine
    greedy = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    times = [perf_counter()]
    engine.add_request(str(times[0]), {"prompt_token_ids": tokens}, greedy)
    while engine.has_unfinished_requests():
        if engine.step():
            times.append(perf_counter())
    return 1000 * (times[1] - times[0]), 1 / median(b - a for a, b in pairwise(times[1:]))


def opened(folder: Path, dtype: str, *, compiled: bool) -> LLM:
    limit = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    return LLM(
        model=str(folder),
        dtype=dtype,
        enforce_eager=not compiled,
        max_model_len=min(limit, LONGEST),
        max_num_seqs=1,
        max_logprobs=-1,
        logprobs_mode="raw_logits",
        enable_prefix_caching=False,
    )


def main() -> None:
    if not hasattr(torch.ops._C, "cpu_gemm_wna16") and "VLLM_SOURCE" in os.environ:
        register(Path(os.environ["VLLM_SOURCE"]))
    llm: LLM | None = None
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints, too
    for line in sys.stdin:
        asked, answer = json.loads(line), {}
        if "open" in asked:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            llm = None
            cleanup_dist_env_and_memory()
            try:
                llm = opened(Path(asked["open"]), sys.argv[1], compiled="--compile" in sys.argv)
            except Exception as error:  # noqa: BLE001 - the reason is the answer
                answer = {"refused": f"{type(error).__name__}: {error}"}
        elif "scores" in asked:
            save_file({"scores": scores(llm, asked["scores"])}, asked["to"])
        else:
            answer = speed(llm, asked["speed"], asked["count"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
