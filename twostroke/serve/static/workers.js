// The workers of a deployment: role, health and load of each, and what travels between them.

import { get } from "./api.js";
import { byId, count, element, seconds } from "./format.js";

function row(one) {
  const held = one.blocks.total - one.blocks.free - one.blocks.cached;
  const share = one.blocks.total ? `${Math.round((100 * held) / one.blocks.total)} %` : "–";
  const speed = one.prompt_tokens_s === null ? "–" : `${count(Math.round(one.prompt_tokens_s))}/s`;
  const cells = [
    one.name, one.role, one.healthy ? "ready" : one.trouble ?? "not ready", one.machine, count(one.running),
    count(one.queued_tokens), count(one.streams), share, speed, seconds(one.step_s), count(one.losses),
  ];
  return element("tr", { class: one.healthy ? "" : "bad" }, ...cells.map((text) => element("td", {}, text)));
}

export async function drawWorkers() {
  const found = await get("/twostroke/workers");
  const { transfers } = found;
  const failed = Object.entries(transfers.failed).map(([why, times]) => `${count(times)} ${why}`).join(", ") || "none";
  const mean = transfers.done ? seconds(transfers.seconds / transfers.done) : "–";
  const pairs = [
    ["transfers now", count(transfers.in_flight)], ["done", count(transfers.done)], ["failed", failed],
    ["sent", `${(transfers.bytes / 1e6).toFixed(1)} MB`], ["mean time", mean], ["resumed elsewhere", count(found.resumed)],
  ];
  byId("workers-list").replaceChildren(...pairs.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  byId("workers-table").tBodies[0].replaceChildren(...found.workers.map(row));
  byId("workers-card").hidden = false;
}
