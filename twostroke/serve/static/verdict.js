// The current verdict, its best lever, and everything it rests on.

import { post } from "./api.js";
import { byId, change, count, element, seconds } from "./format.js";
import { fetchSettings, state } from "./store.js";
import { drawSettings } from "./settings.js";

let shown = "";

export function drawVerdict() {
  const answer = state.diagnosis;
  if (!answer) return;
  const found = answer.verdict;
  note(answer);
  byId("verdict").closest(".verdict").classList.toggle("faded", Boolean(found) && faded(answer) !== "");
  const now = JSON.stringify(found ?? [answer.needed, answer.requests, answer.trouble]);
  if (now === shown) return;  // the button of a verdict keeps what it says
  shown = now;
  if (!found) {
    byId("verdict").textContent = answer.trouble
      ? "No verdict could be reached."
      : answer.requests >= answer.needed ? `A verdict on ${count(answer.requests)} answers is being made.` : `A verdict needs ${answer.needed} answers; there ${answer.requests === 1 ? "is" : "are"} ${answer.requests}.`;
    return;
  }
  byId("verdict").textContent = found.sentence;
  byId("verdict").closest(".verdict").dataset.phase = found.phase;
  drawBest(found.levers[0]);
  drawTable(found);
}

const OLD = 30;   // seconds after which a verdict on another load fades
const LATE = 300; // seconds after which any verdict does

// Why a verdict may no longer hold; empty: it does.
function faded(answer) {
  if (answer.outdated && answer.age_s > OLD) return "the load or the settings have changed since";
  return answer.age_s > LATE ? "nothing has run since" : "";
}

// "40 s", "3 min", "2 h".
const age = (value) => (value < 120 ? `${Math.round(value)} s` : value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`);

function note(answer) {
  const parts = [];
  if (answer.verdict) {
    const { requests, measured, replayed } = answer.verdict;
    const why = faded(answer);
    parts.push(`From ${count(requests)} requests, ${age(answer.age_s)} ago${why ? `: ${why}` : ""}`);
    parts.push(`replayed as they were: TTFT ${seconds(replayed.ttft)} (measured ${seconds(measured.ttft)}), TPOT ${seconds(replayed.tpot)} (measured ${seconds(measured.tpot)})`);
  }
  if (answer.working) parts.push("a new one is being made");
  if (answer.trouble) parts.push(answer.trouble);
  byId("verdict-note").textContent = parts.join(" · ");
}

const GOOD = { ttft: -1, tpot: -1, stall: -1, throughput: 1, cost: -1 };

function delta(name, ratio) {
  const moved = ratio - 1;
  const kind = Math.abs(moved) < 0.03 ? "" : moved * GOOD[name] > 0 ? "better" : "worse";
  return element("span", { class: `delta ${kind}` }, change(ratio));
}

function drawBest(best) {
  const place = byId("best");
  place.hidden = !best;
  if (!best) return;
  const moves = [["TTFT", "ttft"], ["TPOT", "tpot"], ["tokens/s", "throughput"]];
  place.replaceChildren(
    element("span", {}, "Best lever: ", element("strong", {}, best.title)),
    ...moves.map(([label, name]) => element("span", { class: "delta" }, `${label} `, delta(name, best[name]))),
  );
  if (best.live && best.settings) place.append(pullButton(best));
}

function pullButton(best) {
  const button = element("button", { type: "button", id: "pull" }, "Pull it now");
  button.title = Object.entries(best.settings).map(([name, value]) => `${name} = ${value}`).join(", ");
  button.addEventListener("click", async () => {
    button.disabled = true;
    button.textContent = "Waiting for the engine";
    try {
      const given = Object.fromEntries(Object.entries(best.settings).filter(([, value]) => value !== null));
      await post("/twostroke/settings", given);
      await fetchSettings();
      drawSettings();
      button.textContent = "Pulled: watch the numbers";
    } catch (error) {
      button.textContent = "Not possible";
      byId("verdict-note").textContent = error.message;
    }
  });
  return button;
}

function drawTable(found) {
  byId("levers").hidden = false;
  const cells = ["ttft", "tpot", "stall", "throughput", "cost"];
  byId("lever-table").tBodies[0].replaceChildren(
    ...found.levers.map((lever) => element("tr", {}, element("th", { scope: "row" }, lever.name), ...cells.map((name) => element("td", {}, delta(name, lever[name]))), element("td", {}, lever.title))),
  );
  byId("evidence").replaceChildren(...found.evidence.map((line) => element("li", {}, line)));
  byId("useless").replaceChildren(...found.useless.map((one) => element("li", {}, element("strong", {}, one.name), `: ${one.reason}`)));
}
