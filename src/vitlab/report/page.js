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

// Lines to copy, also those of cards that are not there yet.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("button.copy");
  if (!button) return;
  const code = button.closest(".code").querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } catch {
    getSelection().selectAllChildren(code); // the reader's own copy key does the rest
  }
});

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

// The card of a point: shown while one points at it or focuses it; a click keeps it, so that its text can be selected.
const NEAR_PX = 24, GAP_PX = 14; // how far one may miss a point; between a point and its card
for (const plot of document.querySelectorAll(".plot")) {
  const card = plot.querySelector(".card");
  const contents = plot.querySelectorAll("template");
  const drawings = [...plot.querySelectorAll("svg")];
  let open = null, kept = false; // the number of the card that is shown
  const twins = () => plot.querySelectorAll(`[data-card="${open}"]`); // in the drawing for the desk and in that for the phone
  const visible = () => [...twins()].find((point) => point.getClientRects().length);
  const middle = (point) => {
    const box = point.querySelector(".marker").getBoundingClientRect();
    return [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
  };
  const nearest = (event) => {
    const drawing = drawings.find((one) => one.contains(event.target));
    let best = null, least = NEAR_PX;
    for (const point of drawing ? drawing.querySelectorAll(".point") : []) {
      const [x, y] = middle(point);
      const far = Math.hypot(event.clientX - x, event.clientY - y);
      if (far < least) [best, least] = [point, far];
    }
    return best;
  };
  const place = () => {
    const point = open !== null && visible();
    if (!point || getComputedStyle(card).position === "static") return; // on a phone it stands below the drawing
    const outer = plot.getBoundingClientRect(), [x, y] = middle(point);
    const { width, height } = card.getBoundingClientRect(), page = root.clientWidth;
    const sides = [x + GAP_PX, x - GAP_PX - width];
    const left = sides.find((side) => side >= outer.left && side + width <= outer.right)
      ?? sides.find((side) => side >= 0 && side + width <= page) ?? Math.max(0, page - width);
    const beside = Math.max(outer.top, Math.min(y - height / 2, outer.bottom - height));
    const top = Math.max(0, Math.min(beside, root.clientHeight - height)); // all of it in the window, also over what stands above
    card.style.left = `${left - outer.left}px`;
    card.style.top = `${top - outer.top}px`;
  };
  const hide = () => {
    for (const point of twins()) point.classList.remove("open");
    open = null;
    kept = false;
    card.hidden = true;
  };
  const show = (point, keep = false) => {
    if (open !== point.dataset.card) {
      hide();
      open = point.dataset.card;
      for (const twin of twins()) twin.classList.add("open");
      card.replaceChildren(contents[open].content.cloneNode(true));
      card.setAttribute("aria-label", point.getAttribute("aria-label"));
      card.hidden = false;
    }
    kept = keep;
    card.classList.toggle("kept", keep);
    place();
  };
  const hover = (event) => {
    if (kept || event.pointerType === "touch") return;
    const point = nearest(event) ?? plot.querySelector(".point:focus-visible");
    if (point) show(point); else hide();
  };
  // Not on the drawings: Chromium lets Tab stop at an SVG element that listens for the focus.
  plot.addEventListener("focusin", (event) => { if (event.target.matches(".point:focus-visible")) show(event.target); });
  plot.addEventListener("focusout", (event) => { if (!kept && event.target.matches(".point")) hide(); });
  for (const drawing of drawings) {
    drawing.addEventListener("pointermove", hover);
    drawing.addEventListener("pointerleave", hover);
    drawing.addEventListener("keydown", (event) => {
      const point = event.target.closest(".point");
      if (!point) return;
      const rows = [...drawing.querySelectorAll(".series")].map((one) => [...one.querySelectorAll(".point")]);
      const row = rows.findIndex((one) => one.includes(point)), k = rows[row].indexOf(point);
      const other = (step) => rows[row + step]?.[Math.min(k, rows[row + step].length - 1)];
      const next = { ArrowRight: rows[row][k + 1], ArrowLeft: rows[row][k - 1], ArrowDown: other(1), ArrowUp: other(-1) };
      if (event.key in next) next[event.key]?.focus();
      else if (event.key === "Enter" || event.key === " ") { show(point, true); card.focus(); }
      else return;
      event.preventDefault(); // the page would scroll
    });
  }
  document.addEventListener("click", (event) => {
    const selected = getSelection();
    const inside = card.contains(event.target) || (!selected.isCollapsed && card.contains(selected.anchorNode)); // a drag may end outside
    const point = nearest(event);
    if (event.target.closest(".card .close") || (!inside && !point)) hide();
    else if (!inside) show(point, true);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || open === null) return;
    if (card.contains(document.activeElement)) visible()?.focus();
    hide(); // after the focus, which shows it
  });
  addEventListener("resize", place);
}
