"""Strings to tokens and back, chat messages to prompts, and the text of an answer as it is generated.

tokenizer.py          encodes and decodes; what the rest of the engine uses
encode.py             encodes one text while other threads run
vocabulary.py         the record that both vocabulary readers make
folder_vocabulary.py  reads tokenizer.json and the files beside it
gguf_vocabulary.py    reads the vocabulary in a GGUF header
pretokenize.py        how families split text into words, by the name that a GGUF gives
token_bytes.py        from one token to its bytes
stream.py             tokens to whole characters, and stop strings
chat.py               messages to a prompt, through the model's chat template
controls.py           control tokens of the template, told apart from the same characters in a message
render.py             the child process that renders the template
conversation.py       messages with roles, calls and tools to a prompt; an answer that is continued
generic_tools.py      tools for models whose template has no form for them
history.py            earlier answers as the template of a family takes them
infill.py             prompts for filling in the middle
tools.py              tools as clients describe them
formats.py            the table of formats in which models write calls
parse.py              an answer's text as content, reasoning and tool calls
reading.py            what its parts share: characters, deltas, marks
json_calls.py         calls as JSON objects
tagged_calls.py       calls with arguments between tags
channels.py           answers in channels (Harmony)
"""
