"""Loads, measurements and reports.

workload.py, prompts.py, texts.py   what to send and when
client.py, inprocess.py   send it to a server, or to an engine in this process
record.py                 what happened to each request, and a run of them as JSON
report.py, html.py, plots.py, compare.py   results in a terminal, on a page, beside each other
grid.py, calibrate.py, processor.py        steps of every kind, measured; rates fitted to them
remote.py, black_box.py   diagnose a running twostroke, or any other server
apply.py, ledger.py       pull the best lever, measure again, keep predicted and measured
levers.py, kernels.py     every lever off and on; known_answers.py: the answer cache
split.py                  how the workers of a running cluster should be divided; their roles changed
"""
