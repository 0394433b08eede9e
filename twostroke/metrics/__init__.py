"""Times and counters. Torch-free.

timeline.py    where one answer's time went: queue, prefill, decode
steplog.py     the last steps with what they computed
counts.py      the counters of an engine
registry.py    the server's metrics for Prometheus (docs/metrics.md); histogram.py: a histogram without a lock
"""
