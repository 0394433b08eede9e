"""The command line. `main.py` lists the commands; each command is the file of its name.

A command imports what it needs when it runs, so that `--help` is fast.

chat, generate, serve, cluster, bench, plan, diagnose, cache, models   the commands
options          options that several commands have; server_options: those of the commands that serve
terminal         consoles and progress bars; watch: a live line while a load is measured
deployment       a model and a machine as typed, made into a deployment for the cost model
plan_tables      the tables that `plan` prints
cluster_auto     `cluster --auto`: the simulator divides the workers
"""
