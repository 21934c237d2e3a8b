// Maps over photos, as `inspection/overlays.py` draws them: where a patch does not stand out, the photo is left as it is.

const MOST_OPAQUE = 0.78, RISE = 0.75, BLEACH = 0.6; // as in `inspection/overlays.py`, and so are the two of what was cut off:
const DIMMED = 0.45, GREY = "rgb(110 110 110)";
const GROUND = [20, 16, 30]; // behind the small maps
const SMOOTH_PX = 384; // side of a smooth map before the browser enlarges it
const FEW_PX = 96; // side of pictures whose pixels one can count
const TWEEN_MS = 220;

export const DEFAULT_STRENGTH = MOST_OPAQUE;
export const bytesOf = (base64) => Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
const isStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

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

const pixel = (r, g, b, a) => (a << 24 | b << 16 | g << 8 | r) >>> 0;

// Colours by place on the scale, as the 32 bits of a pixel: over a photo, over the dark ground, and the grey that takes the
// photo's own colours away below: orange would be lost on orange petals.
export const colourTables = (rgb, strength) => {
  const over = new Uint32Array(256), solid = new Uint32Array(256), grey = new Uint32Array(256);
  for (let i = 0; i < 256; i++) {
    const colour = rgb.subarray(3 * i, 3 * i + 3), dense = i ? Math.min(1, (i / 255) ** RISE + 0.08) : 0;
    // With little strength, the photo keeps its colours too.
    grey[i] = pixel(128, 128, 128, Math.round(255 * (i / 255) ** BLEACH * Math.min(1, strength / MOST_OPAQUE)));
    over[i] = pixel(...colour, Math.round(255 * strength * (i / 255) ** RISE));
    solid[i] = pixel(...colour.map((value, k) => Math.round(GROUND[k] + dense * (value - GROUND[k]))), 255);
  }
  return { over, solid, grey };
};

const fitted = (canvas, width, height) => {
  const scale = Math.min(window.devicePixelRatio || 1, 3);
  const [w, h] = [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
  const context = canvas.getContext("2d");
  context.setTransform(w / width, 0, 0, h / height, 0, 0);
  return context;
};

// The large picture. `show` fades from one map to the next where both have the same grid.
export class Stage {
  constructor(box, canvas) {
    Object.assign(this, { box, canvas, heat: document.createElement("canvas"), scene: null, places: null, frame: 0 });
    new ResizeObserver(() => this.draw()).observe(box);
  }

  // `scene`: picture (an image), photo (width, height, region), grid, places (or null), colours (tables), squares.
  show(scene) {
    const before = this.scene && this.scene.picture === scene.picture && this.scene.grid?.join() === scene.grid?.join() ? this.places : null;
    this.scene = scene;
    cancelAnimationFrame(this.frame);
    const target = scene.places && Float32Array.from(scene.places, (place) => place / 255);
    if (!before || !target || before.length !== target.length || isStill()) { this.places = target; this.draw(); return; }
    const from = before, start = performance.now();
    const step = (now) => {
      const t = clamp((now - start) / TWEEN_MS, 0, 1), eased = t * t * (3 - 2 * t);
      this.places = t < 1 ? target.map((value, k) => from[k] + eased * (value - from[k])) : target;
      this.draw();
      if (t < 1) this.frame = requestAnimationFrame(step);
    };
    this.frame = requestAnimationFrame(step);
  }

  draw() {
    if (!this.scene) return;
    const { picture, photo, squares } = this.scene, width = this.box.clientWidth, height = this.box.clientHeight;
    if (!width || !height) return;
    const context = fitted(this.canvas, width, height);
    context.globalCompositeOperation = "source-over";
    context.imageSmoothingEnabled = Math.max(photo.width, photo.height) > FEW_PX;
    context.imageSmoothingQuality = "high";
    context.clearRect(0, 0, width, height);
    context.drawImage(picture, 0, 0, width, height);
    const [down, across] = [height / photo.height, width / photo.width];
    const box = [photo.region[1] * across, photo.region[0] * down, photo.region[3] * across, photo.region[2] * down];
    if (this.places) this.drawHeat(context, box, squares);
    if (photo.note) this.fade(context, box, width, height);
  }

  drawHeat(context, box, squares) {
    let [rows, cols] = this.scene.grid, places = this.places;
    const scale = squares ? 1 : clamp(Math.floor(SMOOTH_PX / Math.max(rows, cols)), 1, 32);
    if (scale > 1) { places = enlarged(places, rows, cols, scale); rows *= scale; cols *= scale; }
    this.heat.width = cols;
    this.heat.height = rows;
    const inner = this.heat.getContext("2d"), image = inner.createImageData(cols, rows), pixels = new Uint32Array(image.data.buffer);
    context.imageSmoothingEnabled = scale > 1;
    for (const [table, how] of [[this.scene.colours.grey, "saturation"], [this.scene.colours.over, "source-over"]]) {
      for (let k = 0; k < pixels.length; k++) pixels[k] = table[clamp(Math.round(255 * places[k]), 0, 255)];
      inner.putImageData(image, 0, 0);
      context.globalCompositeOperation = how;
      context.drawImage(this.heat, ...box);
    }
    context.globalCompositeOperation = "source-over";
    if (squares) this.lines(context, box);
  }

  lines(context, [x, y, w, h]) {
    const [rows, cols] = this.scene.grid, path = new Path2D();
    for (let col = 1; col < cols; col++) { path.moveTo(x + col * w / cols, y); path.lineTo(x + col * w / cols, y + h); }
    for (let row = 1; row < rows; row++) { path.moveTo(x, y + row * h / rows); path.lineTo(x + w, y + row * h / rows); }
    context.strokeStyle = "rgb(255 255 255 / .4)";
    context.lineWidth = 0.75;
    context.stroke(path);
  }

  // What was cut off before the model saw the photo.
  fade(context, [x, y, w, h], width, height) {
    const outside = new Path2D();
    outside.rect(0, 0, width, height);
    outside.rect(x, y, w, h);
    context.globalAlpha = DIMMED;
    context.fillStyle = GREY;
    context.fill(outside, "evenodd");
    context.globalAlpha = 1;
    context.strokeStyle = "rgb(255 255 255 / .9)";
    context.lineWidth = 1.5;
    context.strokeRect(x, y, w, h);
  }
}

// Small maps of all heads: a column for each layer, a row for each head. Returns the size of a cell.
export const drawSheet = (canvas, { layers, heads, grid, places }, colours, width) => {
  const [rows, cols] = grid, gap = 2, cell = (width + gap) / layers, high = Math.max(12, (cell - gap) * rows / cols) + gap;
  const height = heads * high - gap, context = fitted(canvas, width, height), small = document.createElement("canvas");
  canvas.style.height = `${height}px`;
  context.clearRect(0, 0, width, height);
  context.imageSmoothingEnabled = false; // smooth edges would shine from one map into the next
  small.width = cols;
  small.height = rows;
  const inner = small.getContext("2d"), image = inner.createImageData(cols, rows), pixels = new Uint32Array(image.data.buffer);
  for (let layer = 0; layer < layers; layer++) {
    for (let head = 0; head < heads; head++) {
      const from = (layer * heads + head) * rows * cols;
      for (let k = 0; k < pixels.length; k++) pixels[k] = colours.solid[places[from + k]];
      inner.putImageData(image, 0, 0);
      context.drawImage(small, layer * cell, head * high, cell - gap, high - gap);
    }
  }
  return { cell, high, gap };
};

// The colours as they lie over a photo: on squares of two greys, which show where they let it through.
export const drawBar = (canvas, colours) => {
  const context = canvas.getContext("2d"), { width, height } = canvas, side = height / 2;
  for (let x = 0; x < width; x += side) {
    for (let y = 0; y < height; y += side) {
      context.fillStyle = (x / side + y / side) % 2 ? "#d8d8d8" : "#fafafa";
      context.fillRect(x, y, side, side);
    }
  }
  const strip = document.createElement("canvas");
  strip.width = 256;
  strip.height = 1;
  const inner = strip.getContext("2d"), image = inner.createImageData(256, 1);
  new Uint32Array(image.data.buffer).set(colours.over);
  inner.putImageData(image, 0, 0);
  context.drawImage(strip, 0, 0, width, height);
};
