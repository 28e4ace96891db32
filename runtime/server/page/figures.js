// Live figures in the page's head, read from /metrics every second while the page is seen.

import { ask } from "./client.js";
import { figures, reading } from "./metrics.js";

const PERIOD = 1000; // ms
const list = document.getElementById("figures");
let last;

export function showFigures() {
  update().finally(() => setTimeout(showFigures, PERIOD));
}

async function update() {
  if (document.hidden) {
    last = undefined;
    return;
  }
  try {
    const text = await (await ask("/metrics")).text();
    const now = { at: performance.now(), values: reading(text) };
    const before = last ?? now;
    last = now;
    show(figures(before.values, now.values, Math.max(now.at - before.at, 1) / 1000));
  } catch {
    last = undefined;
    list.replaceChildren(); // old figures would look like live ones
  }
}

function show(values) {
  const rows = Object.entries(values).map(([name, value]) => {
    const row = document.createElement("div");
    for (const [tag, text] of [["dt", name], ["dd", value]]) {
      const element = document.createElement(tag);
      element.textContent = text;
      row.append(element);
    }
    row.dataset.figure = name;
    return row;
  });
  list.replaceChildren(...rows);
}
