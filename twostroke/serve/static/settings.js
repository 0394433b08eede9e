// The resolved settings, each with its reason.

import { byId, count, element } from "./format.js";
import { state } from "./store.js";

const FROM_FILE = ["dtype", "quantize"]; // what they are when they are not given

function words(name, value) {
  if (value === null) return FROM_FILE.includes(name) ? "as in the file" : "not given";
  if (typeof value === "boolean") return value ? "on" : "off";
  if (typeof value === "number" && Number.isInteger(value) && Math.abs(value) < 1e12) return count(value);
  return String(value);
}

export function drawSettings() {
  if (!state.settings) return;
  byId("settings").tBodies[0].replaceChildren(
    ...Object.entries(state.settings.settings).map(([name, one]) => element("tr", {},
      element("td", {}, name), element("td", {}, words(name, one.value)), element("td", {}, one.reason),
      element("td", { class: one.live ? "live" : "" }, one.live ? "yes" : "no"))),
  );
}
