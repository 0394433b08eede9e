"""Seconds of one step on one machine.

devices.py       datasheets by name: memory, bandwidth, peak rates, price
rates.py         the rates that a program reaches, from which times are predicted
calibration.py   rates that were measured on a machine, kept as JSON
known_models.py  architectures of well-known models, so that a plan needs no download
weight_formats.py  bytes of a weight in each format, and the formats in which models are published
roofline.py      bytes and FLOPs of a step divided by the rates: its seconds
tiles.py         what a GPU adds: padded rows, attention over prompts in tiles
drafts.py        what speculative decoding changes in the time of a token
fit.py           the rates with which the predicted times of logged steps are the measured ones
"""
