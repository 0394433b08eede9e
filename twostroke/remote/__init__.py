"""An engine that runs elsewhere, and its asynchronous front end.

    AsyncEngine ──Request──▶ EngineClient ═══ messages ═══▶ EngineLoop ──▶ Core
    Stream      ◀──Event────                                (a child process, or a thread)

file           what it does
async_engine   `AsyncEngine`: tokenizer, admission, a `Stream` for each call; what the server is built on
stream         `Stream`: the pieces of the answers to one call, for one reader
admission      which requests are taken: a queue bounded by what its requests may cost, with a share for each API key
turns          one at a time, and API keys take turns: for grammars that are tried
progress       what the engine did over the last seconds with work
ended          the record of the last requests that ended, for a replay in the simulator
observer       the interface of metrics: tokens, gaps, ends of answers
client         the `EngineClient` protocol: submit, abort, change, steps, health; ids and clocks across machines
process        `ProcessEngine`: the engine in a child process, watched and started again
thread         `ThreadEngine`: the engine on a thread of this process
loop           `EngineLoop`: takes messages between steps, runs the core, reports each step; start and warm-up
blocks         KV blocks that the engine gives to other engines or gets from them
direct         blocks that engines read from each other's pools: from GPU to GPU, or from host to host
nixl_agent     NIXL in this process: memory that peers may read, and reads of theirs
segment        memory that two processes share, in which the bytes of blocks travel
child_main     the main program of the child process
messages       what front end and engine say to each other
wire           messages as bytes

The server's process imports all of it but loop, blocks, direct, child_main and thread, and none of that needs torch.
"""
