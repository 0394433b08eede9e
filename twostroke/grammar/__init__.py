"""Answers that must belong to a language: JSON schemas, regular expressions and EBNF become token masks.

lark.py     a `Grammar` in the one notation that the grammar library reads
schema.py   JSON schemas in the form that the library follows exactly; what it cannot follow is refused
unique.py   lists without repetition, spelled out where they are few
keywords.py where a schema has other schemas in it
tools.py    a grammar that forces tool calls
tagged.py   their arguments between tags
library.py  the calls into the grammar library (llguidance), with limits
check.py    the child process in which every new grammar is tried
compile.py  compiled grammars of one vocabulary
masks.py    the state of each answer in its grammar, and the masks of a step
forced.py   tokens that a grammar leaves no choice about, as drafts
budget.py   the time that grammars may take of the engine's steps
queue.py    requests that wait until their grammar is compiled
"""
