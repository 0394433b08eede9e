// Light, dark, or as the system has it.

import { byId } from "./format.js";

const SLOT = "twostroke-theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };
const WORDS = { auto: "as the system has them", light: "light", dark: "dark" };
const system = window.matchMedia("(prefers-color-scheme: dark)");

function apply(wanted, repaint) {
  const dark = wanted === "dark" || (wanted === "auto" && system.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  const button = byId("theme");
  button.textContent = wanted[0].toUpperCase() + wanted.slice(1);
  button.setAttribute("aria-label", `Colours: ${WORDS[wanted]}`);
  repaint();
}

export function startTheme(repaint) {
  let wanted = localStorage.getItem(SLOT) || "auto";
  apply(wanted, () => {});
  system.addEventListener("change", () => apply(wanted, repaint));
  byId("theme").addEventListener("click", () => {
    wanted = NEXT[wanted];
    localStorage.setItem(SLOT, wanted);
    apply(wanted, repaint);
  });
}
