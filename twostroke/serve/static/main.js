// Starts everything, and asks the server again and again, each thing at its own pace; not while the page is hidden.

import { askForKey, get, keyNeeded, operated, Trouble } from "./api.js";
import { drawAnswers } from "./answers.js";
import { drawCharts, drawRoofline, makeCharts, repaint } from "./charts.js";
import { byId, count } from "./format.js";
import { drawLanes, watchPointer } from "./lanes.js";
import { drawMemory } from "./memory.js";
import { startPlayground } from "./playground.js";
import { drawSettings } from "./settings.js";
import { fetchArrivals, fetchDiagnosis, fetchSettings, fetchSteps, state } from "./store.js";
import { drawSummary } from "./summary.js";
import { startTheme } from "./theme.js";
import { drawVerdict } from "./verdict.js";
import { drawWorkers } from "./workers.js";

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function awake() {
  while (document.hidden) await pause(500);
}

async function every(ms, work) {
  for (;;) {
    await awake();
    try {
      await work();
      await pause(ms);
    } catch (error) {
      status("bad", error instanceof Trouble ? error.message : "The server does not answer.");
      await pause(3000);
    }
  }
}

function status(kind, text) {
  const place = byId("status");
  place.dataset.state = kind;
  if (place.lastElementChild.textContent !== text) place.lastElementChild.textContent = text;
}

async function health() {
  const answer = await get("/health");
  status("ok", `${count(answer.running)} running, ${count(answer.waiting)} waiting`);
  state.blocks = answer.blocks;
  state.waiting = answer.waiting;
  drawMemory();
}

async function settings() {
  await fetchSettings();
  const name = state.settings.model;
  byId("model").textContent = name.split("/").pop();
  byId("model").title = name;
  byId("model").hidden = false;
  drawSettings();
  if (state.settings.answer_cache !== "off") await drawAnswers();
  if (state.settings.workers) await drawWorkers();
}

// Ten frames a second: smooth enough to follow, and little enough to leave the machine to the engine.
function animate() {
  if (!document.hidden) drawLanes();
  setTimeout(() => requestAnimationFrame(animate), 100);
}

startTheme(() => { repaint(); drawMemory(); });
startPlayground();
makeCharts();
watchPointer();
requestAnimationFrame(animate);
if (keyNeeded()) {
  byId("key-button").hidden = false;
  byId("key-button").addEventListener("click", () => askForKey(""));
}
every(1000, health);
if (operated()) {
  every(5000, settings);
  every(400, async () => { await fetchSteps(); drawSummary(); drawMemory(); });
  every(1500, async () => { await fetchArrivals(); drawCharts(); drawRoofline(); });
  every(3000, async () => { await fetchDiagnosis(); drawVerdict(); });
} else {
  byId("verdict").textContent = "What all requests do is shown to an admin key, and this server has none: start it with --admin-key.";
}
