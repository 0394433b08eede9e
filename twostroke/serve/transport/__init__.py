"""HTTP: connections, request bodies, answers, API keys, errors. Nothing here knows an API or the engine.

`listen` the socket and uvicorn's server · `connection` one TCP connection with its limits · `lingering_close` a close
that lets the client read the answer · `http` one request and its answer · `auth` API keys · `errors` error answers
"""
