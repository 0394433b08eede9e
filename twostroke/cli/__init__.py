"""The command line: `main.py` has the list of commands, each is a file; `run_*.py` do what the longer ones ask for."""
