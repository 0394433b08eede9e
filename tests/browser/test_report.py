"""The page that `twostroke bench --html` writes, in a real browser."""

from __future__ import annotations

import pytest

from tests.bench.test_bench import made_up
from tests.browser.test_dashboard import PHONE, WIDE, picture
from twostroke.bench import html
from twostroke.cost.simulation.served import Targets

pytestmark = pytest.mark.system


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_is_whole_by_itself(watched, tmp_path, scheme):
    file = tmp_path / "report.html"
    file.write_text(html.page([made_up(), made_up(ttft=0.3, seed=1)], "twostroke bench", Targets(0.5, 0.05)))
    seen = watched(viewport=WIDE, color_scheme=scheme, offline=True)
    page = seen.page
    page.goto(file.as_uri())
    assert page.locator("svg").count() >= 6
    boxes = page.evaluate("[...document.querySelectorAll('svg')].map((one) => one.getBoundingClientRect().height)")
    assert min(boxes) > 100
    picture(page, f"report-{scheme}.png")
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert seen.complaints == []
