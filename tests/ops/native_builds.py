"""The native kernels' driver, built for sanitizers and for the other architecture: each build is made once.

`python tests/ops/native_builds.py FOLDER` makes those of this machine before a test asks, and imports no package:
.ci/run does so while packages are fetched. Tests look into the folder that NATIVE_BUILDS names.
"""

from __future__ import annotations

import fcntl
import importlib.util
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

CPU = Path(__file__).resolve().parents[2] / "twostroke" / "ops" / "cpu"
# -O1 takes minutes to compile, -O0 minutes to run. Lines for reports, without variables.
SANITIZED = ("-Og", "-g1", "-DTS_SLOW", "-fno-sanitize-recover=all")
ARM = "aarch64-linux-gnu-g++"
# name: the compiler (None: the system's), flags
BUILDS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "address": (None, (*SANITIZED, "-fsanitize=address,undefined")),
    "threads": (None, (*SANITIZED, "-fsanitize=thread")),
    "arm": (ARM, ("-static",)),
}


def compiled(folder: Path, compiler: str | None = None, extra: tuple[str, ...] = ()) -> Path:
    """By the library's own recipe, found by its path: the package's imports may not be installed yet."""
    spec = importlib.util.spec_from_file_location("native_build", CPU / "build.py")
    assert spec is not None and spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    sources = [recipe.NATIVE / "selftest.cpp"]
    return recipe.build(folder / "selftest", compiler, extra, sources=sources, shared=False)


def made_once(folder: Path, make: Callable[[Path], Path]) -> Path:
    """What make(folder) builds: the first process that asks compiles, the others wait for it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        program = folder / "selftest"
        return program if program.exists() else make(folder)


def built(folder: Path, name: str) -> Path:
    compiler, flags = BUILDS[name]
    return made_once(folder / name, lambda place: compiled(place, compiler, flags))


if __name__ == "__main__":
    for name, (compiler, _) in BUILDS.items():
        if compiler is None or (shutil.which(compiler) and platform.machine() != "aarch64"):
            print(built(Path(sys.argv[1]), name))
