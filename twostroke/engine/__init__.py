"""The engine in one process: from a prompt to text, without HTTP or a second process.

file          what it does
llm           `LLM`: load a model and ask it, from Python
several       one prompt or several, with their sampling parameters
vectors       the part of `LLM` for models that make vectors and scores
intake        checks prompts and sampling parameters, and makes a frozen `Request` for each sample
core          `Core`: one step is plan → run → commit; a submitted `Request` becomes a `RequestState` here
answer        from the core's events to text: `Answer` decodes and finds stop strings
output        what the caller gets: `StreamEvent`, `Output`
chat_form     of models with channels: reasoning apart from the text
build         puts an engine together: checkpoint, settings, backend, model, KV cache, scheduler, core
device        which device computes, what it has free, and which models it serves
draft_model   opens the draft model's checkpoint, and checks that it fits
settings      settings that can change while the engine runs
exchange      KV blocks that leave one engine and enter another
interrupt     Ctrl-C takes effect between steps, never within one

A request has three shapes on its way. `Request` is what is asked: the front end makes it and nothing changes it.
`RequestState` is what the engine knows of it: tokens, blocks, `computed`. `Answer` is what the caller sees: text and a
timeline. An `Event` carries what is new from the second to the third, with the request's id. An engine that runs
elsewhere (twostroke/remote) uses the same three.
"""
