// The two cards at the top: the last minute's percentiles, the last seconds' rates, the last half minute's shares.

import { byId, figure, percentile, rate, seconds } from "./format.js";
import { serverNow, state, stepsSince } from "./store.js";

const MINUTE = 60;
const RECENT = 5;
const SHARED = 30;

export function drawSummary() {
  const now = serverNow();
  const ended = state.arrivals.filter((one) => one.time + one.e2e_s > now - MINUTE);
  const firsts = ended.map((one) => one.ttft_s).filter((value) => value !== null);
  const paces = ended.map((one) => one.tpot_s).filter((value) => value !== null);
  split("ttft-p50", percentile(firsts, 0.5));
  split("ttft-p95", percentile(firsts, 0.95));
  split("tpot-p50", percentile(paces, 0.5));
  split("tpot-p95", percentile(paces, 0.95));
  const prompts = ended.reduce((sum, one) => sum + one.prompt_tokens, 0);
  const cached = ended.reduce((sum, one) => sum + one.cached_tokens, 0);
  if (prompts) figure("hit-rate", Math.round((100 * cached) / prompts).toString(), "%");
  else figure("hit-rate", "–");
  const recent = stepsSince(now - RECENT);
  figure("read-rate", rate(sum(recent, "prefill_tokens") / RECENT), "tok/s");
  figure("write-rate", rate(sum(recent, "sampled") / RECENT), "tok/s");
  const streaming = recent.filter((step) => step.decode_tokens > 0);
  figure("batch", streaming.length ? rate(sum(streaming, "decode_tokens") / streaming.length) : "0");
  drawShare(now);
}

function split(id, value) {
  const [number, unit] = seconds(value).split(" ");
  figure(id, number, unit || "");
}

const sum = (steps, name) => steps.reduce((total, step) => total + step[name], 0);

function drawShare(now) {
  const steps = stepsSince(now - SHARED);
  const inside = (step) => Math.max(0, Math.min(now, step.time + step.seconds) - Math.max(now - SHARED, step.time));
  let reading = 0;
  let writing = 0;
  for (const step of steps) {
    if (step.prefill_tokens > 0) reading += inside(step);
    else writing += inside(step);
  }
  const engines = Math.max(1, new Set(steps.map((step) => step.worker)).size, state.workers.length);
  const parts = [reading / SHARED / engines, writing / SHARED / engines];
  const [first, second] = byId("share").children;
  first.style.width = `${Math.min(100, 100 * parts[0])}%`;
  second.style.width = `${Math.min(100, 100 * parts[1])}%`;
  const idle = Math.max(0, 1 - parts[0] - parts[1]);
  const percent = (value) => `${Math.round(100 * value)} %`;
  byId("share-text").textContent =
    `Engine time of the last 30 s: ${percent(parts[0])} in steps that read prompts, ${percent(parts[1])} in steps that only write, ${percent(idle)} idle.`;
}
