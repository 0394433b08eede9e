"""The command line's way into the server: fetch the model, read the keys, run."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from twostroke.cli.terminal import errors, progress_bar
from twostroke.config import make_config
from twostroke.errors import ConfigError
from twostroke.serve.auth import read_keys
from twostroke.weights.checkpoint import locate


def serve(
    model: str,
    host: str,
    port: int,
    api_key: str | None,
    api_key_file: Path | None,
    max_queue: int | None,
    drain_timeout: float,
    settings: dict[str, Any],
) -> None:
    try:
        from twostroke.serve.main import Options, run
    except ImportError as error:
        raise ConfigError(
            f"the server needs a package that is not installed ({error.name}): pip install twostroke."
        ) from None
    keys = read_keys(api_key, api_key_file)
    make_config(**settings)  # refused here, before anything is fetched
    with progress_bar(f"fetching {model}") as fetching:
        path = locate(model, fetching)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    options = Options(
        path.resolve(), model, settings, host, port, tuple(keys), max_queue=max_queue, drain_timeout=drain_timeout
    )
    run(options, lambda line: errors.print(line, markup=False, soft_wrap=True))
    sys.stderr.flush()
    os._exit(0)  # a thread that still tries a grammar must not hold the end up
