"""Engines that share the work of a request: prompts computed here, answers written there, KV blocks sent between them.

    Pair        prefill engine ──▶ Holder ══ transport ══▶ Handover ──▶ decode engine

file        what it does
pair        `Pair`: two engines as one `EngineClient`; what happens when one of them is lost
side        one of these engines: its events say where they come from
flight      a request on its way through several engines: what each is asked, one answer for the caller
handover    one request moves to another engine: room, blocks that are lacking, and local prefill when they do not come
holder      lends the blocks of an engine: offers, leases, bytes for peers
transfer    five states with a lease, without bytes or engines
transport   the protocol of all transports
sockets     TCP between machines; a Unix socket with shared memory on one machine
session     what the two ends of a transfer say to each other
channel     proof of the deployment's key, and sealed frames over a socket
router      which worker computes a prompt and which writes the answer: expected TTFT

None of it needs torch.
"""
