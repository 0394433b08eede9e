"""Compiled kernels are kept beside the models, in a folder for these versions and this device: the next start finds
them."""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from pathlib import Path

VARIABLE = "TRITON_CACHE_DIR"  # where Triton keeps what it compiled


def use_kernel_cache(home: Path, device: str) -> None:
    """home: the folder of this program's caches. A folder that the environment names is left alone, and so is Triton's
    own choice where `home` cannot be written."""
    if os.environ.get(VARIABLE):
        return
    folder = home / "kernels" / re.sub(r"[^\w.]+", "-", f"{device} triton {version('triton')} torch {version('torch')}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        os.environ[VARIABLE] = str(folder)
