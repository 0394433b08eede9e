// The workers of a deployment: role, health and load of each, and what travels between them.

import { get } from "./api.js";
import { byId, count, element, nameOf, seconds } from "./format.js";
import { serverNow, state } from "./store.js";

const NEWEST = 12;  // transfers
const KINDS = { request: "with its request", early: "while the prompt was read", shared: "before the prompt was read" };
const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

function row(one) {
  const held = one.blocks.total - one.blocks.free - one.blocks.cached;
  const share = one.blocks.total ? `${Math.round((100 * held) / one.blocks.total)} %` : "–";
  const speed = one.prompt_tokens_s === null ? "–" : `${count(Math.round(one.prompt_tokens_s))}/s`;
  const cells = [
    one.name, one.role, one.healthy ? "ready" : one.trouble ?? "not ready", one.machine, count(one.running),
    count(one.queued_tokens), count(one.streams), share, speed, seconds(one.step_s),
    megabytes(one.sent_bytes), megabytes(one.received_bytes), count(one.losses),
  ];
  return element("tr", { class: one.healthy ? "" : "bad" }, ...cells.map((text) => element("td", {}, text)));
}

function moved(one) {
  const cells = [
    new Date(one.time * 1000).toLocaleTimeString(), nameOf(one.request), one.from, one.to, KINDS[one.kind],
    megabytes(one.bytes), seconds(one.seconds), seconds(one.waited_s), one.failed || "done",
  ];
  return element("tr", { class: one.failed ? "bad" : "" }, ...cells.map((text) => element("td", {}, text)));
}

function moving(one, now) {
  const cells = [
    new Date(one.since * 1000).toLocaleTimeString(), nameOf(one.request), "", one.to, KINDS.request, "",
    seconds(Math.max(0, now - one.since)), "", "moves now",
  ];
  return element("tr", {}, ...cells.map((text) => element("td", {}, text)));
}

export async function drawWorkers() {
  const found = await get("/twostroke/workers");
  const { transfers } = found;
  state.workers = found.workers.map((one) => one.name);
  const failed = Object.entries(transfers.failed).map(([why, times]) => `${count(times)} ${why}`).join(", ") || "none";
  const mean = transfers.done ? seconds(transfers.seconds / transfers.done) : "–";
  const pairs = [
    ["transfers now", count(transfers.in_flight)], ["done", count(transfers.done)], ["failed", failed],
    ["sent", megabytes(transfers.bytes)], ["mean time", mean], ["resumed elsewhere", count(found.resumed)],
  ];
  byId("workers-list").replaceChildren(...pairs.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  byId("workers-table").tBodies[0].replaceChildren(...found.workers.map(row));
  const newest = transfers.last.slice(-NEWEST).reverse();
  byId("transfers-table").tBodies[0].replaceChildren(
    ...transfers.now.slice(0, NEWEST).map((one) => moving(one, serverNow())), ...newest.map(moved),
  );
  byId("transfers").hidden = !transfers.now.length && !newest.length;
  byId("workers-card").hidden = false;
}
