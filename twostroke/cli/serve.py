"""The command `serve`: fetch the model, read the keys, run."""

from __future__ import annotations

from twostroke.cli.options import ModelArgument, Settings, parse_settings
from twostroke.cli.server_options import (
    AdminKey,
    AdminKeyFile,
    AllowedHost,
    AllowOrigin,
    AnswerCache,
    AnswerCacheAllow,
    AnswerCacheEntries,
    AnswerCacheError,
    AnswerCacheFile,
    AnswerCacheTtl,
    AnswerCacheUrl,
    ApiKeyFile,
    ApiKeys,
    ClosedObjects,
    DrainTimeout,
    Given,
    Host,
    MaxQueue,
    Port,
    RecordQuestions,
    run_server,
    server_options,
)
from twostroke.weights.catalog import DEFAULT


def serve(
    model: ModelArgument = DEFAULT,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKeys = None,
    api_key_file: ApiKeyFile = None,
    max_queue: MaxQueue = None,
    drain_timeout: DrainTimeout = 30.0,
    option: Settings = None,
    admin_key: AdminKey = None,
    admin_key_file: AdminKeyFile = None,
    allowed_host: AllowedHost = None,
    allow_origin: AllowOrigin = None,
    closed_objects: ClosedObjects = False,
    answer_cache: AnswerCache = "off",
    answer_cache_url: AnswerCacheUrl = None,
    answer_cache_file: AnswerCacheFile = None,
    answer_cache_error: AnswerCacheError = 0.01,
    answer_cache_ttl: AnswerCacheTtl = None,
    answer_cache_entries: AnswerCacheEntries = 100_000,
    answer_cache_allow: AnswerCacheAllow = "",
    record_questions: RecordQuestions = False,
) -> None:
    """Serve a model over HTTP: OpenAI's and Anthropic's APIs, metrics, health."""
    given = Given(
        host=host, port=port, api_key=api_key, api_key_file=api_key_file, max_queue=max_queue,
        drain_timeout=drain_timeout, admin_key=admin_key, admin_key_file=admin_key_file, allowed_host=allowed_host,
        allow_origin=allow_origin, closed_objects=closed_objects, answer_cache=answer_cache,
        answer_cache_url=answer_cache_url, answer_cache_file=answer_cache_file,
        answer_cache_error=answer_cache_error, answer_cache_ttl=answer_cache_ttl,
        answer_cache_entries=answer_cache_entries, answer_cache_allow=answer_cache_allow,
        record_questions=record_questions,
    )  # fmt: skip
    options = server_options(model, parse_settings(option), given)
    from twostroke.serve.main import run

    run_server(options, run)
