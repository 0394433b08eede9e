// The chat: asks, shows text as it comes, and a strip for each answer.

import { post } from "./api.js";
import { byId, element } from "./format.js";
import { Strip } from "./strip.js";
import { state } from "./store.js";

const hint = byId("hint");
const history = [];
let stopping = null;
let strips = [];

const LONG = "The engine has two strokes. In the first it reads, in the second it writes. ".repeat(45);

const TRIES = {
  short: ["What is the capital of France?", 1],
  long: [`${LONG}\n\nHow many strokes does the engine have?`, 1],
  batch: ["Write a short poem about a small engine.", 8],
};

export function startPlayground() {
  byId("ask").addEventListener("submit", (event) => { event.preventDefault(); send(byId("question").value, Number(byId("copies").value)); });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); byId("ask").requestSubmit(); }
  });
  byId("stop").addEventListener("click", () => stopping?.abort());
  byId("clear").addEventListener("click", () => { stopping?.abort(); history.length = 0; byId("talk").replaceChildren(hint); });
  for (const button of document.querySelectorAll("[data-try]")) {
    button.addEventListener("click", () => { if (!stopping) send(...TRIES[button.dataset.try]); });
  }
}

async function send(text, copies) {
  if (!text.trim() || stopping) return;
  const talk = byId("talk");
  hint.remove();
  byId("question").value = "";
  history.push({ role: "user", content: text });
  talk.append(element("div", { class: "message user" }, text));
  stopping = new AbortController();
  busy(true);
  const box = element("div", { class: "answer" });
  const words = element("div", { class: "message" });
  box.append(words);
  talk.append(box);
  strips = Array.from({ length: copies }, () => new Strip());
  for (const strip of strips) box.append(strip.svg, ...(copies === 1 ? [strip.caption] : []));
  if (copies > 1) box.append(strips[0].caption);
  const frame = () => { redraw(talk); if (stopping) setTimeout(() => requestAnimationFrame(frame), 100); };
  requestAnimationFrame(frame);
  try {
    await stream(copies, words);
    history.push({ role: "assistant", content: words.textContent });
  } catch (error) {
    if (error.name !== "AbortError") { box.classList.add("failed"); words.append(`${words.textContent ? "\n" : ""}${error.message}`); }
    history.pop();
  }
  stopping = null;
  redraw(talk);
  busy(false);
}

function redraw(talk) {
  const longest = Math.max(...strips.map((strip) => strip.phases().until));
  const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
  for (const strip of strips) strip.draw(longest);
  if (atEnd || stopping) talk.scrollTop = talk.scrollHeight;
}

function busy(yes) {
  byId("send").disabled = yes;
  byId("send").textContent = yes ? "Waiting for the answer" : "Send";
  byId("stop").hidden = !yes;
  for (const button of document.querySelectorAll("[data-try]")) {
    button.disabled = yes;
    button.title = yes ? "An answer is being written: wait for it, or stop it" : "";
  }
}

// All copies come over one connection: a browser opens only six, and the page needs some for itself.
async function stream(copies, words) {
  const body = {
    model: state.settings?.model, messages: history, stream: true, n: copies,
    max_tokens: Number(byId("max-tokens").value) || 128, temperature: Number(byId("temperature").value),
  };
  const answer = await post("/v1/chat/completions", body, stopping.signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") take(JSON.parse(line.slice(6)), words);
  }
  for (const strip of strips) if (strip.ended === null) strip.end(null);
}

function take(event, words) {
  if (event.error) throw new Error(event.error.message);
  const choice = event.choices?.[0];
  if (!choice) return;
  const strip = strips[choice.index];
  const delta = choice.delta ?? {};
  const text = (delta.reasoning_content ?? "") + (delta.content ?? "");
  if (text) {
    strip.piece();
    if (choice.index === 0) words.append(text);
  }
  if (event.timings) strip.end(event.timings);
}
