"""Freed memory is kept by the commands' processes alone, and not while latency is measured."""

import ctypes
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource, sys
from compress.common import malloc

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def allocations():
    before = faults()
    for _ in range(20):
        block = bytearray(48 << 20)  # more than glibc's largest threshold
        del block
    return faults() - before

default = allocations()
malloc.keep_freed_memory()
kept = allocations()
with malloc.memory_as_deployed():
    deployed = allocations()
again = allocations()
malloc.trim_memory()
print(default, kept, deployed, again, malloc.keeps_freed_memory())
"""

on_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="mallopt is glibc's"
)


def _run(**environment: str) -> list[str]:
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


@on_glibc
def test_freed_memory_is_kept_but_while_latency_is_measured() -> None:
    *faults, keeps = _run()
    default, kept, deployed, again = map(int, faults)
    assert keeps == "True"
    # Each block of 48 MiB is mapped anew: at least one fault for each, with huge pages.
    assert kept < default / 4 and again < deployed / 4 and deployed > default / 2


@on_glibc
def test_an_allocator_that_the_user_has_set_stays() -> None:
    assert _run(GLIBC_TUNABLES="glibc.malloc.mmap_max=65536")[-1] == "False"
