"""Workers that share the work of requests: prompts computed here, answers written there, KV blocks sent between them.

    Pools ── router          Worker: engine, Holder ══ transport ══▶ Handover, engine: Worker

file             what it does
pools            `Pools`: workers as one `EngineClient`; what happens when one of them is lost
group            their settings, health and roles as those of one engine
mixed            pools that compute K and V in different ways: what is said of them
router           which worker computes a prompt and which writes the answer: the least expected time
core             what decides behind it, in Python: the specification
native_core      the same in C++
search           the best route among the workers that come into question
ranks            workers in the order of what a prompt costs there
standing         what the router knows of one worker
holdings         which blocks they have, by name
member           one of these workers: its load, its speed, its events
totals           the counters of several workers as those of one engine
flight           a request on its way through several workers: what each is asked, one answer for the caller
worker           `Worker`: an engine that gives its blocks to others and takes theirs
handover         one request moves to another worker: room, blocks that are lacking, local prefill when they do not come
parcels          blocks that travel before their request does
journal          what has travelled, one by one
holder           lends the blocks of an engine: offers, leases, bytes for peers
transfer         five states with a lease, without bytes or engines
transport        the protocol of all transports
transports       the one that fits a pair of workers, and whether their engines read each other's pools
sockets          TCP between machines; a Unix socket with shared memory on one machine
session          what the two ends of a transfer say to each other
acceptor         a listening socket, and a task for each connection
channel          proof of the deployment's key, and sealed frames over a socket

deployment       `Deployment`: `Pools` on Ray
placement        the router's end of its Ray driver
placement_main   the Ray driver: workers as actors, placed and started again
placing          what these two say to each other
agent            the process of a worker
remote_worker    a worker in the router's process: the end of its line
hub              where workers join the router
control          what router and worker say to each other

app              a deployment as a Ray Serve application: an entry point, as the commands are

None of it needs torch, and only placement_main and app need Ray.
"""
