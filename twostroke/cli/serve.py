"""The command `serve`: fetch the model, read the keys, run."""

from __future__ import annotations

from twostroke.cli.options import ModelArgument, SettingsOption, parse_settings
from twostroke.cli.server_options import Given, run_server, server_options, takes_server_options
from twostroke.weights.catalog import DEFAULT


@takes_server_options
def serve(
    model: ModelArgument = DEFAULT,
    option: SettingsOption = None,
    *,
    given: Given,
) -> None:
    """Serve a model over HTTP, with OpenAI's and Anthropic's APIs. Metrics, health and a dashboard are there too."""
    options = server_options(model, parse_settings(option), given)
    from twostroke.serve.main import run

    run_server(options, run)
