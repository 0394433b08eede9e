// KV blocks as a mosaic: each tile stands for some blocks, the fullest first.

import { byId, colour, count, element } from "./format.js";
import { serverNow, state } from "./store.js";

const TILE = 16;  // pixels
let shown = "";

// While one engine works its last step tells; afterwards, and of a deployment, what is held now does.
export function drawMemory() {
  const last = state.workers.length ? undefined : state.steps.at(-1);
  const blocks = last && serverNow() - last.time - last.seconds < 1.5 ? last.blocks : state.blocks;
  if (!blocks || !blocks.total) return;
  const held = blocks.held ?? blocks.total - blocks.free - blocks.cached;
  const shared = blocks.shared ?? 0;
  const canvas = byId("kv");
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  const theme = document.documentElement.dataset.theme;
  const look = [held, shared, blocks.cached, blocks.host, blocks.total, width, height, ratio, theme, Boolean(state.settings)].join();
  if (look === shown) return;
  shown = look;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  const rows = Math.max(4, Math.floor(height / TILE));
  const columns = Math.max(8, Math.floor(width / TILE));
  const pitch = height / rows;
  const tiles = Math.min(blocks.total, columns * rows);
  const kinds = share([["kv-shared", shared], ["kv", held - shared], ["kv-cached", blocks.cached], ["free", blocks.free]], tiles, blocks.total);
  const across = width / columns;
  let tile = 0;
  for (const [kind, number] of kinds) {
    for (let index = 0; index < number; index += 1, tile += 1) {
      const x = Math.floor(tile / rows) * across;
      const y = (tile % rows) * pitch;
      if (kind === "free") {
        pen.strokeStyle = colour("line");
        pen.strokeRect(x + 1.5, y + 1.5, across - 4, pitch - 4);
      } else {
        pen.fillStyle = colour(kind);
        pen.fillRect(x + 1, y + 1, across - 3, pitch - 3);
      }
    }
  }
  describe(blocks, held, shared);
}

// Whole tiles for each kind; one that has any block has a tile.
function share(kinds, tiles, total) {
  const wanted = kinds.map(([kind, blocks]) => [kind, blocks > 0 ? Math.max(1, Math.round((blocks / total) * tiles)) : 0]);
  const free = wanted[wanted.length - 1];
  free[1] = Math.max(0, tiles - wanted.slice(0, -1).reduce((sum, [, number]) => sum + number, 0));
  return wanted;
}

function describe(blocks, held, shared) {
  const rows = [["held", "held by requests", held], ["shared", "of these shared", shared], ["cached", "cached for reuse", blocks.cached], ["free", "free", blocks.free]];
  const layout = state.settings?.layout;
  const offload = state.settings?.settings.kv_offload.value;  // bytes of the host's memory
  byId("kv-list").replaceChildren(
    ...rows.map(([kind, label, number]) => element("div", {}, element("dt", { class: `key ${kind}` }, label), element("dd", {}, count(number)))),
    ...(offload ? [element("div", {}, element("dt", {}, "kept on the host"), element("dd", {}, count(blocks.host), element("small", {}, `of ${count(offload / layout.block_bytes)}`)))] : []),
    ...(layout ? [element("div", {}, element("dt", {}, "a block"), element("dd", {}, `${layout.block_tokens}`, element("small", {}, `tokens, ${count(layout.block_bytes / 1024)} KiB`)))] : []),
  );
}
