"""Runs llama.cpp's own server tests against a server that is already there: a `conftest.py` beside their `utils.py`.

Their model names and settings of the server do not apply: the model's name is replaced, starting and stopping does
nothing.
"""

import os
import sys
import types
from urllib.parse import urlsplit

import pytest
import requests

sys.modules.setdefault("wget", types.ModuleType("wget"))  # only for models that are not fetched here
sys.modules.setdefault("filelock", types.ModuleType("filelock"))

import openai  # noqa: E402
import utils  # noqa: E402

WHERE = urlsplit(os.environ["TWOSTROKE_URL"])
MODEL = os.environ["TWOSTROKE_MODEL"]


def start(self, timeout_seconds=60):
    self.server_host, self.server_port, self.api_key = WHERE.hostname, WHERE.port, None


utils.ServerProcess.start = start
utils.ServerProcess.stop = lambda self: None
utils.ServerPreset.load_all = staticmethod(lambda: None)


def with_our_model(data):
    """Their requests name a model that is not served, and leave the limit of an answer out where the server has one."""
    return {**data, "model": MODEL} if isinstance(data, dict) and "model" in data else data


def renamed(method):
    def call(url, **named):
        for route in ("/chat/completions", "/completions"):  # theirs are served without a version too
            url = url if "/v1/" in url else url.replace(route, "/v1" + route)
        if "json" in named:
            named["json"] = with_our_model(named["json"])
        return method(url, **named)

    return call


requests.post = renamed(requests.post)
_request = openai.OpenAI.request


def request(self, cast_to, options, **more):
    if isinstance(options.json_data, dict):
        options.json_data = {**options.json_data, "model": MODEL}
    return _request(self, cast_to, options, **more)


openai.OpenAI.request = request


@pytest.fixture(scope="session", autouse=True)
def one_server():
    return
