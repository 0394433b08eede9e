"""Code that lies in a model's folder never runs, ids are the server's own, and the list of both is kept honest."""

from __future__ import annotations

import ast
import json
import re
import socket
from pathlib import Path

import httpx
import pytest

from tests import tiny
from tests.serve.server import OTHER_KEY, ROOT, Server
from twostroke import LLM, SamplingParams
from twostroke.errors import TwostrokeError

TRAP = "open({mark!r}, 'a').write(__file__ + '\\n')\n"
OTHER = {"authorization": f"Bearer {OTHER_KEY}"}
SHORT = {"prompt": "Once", "max_tokens": 2, "temperature": 0}
NAMED = {"id": "mine", "request_id": "mine", "previous_response_id": "resp_1", "conversation": "conv_1", "rid": "mine"}


def trapped(folder: Path, mark: Path) -> Path:
    """A checkpoint that asks for its own code in every way that such folders do."""
    tiny.tiny_llama(folder)
    for name in ("modeling_trap", "configuration_trap", "tokenization_trap", "__init__", "sitecustomize", "conftest"):
        (folder / f"{name}.py").write_text(TRAP.format(mark=str(mark)))
    (folder / "setup.py").write_text(TRAP.format(mark=str(mark)))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(TRAP.format(mark=str(mark)))
    own = {"AutoConfig": "configuration_trap.Trap", "AutoModelForCausalLM": "modeling_trap.Trap",
           "AutoModel": "modeling_trap.Trap", "AutoTokenizer": ["tokenization_trap.Trap", None]}  # fmt: skip
    template = "{{ cycler.__init__.__globals__.os.system('touch " + str(mark) + "') }}"
    for file in ("config.json", "tokenizer_config.json"):
        document = json.loads((folder / file).read_text())
        more = {"auto_map": own, "trust_remote_code": True, "tokenizer_class": "Trap", "chat_template": template}
        (folder / file).write_text(json.dumps(document | more))
    return folder


def test_code_of_a_model_never_runs(tmp_path: Path) -> None:
    """Neither what lies in its folder nor what its chat template says."""
    mark = tmp_path / "ran"
    folder = trapped(tmp_path / "model", mark)
    assert LLM(str(folder)).generate("Once", SamplingParams(max_tokens=2))[0].token_ids
    with pytest.raises(TwostrokeError, match="trust_remote_code"):
        LLM(str(folder), trust_remote_code=True)
    server = Server(folder).wait()
    with server.client() as client:
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=chat).status_code == 400
        for flag in ({"trust_remote_code": True}, {"chat_template": "x"}, {"custom_generate": "x"}):
            refused = client.post("/v1/chat/completions", json=chat | flag)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == next(iter(flag))
    assert server.stop() == 0
    assert not mark.exists(), mark.read_text()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_nobody_chooses_an_id(client: httpx.Client, server: Server, path: str) -> None:
    """A field that would name a request, an answer or a conversation is refused; headers with one change nothing."""
    messages = [{"role": "user", "content": "hi"}]
    body: dict = {
        "/v1/completions": SHORT, "/v1/chat/completions": {"messages": messages, "max_tokens": 2},
        "/v1/responses": {"input": "hi", "max_output_tokens": 16},
        "/v1/messages": {"messages": messages, "max_tokens": 2, "model": server.model},
    }[path]  # fmt: skip
    for field, value in NAMED.items():
        refused = client.post(path, json=body | {field: value})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field, refused.text
    headers = {"x-request-id": "mine", "request-id": "mine", "idempotency-key": "mine"}
    ids = [client.post(path, json=body, headers=headers).raise_for_status().json()["id"] for _ in range(3)]
    assert len(set(ids)) == 3
    assert all(re.fullmatch(r"[a-z]+[-_][0-9a-f]{24,}", one) for one in ids), ids


def test_an_id_opens_nothing(client: httpx.Client, server: Server) -> None:
    """No route reads, continues or ends an answer by its id, or by the beginning of the id, with any key."""
    long = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=long) as one:
        lines = one.iter_lines()
        number = json.loads(next(lines).removeprefix("data: "))["id"]
        for headers in ({}, OTHER):
            for name in (number, number[:8], "*", ""):
                with server.client(headers=dict(client.headers) | headers) as other:
                    for method, path in (
                        ("GET", f"/v1/responses/{name}"), ("DELETE", f"/v1/responses/{name}"),
                        ("POST", f"/v1/responses/{name}/cancel"), ("POST", f"/v1/chat/completions/{name}/cancel"),
                        ("POST", "/abort_request"), ("POST", "/v1/abort"),
                    ):  # fmt: skip
                        assert other.request(method, path, json={"rid": name}).status_code == 404
        last = json.loads([line for line in lines if line.startswith("data: {")][-1].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length", "another request ended it"
        assert last["timings"]["output_tokens"] == 3000


def test_no_address_is_fetched(client: httpx.Client, server: Server) -> None:
    """A field that names an address is refused, or is plain text; the server never connects there."""
    with socket.create_server(("127.0.0.1", 0)) as bait:
        bait.settimeout(0.3)
        url = f"http://127.0.0.1:{bait.getsockname()[1]}/x"
        source = {"type": "url", "url": url}
        image, file = {"type": "image_url", "image_url": {"url": url}}, {"type": "input_file", "file_url": url}
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": url}}}
        chat = {"max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
        bodies: list[tuple[str, dict]] = [
            ("/v1/chat/completions", chat | {"messages": [{"role": "user", "content": [image]}]}),
            ("/v1/chat/completions", chat | {"response_format": schema}),
            ("/v1/responses", {"input": [{"role": "user", "content": [file]}]}),
            ("/v1/messages", chat | {"model": server.model, "messages": [
                {"role": "user", "content": [{"type": "image", "source": source}]}]}),
        ]  # fmt: skip
        for path, body in bodies:
            assert client.post(path, json=body).status_code == 400, (path, body)
        assert client.post("/v1/completions", json=SHORT | {"prompt": url}).status_code == 200
        with pytest.raises(TimeoutError):
            bait.accept()


def test_a_user_name_is_no_identity(client: httpx.Client, server: Server) -> None:
    """What `user` says is not believed: the prefix cache goes by the key alone."""
    body = SHORT | {"prompt": "a secret that only one of them knows " * 4, "user": "alice"}
    again = [client.post("/v1/completions", json=body).raise_for_status().json() for _ in range(2)][1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    other = client.post("/v1/completions", json=body, headers=OTHER).raise_for_status().json()
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_every_test_that_the_list_names_exists() -> None:
    """docs/trust.md names a test for each row."""
    text = (ROOT / "docs" / "trust.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| what")]
    assert len(rows) >= 20
    for row in rows:
        named = re.findall(r"`([\w/]+)::(\w+)`", row)
        assert named or "not built" in row, row
        for file, name in named:
            tree = ast.parse((ROOT / "tests" / f"{file}.py").read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, name)
