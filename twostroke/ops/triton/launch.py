"""Programmatic dependent launch: a kernel may start, and ask for what depends on nobody, before the one ahead ends.

Every kernel launched so waits before it touches anything another kernel writes, so the chain stays ordered.
"""

from __future__ import annotations

import os

import triton
from triton.language.extra import cuda as _cuda

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PDL = not INTERPRETED
EARLY = {"launch_pdl": True} if PDL else {}  # the launch option
gdc_wait = _cuda.gdc_wait
gdc_launch_dependents = _cuda.gdc_launch_dependents

__all__ = ["EARLY", "INTERPRETED", "PDL", "gdc_launch_dependents", "gdc_wait", "triton"]
