// The page: pictures in, answers out. What is shown of a file or a model is set as text, never as HTML.

import { ask, askPatiently, hasToken, isTooLong, listeners, Problem } from "./api.js";
import { rendered } from "./card.js";
import { toCsv } from "./csv.js";
import { bytesOf, colourTables, DEFAULT_STRENGTH, drawBar, drawSheet, Stage } from "./overlay.js";

const AT_ONCE = 4; // pictures that are asked about at a time
const PLAY_MS = 420; // per layer
const THUMB_PX = 96; // twice what the table shows
const TOP = 5;
const LOADING_MS = 1000; // between questions whether a model is there
const BY_LABEL_FIRST = ["gradient-rollout", "grad-cam", "integrated-gradients"];
const EXAMPLES = [["bee.jpg", "a bee on a flower"], ["cat.jpg", "a cat"], ["dog.jpg", "a dog"], ["boat.jpg", "a sailing boat"]];
const THEMES = ["system", "light", "dark"];
const TICK_GAP_PX = 8;

const find = (id) => document.getElementById(id);
const element = (tag, className, text) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};
const percent = (p) => p > 0.9995 ? "> 99.9 %" : p < 0.0005 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`;
const amount = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const bytes = (size) => size < 1e3 ? `${size} bytes` : size < 1e6 ? `${Math.round(size / 1e3)} KB` : `${size < 1e7 ? Math.floor(size / 1e5) / 10 : Math.floor(size / 1e6)} MB`;
const listed = (words) => words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
const say = (text) => { find("live").textContent = text; };

const state = {
  model: null, // what /v1/model says
  methods: null, // what /v1/explain says about the model's methods
  items: [], // the pictures, each once, in the order they came
  current: null,
  view: "label", method: "", depth: 0, layer: 0, head: 0, strength: DEFAULT_STRENGTH, squares: false,
  running: 0, atOnce: AT_ONCE, pause: 0, // questions under way, how many may be, and the timer until the next
  generation: 0, // answers of an earlier model are dropped
};
const stage = new Stage(find("stage"), find("canvas"));

// --- pictures come in --------------------------------------------------------------------------------------------------

const add = (files) => {
  const items = files.map((file) => ({ file, name: file.name || "pasted picture", status: "waiting", top: null, error: null, full: null, maps: new Map(), url: null }));
  if (!items.length) return;
  for (const item of items) {
    const refused = refusal(item.file);
    if (refused) Object.assign(item, { status: "failed", error: refused });
    item.row = makeRow(item);
  }
  state.items.push(...items);
  find("rows").append(...items.map((item) => item.row.line));
  items.forEach(showRow);
  document.body.classList.add("filled");
  say(items.length > 1 ? `${amount(items.length, "picture")} added` : `Looking at ${items[0].name}`);
  choose(items[0]);
  showBatch();
  pump();
};

const refusal = (file) => {
  const most = state.model?.limits?.image_bytes;
  if (!file.size) return new Problem("empty", "The file is empty.");
  if (most && file.size > most) return new Problem("body_too_large", `The file has ${bytes(file.size)}; this server takes at most ${bytes(most)}.`);
  return null;
};

// Those of a dropped folder too.
const filesOf = async (transfer) => {
  const entries = [...transfer.items].map((one) => one.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.some((entry) => entry.isDirectory)) return [...transfer.files];
  const found = [];
  const walk = async (entry) => {
    if (entry.isFile) { found.push(await new Promise((done, stop) => entry.file(done, stop))); return; }
    const reader = entry.createReader();
    for (;;) {
      const part = await new Promise((done, stop) => reader.readEntries(done, stop));
      if (!part.length) return;
      for (const one of part) await walk(one);
    }
  };
  for (const entry of entries) await walk(entry);
  return found.filter((file) => !file.name.startsWith("."));
};

// --- answers -----------------------------------------------------------------------------------------------------------

const nextWaiting = () => state.current?.status === "waiting" ? state.current : state.items.find((item) => item.status === "waiting");

const pump = () => {
  if (!state.model || state.pause) return;
  for (let item = nextWaiting(); item && state.running < state.atOnce; item = nextWaiting()) answer(item, state.generation);
  showBatch();
};

// Nothing more is sent until then, and fewer at a time: others use the server too.
const holdBack = (seconds) => {
  state.atOnce = Math.max(1, Math.floor(state.atOnce / 2));
  clearTimeout(state.pause);
  state.pause = setTimeout(() => { state.pause = 0; pump(); }, 1000 * seconds);
  listeners.busy(seconds);
};

const answer = async (item, generation) => {
  Object.assign(item, { status: "asking", since: item.since ?? performance.now() });
  state.running++;
  showRow(item);
  const outcome = await predicted(item.file).catch((error) => ({ error }));
  state.running--;
  if (generation === state.generation) {
    const { top = null, error = null } = outcome, waits = error?.pause && !isTooLong(item.since);
    Object.assign(item, { top, error: waits ? null : error, status: waits ? "waiting" : error ? "failed" : "done" });
    if (waits) holdBack(error.pause);
    else state.atOnce = Math.min(AT_ONCE, state.atOnce + 1);
    showRow(item);
    if (item === state.current) showCurrent(true);
  }
  pump();
};

const predicted = async (file) => {
  if (!state.model.labels.length) return {};
  const { results: [result] } = await ask("v1/predict", { query: { model: state.model.name, top: TOP }, body: file });
  return result.error ? { error: new Problem(result.error.code, result.error.message) } : { top: result.top };
};

const tryAgain = (item) => {
  Object.assign(item, { status: "waiting", error: null, since: null });
  showRow(item);
  showCurrent(false);
  pump();
};

let asking = null;
// The maps of the current picture: all of them at first, then no more than that of another label or method.
const explain = async () => {
  const item = state.current, generation = state.generation;
  asking?.abort();
  if (!item || item.status !== "done" || !state.model.methods.length) return;
  const { method, label } = wanted(item), key = JSON.stringify([method, label]);
  if (item.maps.has(key) && item.full) { status(""); show(); return; }
  const mine = asking = new AbortController();
  status(item.full ? "" : "Looking for where it looked…");
  find("stage").setAttribute("aria-busy", "true");
  try {
    const query = { model: state.model.name, method, label, detail: item.full ? "map" : null };
    const found = await askPatiently("v1/explain", { query, body: item.file, signal: mine.signal });
    if (generation !== state.generation) return;
    if (!item.full) {
      item.full = unpacked(found);
      if (!state.methods) setMethods(found.methods);
      item.picture = new Image();
      item.picture.src = found.picture;
      await item.picture.decode();
    }
    item.maps.set(key, unpackedMap(found.map));
    if (item === state.current) { status(""); show(true); }
  } catch (error) {
    if (!mine.signal.aborted && item === state.current) status(error instanceof Problem ? `There is no map: ${error.message}` : "There is no map: the answer could not be read.", true);
  } finally {
    if (asking === mine) find("stage").removeAttribute("aria-busy");
  }
};

const unpackedMap = (map) => map && { ...map, places: bytesOf(map.places) };
const unpacked = (found) => ({ photo: found.photo, rgb: bytesOf(found.colours), rollout: unpackedMap(found.rollout), heads: unpackedMap(found.heads) });

// Whether maps by a method are about one label; the server says so with its first map.
const isByLabel = (name) => state.methods?.find((one) => one.name === name)?.by_label ?? BY_LABEL_FIRST.includes(name);
const wanted = (item) => {
  const label = item.about ?? item.top?.[0]?.label ?? null;
  return { method: state.method, label: isByLabel(state.method) ? label : null };
};

// --- what is shown of the current picture ------------------------------------------------------------------------------

const choose = (item) => {
  stopPlaying();
  const before = state.current;
  state.current = item;
  if (before && before !== item) showRow(before);
  showRow(item);
  showCurrent(false);
};

const open = (item) => {
  choose(item);
  find("result").scrollIntoView({ block: "nearest" });
};

const status = (text, bad = false) => {
  find("status").hidden = !text;
  find("status").textContent = text;
  find("status").classList.toggle("bad", bad);
};

const showCurrent = (isNew) => {
  const item = state.current;
  find("result").hidden = !item;
  if (!item) return;
  find("file-name").textContent = item.name;
  find("file-facts").textContent = bytes(item.file.size);
  if (!item.full) showPreview(item);
  showAnswer(item, isNew);
  const failed = item.status === "failed";
  find("look").hidden = failed || !state.model?.methods.length;
  if (failed || !item.full) { find("legend").hidden = true; find("caption").textContent = ""; }
  if (failed) status("");
  else if (item.status !== "done") status(item.status === "waiting" ? "Waiting for its turn…" : "Looking…");
  else if (!state.model.methods.length) status("");
  else explain();
};

// The file itself, until the server has said what it read; some formats only the server can show.
const showPreview = (item) => {
  const preview = find("preview"), box = find("stage");
  item.url ??= URL.createObjectURL(item.file);
  find("canvas").hidden = true;
  preview.hidden = true;
  box.classList.add("empty");
  box.style.removeProperty("aspect-ratio");
  preview.onload = () => { if (state.current === item && !item.full) { preview.hidden = false; box.classList.remove("empty"); fit(preview.naturalWidth, preview.naturalHeight); } };
  preview.onerror = () => { preview.hidden = true; };
  preview.alt = item.name;
  preview.src = item.url;
};

// As wide as there is room, and no higher than a screen.
const fit = (width, height) => {
  const box = find("stage");
  box.style.aspectRatio = `${width} / ${height}`;
  box.style.maxWidth = `calc(var(--highest) * ${width / height})`;
};

const showAnswer = (item, isNew) => {
  const verdict = find("verdict"), bars = find("bars"), top = item.top ?? [];
  verdict.replaceChildren();
  verdict.classList.toggle("bad", item.status === "failed");
  find("bars-box").hidden = !top.length;
  bars.replaceChildren(...top.map((one, rank) => bar(item, one, rank, isNew)));
  find("bars-legend").hidden = !state.model?.methods.length;
  if (item.status === "failed") {
    verdict.append(element("strong", "", "No answer."), ` ${item.error.message}`);
    if (item.error.passing) {
      const again = element("button", "", "Try again");
      again.type = "button";
      again.addEventListener("click", () => tryAgain(item));
      verdict.append(again);
    }
  }
  else if (item.status !== "done") verdict.append(element("span", "wait", "…"));
  else if (!state.model.labels.length) verdict.append("This model has no labels, so it names nothing. It can show where it looks.");
  else if (state.model.several_labels) {
    const has = top.filter((one) => one.has).map((one) => one.label);
    verdict.append(...(has.length ? ["This picture has ", element("strong", "", listed(has))] : [element("strong", "", "None of its labels"), " fits this picture."]));
  } else {
    const sure = top[0].p >= 0.9 ? "This looks like" : top[0].p >= 0.5 ? "Probably" : "Not sure. Perhaps";
    verdict.append(element("span", "sure", sure), element("strong", "", top[0].label));
  }
  if (isNew && item.status !== "waiting") say(item.status === "failed" ? `${item.name}: ${item.error.message}` : top.length ? `${item.name}: ${top.slice(0, 3).map((one) => `${one.label} ${percent(one.p)}`).join(", ")}` : "");
};

const bar = (item, one, rank, isNew) => {
  const line = element("li"), label = element("label"), input = element("input"), track = element("span", "track"), fill = element("span", "fill");
  input.type = "radio";
  input.name = "about";
  input.checked = one.label === (item.about ?? item.top[0].label);
  input.disabled = !state.model.methods.length;
  input.addEventListener("change", () => {
    item.about = one.label;
    if (!isByLabel(state.method)) setMethod(firstByLabel());
    setView("label");
    explain();
  });
  fill.style.width = `${100 * one.p}%`;
  if (isNew) { fill.classList.add("grow"); fill.style.animationDelay = `${60 * rank}ms`; }
  track.append(fill);
  label.append(input, element("span", "name", one.label), element("span", "number", percent(one.p)), track);
  if (one.has) label.querySelector(".name").append(" ", element("span", "has", "✓ has it"));
  line.classList.toggle("first", one.has ?? rank === 0);
  line.append(label);
  return line;
};

// --- maps --------------------------------------------------------------------------------------------------------------

let tables = null, tablesFor = "";
const colours = (rgb) => {
  const key = `${state.strength}`;
  if (tablesFor !== key || !tables) { tables = colourTables(rgb, state.strength); tablesFor = key; }
  return tables;
};

const part = (map, index) => map.places.subarray(index * map.grid[0] * map.grid[1], (index + 1) * map.grid[0] * map.grid[1]);

// The map of the chosen view: places, and the words that belong to them.
const chosenMap = (item) => {
  const { rollout, heads } = item.full, view = state.view;
  if (view === "layers" && rollout) return { ...rollout, places: part(rollout, state.depth - 1), title: `${rollout.title} after layer ${state.depth} of ${rollout.depths}` };
  if (view === "heads" && heads) return { ...heads, places: part(heads, (state.layer - 1) * heads.heads + state.head - 1), title: `Layer ${state.layer}, head ${state.head}` };
  if (view === "photo") return null;
  const { method, label } = wanted(item), map = item.maps.get(JSON.stringify([method, label]));
  return map ? { ...map, title: map.label === null ? map.title : `${map.title} for ${map.label}` } : null;
};

const show = (first = false) => {
  const item = state.current;
  if (!item?.full || !item.picture?.naturalWidth) return;
  const { photo, rgb, rollout, heads } = item.full, table = colours(rgb);
  showControls(rollout, heads, first);
  const map = chosenMap(item);
  fit(photo.width, photo.height);
  find("preview").hidden = true;
  find("canvas").hidden = false;
  find("stage").classList.remove("empty");
  find("file-facts").textContent = `${photo.width} × ${photo.height} · ${bytes(item.file.size)}`;
  stage.show({ picture: item.picture, photo, grid: map?.grid, places: map?.places, colours: table, squares: state.squares });
  find("canvas").setAttribute("aria-label", map ? `${item.name} with a heat map: ${map.title}` : item.name);
  find("caption").textContent = [map?.caption, photo.note].filter(Boolean).join(" ");
  find("legend").hidden = !map;
  if (map) showLegend(map, table);
  if (state.view === "heads" && heads) showSheet(heads, table);
  clearTimeout(saying);
  if (!first && map) saying = setTimeout(() => say(map.title), 500);
};
let saying = 0;

const showLegend = (map, table) => {
  find("legend-title").textContent = map.title;
  find("legend-unit").textContent = map.scale.sentence;
  drawBar(find("legend-bar"), table);
  const ticks = find("ticks"), made = map.scale.ticks.map(([place, text]) => {
    const tick = element("span", "", text);
    tick.style.left = `${100 * place}%`;
    return tick;
  });
  ticks.replaceChildren(...made);
  // Those that would touch their neighbours go; the ends stay.
  let taken = made[0].getBoundingClientRect().right;
  const end = made.at(-1).getBoundingClientRect().left;
  for (const tick of made.slice(1, -1)) {
    const { left, right } = tick.getBoundingClientRect();
    if (left < taken + TICK_GAP_PX || right > end - TICK_GAP_PX) tick.remove();
    else taken = right;
  }
};

const showControls = (rollout, heads, first) => {
  const limit = (id, most, value) => { find(id).max = most; find(id).value = value; };
  if (rollout) {
    if (!state.depth || state.depth > rollout.depths) state.depth = rollout.depths;
    limit("depth", rollout.depths, state.depth);
    find("depth-said").textContent = `1 to ${state.depth}`;
  }
  if (heads) {
    if (!state.layer || state.layer > heads.layers) state.layer = heads.layers;
    state.head = Math.min(heads.heads, Math.max(1, state.head));
    limit("layer", heads.layers, state.layer);
    limit("head", heads.heads, state.head);
    find("layer-said").textContent = `${state.layer} of ${heads.layers}`;
    find("head-said").textContent = `${state.head} of ${heads.heads}`;
  }
  find("opacity-said").textContent = `${Math.round(100 * state.strength)} %`;
  if (!first) return;
  for (const [view, map] of [["layers", rollout], ["heads", heads]]) {
    const tab = document.querySelector(`#views input[value=${view}]`);
    tab.closest("label").hidden = !map;
    if (!map && state.view === view) setView("label");
  }
};

let cells = null;
const showSheet = (heads, table) => {
  const sheet = find("sheet"), width = sheet.clientWidth;
  if (!width) return;
  cells = drawSheet(find("sheet-canvas"), heads, table, width);
  const frame = find("sheet-frame");
  frame.style.width = `${cells.cell - cells.gap + 4}px`;
  frame.style.height = `${cells.high - cells.gap + 4}px`;
  frame.style.transform = `translate(${(state.layer - 1) * cells.cell - 2}px, ${(state.head - 1) * cells.high - 2}px)`;
};

const setView = (view) => {
  if (view !== "layers") stopPlaying();
  state.view = view;
  for (const input of document.querySelectorAll("#views input")) input.checked = input.value === view;
  for (const panel of document.querySelectorAll(".panel[data-view]")) panel.hidden = panel.dataset.view !== view;
  find("tools").hidden = view === "photo";
  show();
};

const firstByLabel = () => BY_LABEL_FIRST.find((name) => state.model.methods.includes(name)) ?? state.model.methods[0] ?? "";

const setMethods = (methods) => {
  state.methods = methods;
  find("method").replaceChildren(...methods.map((one) => Object.assign(element("option", "", one.title), { value: one.name })));
  setMethod(state.method);
};

const setMethod = (name) => {
  state.method = name;
  find("method").value = name;
  find("method-note").textContent = !isByLabel(name) && state.model.labels.length ? "The same for every label." : "";
};

let playing = 0;
const stopPlaying = () => {
  clearInterval(playing);
  playing = 0;
  find("play").textContent = "Play";
  find("play").setAttribute("aria-pressed", "false");
};
const play = () => {
  if (playing) { stopPlaying(); return; }
  const last = Number(find("depth").max);
  if (state.depth >= last) state.depth = 0;
  find("play").textContent = "Pause";
  find("play").setAttribute("aria-pressed", "true");
  const step = () => {
    state.depth++;
    show();
    if (state.depth >= last) stopPlaying();
  };
  playing = setInterval(step, PLAY_MS);
  step();
};

// --- the table ---------------------------------------------------------------------------------------------------------

const WORDS = { waiting: "waiting", asking: "looking…", done: "done", failed: "no answer" };

let thumbs = Promise.resolve();
const makeRow = (item) => {
  const line = element("tr"), thumb = element("td", "thumb"), canvas = element("canvas"), head = element("th"), name = element("button", "link", item.name);
  head.scope = "row";
  name.type = "button";
  line.addEventListener("click", () => open(item)); // a click on the name comes here too
  head.append(name);
  thumb.append(canvas);
  const [label, number, outcome] = [element("td", "label"), element("td", "number"), element("td", "outcome")];
  line.append(thumb, head, label, number, outcome);
  line.setAttribute("role", "row"); // on a phone, they are drawn as other boxes
  for (const one of line.children) one.setAttribute("role", one === head ? "rowheader" : "cell");
  thumbs = thumbs.then(() => drawThumb(item.file, canvas)); // one after the other: photos are large
  return { line, label, number, outcome };
};

const drawThumb = async (file, canvas) => {
  canvas.width = canvas.height = THUMB_PX;
  try {
    const picture = await createImageBitmap(file, { imageOrientation: "from-image" });
    const scale = Math.max(THUMB_PX / picture.width, THUMB_PX / picture.height), [w, h] = [picture.width * scale, picture.height * scale];
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(picture, (THUMB_PX - w) / 2, (THUMB_PX - h) / 2, w, h);
    picture.close();
  } catch { canvas.className = "unknown"; } // a format that only the server reads, or none
};

const showRow = (item) => {
  const { line, label, number, outcome } = item.row, has = item.top?.filter((one) => one.has).map((one) => one.label);
  line.className = item.status;
  if (item === state.current) line.setAttribute("aria-current", "true");
  else line.removeAttribute("aria-current");
  label.textContent = !item.top ? "" : state.model.several_labels ? has.join(", ") || "none" : item.top[0].label;
  number.textContent = item.top && !state.model.several_labels ? percent(item.top[0].p) : "";
  outcome.textContent = item.status === "failed" ? item.error.message : WORDS[item.status];
};

const showBatch = () => {
  const { items } = state, finished = items.filter((item) => item.status === "done" || item.status === "failed").length;
  const failed = items.filter((item) => item.status === "failed").length;
  find("batch").hidden = items.length < 2;
  find("progress").hidden = finished === items.length;
  find("progress").max = items.length || 1;
  find("progress").value = finished;
  const said = finished < items.length ? `${finished} of ${items.length} answered` : amount(items.length, "picture");
  find("batch-said").textContent = failed ? `${said}, ${failed} without an answer` : said;
  if (items.length > 1 && finished === items.length && !items.announced) say(find("batch-said").textContent);
  items.announced = finished === items.length;
  find("csv").disabled = !finished;
};

const downloadCsv = () => {
  const several = state.model.several_labels, ranks = Array.from({ length: TOP }, (_, k) => [`label ${k + 1}`, `p ${k + 1}`]).flat();
  const head = ["file", "status", ...(several ? ["has"] : []), ...ranks, "error"];
  const rows = state.items.map((item) => {
    const best = Array.from({ length: TOP }, (_, k) => [item.top?.[k]?.label ?? "", item.top?.[k] ? Number(item.top[k].p.toPrecision(6)) : ""]).flat();
    const has = several ? [item.top?.filter((one) => one.has).map((one) => one.label).join("; ") ?? ""] : [];
    return [item.name, WORDS[item.status], ...has, ...best, item.error?.message ?? ""];
  });
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([toCsv([head, ...rows])], { type: "text/csv;charset=utf-8" }));
  link.download = `${state.model.name.replace(/[^\w.-]+/g, "-")}-answers.csv`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
};

const clear = () => {
  for (const item of state.items) if (item.url) URL.revokeObjectURL(item.url);
  asking?.abort();
  stopPlaying();
  Object.assign(state, { items: [], current: null, generation: state.generation + 1 });
  find("rows").replaceChildren();
  find("result").hidden = true;
  document.body.classList.remove("filled");
  showBatch();
  find("choose").focus();
};

// --- the model ---------------------------------------------------------------------------------------------------------

const RESIZES = { "shorter-side": "shorter side scaled, then the middle cut out", squash: "the whole picture squeezed into it" };

const fact = (name, text) => {
  const row = element("div");
  row.append(element("dt", "", name), element("dd", "", text));
  return row;
};

const showModel = (model) => {
  state.model = model;
  model.methods ??= [];
  const count = model.labels.length, [rows, cols] = model.image_size, most = model.limits?.image_bytes;
  const named = model.labels.filter((label) => label.length < 30).filter((_, k, all) => [0, 1, 2].map((n) => Math.floor(n * (all.length - 1) / 2)).includes(k));
  find("lead").textContent = count
    ? `This model tells ${amount(count, "label")} apart${count > 3 ? `, such as ${listed(named)}` : count > 1 ? `: ${listed(model.labels)}` : ""}. See what it answers, and where it looks.`
    : "This model has no labels. See where it looks.";
  find("by-label").textContent = count ? "For a label" : "As a whole";
  find("limits").textContent = `JPEG, PNG, WebP and more${most ? `, up to ${bytes(most)} each` : ""}`;
  find("facts").replaceChildren(
    fact("Name", model.name), fact("Architecture", model.architecture), fact("Parameters", model.parameters.toLocaleString("en")),
    fact("Picture it sees", `${cols} × ${rows} pixels${RESIZES[model.preprocess?.resize] ? `; ${RESIZES[model.preprocess.resize]}` : ""}`),
    fact("Labels", count ? `${count.toLocaleString("en")}; ${model.several_labels ? "a picture can have several" : "each picture has one"}` : "none"),
  );
  find("labels-box").hidden = !count;
  find("labels-title").textContent = `All ${amount(count, "label")}`;
  find("labels").textContent = model.labels.slice(0, 2000).join(", ") + (count > 2000 ? ` and ${(count - 2000).toLocaleString("en")} more` : "");
  find("card").replaceChildren(rendered(model.card ?? ""));
  find("about").hidden = false;
  state.methods = null;
  setMethod(firstByLabel());
  const path = new URL("v1/predict", document.baseURI).href;
  const query = find("pick").hidden ? "" : `?model=${encodeURIComponent(model.name)}`;
  find("curl").textContent = `curl ${hasToken() ? "-H 'Authorization: Bearer TOKEN' " : ""}-F image=@photo.jpg '${path}${query}'`;
};

const start = async (name = null) => {
  try {
    if (!name) {
      const { models } = await askPatiently("v1/models");
      if (!models.length) { // they are still being loaded
        setTimeout(start, LOADING_MS);
        return;
      }
      name = models[0].name;
      find("pick").hidden = models.length < 2;
      find("model").replaceChildren(...models.map((one) => Object.assign(element("option", "", one.name), { value: one.name })));
      find("model").value = name;
    }
    showModel(await askPatiently("v1/model", { query: { model: name } }));
    find("trouble").hidden = true;
    again();
  } catch (error) {
    find("trouble").hidden = false;
    find("trouble").textContent = error instanceof Problem ? error.message : "The server's answer could not be read.";
  }
};

// The same pictures, asked of another model.
const again = () => {
  state.generation++;
  asking?.abort();
  for (const item of state.items) {
    const error = refusal(item.file);
    Object.assign(item, { status: error ? "failed" : "waiting", since: null, top: null, error, full: null, picture: null, about: null, maps: new Map() });
    showRow(item);
  }
  tables = null;
  if (state.current) showCurrent(false);
  pump();
};

// --- what the reader does ----------------------------------------------------------------------------------------------

const patches = () => {
  // The mark of the page: a photo as patches, some of which matter.
  const heat = [0, 1, 1, 2, 1, 0, 1, 3, 5, 6, 3, 1, 1, 4, 6, 5, 3, 1, 0, 1, 2, 2, 1, 0];
  const svg = document.querySelector(".patches");
  heat.forEach((level, k) => {
    const square = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const place = { x: 14 * (k % 6) + 1, y: 14 * Math.floor(k / 6) + 1, width: 12, height: 12, rx: 2.5, class: `p${level}` };
    for (const [name, value] of Object.entries(place)) square.setAttribute(name, value);
    svg.append(square);
  });
};

const examples = () => {
  const made = EXAMPLES.map(([file, words]) => {
    const line = element("li"), button = element("button", "example"), picture = element("img");
    button.type = "button";
    Object.assign(picture, { src: `assets/${file}`, alt: words, width: 88, height: 88 });
    button.append(picture);
    button.addEventListener("click", async () => {
      const found = await fetch(`assets/${file}`).then((response) => response.blob());
      add([new File([found], file, { type: found.type })]);
    });
    line.append(button);
    return line;
  });
  document.querySelector("#examples ul").replaceChildren(...made);
  find("examples").hidden = false;
};

const setTheme = (theme) => {
  document.documentElement.dataset.theme = theme;
  find("theme").setAttribute("aria-label", `Theme: ${theme}`);
  find("theme").title = `Theme: ${theme}`;
  try { localStorage.setItem("vitlab-theme", theme); } catch { /* some browsers forbid it */ }
};

const wire = () => {
  for (const [button, input] of [["choose", "files"], ["shoot", "camera"]]) {
    find(button).addEventListener("click", () => find(input).click());
    find(input).addEventListener("change", () => { add([...find(input).files]); find(input).value = ""; });
  }
  let inside = 0; // elements entered and not yet left
  const dragged = (event) => event.dataTransfer?.types.includes("Files");
  const drag = (on) => { find("drag").hidden = !on; if (!on) inside = 0; };
  document.addEventListener("dragenter", (event) => { if (dragged(event)) { event.preventDefault(); inside++; drag(true); } });
  document.addEventListener("dragover", (event) => { if (dragged(event)) event.preventDefault(); });
  document.addEventListener("dragleave", (event) => { if (dragged(event) && --inside <= 0) drag(false); });
  document.addEventListener("drop", async (event) => {
    if (!dragged(event)) return;
    event.preventDefault();
    drag(false);
    add(await filesOf(event.dataTransfer));
  });
  document.addEventListener("paste", (event) => {
    if (event.target.matches?.("input, textarea")) return;
    const files = [...event.clipboardData.files];
    if (files.length) { event.preventDefault(); add(files); } else toast("There is no picture in the clipboard.");
  });

  find("views").addEventListener("change", (event) => setView(event.target.value));
  find("method").addEventListener("change", () => { setMethod(find("method").value); explain(); });
  find("depth").addEventListener("input", () => { stopPlaying(); state.depth = Number(find("depth").value); show(); });
  find("play").addEventListener("click", play);
  for (const name of ["layer", "head"]) find(name).addEventListener("input", () => { state[name] = Number(find(name).value); show(); });
  find("sheet").addEventListener("click", (event) => {
    const box = find("sheet-canvas").getBoundingClientRect(), heads = state.current?.full?.heads;
    if (!heads || !cells) return;
    state.layer = Math.min(heads.layers, 1 + Math.max(0, Math.floor((event.clientX - box.left) / cells.cell)));
    state.head = Math.min(heads.heads, 1 + Math.max(0, Math.floor((event.clientY - box.top) / cells.high)));
    show();
  });
  find("opacity").addEventListener("input", () => { state.strength = Number(find("opacity").value) / 100; show(); });
  find("squares").addEventListener("change", () => { state.squares = find("squares").checked; show(); });
  new ResizeObserver(() => { if (state.view === "heads") show(); }).observe(find("sheet"));

  find("csv").addEventListener("click", downloadCsv);
  find("clear").addEventListener("click", clear);
  find("model").addEventListener("change", () => start(find("model").value));
  find("copy").addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(find("curl").textContent); find("copy").textContent = "Copied"; } catch { getSelection().selectAllChildren(find("curl")); find("copy").textContent = "Selected"; }
    setTimeout(() => { find("copy").textContent = "Copy"; }, 1500);
  });
  find("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]));
};

let toasting = 0;
const toast = (text, seconds = 4) => {
  clearTimeout(toasting);
  find("busy").textContent = text;
  find("busy").hidden = !text;
  if (text) toasting = setTimeout(() => toast(""), 1000 * seconds);
};

listeners.busy = (seconds) => toast(`The server is busy. Trying again in ${amount(seconds, "second")}…`, seconds + 1);

listeners.token = (wrong) => new Promise((done) => {
  const dialog = find("token");
  find("token-wrong").hidden = !wrong;
  find("token-text").value = "";
  dialog.addEventListener("close", () => done(find("token-text").value.trim()), { once: true });
  dialog.showModal();
});

let remembered = "system";
try { remembered = localStorage.getItem("vitlab-theme") ?? remembered; } catch { /* some browsers forbid it */ }
setTheme(THEMES.includes(remembered) ? remembered : "system");
patches();
examples();
wire();
start();
