// One answer's two strokes as a strip: it grows while the answer streams, and is exact when the server has sent its timings.

import { element, seconds } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000;
const HEIGHT = 26;
const SCALES = [0.5, 1, 2, 5, 10, 20, 40, 60, 120, 240, 600];

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export class Strip {
  constructor() {
    this.began = performance.now() / 1000;
    this.pieces = [];      // moments of text, seconds from the start
    this.timings = null;   // the server's own, at the end
    this.ended = null;
    this.svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "strip", role: "img" });
    this.caption = element("div", { class: "caption" });
  }

  now() { return performance.now() / 1000 - this.began; }

  piece() { this.pieces.push(this.now()); }

  end(timings) {
    this.timings = timings;
    this.ended = this.now();
  }

  // Seconds of each phase as far as they are known. Before the end, queue and prefill cannot be separated.
  phases() {
    const until = this.ended ?? this.now();
    const first = this.pieces[0];
    if (this.timings) {
      const { queue_s: queue, prefill_s: prefill, decode_s: decode } = this.timings;
      return { queue, prefill, decode, until: queue + prefill + decode };
    }
    if (first === undefined) return { queue: 0, prefill: until, decode: 0, until };
    return { queue: 0, prefill: first, decode: until - first, until };
  }

  draw(longest) {
    const { queue, prefill, decode, until } = this.phases();
    const whole = SCALES.find((scale) => scale >= (longest ?? until)) ?? until;
    const x = (value) => (WIDTH * value) / whole;
    const parts = [
      shape("rect", { class: "queue", x: 0, y: 0, width: x(queue), height: HEIGHT }),
      shape("rect", { class: this.pieces.length || this.timings ? "prefill" : "prefill open", x: x(queue), y: 0, width: x(prefill), height: HEIGHT }),
      shape("rect", { class: "decode", x: x(queue + prefill), y: 0, width: x(decode), height: HEIGHT }),
    ];
    const shift = this.timings && this.pieces.length ? queue + prefill - this.pieces[0] : 0;
    const gap = this.pieces.length > 1 ? x(this.pieces.at(-1) - this.pieces[0]) / this.pieces.length : 0;
    if (gap > 3) {
      for (const moment of this.pieces.slice(1)) {
        const place = x(moment + shift);
        parts.push(shape("line", { class: "tick", x1: place, x2: place, y1: 0, y2: HEIGHT }));
      }
    }
    this.svg.replaceChildren(...parts);
    this.svg.setAttribute("aria-label", this.write(queue, prefill, decode));
  }

  write(queue, prefill, decode) {
    const timings = this.timings;
    const tokens = timings ? timings.output_tokens : this.pieces.length;
    const tpot = timings ? timings.tpot_s : tokens > 1 ? (this.pieces.at(-1) - this.pieces[0]) / (tokens - 1) : null;
    const rows = [];
    if (timings) rows.push(["queue", "waited", queue, ""]);
    const reads = timings ? ` ${timings.prompt_tokens} tokens${timings.cached_tokens ? `, ${timings.cached_tokens} from the cache` : ""}` : "";
    rows.push(["prefill", timings ? "read" : this.pieces.length ? "first word after" : "waits and reads", prefill, reads]);
    const drafts = timings?.drafted_tokens ? ` (${timings.accepted_tokens} of ${timings.drafted_tokens} drafted ones right, ${timings.tokens_per_step.toFixed(1)} a step)` : "";
    if (tokens) rows.push(["decode", "wrote", decode, ` ${tokens} tokens${drafts}`]);
    this.caption.replaceChildren(
      ...rows.map(([kind, label, value, more]) => element("span", { class: kind }, `${label}${more} `, element("b", {}, seconds(value)))),
      ...(this.pieces.length || timings ? [element("span", { class: "prefill" }, "TTFT ", element("b", {}, seconds(timings ? timings.ttft_s : this.pieces[0])))] : []),
      ...(tpot ? [element("span", { class: "decode" }, "TPOT ", element("b", {}, seconds(tpot)))] : []),
    );
    return `Waited ${seconds(queue)}, read the prompt in ${seconds(prefill)}, wrote ${tokens} tokens in ${seconds(decode)}.`;
  }
}
