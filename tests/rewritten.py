"""Keep all tests with rewritten assertions, as pytest does when it first imports them.

And the constants of what is tested, as Hypothesis does. Run as a script before the tests: each of
the workers that begin at once would do it for itself.
"""

from multiprocessing import Pool
from pathlib import Path
from types import ModuleType

from _pytest.assertion import install_importhook, rewrite
from _pytest.config import get_config

ROOT = Path(__file__).parents[1]


def keep(files: list[Path]) -> None:
    """Write what is read instead of some modules."""
    from hypothesis.internal.constants_ast import constants_from_module

    hook = install_importhook(get_config())
    state = hook.config.stash[rewrite.assertstate_key]
    for file in files:
        if file.is_relative_to(ROOT / "tests"):
            folder = rewrite.get_cache_dir(file)
            folder.mkdir(parents=True, exist_ok=True)
            stat, code = rewrite._rewrite_test(file, hook.config)
            rewrite._write_pyc(state, code, stat, folder / f"{file.stem}{rewrite.PYC_TAIL}")
        else:
            module = ModuleType(file.stem)
            module.__file__ = str(file)
            constants_from_module(module)


if __name__ == "__main__":
    patterns = ("tests/**/test_*.py", "tests/**/conftest.py", "*.py")
    packages = ("compress", "export", "pipelines", "serve")
    patterns += tuple(f"{package}/**/*.py" for package in packages)
    files = sorted({file for pattern in patterns for file in ROOT.glob(pattern)})
    with Pool(parts := 2) as pool:
        pool.map(keep, [files[part::parts] for part in range(parts)])
