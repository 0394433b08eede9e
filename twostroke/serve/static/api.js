// Talking to the server: one key for this tab, one place that asks for it.

import { byId } from "./format.js";

const SLOT = "twostroke-key";
let key = sessionStorage.getItem(SLOT) || "";
let asking = null;

export class Trouble extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

const kind = document.documentElement.dataset.key;  // the best key that there is to ask for: none, user or admin
export const keyNeeded = () => kind !== "none";
export const operated = () => kind !== "user";  // false: no key of this server opens the operator's routes

export async function call(path, options = {}) {
  if (keyNeeded() && !key) await askForKey("");
  const headers = { ...(options.headers || {}) };
  if (key) headers.authorization = `Bearer ${key}`;
  if (options.body) headers["content-type"] = "application/json";
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.status === 401) {
    await askForKey("That key was not accepted.");
    return call(path, options);
  }
  if (answer.ok) return answer;
  const { code, message } = await problem(answer);
  if (code === "admin_key_needed") {
    await askForKey("That is a user key. The dashboard needs an admin key.");
    return call(path, options);
  }
  throw new Trouble(answer.status, message);
}

export const get = async (path) => (await call(path)).json();

export const post = (path, body, signal) => call(path, { method: "POST", body: JSON.stringify(body), signal });

async function problem(answer) {
  try {
    const found = await answer.json();
    return found.error ?? { code: null, message: `The server is not well: ${found.reason}.` };
  } catch {
    return { code: null, message: `The server answered ${answer.status}.` };
  }
}

// All callers wait for one dialog.
export function askForKey(trouble) {
  if (asking) return asking;
  const dialog = byId("key-dialog");
  byId("key-problem").textContent = trouble;
  byId("key-problem").hidden = !trouble;
  if (kind === "admin") {
    byId("key-title").textContent = "This dashboard needs an admin key";
    byId("key-label").textContent = "Admin key";
  }
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
