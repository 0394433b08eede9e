"""The dashboard in a real browser: what a person who opens it meets with."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.conftest import PATIENT
from tests.serve.server import KEY, OTHER_KEY, Server

pytestmark = pytest.mark.system
WIDE = {"width": 1440, "height": 1000}
PHONE = {"width": 390, "height": 844}
PICTURES = os.environ.get("TWOSTROKE_SCREENSHOTS")  # a folder: what the pages looked like is kept there


def expect(page, selector: str):
    from playwright.sync_api import expect as expected

    expected.set_options(timeout=PATIENT)
    return expected(page.locator(selector))


def picture(page, name: str, whole: bool = True) -> None:
    data = page.screenshot(full_page=whole)
    assert len(data) > 10_000
    if PICTURES:
        Path(PICTURES, name).write_bytes(data)


def wait_for(page, expression: str) -> None:
    """Until it is true. Playwright's own wait evaluates text within the page after its first look, and what the server
    allows its page forbids that."""
    deadline = time.monotonic() + PATIENT / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"never true: {expression}"
        page.wait_for_timeout(100)


def wait_for_answer(page) -> None:
    expect(page, "#send").to_be_enabled()


def lengthen(route) -> None:
    route.continue_(post_data=json.dumps({**json.loads(route.request.post_data), "ignore_eos": True}))


def without_early_ends(page) -> None:
    """Answers are as long as was asked for: what is seen while they come must not depend on when a model is done."""
    page.route("**/v1/chat/completions", lengthen)


def held_requests(page) -> Callable[[], None]:
    """The next request is sent when the function is called that this gives: what the page shows until its answer has
    come can be looked at, however slow this machine is."""
    held: list = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))

    def send() -> None:
        while not held:
            page.wait_for_timeout(50)
        lengthen(held.pop())

    return send


NOTE_TEXTS = """() => {
  const lanes = document.getElementById('lanes-text');
  window.noted = [];
  const watch = new MutationObserver(() => window.noted.push(lanes.textContent));
  watch.observe(lanes, { childList: true, characterData: true, subtree: true });
}"""  # what is shown for a moment is noted when it is


@pytest.fixture
def opened(server: Server, watched):
    seen = watched(viewport=WIDE, color_scheme="light")
    seen.page.goto(server.url + "/")
    expect(seen.page, "#status").to_contain_text("running")
    return seen


def test_an_answer_streams_with_its_two_strokes(opened):
    page = opened.page
    send = held_requests(page)
    page.fill("#max-tokens", "160")
    page.fill("#question", "Write one sentence about engines.")
    page.press("#question", "Enter")
    expect(page, "#stop").to_be_visible()
    send()
    expect(page, ".answer .message").not_to_be_empty()
    wait_for_answer(page)
    caption = page.locator(".answer .caption")
    text = caption.inner_text()
    for word in ("waited", "read", "wrote", "TTFT", "TPOT"):
        assert word in text, text
    for stroke in ("prefill", "decode"):
        assert float(page.locator(f".answer .strip .{stroke}").first.get_attribute("width")) > 0
    assert "read the prompt in" in page.locator(".answer .strip").get_attribute("aria-label")
    expect(page, "#ttft-p50").not_to_have_text("–")
    expect(page, "#tpot-p50").not_to_have_text("–")
    assert opened.complaints == []


def test_the_page_moves_while_requests_run(opened):
    """Lanes, shares, memory, roofline, then a verdict with its best lever; afterwards each theme and width."""
    page = opened.page
    page.fill("#max-tokens", "64")
    page.click("[data-try=long]")
    expect(page, "#lanes-text").to_contain_text("in the last 30 seconds")
    wait_for_answer(page)
    without_early_ends(page)
    page.fill("#max-tokens", "400")  # long enough to be seen on a fast machine
    page.evaluate(NOTE_TEXTS)
    page.click("[data-try=batch]")
    wait_for(page, "window.noted.some((text) => /[2-8] streams are being written/.test(text))")
    page.wait_for_timeout(1200)
    picture(page, "dashboard-live.png", whole=False)
    wait_for_answer(page)
    # Bars of the first request may have left the picture by now, where the machine is slow.
    wait_for(page, "(lanes => lanes.rows >= 8 && lanes.bars >= 8)(document.getElementById('lanes').dataset)")
    assert len(page.locator(".answer").last.locator(".strip").all()) == 8
    expect(page, "#share-text").not_to_contain_text("100 % idle")
    expect(page, "#kv-list").to_contain_text("cached for reuse")
    expect(page, "#roofline-text").to_contain_text("FLOP/s")
    expect(page, "#settings tbody tr >> nth=0").to_be_visible()
    assert page.locator("#settings tbody tr").count() > 12
    shown = dict(row.split("\t")[:2] for row in page.locator("#settings tbody").inner_text().splitlines())
    assert (shown["dtype"], shown["draft_model"]) == ("as in the file", "not given")
    expect(page, "#verdict-note").to_contain_text("replayed as they were")
    expect(page, "#verdict-note").to_contain_text("ago")
    assert page.locator("#itl-chart canvas").count() == 1
    assert page.locator("#verdict").inner_text().endswith(".")
    page.wait_for_timeout(1500)
    picture(page, "dashboard-light.png")
    page.click("#levers summary")
    expect(page, "#useless li >> nth=0").to_be_visible()
    page.click("#levers summary")
    page.click("#theme")  # light
    page.click("#theme")  # dark
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 18, 22)"
    page.wait_for_timeout(500)
    picture(page, "dashboard-dark.png")
    page.set_viewport_size(PHONE)
    page.wait_for_timeout(800)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], "nothing is wider than the phone"
    picture(page, "dashboard-phone.png")
    assert opened.complaints == []


def test_stopping_an_answer_and_clearing(opened):
    page = opened.page
    without_early_ends(page)
    page.fill("#max-tokens", "2000")
    page.fill("#question", "Count to one thousand.")
    page.click("#send")
    expect(page, ".answer .message").not_to_be_empty()
    page.click("#stop")
    wait_for_answer(page)
    page.click("#clear")
    expect(page, "#hint").to_be_visible()
    page.fill("#question", "Count to two thousand.")
    page.click("#send")
    expect(page, "#send").to_have_text("Waiting for the answer")
    expect(page, "[data-try=short]").to_be_disabled()
    assert "wait for it, or stop it" in page.locator("[data-try=short]").get_attribute("title")
    expect(page, ".answer .message").not_to_be_empty()
    page.click("#clear")  # while it is written: that ends it
    wait_for_answer(page)
    expect(page, "#send").to_have_text("Send")
    expect(page, "#status").to_contain_text("0 running")
    assert page.locator(".answer").count() == 0
    assert opened.complaints == []


def change_diagnosis(page, **changes) -> None:
    """The server's answer about its verdict, with other values: as it would be later, or for another load."""
    page.unroute_all()
    page.route("**/twostroke/diagnosis", lambda route: route.fulfill(json={**route.fetch().json(), **changes}))


def with_verdict(page) -> dict[str, object]:
    """The server's verdict, as soon as it has one."""
    page.fill("#max-tokens", "16")
    page.click("[data-try=batch]")
    expect(page, "#verdict-note").to_contain_text("ago")
    return page.evaluate("fetch('/twostroke/diagnosis').then((answer) => answer.json())")["verdict"]


def test_a_verdict_carries_its_age_and_fades(opened):
    page = opened.page
    with_verdict(page)
    cases = [
        ({"age_s": 40.0, "outdated": False}, "requests, 40 s ago · ", "1"),
        ({"age_s": 20.0, "outdated": True}, "requests, 20 s ago · ", "1"),  # another one is made soon
        ({"age_s": 40.0, "outdated": True}, "40 s ago: the load or the settings have changed since", "0.55"),
        ({"age_s": 420.0, "outdated": False}, "7 min ago: nothing has run since", "0.55"),
        ({"age_s": 1.0, "outdated": False}, "requests, 1 s ago · ", "1"),
    ]
    for changes, note, opacity in cases:
        change_diagnosis(page, **changes)
        expect(page, "#verdict-note").to_contain_text(note)
        expect(page, "#verdict").to_have_css("opacity", opacity)
    page.unroute_all()
    assert opened.complaints == []


def test_a_lever_says_that_it_waits_for_the_engine(opened):
    page = opened.page
    verdict = with_verdict(page)
    setting = page.evaluate("fetch('/twostroke/settings').then((answer) => answer.json())")["settings"]["max_gap"]
    lever = {"name": "gap", "title": "the same gap", "live": True, "settings": {"max_gap": setting["value"]}}
    lever |= dict.fromkeys(("ttft", "tpot", "stall", "throughput", "cost"), 1.0)
    change_diagnosis(page, verdict={**verdict, "levers": [lever]}, age_s=1.0)
    held = []
    page.route(
        "**/twostroke/settings",
        lambda route: held.append(route) if route.request.method == "POST" else route.continue_(),
    )
    page.click("#pull")
    expect(page, "#pull").to_have_text("Waiting for the engine")
    expect(page, "#pull").to_be_disabled()
    page.wait_for_timeout(4000)  # the verdict was asked for again
    expect(page, "#pull").to_have_text("Waiting for the engine")
    held[0].continue_()
    expect(page, "#pull").to_have_text("Pulled: watch the numbers")
    page.unroute_all()
    assert opened.complaints == []


KV_LINE = """() => {
  const canvas = document.getElementById('lanes');
  const name = getComputedStyle(document.documentElement).getPropertyValue('--kv-shared').trim();
  const pen = document.createElement('canvas').getContext('2d');
  pen.fillStyle = name;
  pen.fillRect(0, 0, 1, 1);
  const wanted = pen.getImageData(0, 0, 1, 1).data;
  const seen = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let found = 0;
  for (let at = 0; at < seen.length; at += 4) {
    if (seen[at + 3] > 200 && [0, 1, 2].every((part) => Math.abs(seen[at + part] - wanted[part]) < 24)) found += 1;
  }
  return found;
}"""


SPANS = """async ([steps, arrivals, now]) => {
  const { collect } = await import('/static/lanes.js');
  return collect(steps, arrivals, now).map((row) => [row.spans, row.stretches]);
}"""


def test_a_lane_shows_where_the_time_went(opened):
    """In the queue; and of a request that two workers had: what each did, the way from one to the other, the queue
    there. What the first one did is one span where its steps are not known."""

    def step(request, begin, worker="decode-0", stage="decode", start=40, tokens=1):
        work = {"request": request, "stage": stage, "start": start, "tokens": tokens}
        return {"time": begin, "seconds": 0.1, "worker": worker, "lanes": [work]}

    alone = {"request": 1, "time": 100.0, "queue_s": 0.5, "prefill_s": 1.0, "transfer_s": 0.0, "decode_queue_s": 0.0}
    moved = alone | {"request": 2, "transfer_s": 0.25, "decode_queue_s": 0.125}
    unseen = moved | {"request": 3}
    steps = [
        step(2, 101.0, "prefill-0", "prefill", 0, 40), step(1, 101.5), step(2, 102.0), step(2, 102.1), step(3, 102.0),
    ]  # fmt: skip
    found = opened.page.evaluate(SPANS, [steps, [alone, moved, unseen], 110.0])
    spans = [[(span["stage"], span["begin"], span["end"]) for span in row] for row, _ in found]
    waits, way = ("queue", 100.0, 100.5), [("transfer", 101.5, 101.75), ("queue", 101.75, 101.875)]
    assert spans == [[waits], [waits, *way], [waits, ("elsewhere", 100.5, 101.5), *way]]
    stretches = [(one["stage"], one["worker"], one["steps"]) for one in found[1][1]]
    assert stretches == [("prefill", "prefill-0", 1), ("decode", "decode-0", 2)]
    assert opened.complaints == []


WORKERS = """async (document) => {
  const { drawWorkers } = await import('/static/workers.js');
  const { state, fetchSteps } = await import('/static/store.js');
  window.fetch = (ask => async (path, ...rest) => {
    const url = new URL(path, location.href);
    if (url.pathname === '/twostroke/workers') return new Response(JSON.stringify(document));
    const name = url.searchParams.get('worker');
    if (name === null) return ask(path, ...rest);
    if (name === 'decode-1') return new Response('{}', { status: 503 });
    const lanes = [{ request: 5, stage: name === 'prefill-0' ? 'prefill' : 'decode', start: 0, tokens: 1 }];
    const now = Date.now() / 1000;
    const steps = Number(url.searchParams.get('since')) ? [] : [{ number: 1, time: now, seconds: 0.1, lanes }];
    return new Response(JSON.stringify({ worker: name, restarts: 0, now, last: 1, steps }));
  })(window.fetch);
  await drawWorkers();
  for (let turn = 0; turn < 6; turn += 1) await fetchSteps();
  const rows = [...window.document.querySelectorAll('#transfers-table tbody tr')].map((row) => row.textContent);
  const seen = new Set(state.steps.filter((step) => step.lanes[0].request === 5).map((step) => step.worker));
  return [rows, [...seen].sort()];
}"""


def test_transfers_and_the_steps_of_all_workers_are_fetched(opened):
    """A worker that does not answer keeps the others from nothing."""
    blocks = {"total": 10, "free": 5, "cached": 1}
    row = {
        "healthy": True, "trouble": None, "machine": "m", "running": 0, "waiting": 0, "queued_tokens": 0, "streams": 0,
        "blocks": blocks, "leases": 0, "prompt_tokens_s": None, "step_s": 0.01, "losses": 0, "sent_bytes": 2e6,
        "received_bytes": 0,
    }  # fmt: skip
    names = ("prefill-0", "decode-0", "decode-1")
    last = {"time": 1e9, "kind": "early", "request": 5, "from": "prefill-0", "to": "decode-0", "blocks": 4,
            "bytes": 2e6, "seconds": 0.02, "waited_s": 0.0, "failed": ""}  # fmt: skip
    transfers = {"in_flight": 1, "now": [{"request": 6, "to": "decode-1", "since": 1e9}], "last": [last], "done": 1,
                 "failed": {}, "blocks": 4, "bytes": 2e6, "seconds": 0.02}  # fmt: skip
    workers = [row | {"name": name, "role": name[:-2]} for name in names]
    rows, steps = opened.page.evaluate(WORKERS, {"workers": workers, "transfers": transfers, "resumed": 0})
    assert "#6" in rows[0] and "moves now" in rows[0]
    assert "#5" in rows[1] and "prefill-0" in rows[1] and "2.0 MB" in rows[1] and "20" in rows[1]
    assert steps == ["decode-0", "prefill-0"]


TIPS = """() => {
  const canvas = document.getElementById('lanes');
  const tip = document.getElementById('lanes-tip');
  const box = canvas.getBoundingClientRect();
  const found = new Set();
  for (let x = box.left; x < box.right; x += 3) {
    for (let y = box.top; y < box.bottom; y += 3) {
      canvas.dispatchEvent(new PointerEvent('pointermove', { clientX: x, clientY: y }));
      if (!tip.hidden) found.add(tip.textContent);
    }
  }
  return [...found];
}"""  # the lanes move on: a mouse would be too late


def test_gaps_and_the_growth_of_a_request_can_be_seen(opened):
    page = opened.page
    without_early_ends(page)
    page.fill("#max-tokens", "120")
    page.click("[data-try=short]")
    wait_for_answer(page)
    page.wait_for_timeout(2000)  # a bin of the charts, and one more drawing
    chart = page.locator("#itl-chart .u-over")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    until = time.monotonic() + PATIENT / 1000
    values = ["–"]
    while "–" in values and time.monotonic() < until:
        page.wait_for_timeout(500)  # a busy machine draws later
        for back in range(2, int(box["width"]), 2):
            page.mouse.move(box["x"] + box["width"] - back, box["y"] + box["height"] / 2)
            values = page.locator("#itl-chart .u-value").all_inner_texts()
            if "–" not in values:
                break
    assert len(values) == 3 and all(value.endswith(("ms", " s", "µs")) for value in values), values
    assert page.evaluate(KV_LINE) > 20
    tips = page.evaluate(TIPS)
    assert any(" wrote " in tip and "tokens in its KV cache, " in tip and "KiB" in tip for tip in tips), tips
    assert opened.complaints == []


def test_text_of_the_model_and_of_people_is_only_text(opened):
    page = opened.page
    page.fill("#max-tokens", "4")
    page.fill("#question", "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>")
    page.click("#send")
    wait_for_answer(page)
    assert page.locator("#talk img").count() == 0 and page.title() == "twostroke"
    assert "<img src=x" in page.locator(".message.user").inner_text()


def test_a_locked_server_asks_for_its_key(locked: Server, watched):
    seen = watched(viewport=PHONE, color_scheme="dark")
    page = seen.page
    page.goto(locked.url + "/")
    expect(page, "#key-dialog").to_be_visible()
    assert seen.complaints == []
    picture(page, "dashboard-key.png", whole=False)
    page.fill("#key", "a wrong key")
    page.click("#key-send")
    expect(page, "#key-problem").to_be_visible()
    assert page.evaluate("document.activeElement.id") == "key"
    page.fill("#key", OTHER_KEY)  # a user's
    page.click("#key-send")
    expect(page, "#key-problem").to_contain_text("admin key")
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    expect(page, "#status").to_contain_text("running")
    expect(page, "#key-dialog").to_be_hidden()
    page.reload()  # the key stays with the tab
    expect(page, "#status").to_contain_text("running")
    expect(page, "#kv-list").to_contain_text("kept on the host")


def test_everything_can_be_reached_by_keyboard_and_has_a_name(opened):
    page = opened.page
    expect(page, "#settings tbody tr >> nth=0").to_be_visible()
    nameless = page.evaluate(
        """[...document.querySelectorAll('button, input, select, textarea, canvas, [role=img]')]
        .filter((one) => one.offsetParent !== null && !one.parentElement.closest('[role=img]'))
        .filter((one) => !one.innerText?.trim() && !one.labels?.length)
        .filter((one) => !['label', 'labelledby', 'describedby'].some((name) => one.getAttribute(`aria-${name}`)))
        .map((one) => one.outerHTML.slice(0, 80))"""
    )
    assert nameless == []
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.dataset.try || ''"))
    assert {"theme", "question", "max-tokens", "temperature", "copies", "send", "short", "long", "batch"} <= reached
