// The batch as lanes: a row for each request, blue where it reads a chunk of its prompt, orange where it writes, dark
// orange where it verifies several drafted tokens in one step. The line in a row is the growth of its K and V. In a
// deployment a row goes through several workers; between them its blocks move, which is known once it has ended.

import { byId, colour, count, nameOf as name, seconds } from "./format.js";
import { serverNow, state, stepsSince } from "./store.js";

const WINDOW = 30;
const GUTTER = 44;
const AXIS = 20;
const MOST = 40;
const SHORTEST = 0.002;  // seconds of a span

let drawn = [];

// Requests of the window with their stretches; consecutive tokens of one stream are one stretch.
export function collect(steps, arrivals, now) {
  const requests = new Map();
  const begin = now - WINDOW;
  for (const step of steps) {
    const end = step.time + step.seconds;
    for (const lane of step.lanes) {
      let one = requests.get(lane.request);
      if (!one) requests.set(lane.request, (one = { request: lane.request, spans: [], stretches: [], last: 0 }));
      const before = one.stretches[one.stretches.length - 1];
      // Of a draft only the right tokens are kept: the next step begins where they end.
      if (before && before.stage !== "prefill" && lane.start > before.until) before.until = lane.start;
      const stage = lane.stage === "decode" && lane.tokens > 1 ? "verify" : lane.stage;
      const until = lane.start + (stage === "prefill" ? lane.tokens : 1);
      if (before && stage !== "prefill" && before.stage === stage && before.worker === step.worker && step.time - before.end < 0.05) {
        before.end = end;
        before.until = until;
        before.rows += lane.tokens;
        before.steps += 1;
        before.longest = Math.max(before.longest, step.seconds);
      } else {
        one.stretches.push({ stage, worker: step.worker, begin: step.time, end, start: lane.start, until, rows: lane.tokens, steps: 1, longest: step.seconds });
      }
      one.last = end;
    }
  }
  for (const arrival of arrivals) {
    const one = requests.get(arrival.request);
    if (one) one.spans = spansOf(arrival, one.stretches).filter((span) => span.end - span.begin > SHORTEST);
  }
  const rows = [...requests.values()].filter((one) => one.last > begin);
  rows.sort((a, b) => a.request - b.request);
  return rows.slice(-MOST);
}

// Where the time went between the steps: in a queue, and where two workers had the request, on the way from one to the
// other and in the queue there. Of a worker whose steps are not known, what it read is one span.
function spansOf(arrival, stretches) {
  const read = arrival.time + arrival.queue_s;
  const spans = [{ stage: "queue", begin: arrival.time, end: read }];
  if (!arrival.transfer_s && !arrival.decode_queue_s) return spans;
  const first = read + arrival.prefill_s;
  if (stretches[0].begin >= first) spans.push({ stage: "elsewhere", begin: read, end: first });
  const moved = first + arrival.transfer_s;
  spans.push({ stage: "transfer", begin: first, end: moved }, { stage: "queue", begin: moved, end: moved + arrival.decode_queue_s });
  return spans;
}

export function drawLanes() {
  const canvas = byId("lanes");
  const box = canvas.parentElement;
  const ratio = window.devicePixelRatio || 1;
  const width = box.clientWidth;
  const height = box.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const now = serverNow();
  const rows = collect(stepsSince(now - WINDOW), state.arrivals, now);
  const place = (moment) => GUTTER + ((moment - (now - WINDOW)) / WINDOW) * (width - GUTTER);
  drawAxis(pen, width, height, now);
  const pitch = Math.min(26, (height - AXIS - 4) / Math.max(6, rows.length));
  const thick = Math.max(2, pitch - Math.min(5, pitch * 0.25));
  const longest = Math.max(1, ...rows.map((row) => row.stretches.at(-1).until));
  drawn = [];
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const bar = (row, stretch, top, kind) => {
    const left = Math.max(GUTTER, place(stretch.begin));
    const right = place(stretch.end);
    if (right < GUTTER) return;
    pen.fillStyle = colour(`${kind}-fill`);
    pen.fillRect(left, top, Math.max(1, right - left - (kind === "prefill" ? 0.6 : 0)), thick);
    drawn.push({ left, right: Math.max(right, left + 3), top, bottom: top + thick, kind, stretch, request: row.request });
  };
  rows.forEach((row, index) => {
    const top = 2 + index * pitch;
    if (pitch >= 11) {
      pen.fillStyle = colour("soft");
      pen.textAlign = "right";
      pen.fillText(name(row.request), GUTTER - 6, top + thick / 2);
    }
    for (const span of row.spans) bar(row, span, top, span.stage);
    for (const stretch of row.stretches) bar(row, stretch, top, stretch.stage);
    if (thick >= 8) drawGrowth(pen, row, place, top, thick, longest);
  });
  byId("lanes-moved").hidden = !rows.some((row) => row.spans.some((span) => span.stage === "transfer"));
  canvas.dataset.rows = rows.length;
  canvas.dataset.bars = drawn.length;
  describe(rows, now);
}

// Tokens in the KV cache over time, as a line in the row; the longest request of the picture fills its row.
function drawGrowth(pen, row, place, top, thick, longest) {
  const height = (tokens) => top + thick - 1 - (thick - 2) * (tokens / longest);
  pen.strokeStyle = colour("kv-shared");
  pen.lineWidth = 1.5;
  pen.beginPath();
  row.stretches.forEach((stretch, index) => {
    const left = Math.max(GUTTER, place(stretch.begin));
    const right = Math.max(GUTTER, place(stretch.end));
    if (index === 0) pen.moveTo(left, height(stretch.start));
    else pen.lineTo(left, height(stretch.start));
    pen.lineTo(right, height(stretch.until));
  });
  pen.stroke();
}

function drawAxis(pen, width, height, now) {
  pen.strokeStyle = colour("line");
  pen.fillStyle = colour("soft");
  pen.lineWidth = 1;
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "center";
  pen.textBaseline = "alphabetic";
  for (let ago = 0; ago <= WINDOW; ago += 5) {
    const x = Math.round(width - (ago / WINDOW) * (width - GUTTER)) - 0.5;
    pen.beginPath();
    pen.moveTo(x, 0);
    pen.lineTo(x, height - AXIS);
    pen.stroke();
    if (ago && ago < WINDOW) pen.fillText(`−${ago} s`, x, height - 5);
  }
  pen.textAlign = "right";
  pen.fillText("now", width - 2, height - 5);
}

let described = 0;

function describe(rows, now) {
  if (now - described < 1) return;
  described = now;
  const writing = rows.filter((row) => row.last > now - 1 && row.stretches.at(-1).stage !== "prefill").length;
  const text = rows.length
    ? `${count(rows.length)} ${rows.length === 1 ? "request" : "requests"} in the last 30 seconds; ${count(writing)} ${writing === 1 ? "stream is" : "streams are"} being written, ${count(writing ? state.waiting : 0)} waiting.`
    : "No request ran in the last 30 seconds.";
  if (byId("lanes-text").textContent !== text) byId("lanes-text").textContent = text;
}

export function watchPointer() {
  const canvas = byId("lanes");
  const tip = byId("lanes-tip");
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    const found = drawn.findLast((one) => x >= one.left - 1 && x <= one.right + 1 && y >= one.top && y <= one.bottom);
    tip.hidden = !found;
    if (!found) return;
    tip.textContent = words(found);
    const room = box.width - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(0, Math.min(room, x + 12))}px`;
    tip.style.top = `${Math.max(0, found.top - 28)}px`;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
}

function words({ kind, stretch, request }) {
  const took = seconds(stretch.end - stretch.begin);
  if (kind === "queue") return `${name(request)} waited ${took}`;
  if (kind === "elsewhere") return `${name(request)} was read by another worker in ${took}`;
  if (kind === "transfer") return `${name(request)} moved to another worker in ${took}`;
  const tokens = stretch.until - stretch.start;
  const where = stretch.worker ? ` on ${stretch.worker}` : "";
  if (kind === "prefill") return `${name(request)} read ${tokens} tokens from position ${stretch.start} in ${took}${where}; ${held(stretch)}`;
  const steps = kind === "verify" ? ` in ${stretch.steps} steps that verified ${stretch.rows - stretch.steps} drafted tokens` : "";
  return `${name(request)} wrote ${tokens} tokens${steps} in ${took}${where}, the longest step ${seconds(stretch.longest)}; ${held(stretch)}`;
}

// What the request's K and V take at the end of a stretch.
function held(stretch) {
  const layout = state.settings?.layout;
  if (!layout) return `${count(stretch.until)} tokens in its KV cache`;
  const blocks = Math.ceil(stretch.until / layout.block_tokens);
  return `${count(stretch.until)} tokens in its KV cache, ${count(blocks)} blocks, ${count((blocks * layout.block_bytes) / 1024)} KiB`;
}
