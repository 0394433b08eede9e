"""The command line. `main.py` lists the commands; each command is the file of its name.

A command imports what it needs when it runs, so that `--help` is fast. Beside the commands: `options.py` (options that
several commands have), `terminal.py` (consoles, progress bars), `deployment.py` (a model and a machine as typed),
`watch.py` (a live line while a load is measured).
"""
