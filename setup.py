"""Builds the native CPU library on the way. Without a working C++ compiler the install goes on: the reference runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CPU = Path(__file__).resolve().parent / "twostroke" / "ops" / "cpu"


def native_build():
    spec = importlib.util.spec_from_file_location("native_build", CPU / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildNative(build_ext):
    """Compiles the library with its own recipe (flags differ from file to file) and puts it into the package."""

    def run(self) -> None:
        build = native_build()
        in_source = self.inplace or self.editable_mode
        folder = CPU if in_source else Path(self.build_lib) / "twostroke" / "ops" / "cpu"
        try:
            print(f"twostroke: built {build.build(folder / build.LIBRARY)}", file=sys.stderr)
        except (build.BuildError, OSError) as error:
            print(
                f"twostroke: the native CPU library was not built, the slower reference will run.\n{error}",
                file=sys.stderr,
            )

    def get_outputs(self) -> list[str]:
        path = Path(self.build_lib) / "twostroke" / "ops" / "cpu" / "libtwostroke.so"
        return [str(path)] if path.exists() else []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


setup(ext_modules=[Extension("twostroke.ops.cpu.libtwostroke", sources=[])], cmdclass={"build_ext": BuildNative})
