// The answer cache: hits by tier, what they saved, the estimated error with its bound, and the last decisions.

import { get, post } from "./api.js";
import { byId, count, element, seconds } from "./format.js";

const percent = (share) => `${(100 * share).toFixed(2)} %`;

function pair(name, value) {
  return [element("dt", {}, name), element("dd", {}, value)];
}

function wrongButton(entry) {
  const button = element("button", { type: "button" }, "this was wrong");
  button.addEventListener("click", async () => {
    button.disabled = true;
    await post(`/twostroke/answers/${entry}/wrong`, {}).catch(() => {});  // it may be forgotten already
    button.textContent = "forgotten";
  });
  return button;
}

function decision(one) {
  const shared = one.decision === "shared";
  return element("tr", {},
    element("td", {}, one.asked), element("td", {}, one.known), element("td", {}, one.similarity.toFixed(3)),
    element("td", {}, one.decision), element("td", {}, ...(shared ? [wrongButton(one.hit)] : [])));
}

export async function drawAnswers() {
  const found = await get("/twostroke/answers?limit=0");
  const { error, hits } = found;
  const from = error.threshold === null ? "nothing is shared yet" : `from similarity ${error.threshold.toFixed(2)}`;
  byId("answers-list").replaceChildren(
    ...pair("exact hits", count(hits.exact)), ...pair("semantic hits", count(hits.semantic)),
    ...pair("computed once for several", count(hits.coalesced)), ...pair("misses", count(found.misses)),
    ...pair("tokens saved", count(found.tokens_saved)), ...pair("time saved", seconds(found.seconds_saved)),
    ...pair("estimated error", `${percent(error.rate)}, at most ${percent(error.upper)} (95 %)`),
    ...pair("bound", `${percent(found.error_bound)}, ${from}`),
  );
  byId("answers-table").tBodies[0].replaceChildren(...found.borderline.slice(-10).reverse().map(decision));
  byId("answers-card").hidden = false;
}
