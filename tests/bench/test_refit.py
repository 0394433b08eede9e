"""A result of the cost model's benchmark holds every shape, so that another model can be fitted to it later."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks.cost_model import HELD_OUT, compact, judged, refit
from tests.cost.model.test_roofline import roofline
from tests.cost.model.test_tiles import grid_steps
from twostroke.bench.grid import CALIBRATION


def test_a_result_can_be_fitted_again(tmp_path):
    line, rng = roofline("llama-3.1-8b"), random.Random(0)
    fitted, held_out = (grid_steps(sizes["cuda"], line, rng) for sizes in (CALIBRATION, HELD_OUT))
    _, found = judged(fitted, held_out, line.model, line.layout, "cuda", line.rates)
    path = tmp_path / "result.json"
    path.write_text(compact({"device": "some", "grid": {"weight bytes": line.model.bytes, **found}}))
    assert path.read_text().count("\n") < 600, "a row on a line"
    again = refit(path)
    for name in ("median", "p95"):
        assert again["shapes held out"][name] == pytest.approx(found["shapes held out"][name], abs=0.01)
    path.write_text(json.dumps({"device": "some", "grid": {}}))
    with pytest.raises(SystemExit, match="Measure again"):
        refit(path)
