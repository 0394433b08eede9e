"""What every test may rely on, however it is started: no terminal, no colours, nothing between it and a server
on this machine. Set before anything else is imported, since some libraries look once, when they are loaded."""

import os

for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)
os.environ |= {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120", "PYTHONUTF8": "1"}  # the last for processes we start
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # torch's waiting threads leave the processor to those with work
for name in ("NO_PROXY", "no_proxy"):
    os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost", "0.0.0.0")))
