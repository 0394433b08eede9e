"""Which requests compute which tokens (docs/scheduling.md). Torch-free.

scheduler.py   requests wait, run and end; `plan`, `commit`, `fail`
planner.py     makes one plan within the budgets
draft_rows.py  its rows for drafts, and what the draft model reads
policy.py      the order of requests: a policy is a sort key
pace.py        how much prompt a step may carry beside running streams
together.py    prompts that arrive together are read before their answers begin
asking.py      requests from other engines that wait for room
keys.py        turns and shares of API keys
make.py        the scheduler for given settings
"""
