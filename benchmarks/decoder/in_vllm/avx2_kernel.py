"""vLLM's product with 4-bit weights for processors without AVX-512, compiled from vLLM's source.

Its CPU wheels have the kernel `cpu_gemm_wna16` for AVX-512 alone, as one constructor, which looks
16 packed integers up in a table, is not written for AVX2. All else is vLLM's code, unchanged.
"""

import shutil
from pathlib import Path

import torch
from torch.utils.cpp_extension import load

BEFORE = "  explicit FP32Vec16(__m256 low, __m256 high) : reg_low(low), reg_high(high) {}\n"
LOOK_UP = """
  explicit FP32Vec16(int64_t value, const FP32Vec16& lut) {
    __m128i bytes = _mm_cvtsi64_si128(value);
    __m128i even = _mm_and_si128(bytes, _mm_set1_epi8(15));
    __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
    __m128i indices = _mm_unpacklo_epi8(even, odd);
    auto look_up = [&](__m128i eight) {
      __m256i index = _mm256_cvtepu8_epi32(eight);
      __m256 low = _mm256_permutevar8x32_ps(lut.reg_low, index);
      __m256 high = _mm256_permutevar8x32_ps(lut.reg_high, index);
      // Bit 3 of the index, as the sign, chooses the half.
      return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
    };
    reg_low = look_up(indices);
    reg_high = look_up(_mm_srli_si128(indices, 8));
  }
"""
MAIN = """
#include <torch/all.h>
#include <torch/library.h>
#include "cpu/cpu_types.hpp"
namespace vec_op {  // called for AMX alone, which is refused before
template <class V, class T> void interleave_save(const V&, const V&, T*) { TORCH_CHECK(false); }
}
#include "cpu/cpu_wna16.cpp"
%s}
TORCH_LIBRARY_FRAGMENT(_C, ops) {
  ops.def("cpu_gemm_wna16(Tensor input, Tensor q_weight, Tensor(a2!) output, Tensor scales, "
          "Tensor? zeros, Tensor? g_idx, Tensor? bias, SymInt pack_factor, str isa_hint) -> ()");
  ops.impl("cpu_gemm_wna16", torch::kCPU, &cpu_gemm_wna16);
}
"""
FLAGS = ["-O3", "-mavx2", "-mf16c", "-fopenmp"]  # those of vLLM's own AVX2 build


def register(source: Path) -> None:
    """Compile the kernel from an unpacked source distribution of vLLM, once, and register it."""
    build = source / "build-avx2"
    library = build / "vllm_wna16_avx2.so"
    if library.exists():
        torch.ops.load_library(library)
        return
    code = build / "include" / "cpu"
    shutil.copytree(source / "csrc" / "cpu", code, dirs_exist_ok=True)
    types = (code / "cpu_types_x86.hpp").read_text()
    if types.count(BEFORE) != 1:
        raise SystemExit(f"{source}: another vLLM than 0.29, for which this was written")
    (code / "cpu_types_x86.hpp").write_text(types.replace(BEFORE, BEFORE + LOOK_UP))
    utilities = (code / "utils.cpp").read_text()
    begin = utilities.index("namespace cpu_utils {")
    scratchpad = utilities[begin : utilities.index("}  // namespace cpu_utils", begin)]
    main = build / "main.cpp"
    main.write_text(MAIN % scratchpad)
    load(
        library.stem,
        [str(main)],
        extra_cflags=FLAGS,
        extra_ldflags=["-fopenmp"],
        extra_include_paths=[str(code.parent)],
        build_directory=str(build),
        is_python_module=False,
    )
