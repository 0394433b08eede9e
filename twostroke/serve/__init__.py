"""The server: OpenAI's and Anthropic's APIs over the engine process, in the order of a request.

`transport/`    HTTP: connections and their limits, bodies, keys, error answers
`app`           checks the key, finds the route, turns errors into answers; `route`, `routes`: the table of routes
`api/`          one file for each API: its payloads, its routes, its answers; `dashboard`, `openapi` beside them
`fields`        from bytes to checked fields; `fates`, `field_table`: which fields are hints, and which are refused
`sampling`, `forms`, `structured`, `thinking`   fields that several APIs share
`service`       the engine as the routes see it, and the way from a prompt to an answer
`segments`      an answer's text as content, reasoning and tool calls; `sse`: answers as events, or whole
`usage`, `costs`, `cache_miss`, `verdicts`   what an answer says about itself, and the server about its load
`expected`      what the cost model expects of the engine's work: a slow engine is not healthy
`body_shape`    limits on large bodies, checked before they are parsed; `off_loop`: large work, in threads
`answering`, `answer_setup`   the answer cache; `shadow`: hits that are computed as well; `recorder`: recorded questions
`main`, `main_base`   bind, load, serve, drain, stop; `serving`: the same without a socket; `pool_metrics`: of workers
`embedding`, `embedding_main`, `embedding_routes`   a server of an embedder; `base_service`: what both kinds have

The server needs only the packages of the default install, and its process does not import torch.
"""
