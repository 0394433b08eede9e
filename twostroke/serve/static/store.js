// What is known of the server: its steps, its ended requests, its settings. All views draw from here.

import { call, get } from "./api.js";

const KEPT_SECONDS = 330;
const MOST_WORKERS = 16;  // whose steps are fetched
const SLOWER = 3;  // where there are several, the steps of each are asked for at every third turn

export const state = {
  steps: [],       // of all workers, by their ends
  arrivals: [],    // ended requests, oldest first
  settings: null,
  diagnosis: null,
  blocks: null,    // KV blocks now
  waiting: 0,      // requests now
  workers: [],     // names of those of a deployment; one engine has none
  offset: null,    // the server's clock less ours
};

export function serverNow() {
  return Date.now() / 1000 + (state.offset || 0);
}

const read = new Map();  // what was read last of each worker: the number of its step, and how often it was lost
let turn = 0;

// Of one engine; of a deployment, those of each worker in turn.
export async function fetchSteps() {
  const workers = state.workers.slice(0, MOST_WORKERS);
  turn += 1;
  const asked = workers.length ? workers.filter((_, index) => index % SLOWER === turn % SLOWER) : [null];
  for (const worker of asked) {
    try {
      await fetchStepsOf(worker);
    } catch (error) {
      if (worker === null) throw error;  // a worker that does not answer is shown in the card of the workers
    }
  }
}

async function fetchStepsOf(worker) {
  const before = read.get(worker) ?? { last: 0, restarts: null };
  const whose = worker === null ? "" : `&worker=${encodeURIComponent(worker)}`;
  const answer = await get(`/twostroke/steps?since=${before.last}&limit=1024${whose}`);
  const offset = answer.now - Date.now() / 1000;
  // An answer that came late makes the server look slow: the largest offset of all is the truest.
  state.offset = state.offset === null || Math.abs(offset - state.offset) > 2 ? offset : Math.max(offset, state.offset - 0.001);
  if (before.restarts !== null && answer.restarts !== before.restarts) {
    read.set(worker, { last: 0, restarts: answer.restarts });
    return fetchStepsOf(worker);
  }
  for (const key of [worker, answer.worker]) read.set(key, { last: answer.last, restarts: answer.restarts });
  add(answer.steps.map((step) => ({ ...step, worker: answer.worker })), answer.now - KEPT_SECONDS);
}

const endOf = (step) => step.time + step.seconds;

function add(steps, oldest) {
  state.steps = state.steps.concat(steps);
  if (state.workers.length) state.steps.sort((one, other) => endOf(one) - endOf(other));
  let drop = 0;
  while (drop < state.steps.length && state.steps[drop].time < oldest) drop += 1;
  if (drop) state.steps.splice(0, drop);
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
  while (first > 0 && endOf(state.steps[first - 1]) > moment) first -= 1;
  return state.steps.slice(first);
}
