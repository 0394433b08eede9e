"""llama.cpp's own tokens for texts on standard input, in a process of its own: it may abort, and it logs a lot.

python -m tests.text.llama_oracle MODEL.gguf < texts.json > tokens.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path


def llama_tokens(model: Path, texts: list[str], *, special: bool = False) -> list[list[int]]:
    """Ask llama.cpp, with its begin token where it adds one."""
    asked = json.dumps({"texts": texts, "special": special})
    command = [sys.executable, "-m", "tests.text.llama_oracle", str(model)]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=600, check=True)
    found: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _main() -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 64, 1, 1
    params.warmup, params.fit_params, params.port, params.verbosity = False, False, 0, 0
    server = xllamacpp.Server(params)
    asked = json.load(sys.stdin)

    def tokens(text: str) -> list[int]:
        body = json.dumps({"content": text, "add_special": True, "parse_special": asked["special"]}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return list(json.load(answer)["tokens"])

    print(json.dumps([tokens(text) for text in asked["texts"]]), flush=True)


if __name__ == "__main__":
    _main()
