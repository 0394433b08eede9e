"""Black-box probing: the strokes of a machine that is known, read back from what it shows."""

from __future__ import annotations

import pytest

from tests.cost.fleets import fleet, parts, requests
from twostroke.bench.black_box import BATCHES, PROMPTS, Probe, fit_probe, verdict
from twostroke.cost.simulation.served import summarize


def test_the_strokes_are_read_back():
    roofline, _ = parts()
    prompts = [(length, 0.01 + roofline.prefill_seconds(length)) for length in PROMPTS]
    batches = [(count, roofline.decode_seconds(count, 50)) for count in BATCHES]
    found = fit_probe(prompts, batches, 1.0, 0.1)
    real = (prompts[-1][1] - prompts[0][1]) / (PROMPTS[-1] - PROMPTS[0])
    assert found.per_token == pytest.approx(real, rel=0.1)
    assert found.alone == pytest.approx(roofline.decode_seconds(1, 50))
    assert found.growth < 0.15 and any("almost free" in line for line in found.sentences)
    assert any("prefix cache works" in line for line in found.sentences)


def test_a_batch_that_is_full_is_seen():
    batches = [(count, 0.01 * count) for count in BATCHES]
    found = fit_probe([(32, 0.1), (1024, 0.2)], batches, 1.0, 0.98)
    assert found.growth == pytest.approx(1.0)
    assert any("slows the others" in line for line in found.sentences)
    assert any("no prefix cache" in line for line in found.sentences)


def test_one_sentence_from_outside():
    streams = summarize(fleet().run(requests(count=20, rate=0.05, prompt=(20, 40), output=(80, 120))))
    alone = Probe(0.02, 0.001, streams.tpot.p50, 0.1, 0.5)
    assert verdict(alone, streams, 30).startswith("Slow to stream") and "as for a stream alone" in (
        verdict(alone, streams, 30)
    )
    queue = summarize(fleet(max_requests=1).run(requests(count=30, rate=50.0, prompt=(20, 40), output=(80, 120))))
    assert "waiting for others" in verdict(alone, queue, 30)
    prompts = summarize(fleet().run(requests(count=10, rate=0.05, prompt=(900, 1000), output=(2, 3))))
    slow = Probe(0.02, prompts.ttft.mean / 1000, 0.005, 0.1, 1.0)
    assert "is reading the prompt" in verdict(slow, prompts, 950)
