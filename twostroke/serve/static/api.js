// Talking to the server: one key for this tab, one place that asks for it.

import { byId } from "./format.js";

const SLOT = "twostroke-key";
let key = sessionStorage.getItem(SLOT) || "";
let asking = null;

export class Trouble extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export const keyNeeded = () => document.documentElement.dataset.key === "required";

export async function call(path, options = {}) {
  if (keyNeeded() && !key) await askForKey(false);
  const headers = { ...(options.headers || {}) };
  if (key) headers.authorization = `Bearer ${key}`;
  if (options.body) headers["content-type"] = "application/json";
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.status === 401) {
    await askForKey(true);
    return call(path, options);
  }
  if (!answer.ok) throw new Trouble(answer.status, await problem(answer));
  return answer;
}

export const get = async (path) => (await call(path)).json();

export const post = (path, body, signal) => call(path, { method: "POST", body: JSON.stringify(body), signal });

async function problem(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server answered ${answer.status}.`;
  }
}

// All callers wait for one dialog.
export function askForKey(refused) {
  if (asking) return asking;
  const dialog = byId("key-dialog");
  byId("key-problem").hidden = !refused;
  byId("key").value = "";
  asking = new Promise((resolve) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      key = byId("key").value.trim();
      sessionStorage.setItem(SLOT, key);
      dialog.close();
      asking = null;
      resolve();
    };
  });
  dialog.oncancel = (event) => event.preventDefault();
  if (!dialog.open) dialog.showModal();
  return asking;
}
