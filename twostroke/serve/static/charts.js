// Lines over time, and the roofline, with uPlot.

import { byId, colour, count, percentile, scaled, seconds } from "./format.js";
import { serverNow, state, stepsSince } from "./store.js";

const SPAN = 300;
const BIN = 2;
const WINDOW = 60;
const HEIGHT = 190;
const charts = new Map();

function axis(format, size = 30) {
  return {
    stroke: () => colour("soft"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false }, size,
    font: "11px system-ui, sans-serif", values: (plot, values) => values.map(format),
  };
}

const ago = (value) => (value === 0 ? "now" : `${value / 60} min`);

function timeChart(id, series, format) {
  const place = byId(id);
  const options = {
    width: place.clientWidth, height: HEIGHT, cursor: { points: { size: 6 } }, legend: { live: true, markers: { show: false } },
    scales: { x: { time: false, range: [-SPAN, 0] }, y: { range: (plot, low, high) => [0, high > 0 ? 1.1 * high : 1] } },
    axes: [{ ...axis(ago), splits: () => [-300, -240, -180, -120, -60, 0] }, axis(format, 58)],
    series: [{ label: "when", value: (plot, value) => (value === null ? "–" : `${Math.round(value)} s`) }, ...series.map(([label, name, dashed]) => ({
      label, stroke: () => colour(name), width: 2, dash: dashed ? [5, 4] : undefined, points: { show: false }, spanGaps: false,
      value: (plot, value) => (value === null || value === undefined ? "–" : format(value)),
    }))],
  };
  const chart = new uPlot(options, [[], ...series.map(() => [])], place);
  charts.set(id, chart);
  name(place);
  new ResizeObserver(() => chart.setSize({ width: place.clientWidth, height: HEIGHT })).observe(place);
}

// A picture with the name of its section; what is in it stands in words elsewhere on the page.
function name(place) {
  place.setAttribute("role", "img");
  place.setAttribute("aria-labelledby", place.closest("section").getAttribute("aria-labelledby"));
}

export function makeCharts() {
  timeChart("rate-chart", [["read", "prefill-fill", false], ["written", "decode-fill", false]], count);
  timeChart("ttft-chart", [["median", "prefill-fill", false], ["95 %", "prefill-fill", true]], seconds);
  timeChart("tpot-chart", [["median", "decode-fill", false], ["95 %", "decode-fill", true]], seconds);
  timeChart("itl-chart", [["median", "decode-fill", false], ["99 %", "decode-fill", true]], seconds);
  makeRoofline();
}

// The gaps of all streams by the bin in which they end. A step that verified a draft writes several tokens at once.
function gapsByBin(begin, bins) {
  const found = Array.from({ length: bins }, () => []);
  const last = new Map();
  for (const step of state.steps) {
    const end = step.time + step.seconds;
    const bin = Math.floor((end - begin) / BIN);
    for (const lane of step.lanes) {
      const before = last.get(lane.request);
      if (before !== undefined && lane.stage === "decode" && bin >= 0 && bin < bins) found[bin].push(end - before);
      last.set(lane.request, end);
    }
  }
  return found;
}

export function drawCharts() {
  const now = serverNow();
  const bins = SPAN / BIN;
  const end = Math.floor(now / BIN) * BIN;
  const times = Array.from({ length: bins }, (_, index) => end - SPAN + (index + 1) * BIN);
  const read = new Array(bins).fill(0);
  const written = new Array(bins).fill(0);
  for (const step of state.steps) {
    const bin = Math.floor((step.time + step.seconds - (end - SPAN)) / BIN);
    if (bin >= 0 && bin < bins) {
      read[bin] += step.prefill_tokens / BIN;
      written[bin] += step.sampled / BIN;
    }
  }
  const places = times.map((time) => time - now);
  charts.get("rate-chart").setData([places, read, written]);
  const gaps = gapsByBin(end - SPAN, bins);
  charts.get("itl-chart").setData([places, gaps.map((values) => percentile(values, 0.5)), gaps.map((values) => percentile(values, 0.99))]);
  for (const [id, name] of [["ttft-chart", "ttft_s"], ["tpot-chart", "tpot_s"]]) {
    const rows = state.arrivals.filter((one) => one[name] !== null && one.time + one.e2e_s > end - SPAN - WINDOW);
    const within = times.map((time) => rows.filter((one) => one.time + one.e2e_s <= time && one.time + one.e2e_s > time - WINDOW).map((one) => one[name]));
    charts.get(id).setData([places, within.map((values) => percentile(values, 0.5)), within.map((values) => percentile(values, 0.95))]);
  }
}

// ---- the roofline ----------------------------------------------------------------------------------------------

function makeRoofline() {
  const place = byId("roofline-chart");
  const dots = (name) => ({ stroke: () => colour(name), paths: () => null, points: { show: true, size: 6, width: 0, fill: () => colour(name) } });
  const chart = new uPlot({
    width: place.clientWidth, height: 240, legend: { show: false }, cursor: { show: false },
    scales: { x: { time: false, distr: 3, log: 10, range: (plot, low, high) => decades(low, high) }, y: { distr: 3, log: 10, range: (plot, low, high) => decades(low, high) } },
    axes: [{ ...axis((value) => (value === null ? "" : `${value}`)), label: "FLOP for each byte moved", labelFont: "11px system-ui, sans-serif", labelSize: 18, stroke: () => colour("soft") }, { ...axis((value) => (value === null ? "" : scaled(value, "")), 44), label: "FLOP/s", labelFont: "11px system-ui, sans-serif", labelSize: 18 }],
    series: [{ label: "FLOP/byte" },
      { label: "with prompts", ...dots("prefill-fill") }, { label: "streams only", ...dots("decode-fill") },
      { label: "roof", stroke: () => colour("ink"), width: 2, points: { show: false }, spanGaps: true }],
  }, [[], [], [], []], place);
  charts.set("roofline-chart", chart);
  name(place);
  new ResizeObserver(() => chart.setSize({ width: place.clientWidth, height: 240 })).observe(place);
}

function decades(low, high) {
  if (!(low > 0) || !(high > 0)) return [0.1, 1000];
  return [10 ** Math.floor(Math.log10(low * 0.9)), 10 ** Math.ceil(Math.log10(high * 1.1))];
}

let bestCompute = 0;
let bestBandwidth = 0;

export function drawRoofline() {
  const steps = state.steps.filter((step) => step.seconds > 0 && step.flops > 0).slice(-400);
  if (!steps.length) return;
  for (const step of steps) {
    bestCompute = Math.max(bestCompute, step.flops / step.seconds);
    bestBandwidth = Math.max(bestBandwidth, step.bytes / step.seconds);
  }
  const bend = bestCompute / bestBandwidth;
  const points = steps.map((step) => ({ x: step.flops / step.bytes, y: step.flops / step.seconds, prompts: step.prefill_tokens > 0 }));
  const first = Math.min(bend / 3, ...points.map((point) => point.x));
  const last = Math.max(bend * 3, ...points.map((point) => point.x));
  for (const x of [first, bend, last]) points.push({ x, roof: Math.min(bestCompute, x * bestBandwidth) });
  points.sort((a, b) => a.x - b.x);
  charts.get("roofline-chart").setData([
    points.map((point) => point.x),
    points.map((point) => (point.prompts === true ? point.y : null)),
    points.map((point) => (point.prompts === false ? point.y : null)),
    points.map((point) => point.roof ?? null),
  ]);
  byId("roofline-text").textContent =
    `The roof is the best seen since this page was opened: ${scaled(bestBandwidth, "B/s")} and ${scaled(bestCompute, "FLOP/s")}, so the bend is at ${bend.toPrecision(2)} FLOP for each byte.`;
}

export function repaint() {
  for (const chart of charts.values()) chart.redraw(false, true);
}
