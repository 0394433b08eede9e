// What is known of the server: its steps, its ended requests, its settings. All views draw from here.

import { call, get } from "./api.js";

const KEPT_SECONDS = 330;

export const state = {
  steps: [],       // oldest first
  arrivals: [],    // ended requests, oldest first
  settings: null,
  diagnosis: null,
  blocks: null,    // KV blocks now
  restarts: null,
  last: 0,
  offset: null,    // the server's clock less ours
};

export function serverNow() {
  return Date.now() / 1000 + (state.offset || 0);
}

export async function fetchSteps() {
  const answer = await get(`/twostroke/steps?since=${state.last}&limit=1024`);
  const offset = answer.now - Date.now() / 1000;
  // An answer that came late makes the server look slow: the largest offset of all is the truest.
  state.offset = state.offset === null || Math.abs(offset - state.offset) > 2 ? offset : Math.max(offset, state.offset - 0.001);
  if (state.restarts !== null && answer.restarts !== state.restarts) {
    state.restarts = answer.restarts;
    state.last = 0;
    return fetchSteps();
  }
  state.restarts = answer.restarts;
  state.last = answer.last;
  const oldest = answer.now - KEPT_SECONDS;
  state.steps = state.steps.concat(answer.steps);
  let drop = 0;
  while (drop < state.steps.length && state.steps[drop].time < oldest) drop += 1;
  if (drop) state.steps.splice(0, drop);
  return answer.steps.length;
}

export async function fetchArrivals() {
  state.arrivals = (await get("/twostroke/arrivals?limit=1024")).arrivals;
}

export async function fetchSettings() {
  const text = await (await call("/twostroke/settings")).text();
  state.settings = JSON.parse(text.replace(/:(\d{16,})/g, ':"$1"'));  // a seed has more digits than a number here
}

export async function fetchDiagnosis() {
  state.diagnosis = await get("/twostroke/diagnosis");
}

export function stepsSince(moment) {
  let first = state.steps.length;
  while (first > 0 && state.steps[first - 1].time + state.steps[first - 1].seconds > moment) first -= 1;
  return state.steps.slice(first);
}
