"use strict";
// The theme: that of the system, until the reader chooses the other one.
const root = document.documentElement;
const stored = (value) => {
  try {
    if (value) localStorage.setItem("vitlab-theme", value);
    return localStorage.getItem("vitlab-theme");
  } catch { return null; } // where a browser keeps nothing for files
};
const choose = (theme) => { root.style.colorScheme = theme; };
if (stored()) choose(stored());
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.style.colorScheme ? root.style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const next = dark ? "light" : "dark";
  stored(next);
  choose(next);
});

// Lines to copy.
for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    } catch {
      getSelection().selectAllChildren(code); // the reader's own copy key does the rest
    }
  });
}

// The order of a matrix: rows and columns of the classes; columns beyond them stay at the end.
for (const select of document.querySelectorAll("select[data-sorts]")) {
  const table = document.getElementById(select.dataset.sorts);
  const [head, ...rows] = table.rows;
  const lines = [head, ...rows].map((row) => [...row.cells]);
  const names = rows.map((row) => row.cells[0].textContent);
  const errors = rows.map((row) => Number(row.dataset.errors));
  const by = {
    order: (a, b) => a - b,
    name: (a, b) => names[a].localeCompare(names[b], undefined, { numeric: true }),
    errors: (a, b) => errors[b] - errors[a] || a - b,
  };
  select.addEventListener("change", () => {
    const order = rows.map((_, k) => k).sort(by[select.value]);
    for (const [place, row] of [head, ...rows].entries()) {
      const cells = lines[place];
      row.replaceChildren(cells[0], ...order.map((k) => cells[k + 1]), ...cells.slice(rows.length + 1));
    }
    head.after(...order.map((k) => rows[k]));
  });
}

// The values under the pointer.
const shown = (value, percent) => percent ? `${Number((100 * value).toPrecision(4))} %` : String(Number(value.toPrecision(4)));
for (const chart of document.querySelectorAll(".chart")) {
  const series = JSON.parse(chart.dataset.series);
  const tip = chart.querySelector(".tip");
  for (const svg of chart.querySelectorAll("svg")) {
    const cursor = svg.querySelector(".cursor");
    const [left, width, low, high] = svg.dataset.box.split(",").map(Number);
    const leave = () => { tip.hidden = true; cursor.style.display = ""; };
    const move = (event) => {
      const box = svg.getBoundingClientRect();
      const scale = box.width / svg.viewBox.baseVal.width;
      const at = low + ((event.clientX - box.left) / scale - left) / width * (high - low);
      const near = series.map((one) => one.p.filter((point) => point[1] !== null)
        .reduce((best, point) => !best || Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best, null));
      const x = near.filter(Boolean).reduce((best, point) => best === null || Math.abs(point[0] - at) < Math.abs(best - at) ? point[0] : best, null);
      if (x === null) return;
      const line = (text, colour) => {
        const row = document.createElement("div");
        if (colour !== undefined) {
          const dot = document.createElement("i");
          dot.className = `b${colour}`;
          row.append(dot);
        }
        row.append(text);
        return row;
      };
      const rows = series.map((one, k) => near[k] && line(`${one.name}: ${shown(near[k][1], chart.dataset.percent)}`, one.c)).filter(Boolean);
      tip.replaceChildren(line(`${chart.dataset.x} ${Number(x.toPrecision(6)).toLocaleString("en")}`), ...rows);
      const px = left + (x - low) / (high - low) * width;
      cursor.style.display = "block";
      cursor.style.transform = `translateX(${px}px)`;
      tip.hidden = false;
      const outer = chart.getBoundingClientRect();
      const pointer = box.left - outer.left + px * scale;
      tip.style.left = `${Math.max(0, Math.min(pointer + 12, outer.width - tip.offsetWidth))}px`;
      if (pointer + 12 + tip.offsetWidth > outer.width) tip.style.left = `${Math.max(0, pointer - 12 - tip.offsetWidth)}px`;
    };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", leave);
  }
}
