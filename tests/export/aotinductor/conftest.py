from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def compilers_know_the_instructions() -> Iterator[None]:
    """Let torch try no program of AMX, and of what leads to it: six of them for each package.

    A compiler of 2023 or older does not know AMX's products of 16 bits: no code has them.
    """
    from torch._inductor.cpu_vec_isa import VecAMX, VecISA

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VecISA, "check_build", lambda _, code: code != VecAMX._amx_fp16_code)
        yield
