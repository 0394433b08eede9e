"""Builds the native library with the system's C++ compiler: `python -m twostroke.ops.cpu.build` puts it in place.

Each instruction set is a translation unit with its own flags; which one runs is decided on the machine that runs it.
Only the standard library is used here, because setup.py runs this before anything is installed.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
NATIVE = HERE / "native"
LIBRARY = "libtwostroke.so"

COMMON = (
    *(
        "api.cpp",
        "attend.cpp",
        "cpu.cpp",
        "decode.cpp",
        "encode.cpp",
        "entries.cpp",
        "experts.cpp",
        "latent.cpp",
        "layers.cpp",
    ),
    "linear.cpp",
    "pack.cpp",
    "pool.cpp",
    "quantize.cpp",
    "ranks.cpp",
    "router.cpp",
)

# Products are fused only where the source says so, or instruction sets would round differently.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)

# Lanes in arrays are read as floats and as integers. Where two such arrays share their place on the stack, GCC 12
# reorders the accesses by their types and reads the wrong one (seen on aarch64).
PORTABLE = ("-O2", "-fno-strict-aliasing")

ISA_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "portable": PORTABLE,
        "avx2": ("-mavx2", "-mfma", "-mf16c"),
        "avx512": (
            *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
            *("-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        ),
    },
    "aarch64": {
        "portable": PORTABLE,
        "neon": ("-march=armv8.2-a+dotprod+fp16", "-fno-schedule-insns"),
        "i8mm": ("-march=armv8.2-a+dotprod+fp16+i8mm", "-fno-schedule-insns"),
    },
}


class BuildError(RuntimeError):
    """No compiler, or it failed. The message says what it said."""


def machine_of(compiler: str) -> str:
    """The architecture the compiler makes code for, in Linux's spelling."""
    done = subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True, check=False)
    name = done.stdout.split("-")[0].strip() or platform.machine()
    return {"arm64": "aarch64", "amd64": "x86_64", "AMD64": "x86_64"}.get(name, name)


def find_compiler() -> str:
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise BuildError("no C++ compiler found (looked for $CXX, c++, g++, clang++)")


def build(
    out: Path, compiler: str | None = None, extra: Sequence[str] = (), sources: Sequence[Path] = (), shared: bool = True
) -> Path:
    """Compile everything and link it to `out`; with shared=False an executable, of which `sources` holds the main."""
    compiler = compiler or find_compiler()
    units: list[tuple[Path, tuple[str, ...]]] = [(NATIVE / name, ()) for name in COMMON]
    units += [(path, ()) for path in sources]
    isas = ISA_FLAGS.get(machine_of(compiler), {"portable": PORTABLE})
    units += [(NATIVE / "isa" / f"{name}.cpp", flags) for name, flags in isas.items()]
    with tempfile.TemporaryDirectory() as folder:

        def compile_one(unit: tuple[Path, tuple[str, ...]]) -> str:
            path, flags = unit
            target = str(Path(folder) / f"{path.stem}_{path.parent.name}.o")
            _run([compiler, *FLAGS, *flags, *extra, "-I", str(NATIVE), "-c", str(path), "-o", target])
            return target

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, reversed(units)))  # the long ones first
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(folder) / "linked"
        _run([compiler, *(["-shared"] if shared else []), *extra, *objects, "-pthread", "-o", str(fresh)])
        staged = out.with_name(out.name + ".new")
        shutil.copy(fresh, staged)
        os.replace(staged, out)  # a running process keeps the library it has mapped
    return out


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    try:
        print(build(HERE / LIBRARY, extra=sys.argv[1:]))
    except BuildError as error:
        sys.exit(str(error))
