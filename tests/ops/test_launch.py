"""A start finds the compiled kernels of the start before it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CHECK = """
import sys
from triton.runtime.jit import DependenciesFinder, JITFunction
import twostroke.run.cuda.warm_up
from twostroke.ops.cuda.kernels.launch import hash_functions

update = DependenciesFinder._update_hash
def checked(self, function):
    assert function.hash is not None, f"{function.fn.__name__} is hashed after {self.name}, which calls it"
    return update(self, function)
DependenciesFinder._update_hash = checked

class Importing(str):
    def startswith(self, *given):  # as if another thread imported something now
        sys.modules["late"] = sys
        return super().startswith(*given)

sys.modules[Importing("early")] = sys
hash_functions()
assert "late" in sys.modules
kernels = 0
for name, module in list(sys.modules.items()):
    for function in vars(module).values() if name.startswith("twostroke.ops.cuda.kernels.") else ():
        if isinstance(function, JITFunction) and function.hash is None:
            kernels += 1
            function.cache_key
print(kernels)
"""


def test_functions_are_hashed_before_those_that_call_them() -> None:
    """In Triton 3.6 a kernel's hash would else depend on which threads compiled what before."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, env=plain)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40
