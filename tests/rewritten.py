"""Keep all tests with rewritten assertions, as pytest does when it first imports them.

Run as a script before the tests: the workers that import them need not wait for one another.
"""

from multiprocessing import Pool
from pathlib import Path

from _pytest.assertion import install_importhook, rewrite
from _pytest.config import get_config


def keep(files: list[Path]) -> None:
    """Write what pytest reads instead of some modules."""
    hook = install_importhook(get_config())
    state = hook.config.stash[rewrite.assertstate_key]
    for file in files:
        folder = rewrite.get_cache_dir(file)
        folder.mkdir(parents=True, exist_ok=True)
        stat, code = rewrite._rewrite_test(file, hook.config)
        rewrite._write_pyc(state, code, stat, folder / f"{file.stem}{rewrite.PYC_TAIL}")


if __name__ == "__main__":
    tests = Path(__file__).parent
    files = sorted([*tests.rglob("test_*.py"), *tests.rglob("conftest.py")])
    with Pool(parts := 2) as pool:
        pool.map(keep, [files[part::parts] for part in range(parts)])
