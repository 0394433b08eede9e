"""What to do about a slow deployment, and how large a planned one must be.

diagnose.py  which stroke is slow, why, and what each lever would change
levers.py    the table of levers
overload.py  whether requests arrived faster than they were served
evidence.py  the numbers that a diagnosis rests on
tune.py      rates adjusted until a replay matches the measurement
wording.py   a diagnosis in sentences
verdict.py   a diagnosis as one JSON document, made in a process of its own for the dashboard
sizing.py    what fits on a worker, and how fast each stroke is there
workers.py   how many workers a load needs, and which kind is the cheapest
steady.py    a fleet simulated until it is clear whether it meets the targets
split.py     how a number of workers is best divided
"""
