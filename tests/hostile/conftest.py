"""The fixtures of the server's tests, for these tests too."""

from tests.serve.conftest import client, long_folder, server, tooled  # noqa: F401
