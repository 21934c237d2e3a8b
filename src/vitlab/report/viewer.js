"use strict";
// The attention viewer. Everything it shows is in the page: `viewer.py` says how the weights are packed.
// In a function of its own, since all scripts of a page share their names.
(() => {
  const TOP = 32; // equal shares at which colours end, unless each map has its own end
  const FLATTEST = 2; // equal shares: a map that never gets there is drawn faintly, as it should be
  const OPACITY = 0.78, RISE = 0.75, BLEACH = 0.6; // as in `inspection/overlays.py`
  const GROUND = [20, 16, 30]; // behind the small maps
  const SMOOTH_PX = 400; // side of a smooth map before the browser enlarges it
  const HIGHEST_REM = 36; // of the large photo
  const FEW_PX = 96; // side of pictures whose pixels one can count
  const SHEET_PX = 640, MOST_CELL_PX = 110, LEAST_CELL_PX = 12, WORD_PX = 30, GAP_PX = 3, MEAN_GAP_PX = 6; // of the small maps
  const LETTER_PX = 7, TICK_GAP_PX = 8; // of the legend
  const PLAY_MS = 650, SAY_MS = 500;

  // --- packed weights ------------------------------------------------------------------------------------------------

  const bytesOf = (base64) => Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));

  const inflate = async (bytes) => {
    if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old, update it");
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  };

  // Levels as [heads, queries, keys], prefix tokens first. The segment that a level is taken from follows from its neighbours.
  const sorted = (data, model, settings) => {
    const [queryRows, queryCols] = model.queries, [keyRows, keyCols] = model.keys, prefix = model.prefix.length;
    const keys = prefix + keyRows * keyCols, queries = prefix + queryRows * queryCols;
    const most = settings.expectations - 1, weight = settings.queryWeight;
    const next = new Uint32Array(settings.expectations);
    const counts = new Uint32Array(data.buffer, 0, settings.expectations);
    let at = counts.byteLength;
    counts.forEach((count, k) => { next[k] = at; at += count; });
    if (data.length !== at + model.heads * prefix * (queryRows * queryCols + keys)) throw new Error("its length is wrong");
    const levels = new Uint8Array(model.heads * queries * keys);
    for (let head = 0; head < model.heads; head++) {
      for (let row = 0; row < queryRows; row++) {
        for (let col = 0; col < queryCols; col++) {
          let place = ((head * queries) + prefix + row * queryCols + col) * keys + prefix;
          for (let y = 0; y < keyRows; y++) {
            for (let x = 0; x < keyCols; x++, place++) {
              let expected = 0;
              if (row) expected += weight * levels[place - queryCols * keys];
              if (col) expected += weight * levels[place - keys];
              if (y) expected += levels[place - keyCols];
              if (x) expected += levels[place - 1];
              levels[place] = data[next[expected < most ? expected : most]++];
            }
          }
        }
      }
    }
    for (let head = 0; head < model.heads; head++) {
      for (let query = prefix; query < queries; query++, at += prefix) {
        levels.set(data.subarray(at, at + prefix), (head * queries + query) * keys);
      }
    }
    for (let head = 0; head < model.heads; head++, at += prefix * keys) {
      levels.set(data.subarray(at, at + prefix * keys), head * queries * keys);
    }
    return levels;
  };

  // --- numbers and names ---------------------------------------------------------------------------------------------

  const percent = (share, least = 0) => {
    if (share < least) return `under ${Number((100 * least).toPrecision(1))} %`;
    return `${100 * share >= 10 ? Math.round(100 * share) : Number((100 * share).toPrecision(2))} %`;
  };

  const tokenName = (name) => name === "cls" ? "class token" : name.replace(/(\d+)$/, " $1");

  const patchName = (row, col, cell, grid) => {
    const span = (at, size) => cell === 1 ? `${at}` : `${at * cell}–${Math.min(size, (at + 1) * cell) - 1}`;
    return `${cell === 1 ? "patch" : "patches"} (${span(row, grid[0])}, ${span(col, grid[1])})`;
  };

  // Places and texts along a logarithmic scale: its ends, and as many round values between them as have room.
  const ticksAlong = (low, high, first, last, widthPx) => {
    const room = (text) => text.length * LETTER_PX + TICK_GAP_PX, ticks = [[0, first]];
    let taken = room(first);
    for (let power = -5; power <= 0; power++) {
      for (const factor of [1, 2, 5]) {
        const value = factor * 10 ** power, at = Math.log(value / low) / Math.log(high / low), text = percent(value);
        if (at * widthPx - room(text) / 2 < taken || at * widthPx + room(text) / 2 > widthPx - room(last)) continue;
        ticks.push([at, text]);
        taken = at * widthPx + room(text) / 2;
      }
    }
    return [...ticks, [1, last]];
  };

  const BELOW_1 = 1 - 1e-9; // the last place of a photo
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // --- drawing -------------------------------------------------------------------------------------------------------

  // Weights of the four values around each of `count * scale` places (Catmull and Rom's curve goes through all values).
  const enlarging = (count, scale) => {
    const places = [];
    for (let i = 0; i < count * scale; i++) {
      const at = (i + 0.5) / scale - 0.5, below = Math.floor(at), t = at - below;
      const weights = [((2 - t) * t - 1) * t / 2, ((3 * t - 5) * t * t + 2) / 2, ((4 - 3 * t) * t + 1) * t / 2, (t - 1) * t * t / 2];
      places.push(weights.map((weight, k) => [clamp(below + k - 1, 0, count - 1), weight]));
    }
    return places;
  };

  const enlarged = (values, rows, cols, scale) => {
    const across = enlarging(cols, scale), down = enlarging(rows, scale), width = cols * scale;
    const wide = new Float32Array(rows * width), whole = new Float32Array(rows * scale * width);
    for (let y = 0; y < rows; y++) {
      for (let x = 0; x < width; x++) {
        let sum = 0;
        for (const [from, weight] of across[x]) sum += weight * values[y * cols + from];
        wide[y * width + x] = sum;
      }
    }
    for (let y = 0; y < rows * scale; y++) {
      const [[a, p], [b, q], [c, r], [d, s]] = down[y].map(([from, weight]) => [from * width, weight]);
      for (let x = 0; x < width; x++) whole[y * width + x] = p * wide[a + x] + q * wide[b + x] + r * wide[c + x] + s * wide[d + x];
    }
    return whole;
  };

  const opacity = (place) => place <= 0 ? 0 : OPACITY * place ** RISE;

  // Colours by place on the scale, 0 to 255, as the 32 bits of a pixel: over a photo, over the dark ground, and the grey that
  // takes the photo's own colours away below: orange would be lost on orange petals.
  const colourTables = (base64) => {
    const rgb = bytesOf(base64), over = new Uint32Array(256), solid = new Uint32Array(256), grey = new Uint32Array(256);
    const pixel = (r, g, b, a) => (a << 24 | b << 16 | g << 8 | r) >>> 0;
    for (let i = 0; i < 256; i++) {
      const colour = rgb.subarray(3 * i, 3 * i + 3), alpha = opacity(i / 255), dense = i ? Math.min(1, alpha / OPACITY + 0.08) : 0;
      grey[i] = pixel(128, 128, 128, Math.round(255 * (i / 255) ** BLEACH));
      over[i] = pixel(...colour, Math.round(255 * alpha));
      solid[i] = pixel(...colour.map((value, k) => Math.round(GROUND[k] + dense * (value - GROUND[k]))), 255);
    }
    const css = Array.from({ length: 12 }, (_, i) => `rgb(${rgb.subarray(3 * Math.round(i * 255 / 11)).subarray(0, 3).join(" ")})`);
    return { over, solid, grey, gradient: `linear-gradient(to right, ${css.join(", ")})` };
  };

  const fitCanvas = (canvas, width, height) => {
    const scale = Math.min(window.devicePixelRatio || 1, 3);
    const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
    if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
    const context = canvas.getContext("2d");
    context.setTransform(w / width, 0, 0, h / height, 0, 0);
    return context;
  };

  // --- one viewer ----------------------------------------------------------------------------------------------------

  const start = (root) => {
    const settings = JSON.parse(root.dataset.settings);
    const colours = colourTables(settings.colours);
    const packed = new Map([...root.querySelectorAll("script[data-key]")].map((block) => [block.dataset.key, block]));
    const thumbs = [...root.querySelectorAll(".v-thumb")];
    const live = root.querySelector(".v-live");
    const unpacked = new Map(); // "photo model layer" to levels, or to the error that came instead
    // A query is a prefix token by its name, or a place in the photo, from 0 to 1: so it is the same place for both models.
    const options = { smooth: true, grid: false, grey: false, fit: false, link: true };
    const state = { photo: 0, query: { token: "cls" }, pinned: false, here: null, ...options };

    const pending = new Map();
    const unpack = (key, model) => {
      if (!pending.has(key)) {
        const work = async () => sorted(await inflate(bytesOf(packed.get(key).textContent)), model, settings);
        pending.set(key, work().then((levels) => unpacked.set(key, levels), (error) => unpacked.set(key, error)));
      }
      return pending.get(key);
    };

    // The layer that is looked at comes first, then the others.
    const load = async (panel) => {
      const photo = state.photo;
      const order = panel.model.layers.map((_, layer) => layer).sort((a, b) => Math.abs(a - panel.layer) - Math.abs(b - panel.layer));
      for (const layer of order) {
        if (photo !== state.photo || !panel.shown) return;
        const key = `${photo} ${panel.index} ${layer}`;
        if (unpacked.has(key)) continue;
        await unpack(key, panel.model);
        redraw();
      }
    };

    let frame = 0;
    const redraw = () => {
      if (!frame) frame = requestAnimationFrame(() => { frame = 0; for (const panel of panels) if (panel.shown) panel.draw(); });
    };

    let saying = 0;
    const say = () => {
      clearTimeout(saying);
      const sentences = () => panels.filter((panel) => panel.shown).map((panel) => panel.sentence).join(" ");
      saying = setTimeout(() => { live.textContent = sentences(); }, SAY_MS);
    };

    const changed = () => { redraw(); say(); };

    const makePanel = (box, index) => {
      const model = settings.models[index];
      const [queryRows, queryCols] = model.queries, [keyRows, keyCols] = model.keys, [gridRows, gridCols] = model.grid;
      const prefix = model.prefix.length, keys = prefix + keyRows * keyCols, queries = prefix + queryRows * queryCols;
      const find = (selector) => box.querySelector(selector);
      const stage = find(".v-stage"), canvas = stage.querySelector("canvas"), status = find(".v-status");
      const sheet = find(".v-sheet"), sheetCanvas = sheet.querySelector("canvas"), frameBox = find(".v-frame");
      const layerInput = find(".v-layer"), headInput = find(".v-head"), play = find(".v-play");
      const heat = element("canvas"), atlas = element("canvas");
      const shares = Float32Array.from({ length: 256 }, (_, level) =>
        clamp((Math.exp(level * settings.step) / Math.cosh(settings.step / 2) - 1) * settings.offset * model.unit, 0, 1));
      const least = shares[1] / 2; // below it, a share is stored as none
      const columnLabels = find(".v-columns"), rowLabels = find(".v-rows");
      const columns = model.heads + 1; // the mean of the heads, and each of them
      const panel = { model, index, box, stage, shown: true, layer: model.layers.length - 1, head: 0, sentence: "" };

      const levels = (layer) => unpacked.get(`${state.photo} ${index} ${layer}`);

      // The place of the query among the model's tokens; -1 where it has no such token.
      const queryIndex = () => {
        if (state.query.token !== undefined) return model.prefix.indexOf(state.query.token);
        const [row, col] = panel.cellAt(state.query);
        return prefix + row * queryCols + col;
      };

      const fromPatch = () => state.query.token === undefined;
      const queryName = () => fromPatch() ? patchName(...panel.cellAt(state.query), model.queryCell, model.grid) : `the ${tokenName(state.query.token)}`;
      const keyName = ([row, col]) => patchName(row, col, model.keyCell, model.grid);

      // Row and column of the cell at a place of the photo, and the place of a cell.
      const cellOf = (part, size, cell) => Math.floor(clamp(Math.floor(part * size), 0, size - 1) / cell);
      panel.cellAt = ({ x, y }, cell = model.queryCell) => [cellOf(y, gridRows, cell), cellOf(x, gridCols, cell)];
      const keyAt = (place) => panel.cellAt(place, model.keyCell);
      panel.centre = (row, col) => {
        const middle = (at, size) => Math.min(BELOW_1, (at + 0.5) * model.queryCell / size);
        return { x: middle(col, gridCols), y: middle(row, gridRows) };
      };

      // Shares of all keys, prefix tokens first, for head 1 and so on, or for the mean of the heads, 0.
      const sharesOf = (data, head, query) => {
        const result = new Float32Array(keys);
        const [from, to] = head ? [head - 1, head] : [0, model.heads];
        for (let h = from; h < to; h++) {
          const at = (h * queries + query) * keys;
          for (let k = 0; k < keys; k++) result[k] += shares[data[at + k]];
        }
        if (!head) for (let k = 0; k < keys; k++) result[k] /= model.heads;
        return result;
      };

      const mostOf = (values) => {
        let most = prefix;
        for (let k = prefix; k < keys; k++) if (values[k] > values[most]) most = k;
        return most;
      };

      const highEnd = (most) => state.fit ? Math.max(FLATTEST * model.equal, most) : Math.min(1, TOP * model.equal);
      const placer = (high) => {
        const scale = 1 / Math.log(high / model.equal);
        return (share) => share <= model.equal ? 0 : Math.min(1, Math.log(share / model.equal) * scale);
      };

      // Colours of a small map. Those of a head go by its levels, so that no logarithm is taken while the pointer moves.
      const scratch = new Uint32Array(keys), byLevel = new Uint32Array(256);
      let byLevelEnd = 0;
      const headColours = (data, head, query) => {
        const at = ((head - 1) * queries + query) * keys;
        let most = 0;
        if (state.fit) for (let k = prefix; k < keys; k++) most = Math.max(most, data[at + k]);
        const high = highEnd(shares[most]);
        if (high !== byLevelEnd) {
          byLevelEnd = high;
          const place = placer(high);
          byLevel.forEach((_, level) => { byLevel[level] = colours.solid[Math.round(255 * place(shares[level]))]; });
        }
        for (let k = 0; k < keys; k++) scratch[k] = byLevel[data[at + k]];
        return scratch;
      };
      const meanColours = (data, query) => {
        const values = sharesOf(data, 0, query), place = placer(highEnd(values[mostOf(values)]));
        for (let k = 0; k < keys; k++) scratch[k] = colours.solid[Math.round(255 * place(values[k]))];
        return scratch;
      };

      // The map over the photo.
      const drawHeat = (context, values, width, height) => {
        const place = placer(highEnd(values[mostOf(values)]));
        let places = Float32Array.from(values.subarray(prefix), place), rows = keyRows, cols = keyCols;
        const scale = state.smooth ? clamp(Math.floor(SMOOTH_PX / Math.max(rows, cols)), 1, 24) : 1;
        if (scale > 1) {
          places = enlarged(places, rows, cols, scale);
          rows *= scale;
          cols *= scale;
        }
        heat.width = cols;
        heat.height = rows;
        const inner = heat.getContext("2d"), image = inner.createImageData(cols, rows), pixels = new Uint32Array(image.data.buffer);
        context.imageSmoothingEnabled = scale > 1;
        for (const [table, how] of [[colours.grey, "saturation"], [colours.over, "source-over"]]) {
          for (let k = 0; k < pixels.length; k++) pixels[k] = table[clamp(Math.round(255 * places[k]), 0, 255)];
          inner.putImageData(image, 0, 0);
          context.globalCompositeOperation = how;
          // The last cells may reach over the edge of the photo.
          context.drawImage(heat, 0, 0, width * keyCols * model.keyCell / gridCols, height * keyRows * model.keyCell / gridRows);
        }
      };

      // Twice, dark below light: to be seen on every photo.
      const outline = (context, path, thick) => {
        for (const [colour, wide] of [["rgb(0 0 0 / .75)", thick + 2], ["#fff", thick]]) {
          context.strokeStyle = colour;
          context.lineWidth = wide;
          context.stroke(path);
        }
      };

      const cellPath = ([row, col], cell, width, height) => {
        const path = new Path2D(), [w, h] = [width / gridCols, height / gridRows];
        const [right, bottom] = [Math.min(gridCols, (col + 1) * cell), Math.min(gridRows, (row + 1) * cell)];
        path.rect(col * cell * w, row * cell * h, (right - col * cell) * w, (bottom - row * cell) * h);
        return path;
      };

      const drawStage = (values) => {
        const [first, second] = thumbs[state.photo].children;
        const picture = index && second || first; // models may see different parts of a photo
        if (!picture.naturalWidth) return;
        const ratio = picture.naturalWidth / picture.naturalHeight;
        stage.style.aspectRatio = ratio;
        stage.style.maxWidth = `${HIGHEST_REM * ratio}rem`;
        const width = stage.clientWidth, height = stage.clientHeight;
        if (!width || !height) return;
        const context = fitCanvas(canvas, width, height);
        context.imageSmoothingEnabled = Math.max(picture.naturalWidth, picture.naturalHeight) > FEW_PX;
        context.imageSmoothingQuality = "high";
        context.clearRect(0, 0, width, height);
        context.drawImage(picture, 0, 0, width, height);
        if (state.grey) {
          context.globalCompositeOperation = "saturation";
          context.fillStyle = "#808080";
          context.fillRect(0, 0, width, height);
          context.globalCompositeOperation = "source-over";
        }
        if (values) drawHeat(context, values, width, height);
        if (state.grid) {
          const path = new Path2D();
          for (let col = 1; col < gridCols; col++) { path.moveTo(col * width / gridCols, 0); path.lineTo(col * width / gridCols, height); }
          for (let row = 1; row < gridRows; row++) { path.moveTo(0, row * height / gridRows); path.lineTo(width, row * height / gridRows); }
          context.strokeStyle = "rgb(0 0 0 / .35)";
          context.lineWidth = 1.6;
          context.stroke(path);
          context.strokeStyle = "rgb(255 255 255 / .55)";
          context.lineWidth = 0.7;
          context.stroke(path);
        }
        if (fromPatch()) {
          const path = cellPath(panel.cellAt(state.query), model.queryCell, width, height);
          outline(context, path, state.pinned ? 2.5 : 1.5);
        }
        if (state.pinned && state.here) {
          context.setLineDash([3, 3]);
          outline(context, cellPath(keyAt(state.here), model.keyCell, width, height), 1);
          context.setLineDash([]);
        }
      };

      // Small maps: first in an atlas with a pixel for each key, and each map's edge around it so that none shines into the next.
      const tileCols = keyCols + 2, tileRows = keyRows + 2;
      atlas.width = columns * tileCols;
      atlas.height = model.layers.length * tileRows;
      let sheetDrawn = "";
      const drawSheet = (query) => {
        const rows = model.layers.length, ratio = gridRows / gridCols;
        const room = sheet.parentElement.clientWidth - rowLabels.offsetWidth - MEAN_GAP_PX;
        const fitting = Math.floor(Math.min(room / columns, Math.max(SHEET_PX / rows, 2 * LEAST_CELL_PX) / ratio));
        const cell = clamp(fitting, LEAST_CELL_PX, MOST_CELL_PX), high = Math.max(LEAST_CELL_PX, Math.round(cell * ratio));
        const left = (column) => column * cell + (column ? MEAN_GAP_PX : 0);
        const width = left(columns), height = rows * high;
        sheet.style.width = `${width}px`;
        sheet.style.height = `${height}px`;
        columnLabels.firstElementChild.textContent = cell < WORD_PX ? "μ" : "mean";
        box.style.setProperty("--cell", `${cell}px`);
        box.style.setProperty("--high", `${high}px`);
        panel.hit = (event) => {
          const outer = sheet.getBoundingClientRect(), x = event.clientX - outer.left, y = event.clientY - outer.top;
          const column = x < cell + MEAN_GAP_PX / 2 ? 0 : Math.floor((x - MEAN_GAP_PX) / cell);
          return [clamp(Math.floor(y / high), 0, rows - 1), clamp(column, 0, columns - 1)];
        };
        frameBox.style.transform = `translate(${left(panel.head)}px, ${panel.layer * high}px)`;
        box.style.setProperty("--gap", `${GAP_PX}px`);
        const there = model.layers.filter((_, layer) => levels(layer)).length;
        const drawn = [state.photo, there, query, state.smooth, state.fit, width, height, window.devicePixelRatio].join();
        if (sheetDrawn === drawn) return;
        sheetDrawn = drawn;
        const context = fitCanvas(sheetCanvas, width, height);
        context.clearRect(0, 0, width, height);
        if (query < 0) return;
        const inner = atlas.getContext("2d"), image = inner.createImageData(atlas.width, atlas.height);
        const pixels = new Uint32Array(image.data.buffer);
        for (let layer = 0; layer < rows; layer++) {
          const data = levels(layer);
          if (!(data instanceof Uint8Array)) continue;
          for (let column = 0; column < columns; column++) {
            const colour = column ? headColours(data, column, query) : meanColours(data, query);
            for (let y = 0; y < tileRows; y++) {
              const from = prefix + clamp(y - 1, 0, keyRows - 1) * keyCols;
              let to = (layer * tileRows + y) * atlas.width + column * tileCols;
              pixels[to++] = colour[from];
              for (let x = 0; x < keyCols; x++) pixels[to++] = colour[from + x];
              pixels[to] = colour[from + keyCols - 1];
            }
          }
        }
        inner.putImageData(image, 0, 0);
        context.imageSmoothingEnabled = state.smooth;
        context.imageSmoothingQuality = "high";
        const [seenCols, seenRows] = [gridCols / model.keyCell, gridRows / model.keyCell];
        for (let layer = 0; layer < rows; layer++) {
          for (let column = 0; column < columns; column++) {
            const from = [column * tileCols + 1, layer * tileRows + 1, seenCols, seenRows];
            context.drawImage(atlas, ...from, left(column), layer * high, cell - GAP_PX, high - GAP_PX);
          }
        }
      };

      const drawLegend = (values) => {
        const high = highEnd(values ? values[mostOf(values)] : 0), bar = find(".v-bar"), ticks = find(".v-ticks");
        bar.style.backgroundImage = colours.gradient;
        const beyond = values && values[mostOf(values)] > high * 1.0001 ? "≥ " : "";
        const texts = ticksAlong(model.equal, high, `equal share ${percent(model.equal)}`, beyond + percent(high), ticks.clientWidth);
        const said = texts.join();
        if (ticks.dataset.said === said) return;
        ticks.dataset.said = said;
        ticks.replaceChildren(...texts.map(([at, text]) => {
          const tick = element("span", "", text);
          tick.style.left = `${100 * at}%`;
          return tick;
        }));
      };

      // Prefix tokens, each with what it gets; a press makes it the query.
      const drawTokens = (values, query) => {
        const list = find(".v-tokens"), names = [["patch", null], ...model.prefix.map((name) => [name, name])];
        if (!list.childElementCount) {
          list.append(element("span", "v-from", "Look from"), ...names.map(([, token]) => {
            const button = element("button");
            button.type = "button";
            button.append(element("span"), element("small"));
            button.addEventListener("click", () => {
              const middle = panel.centre(...model.queries.map((size) => Math.floor(size / 2)));
              const query = token !== null ? { token } : fromPatch() ? state.query : middle;
              ask(query, !(state.pinned && button.getAttribute("aria-pressed") === "true")); // a second press lets go
            });
            return button;
          }));
        }
        [...list.querySelectorAll("button")].forEach((button, k) => {
          const chosen = k ? query === k - 1 : fromPatch();
          button.setAttribute("aria-pressed", chosen);
          button.firstChild.textContent = k ? tokenName(model.prefix[k - 1]) : fromPatch() ? queryName() : "a patch";
          const remarks = [k && values && `gets ${percent(values[k - 1], least)}`, chosen && state.pinned && "pinned"];
          button.lastChild.textContent = remarks.filter(Boolean).join(", ");
        });
      };

      const drawAnswers = () => {
        const photo = settings.photos[state.photo], answers = photo.predictions[index], list = find(".v-answers");
        if (list.dataset.photo === String(state.photo)) return;
        list.dataset.photo = state.photo;
        list.classList.toggle("none", !answers.length);
        list.querySelector("h4").textContent = photo.label ? `Prediction (true: ${photo.label})` : "Prediction";
        list.querySelector("ul").replaceChildren(...answers.map(([name, value]) => {
          const row = element("li", name === photo.label ? "right" : ""), track = element("span", "track"), bar = element("span", "bar");
          bar.style.width = `${100 * value}%`;
          track.append(bar);
          row.append(element("span", "name", name), track, element("span", "number", percent(value, 0.001)));
          return row;
        }));
      };

      const describe = (values, query) => {
        const where = `Layer ${model.layers[panel.layer] + 1}, ${panel.head ? `head ${panel.head}` : "mean of heads"}`;
        if (query < 0) return `${model.name} has no ${tokenName(state.query.token)}.`;
        if (!values) return `${where}: unpacking …`;
        const most = mostOf(values), place = [Math.floor((most - prefix) / keyCols), (most - prefix) % keyCols];
        const gets = (share, name) => `${percent(share, least)} to ${name}`;
        const shown = { layer: model.layers[panel.layer], head: panel.head || "mean", query, most: place.join(" "), share: values[most] };
        Object.assign(box.dataset, shown);
        const parts = [`${gets(values[most], keyName(place))}, the most of all patches`];
        const registers = model.prefix.flatMap((name, k) => name === "cls" ? [] : [k]);
        if (model.prefix.includes("cls")) parts.push(gets(values[model.prefix.indexOf("cls")], "the class token"));
        if (registers.length) parts.push(gets(registers.reduce((sum, k) => sum + values[k], 0), "all registers"));
        return `${where}: ${queryName()} ${fromPatch() && model.queryCell > 1 ? "give" : "gives"} ${parts.join(", ")}.`;
      };

      panel.values = () => {
        const data = levels(panel.layer), query = queryIndex();
        return data instanceof Uint8Array && query >= 0 ? sharesOf(data, panel.head, query) : null;
      };

      panel.draw = () => {
        const query = queryIndex(), data = levels(panel.layer), values = panel.values();
        drawStage(values);
        drawSheet(query);
        drawLegend(values);
        drawTokens(values, query);
        drawAnswers();
        const failed = data instanceof Error;
        const name = `layer ${model.layers[panel.layer] + 1}`;
        panel.sentence = failed ? `The attention of ${name} cannot be unpacked: ${data.message}.` : describe(values, query);
        status.textContent = failed || query < 0 ? panel.sentence : "Unpacking …";
        status.hidden = values !== null;
        find(".v-said").textContent = panel.sentence;
        let here = state.pinned ? "Pinned. Point at a patch to read its share; Esc or a second click lets go." : "";
        if (values && state.pinned && state.here) {
          const [row, col] = keyAt(state.here), share = values[prefix + row * keyCols + col];
          const times = Number((share / model.equal).toPrecision(2));
          here = `Here, ${keyName([row, col])} ${model.keyCell > 1 ? "get" : "gets"} ${percent(share, least)}, ${times} × an equal share.`;
        }
        find(".v-here").textContent = here;
        layerInput.value = panel.layer + 1;
        headInput.value = panel.head;
        layerInput.nextElementSibling.textContent = `${model.layers[panel.layer] + 1} of ${model.layers[model.layers.length - 1] + 1}`;
        headInput.nextElementSibling.textContent = panel.head ? `${panel.head} of ${model.heads}` : "mean";
        layerInput.setAttribute("aria-valuetext", name);
        headInput.setAttribute("aria-valuetext", panel.head ? `head ${panel.head}` : "mean of heads");
      };

      panel.setLayer = (layer, linked = state.link) => {
        panel.layer = clamp(layer, 0, model.layers.length - 1);
        const depth = model.layers.length > 1 ? panel.layer / (model.layers.length - 1) : 1;
        const others = linked ? panels.filter((other) => other !== panel) : [];
        for (const other of others) other.setLayer(Math.round(depth * (other.model.layers.length - 1)), false);
        changed();
      };
      panel.setHead = (head) => { panel.head = clamp(head, 0, model.heads); changed(); };
      panel.load = () => load(panel);

      // Labels of the small maps.
      columnLabels.append(...Array.from({ length: columns }, (_, k) => element("span", "", k ? k : "mean")));
      rowLabels.append(...model.layers.map((layer) => element("span", "", layer + 1)));

      // What the reader does.
      const placeOf = (event) => {
        const outer = stage.getBoundingClientRect();
        const [x, y] = [(event.clientX - outer.left) / outer.width, (event.clientY - outer.top) / outer.height];
        return { x: clamp(x, 0, BELOW_1), y: clamp(y, 0, BELOW_1) };
      };
      stage.addEventListener("pointermove", (event) => {
        if (event.pointerType === "touch") return; // a tap comes as a click, and a swipe scrolls the page
        if (state.pinned) { state.here = placeOf(event); redraw(); } else ask(placeOf(event), false);
      });
      stage.addEventListener("pointerleave", () => { state.here = null; redraw(); });
      stage.addEventListener("click", (event) => {
        const query = placeOf(event);
        const again = state.pinned && fromPatch() && panel.cellAt(query).join() === panel.cellAt(state.query).join();
        state.here = null;
        ask(query, !again);
      });
      sheet.addEventListener("click", (event) => {
        const [layer, column] = panel.hit(event);
        panel.setHead(column);
        panel.setLayer(layer);
      });
      sheet.addEventListener("pointermove", (event) => {
        const [layer, column] = panel.hit(event);
        sheet.title = `layer ${model.layers[layer] + 1}, ${column ? `head ${column}` : "mean of heads"}`;
      });
      let playing = 0;
      const label = (sign, text) => { play.textContent = sign; play.setAttribute("aria-label", text); };
      const stop = () => { clearInterval(playing); playing = 0; label("▶\uFE0E", "Play through the layers"); };
      play.addEventListener("click", () => {
        if (playing) { stop(); return; }
        label("❚❚", "Pause");
        if (panel.layer === model.layers.length - 1) panel.setLayer(0);
        playing = setInterval(() => { panel.setLayer(panel.layer + 1); if (panel.layer === model.layers.length - 1) stop(); }, PLAY_MS);
      });
      layerInput.addEventListener("input", () => { stop(); panel.setLayer(Number(layerInput.value) - 1); });
      headInput.addEventListener("input", () => panel.setHead(Number(headInput.value)));
      box.addEventListener("pointerenter", () => { active = panel; });
      box.addEventListener("focusin", () => { active = panel; });
      new ResizeObserver(redraw).observe(box);
      return panel;
    };

    const panels = [...root.querySelectorAll(".v-panel")].map(makePanel);
    let active = panels[0]; // that whose sliders the keys move

    const ask = (query, pinned) => {
      state.query = query;
      state.pinned = pinned;
      changed();
    };

    const choosePhoto = (photo) => {
      if (photo < 0 || photo >= thumbs.length) return;
      state.photo = photo;
      thumbs.forEach((thumb, k) => thumb.setAttribute("aria-pressed", k === photo));
      for (const panel of panels) panel.load();
      changed();
    };

    const show = (which) => {
      panels.forEach((panel, k) => { panel.shown = which === "both" || Number(which) === k; panel.box.hidden = !panel.shown; });
      active = panels.find((panel) => panel.shown);
      root.dataset.shown = which;
      for (const button of root.querySelectorAll("[data-show]")) button.setAttribute("aria-pressed", button.dataset.show === which);
      for (const panel of panels) panel.load();
      changed();
    };

    const setOption = (name, value) => {
      state[name] = value;
      for (const input of root.querySelectorAll(`[data-option=${name}]`)) input.checked = value;
      changed();
    };

    const move = (down, across) => {
      const rows = active.model.queries;
      const [row, col] = state.query.token === undefined ? active.cellAt(state.query) : rows.map((size) => Math.floor(size / 2));
      const there = state.query.token === undefined ? [row + down, col + across] : [row, col];
      ask(active.centre(...there.map((at, k) => clamp(at, 0, rows[k] - 1))), true);
    };

    const keys = {
      ArrowUp: () => move(-1, 0), ArrowDown: () => move(1, 0), ArrowLeft: () => move(0, -1), ArrowRight: () => move(0, 1),
      "[": () => active.setLayer(active.layer - 1), "]": () => active.setLayer(active.layer + 1),
      ",": () => active.setHead(active.head - 1), ".": () => active.setHead(active.head + 1),
      g: () => setOption("grid", !state.grid), s: () => setOption("smooth", !state.smooth), p: () => setOption("grey", !state.grey),
      c: () => ask({ token: "cls" }, true),
      Escape: () => { state.pinned = false; state.here = null; changed(); },
    };
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      // Keys are the viewer's only while one is in it: others read this page with keys of their own.
      const inside = root.contains(event.target) || event.target === document.body && root.matches(":hover");
      if (!inside || event.target.matches("input[type=range]") && event.key.startsWith("Arrow")) return;
      const act = /^[1-9]$/.test(event.key) ? () => choosePhoto(Number(event.key) - 1) : keys[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    });

    thumbs.forEach((thumb, k) => {
      thumb.addEventListener("click", () => choosePhoto(k));
      for (const picture of thumb.children) picture.decode().then(redraw, redraw);
    });
    for (const input of root.querySelectorAll("[data-option]")) {
      input.addEventListener("change", () => setOption(input.dataset.option, input.checked));
    }
    for (const button of root.querySelectorAll("[data-show]")) button.addEventListener("click", () => show(button.dataset.show));

    // For scripts and the browser's console: the numbers behind a map, as they were unpacked.
    root.attention = (index = 0) => {
      const panel = panels[index], values = panel.values(), prefix = panel.model.prefix.length, [rows, cols] = panel.model.keys;
      if (!values) return null;
      const patches = Array.from({ length: rows }, (_, row) => [...values.subarray(prefix + row * cols, prefix + (row + 1) * cols)]);
      return { layer: panel.model.layers[panel.layer], head: panel.head, prefix: [...values.subarray(0, prefix)], patches };
    };

    if (!settings.models.some((model) => model.prefix.includes("cls"))) state.query = { x: 0.5, y: 0.5 };
    show(panels.length > 1 && !matchMedia("(max-width: 52rem)").matches ? "both" : "0");
    choosePhoto(0);
  };

  for (const root of document.querySelectorAll(".viewer")) start(root);
})();
