"""Blocks that the host keeps show wherever KV blocks do: metrics, health and steps."""

from __future__ import annotations

import re
from pathlib import Path

import httpx

from tests.serve.server import Server


def metric(client: httpx.Client, name: str) -> float:
    found = re.search(rf"^twostroke:{name}\{{[^}}]*\}} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_what_the_host_keeps_is_counted(llama_folder: Path) -> None:
    limits = ("kv_blocks=12", "max_model_len=128", "max_requests=2", f"kv_offload={1 << 24}")
    server = Server(llama_folder, *(word for limit in limits for word in ("-s", limit))).wait()
    try:
        with server.client() as client:
            assert metric(client, "kv_host_bytes") == metric(client, "kv_blocks_offloaded_total") == 0
            for first in (10, 11, 12, 10):  # three fill the pool more than once; then the first comes again
                body = {"prompt": [first, *range(20, 115)], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
                assert client.post("/v1/completions", json=body).status_code == 200
            blocks = client.get("/health").json()["blocks"]
            size = client.get("/twostroke/settings").json()["layout"]["block_bytes"]
            last = client.get("/twostroke/steps").json()["steps"][-1]["blocks"]
            assert blocks["offloaded"] >= blocks["restored"] > 0 and blocks["host"] == last["host"] > 0
            assert metric(client, "kv_host_bytes") == blocks["host"] * size
            assert metric(client, "kv_blocks_offloaded_total") == blocks["offloaded"]
            assert metric(client, "kv_blocks_restored_total") == blocks["restored"]
    finally:
        assert server.stop() == 0
