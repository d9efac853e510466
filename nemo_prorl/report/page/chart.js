// One chart: curves with a band for the range that a point stands for, or areas on top of each other.
const DASHES = ["", "8 3", "2 3", "9 3 2 3", "14 4", "5 2 1 2 1 2", "4 4", "1 2"];
/** Curves nine and up have another dash than the curve of the same colour. */
const dash = (index) => DASHES[(index + 3 * Math.floor(index / 8)) % 8];
const HEIGHT = 230;
const EDGE = { left: 56, right: 12, top: 20, bottom: 36 };

/** Even ticks 1, 2, 5 times a power of ten, inside [low, high]. */
function ticks(low, high, count, whole = false) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9 && found.length < 50; k += 1) found.push(k * step);
  return [found, step];
}

/** largest: of the axis, so that all its ticks are written alike. */
function tickText(value, step, largest) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (largest >= 1e6 || largest < 2e-3) return value.toExponential(Math.max(0, Math.ceil(Math.log10(size / step) - 1e-9))).replace("e+", "e").replace(/\.0+e/, "e");
  if (largest >= 2e4) return `${Number((value / 1000).toFixed(2)).toLocaleString("en")}k`;
  return value.toFixed(Math.min(6, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9))));
}

/** Running means over `width` points, within stretches without a gap and within a stage. */
function runningMean(series, width, breaks) {
  const half = Math.floor(width / 2);
  const part = series.x.map((x) => breaks.filter((at) => at < x).length);
  return series.m.map((value, k) => {
    if (value === null) return null;
    let sum = 0, count = 0;
    for (let i = Math.max(0, k - half); i <= Math.min(series.m.length - 1, k + half); i += 1) {
      if (series.m[i] !== null && part[i] === part[k]) { sum += series.m[i]; count += 1; }
    }
    return sum / count;
  });
}

class Chart {
  /** spec: id, title, unit, help, area (stacked), share (an axis from 0 to 1 at most), free (an axis without 0). */
  constructor(spec) {
    this.spec = spec;
    this.hidden = new Set();
    this.logarithmic = false;
    this.cursor = null;
    this.data = { series: [], marks: [], bucket: 1 };
    this.logButton = el("button", { type: "button", class: "small", "aria-pressed": "false", hidden: true }, "log");
    this.logButton.addEventListener("click", () => {
      this.logarithmic = !this.logarithmic;
      this.logButton.setAttribute("aria-pressed", String(this.logarithmic));
      this.draw();
    });
    this.heading = el("h3", {}, spec.title, " ", el("span", { class: "unit" }, spec.unit ? `(${spec.unit})` : ""));
    this.at = el("p", { class: "at" });
    this.legend = el("ul", { class: "legend", "aria-label": `${spec.title}: curves` });
    this.box = el("div", { class: "box" });
    this.note = el("p", { class: "note" });
    this.values = el("details", { class: "values" }, el("summary", {}, "Values as a table"));
    this.values.addEventListener("toggle", () => this.fillTable());
    this.spoken = el("p", { class: "skip", "aria-live": "polite" });
    const head = el("figcaption", {}, el("div", { class: "head" }, this.heading, this.logButton), spec.help ? el("p", { class: "note" }, spec.help) : null);
    this.node = el("figure", { id: `chart-${spec.id}` }, head, this.at, this.legend, this.box, this.note, this.values, this.spoken);
    this.width = 0;
    Chart.all.push(this);
  }

  /** data: series [{name, x, m, lo, hi, x0, x1, stats, wide}], marks, bucket, band (what it means), unit. */
  update(data) {
    this.data = data;
    this.buildLegend();
    Chart.waiting.add(this);
  }

  /** Draws what waits for it, in the page's order, for so many milliseconds; true when all is drawn. */
  static drawSome(milliseconds) {
    for (const chart of Chart.waiting) chart.room = chart.box.clientWidth; // all are measured before any is changed
    const end = performance.now() + milliseconds;
    for (const chart of Chart.all) {
      if (!Chart.waiting.has(chart)) continue;
      if (performance.now() > end) return false;
      Chart.waiting.delete(chart);
      chart.draw();
    }
    return true;
  }

  get shown() {
    return this.data.series.filter((series) => !this.hidden.has(series.name) && series.m.some((value) => value !== null));
  }

  /** How many points a line is the mean of: as chosen, or more than one where many noisy curves cross. */
  get smoothing() {
    const { series } = this.data;
    if (this.spec.area || this.data.xName || !series.some((one) => one.m.length > 40)) return 1;
    return Chart.smooth === "auto" ? (series.length > 3 ? 5 : 1) : Number(Chart.smooth);
  }

  buildLegend() {
    const { series } = this.data;
    const key = JSON.stringify(series.map((one) => one.name));
    if (this.legendKey === key) return;
    this.legendKey = key;
    this.valueNodes = new Map();
    const entries = series.map((one, index) => {
      const value = el("span", { class: "value" });
      this.valueNodes.set(one.name, value);
      const line = this.spec.area
        ? svg("rect", { x: 4, y: 1, width: 18, height: 10, class: `area s${index % 8}` })
        : svg("line", { x1: 0, x2: 30, y1: 6, y2: 6, class: `curve s${index % 8}${one.wide ? " wide" : ""}`, "stroke-dasharray": dash(index) });
      const button = el("button", { type: "button", "aria-pressed": String(!this.hidden.has(one.name)) },
        svg("svg", { viewBox: "0 0 30 12", "aria-hidden": "true" }, line), el("span", {}, visible(one.name)), value);
      button.addEventListener("click", () => {
        if (!this.hidden.delete(one.name)) this.hidden.add(one.name);
        button.setAttribute("aria-pressed", String(!this.hidden.has(one.name)));
        this.draw();
      });
      return el("li", {}, button);
    });
    this.legend.replaceChildren(...entries);
  }

  draw() {
    const shown = this.shown;
    this.drawn = null;
    this.tell();
    if (this.values.open) this.fillTable();
    if (!shown.length) {
      const nothing = this.data.series.length && this.hidden.size ? "All curves are switched off." : this.spec.empty || "The run wrote no such number.";
      this.box.replaceChildren(el("p", { class: "empty" }, nothing));
      this.logButton.hidden = !this.logarithmic;
      return;
    }
    this.width = Math.max(260, Math.round(this.room || this.box.clientWidth) || 400);
    const frame = this.frame(shown);
    const picture = svg("svg", { viewBox: `0 0 ${this.width} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": this.words(shown) });
    picture.append(this.axes(frame), this.drawMarks(frame));
    shown.forEach((series, order) => picture.append(this.curve(series, frame, order)));
    this.cursorLine = svg("line", { class: "cursor", y1: EDGE.top, y2: HEIGHT - EDGE.bottom, visibility: "hidden" });
    picture.append(this.cursorLine);
    this.listen(picture, frame);
    const focused = this.box.contains(document.activeElement) && document.activeElement.tagName === "svg";
    this.box.replaceChildren(picture);
    if (focused) picture.focus({ preventScroll: true });
    this.drawn = frame;
    if (this.cursor !== null) this.point(this.cursor);
  }

  /** Scales from numbers to the picture, from all that is shown. */
  frame(shown) {
    const { marks } = this.data;
    const xs = shown.flatMap((series) => [...(series.x0 || series.x), ...(series.x1 || series.x)]);
    let x0 = Math.min(...xs), x1 = Math.max(...xs);
    for (const mark of marks) { x0 = Math.min(x0, mark.x); x1 = Math.max(x1, mark.x); }
    if (x1 - x0 < 1) { x0 -= 0.5; x1 += 0.5; }
    if (this.spec.area && x1 - x0 >= 1) { x0 -= 0.5; x1 += 0.5; } // a step is as wide as its bar
    const stacked = this.spec.area ? this.stack(shown) : null;
    const ys = (stacked ? stacked.flatMap((layer) => layer.top) : shown.flatMap((s) => [...s.m, ...(s.lo || []), ...(s.hi || [])])).filter((y) => y !== null);
    const clamped = (level) => Math.min(1e300, Math.max(-1e300, level)); // differences stay finite
    const positive = ys.filter((y) => y > 0);
    this.logButton.hidden = this.spec.area || this.spec.share || !positive.length || positive.length < ys.filter((y) => y !== 0).length;
    const logarithmic = this.logarithmic && !this.logButton.hidden;
    let low = clamped(Math.min(...ys)), high = clamped(Math.max(...ys));
    if (logarithmic) {
      low = Math.log10(Math.min(...positive)); high = Math.log10(Math.max(...positive));
      if (high - low < 0.5) { low -= 0.25; high += 0.25; }
    } else {
      if (!this.spec.free) { low = Math.min(0, low); high = Math.max(0, high); }
      if (high === low) { high += Math.abs(high) || 1; if (this.spec.free) low -= Math.abs(low) || 1; }
      const room = 0.05 * (high - low);
      if (high > 0) high = this.spec.share && high <= 1 ? Math.min(1, high + room) : high + room;
      if (low < 0 || this.spec.free) low -= room;
    }
    const right = this.width - EDGE.right, bottom = HEIGHT - EDGE.bottom;
    const x = (value) => EDGE.left + ((value - x0) / (x1 - x0)) * (right - EDGE.left);
    const y = (value) => {
      const level = logarithmic ? (value > 0 ? Math.log10(value) : low) : value;
      return bottom - ((Math.min(high, Math.max(low, level)) - low) / (high - low)) * (bottom - EDGE.top);
    };
    return { x, y, x0, x1, low, high, logarithmic, stacked, right, bottom };
  }

  stack(shown) {
    const base = shown[0].x.map(() => 0);
    return shown.map((series) => {
      const from = [...base];
      series.m.forEach((value, k) => { base[k] += value || 0; });
      return { from, top: [...base] };
    });
  }

  axes(frame) {
    const group = svg("g", { "aria-hidden": "true" });
    const text = (x, y, words, anchor) => svg("text", { x, y, "text-anchor": anchor }, words);
    const [levels, step] = frame.logarithmic ? ticks(frame.low, frame.high, 5, frame.high - frame.low > 2) : ticks(frame.low, frame.high, 5);
    for (const level of levels) {
      const value = frame.logarithmic ? 10 ** level : level;
      const y = frame.y(value);
      const words = frame.logarithmic ? pretty(value, 2).replace("e+", "e") : tickText(value, step, Math.max(...levels.map(Math.abs)));
      group.append(svg("line", { class: "gridline", x1: EDGE.left, x2: frame.right, y1: y, y2: y }), text(EDGE.left - 6, y + 4, words, "end"));
    }
    const [steps, every] = ticks(frame.x0, frame.x1, this.width / 75, true);
    for (const step of steps) {
      const x = frame.x(step);
      group.append(svg("line", { class: "axis", x1: x, x2: x, y1: frame.bottom, y2: frame.bottom + 4 }), text(x, frame.bottom + 16, this.data.steps ? this.data.steps(step) : tickText(step, every, frame.x1), "middle"));
    }
    group.append(svg("line", { class: "axis", x1: EDGE.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom }));
    group.append(text((EDGE.left + frame.right) / 2, HEIGHT - 4, this.data.xName || "step", "middle"));
    return group;
  }

  drawMarks(frame) {
    const group = svg("g", { "aria-hidden": "true" });
    let free = -Infinity;
    const { marks } = this.data;
    const lines = { stage: "", reset: "" };
    let flags = "";
    for (const mark of marks) {
      const x = Number(frame.x(mark.x).toFixed(1));
      lines[mark.kind] += `M${x} ${EDGE.top}V${frame.bottom}`;
      if (mark.kind === "reset") flags += `M${x - 4} ${EDGE.top - 1}h8l-4 7z`;
      else if (x >= free) {
        const words = legible(mark.text).slice(0, 14);
        group.append(svg("text", { x: x + 2, y: EDGE.top - 6 }, words));
        free = x + 8 + 6.6 * words.length;
      }
    }
    for (const [kind, path] of Object.entries(lines)) if (path) group.append(svg("path", { class: kind, d: path }));
    if (flags) group.append(svg("path", { class: "flag", d: flags }));
    return group;
  }

  curve(series, frame, order) {
    const index = this.data.series.indexOf(series);
    const group = svg("g", { class: `s${index % 8}${this.shown.length > 3 ? " crowd" : ""}`, "aria-hidden": "true" });
    if (frame.stacked) {
      const layer = frame.stacked[order];
      const edges = (k) => [frame.x(Math.max(frame.x0, (series.x0 || series.x)[k] - 0.5)), frame.x(Math.min(frame.x1, (series.x1 || series.x)[k] + 0.5))];
      const there = series.x.map((_, k) => edges(k).map((x) => [x, frame.y(layer.top[k])])).flat();
      const back = series.x.map((_, k) => edges(k).map((x) => [x, frame.y(layer.from[k])])).flat().reverse();
      group.append(svg("path", { class: "area", d: `M${[...there, ...back].map((p) => p.map((v) => v.toFixed(1)).join(" ")).join("L")}Z` }));
      return group;
    }
    if (series.lo && series.hi) group.append(svg("path", { class: "band", d: this.band(series, frame) }));
    const width = series.m.length > 40 ? this.smoothing : 1;
    if (width > 1 && !series.lo) group.append(svg("path", { class: "curve raw", d: this.line(series, series.m, frame) }));
    const means = width > 1 ? runningMean(series, width, this.data.marks.map((mark) => mark.x)) : series.m;
    group.append(svg("path", { class: series.wide ? "curve wide" : "curve", d: this.line(series, means, frame), "stroke-dasharray": dash(index) }));
    const count = series.m.filter((value) => value !== null).length;
    series.m.forEach((value, k) => {
      const alone = value !== null && (series.m[k - 1] ?? null) === null && (series.m[k + 1] ?? null) === null;
      if (value !== null && (count <= 25 || alone)) group.append(svg("circle", { class: "dot", cx: frame.x(series.x[k]).toFixed(1), cy: frame.y(value).toFixed(1), r: 2.4 }));
    });
    return group;
  }

  line(series, values, frame) {
    let path = "", open = false;
    values.forEach((value, k) => {
      if (value === null) { open = false; return; }
      path += `${open ? "L" : "M"}${frame.x(series.x[k]).toFixed(1)} ${frame.y(value).toFixed(1)}`;
      open = true;
    });
    return path;
  }

  /** Closed shapes between lo and hi, one for each stretch without a gap. */
  band(series, frame) {
    let path = "", there = [], back = [];
    const close = () => {
      if (there.length) path += `M${there.join("L")}L${back.reverse().join("L")}Z`;
      there = []; back = [];
    };
    series.lo.forEach((low, k) => {
      if (low === null || series.hi[k] === null) { close(); return; }
      const x = frame.x(series.x[k]).toFixed(1);
      there.push(`${x} ${frame.y(series.hi[k]).toFixed(1)}`);
      back.push(`${x} ${frame.y(low).toFixed(1)}`);
    });
    close();
    return path;
  }

  listen(picture, frame) {
    const nearest = (event) => {
      const box = picture.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * this.width;
      return frame.x0 + ((at - EDGE.left) / (frame.right - EDGE.left)) * (frame.x1 - frame.x0);
    };
    picture.addEventListener("pointermove", (event) => this.point(nearest(event)));
    picture.addEventListener("pointerleave", () => this.point(null));
    picture.addEventListener("blur", () => this.point(null));
    picture.addEventListener("keydown", (event) => {
      const xs = [...new Set(this.shown.flatMap((series) => series.x))].sort((a, b) => a - b);
      const now = this.cursor === null ? xs.length : xs.findIndex((x) => x >= this.cursor);
      const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: xs.length - 1 }[event.key];
      if (event.key === "Escape") this.point(null);
      if (next === undefined) return;
      event.preventDefault();
      this.point(xs[Math.min(xs.length - 1, Math.max(0, next))]);
      const told = this.shown.map((series) => `${legible(series.name)} ${pretty(this.near(series)?.value)}`).join(", ");
      this.spoken.textContent = `${this.at.textContent}: ${told}`;
    });
  }

  /** The point of a series that is nearest to the cursor. */
  near(series) {
    let best = null;
    series.m.forEach((value, k) => {
      const distance = Math.abs(series.x[k] - this.cursor);
      if (value !== null && (best === null || distance < best.distance)) best = { distance, value, k };
    });
    return best;
  }

  /** Moves the cursor to the step nearest to x, or away. */
  point(x) {
    this.cursor = x;
    if (x !== null && this.drawn) {
      const found = this.shown.map((series) => [series, this.near(series)]).reduce((a, b) => (b[1].distance < a[1].distance ? b : a));
      this.cursor = found[0].x[found[1].k];
      const at = this.drawn.x(this.cursor);
      this.cursorLine.setAttribute("x1", at);
      this.cursorLine.setAttribute("x2", at);
    }
    this.cursorLine?.setAttribute("visibility", x === null ? "hidden" : "visible");
    this.tell();
  }

  /** Step and values under the cursor, else the last ones, into the legend. */
  tell() {
    const { series, bucket } = this.data;
    const name = this.data.xName || "step";
    let where = "";
    for (const one of series) {
      let value = one.stats ? one.stats.last : [...one.m].reverse().find((y) => y !== null);
      if (this.cursor !== null) {
        const near = this.near(one);
        const far = near && near.distance > Math.max(bucket, (this.drawn ? (this.drawn.x1 - this.drawn.x0) / 40 : 0));
        value = near && !far ? near.value : null;
        if (near && !where) where = one.x1 && bucket > 1 ? `mean of steps ${one.x0[near.k]} to ${one.x1[near.k]}` : `${name} ${this.label(one.x[near.k])}`;
      }
      const node = this.valueNodes?.get(one.name);
      if (node) node.textContent = pretty(value, 3);
    }
    this.at.textContent = this.cursor === null ? (series.length ? "last values:" : "\u00a0") : where;
    const lost = series.filter((one) => one.stats && one.stats.lost);
    const notes = [];
    if (series.some((one) => one.lo) && this.data.band) notes.push(this.data.band);
    if (this.smoothing > 1) notes.push(`Lines: running mean of ${this.smoothing} points${series.some((one) => one.lo) ? "" : "; faint: each point"}.`);
    if (lost.length) notes.push(lost.map((one) => `${legible(one.name)}: ${one.stats.lost} ${one.stats.lost === 1 ? "step" : "steps"} without a finite number`).join("; "));
    const left = Math.max(0, ...series.map((one) => one.left_out || 0));
    if (left) notes.push(`${left} points are left out of the picture.`);
    this.note.textContent = notes.join(" ");
    this.note.hidden = !notes.length;
  }

  /** How a place on the horizontal axis is called. */
  label(x) {
    return this.data.steps ? this.data.steps(x) : pretty(x, 6);
  }

  words(shown) {
    const parts = shown.slice(0, 12).map((series) => {
      const points = series.m.map((value, k) => [series.x[k], value]).filter((point) => point[1] !== null);
      const values = points.map((point) => point[1]);
      const [first, last] = [points[0], points[points.length - 1]];
      return `${legible(series.name)} from ${pretty(first[1])} at ${this.label(first[0])} to ${pretty(last[1])} at ${this.label(last[0])}, between ${pretty(Math.min(...values))} and ${pretty(Math.max(...values))}`;
    });
    const resets = this.data.marks.filter((mark) => mark.kind === "reset").length;
    return `${this.spec.title}${this.spec.unit ? ` in ${this.spec.unit}` : ""} by ${this.data.xName || "step"}. ${parts.join("; ")}.${resets ? ` ${resets} hard ${resets === 1 ? "reset" : "resets"} marked.` : ""} Arrow keys read values.`;
  }

  fillTable() {
    this.values.querySelector(".scroll")?.remove();
    if (!this.values.open) return;
    const series = this.shown;
    const xs = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
    const at = series.map((one) => new Map(one.x.map((x, k) => [x, one.lo && one.m[k] !== null ? `${pretty(one.m[k])} (${pretty(one.lo[k])} to ${pretty(one.hi[k])})` : pretty(one.m[k])])));
    const rows = xs.map((x) => [{ text: this.label(x), head: true, number: true }, ...at.map((values) => numeric(values.get(x) ?? "–"))]);
    this.values.append(table(`${this.spec.title}, ${this.spec.unit || "no unit"}`, [this.data.xName || "step", ...series.map((one) => numeric(one.name))], rows, true));
  }
}
Chart.all = [];
Chart.waiting = new Set();
Chart.smooth = "auto";
