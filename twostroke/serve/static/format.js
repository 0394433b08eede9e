// Numbers as people read them, and the few helpers that make elements. Text is always set as text.

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  if (value >= 10) return `${value.toFixed(1)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  const ms = 1000 * value;
  return ms >= 10 ? `${ms.toFixed(0)} ms` : `${ms.toFixed(1)} ms`;
}

export function count(value) {
  return Number.isFinite(value) ? Math.round(value).toLocaleString("en") : "–";
}

export function rate(value) {
  if (!Number.isFinite(value)) return "–";
  return value >= 100 ? count(value) : value.toFixed(value >= 10 || value === 0 ? 0 : 1);
}

const UNITS = ["", "k", "M", "G", "T", "P"];

export function scaled(value, unit) {
  let power = 0;
  while (Math.abs(value) >= 1000 && power < UNITS.length - 1) { value /= 1000; power += 1; }
  return `${value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${UNITS[power]}${unit}`;
}

export function change(ratio) {
  const percent = 100 * (ratio - 1);
  if (Math.abs(percent) < 0.5) return "±0 %";
  return ratio >= 10 ? `×${ratio.toFixed(0)}` : `${percent > 0 ? "+" : "−"}${Math.abs(percent).toFixed(0)} %`;
}

export function percentile(values, share) {
  if (!values.length) return null;
  const sorted = Float64Array.from(values).sort();
  const place = share * (sorted.length - 1);
  const low = Math.floor(place);
  const high = Math.ceil(place);
  return sorted[low] + (sorted[high] - sorted[low]) * (place - low);
}

export const byId = (id) => document.getElementById(id);

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") made.className = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function figure(id, value, unit = "") {
  const place = byId(id);
  const text = value + unit;
  if (place.dataset.shown === text) return;
  place.dataset.shown = text;
  place.replaceChildren(value, ...(unit ? [element("small", {}, unit)] : []));
}

// Colours of the current theme, for canvases; asked for once, because asking makes the browser lay the page out.
const colours = new Map();

export function colour(name) {
  const key = document.documentElement.dataset.theme + name;
  if (!colours.has(key)) colours.set(key, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(key);
}

// Of a request. An id is a random number of the front end and, in its last 24 bits, a counter.
export function nameOf(request) {
  return `#${request % 2 ** 24}`;
}
