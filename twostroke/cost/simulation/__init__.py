"""The engine's own scheduler on virtual time.

trace.py         requests as they arrived: when, how long, which parts of their prompts are equal
worker.py        one engine whose steps take what the roofline predicts
fast_forward.py  streams that only decode are advanced many steps at a time, with the same result
fleet.py         several workers behind a router, in one pool or with pools for prefill and decode
routed.py        the same behind the router of a real deployment
served.py        what happened to each request, and a summary of many
deployment.py    a model on machines with settings; `run` simulates arrivals on it
clustered.py     a running deployment of several workers, from its admin routes
recording.py     a running server's documents as a deployment, arrivals and served requests
"""
