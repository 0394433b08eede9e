// The resolved settings, each with its reason.

import { byId, count, element } from "./format.js";
import { state } from "./store.js";

function words(value) {
  if (value === null) return "as in the file";
  if (typeof value === "boolean") return value ? "on" : "off";
  if (typeof value === "number" && Number.isInteger(value) && Math.abs(value) < 1e12) return count(value);
  return String(value);
}

export function drawSettings() {
  if (!state.settings) return;
  byId("settings").tBodies[0].replaceChildren(
    ...Object.entries(state.settings.settings).map(([name, one]) => element("tr", {},
      element("td", {}, name), element("td", {}, words(one.value)), element("td", {}, one.reason),
      element("td", { class: one.live ? "live" : "" }, one.live ? "yes" : "no"))),
  );
}
