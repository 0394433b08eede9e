"""HTTP: connections, request bodies, answers, API keys, errors. Nothing here knows an API or the engine.

`listen` the socket and uvicorn's server · `connection` one TCP connection with its limits · `places` which connection
gives its place to a new one · `strict_buffer` what h11 forgives · `half_closed` does the client still read ·
`lingering_close` a close that lets the client read the answer · `http` one request and its answer · `browsers` host
names and web sites · `auth` API keys · `errors` error answers
"""
