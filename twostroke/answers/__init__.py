"""Answers that are already known: a cache whose error is bounded and shown. Torch-free.

file      what it does
keys      which requests are the same: the whole context as a keyed hash
guard     which questions may share an answer at all: a table of what both must agree on
bound     from which similarity on answers are shared, so that few are wrong
evidence  what was learnt, shared by all servers of a deployment
entry     a stored answer, authenticated with a key of the deployment
store     the embedded store: a file, and everything in memory
redis     the same on Redis: shared by all servers of a deployment
pending   answers on their way to the store
lookup    what a lookup is asked and finds, the options, the counters
vectors   vectors of questions; the latest are kept
texts     judges an answer's text: a refusal, the same as another one
cache     `AnswerCache`: looks up, stores, learns; on a thread of its own
topics    which recorded questions ask the same, for `diagnose`
"""
