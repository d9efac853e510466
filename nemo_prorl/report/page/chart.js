// One chart: lines, each with a band for the range that a point stands for, or areas on top of each other.
// uPlot draws them on a canvas (uplot.min.js, uplot.min.css: version 1.6.32, MIT, uplot.LICENSE.txt).
const DASHES = [[], [8, 3], [2, 3], [9, 3, 2, 3], [14, 4], [5, 2, 1, 2, 1, 2], [4, 4], [1, 2]];
/** Curves nine and up have another dash than the curve of the same colour. */
const dash = (index) => DASHES[(index + 3 * Math.floor(index / 8)) % 8];
const HEIGHT = 230;
const MARKS_HEIGHT = 18; // above the plot, for flags and the names of stages
const LARGEST = 1e300; // differences of larger numbers are not finite
const WHOLE = Array.from({ length: 30 }, (_, k) => [1, 2, 5][k % 3] * 10 ** Math.floor(k / 3)); // steps between ticks
const STYLE = getComputedStyle(document.documentElement);
/** A colour of page.css; share: its opacity. */
const colour = (name, share = 1) => STYLE.getPropertyValue(`--${name}`).trim() + Math.round(255 * share).toString(16).padStart(2, "0");

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
    this.picture = el("div", { class: "picture", role: "img", tabindex: 0, onkeydown: (event) => this.walk(event), onblur: () => this.point(null) });
    this.empty = el("p", { class: "empty", hidden: true });
    this.note = el("p", { class: "note" });
    this.values = el("details", { class: "values" }, el("summary", {}, "Values as a table"));
    this.values.addEventListener("toggle", () => this.fillTable());
    this.spoken = el("p", { class: "skip", "aria-live": "polite" });
    const head = el("figcaption", {}, el("div", { class: "head" }, this.heading, this.logButton), spec.help ? el("p", { class: "note" }, spec.help) : null);
    this.node = el("figure", { id: `chart-${spec.id}` }, head, this.at, this.legend, this.picture, this.empty, this.note, this.values, this.spoken);
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
    for (const chart of Chart.waiting) chart.room = chart.node.clientWidth - 24; // all are measured before any is changed
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
        : svg("line", { x1: 0, x2: 30, y1: 6, y2: 6, class: `curve s${index % 8}${one.wide ? " wide" : ""}`, "stroke-dasharray": dash(index).join(" ") });
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
    const cursor = this.cursor;
    this.plot?.destroy();
    this.plot = null;
    this.cursor = null;
    this.picture.hidden = !shown.length;
    this.empty.hidden = Boolean(shown.length);
    this.empty.textContent = this.data.series.length && this.hidden.size ? "All curves are switched off." : this.spec.empty || "The run has no values of this metric.";
    const levels = shown.flatMap((one) => [...one.m, ...(one.lo || [])]).filter((value) => value);
    this.logButton.hidden = this.spec.area || this.spec.share || !levels.length || levels.some((value) => value < 0);
    this.tell();
    this.fillTable();
    if (!shown.length) return;
    const { tables, series, bands } = this.spec.area ? this.areas(shown) : this.lines(shown);
    this.picture.setAttribute("aria-label", this.words(shown));
    this.plot = new uPlot({
      width: Math.max(260, Math.round(this.room || this.node.clientWidth - 24)), height: HEIGHT, padding: [MARKS_HEIGHT, 20, 0, 0],
      scales: this.scales(shown), axes: this.axes(), series, bands,
      legend: { show: false }, cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      hooks: { draw: [(plot) => this.drawMarks(plot)], setCursor: [(plot) => this.moved(plot)], ready: [() => cursor !== null && this.point(cursor)] },
    }, uPlot.join(tables), this.picture);
  }

  /** What uPlot draws for lines: a band's edges without a line, faint points below a running mean, and the line. */
  lines(shown) {
    const tables = [], series = [{}], bands = [];
    const add = (x, y, options) => { tables.push([x, y]); series.push({ points: { show: false }, width: 0, ...options }); return tables.length; };
    for (const one of shown) {
      const index = this.data.series.indexOf(one);
      const name = `c${index % 8}`;
      const width = one.m.length > 40 ? this.smoothing : 1;
      const alone = one.m.flatMap((value, k) => (value !== null && (one.m[k - 1] ?? null) === null && (one.m[k + 1] ?? null) === null ? [one.x[k]] : []));
      if (one.lo && one.hi) bands.push({ series: [add(one.x, one.hi), add(one.x, one.lo)], fill: colour(name, shown.length > 3 ? 0.1 : 0.2) });
      if (width > 1 && !one.lo) add(one.x, one.m, { stroke: colour(name, 0.3), width: 1 });
      const few = one.m.filter((value) => value !== null).length <= 25;
      const filter = (plot) => (few ? null : alone.map((x) => plot.data[0].indexOf(x)));
      const means = width > 1 ? runningMean(one, width, this.data.marks.map((mark) => mark.x)) : one.m;
      add(one.x, means, { stroke: colour(name), width: one.wide ? 2.6 : 1.7, dash: dash(index), points: { show: few, filter, size: 5, width: 0, fill: colour(name) } });
    }
    return { tables, series, bands };
  }

  /** What uPlot draws for areas on top of each other: sums, the highest first, so that each covers the part below it. */
  areas(shown) {
    const sum = shown[0].x.map(() => 0);
    const tops = shown.map((one) => one.m.map((value, k) => (sum[k] += value || 0)));
    const layers = shown.map((one, order) => {
      const name = `c${this.data.series.indexOf(one) % 8}`;
      return { table: [one.x, tops[order]], series: { stroke: colour("card"), width: 0.8, fill: colour(name), points: { show: sum.length === 1, fill: colour(name) } } };
    }).reverse();
    return { tables: layers.map((layer) => layer.table), series: [{}, ...layers.map((layer) => layer.series)], bands: [] };
  }

  scales(shown) {
    const xs = [...shown.flatMap((one) => [...(one.x0 || one.x), ...(one.x1 || one.x)]), ...this.data.marks.map((mark) => mark.x)];
    const [first, last] = [Math.min(...xs), Math.max(...xs)];
    const x = { time: false, range: last - first < 1 ? [first - 0.5, last + 0.5] : [first, last] };
    return { x, y: this.logarithmic && !this.logButton.hidden ? { distr: 3 } : { range: (_plot, low, high) => this.range(low, high) } };
  }

  /** Ends of the vertical axis: with 0 unless the chart is free of it, and a little room. */
  range(least, greatest) {
    let [low, high] = [Math.max(-LARGEST, least), Math.min(LARGEST, greatest)];
    if (!this.spec.free) { low = Math.min(0, low); high = Math.max(0, high); }
    if (high === low) { high += Math.abs(high) || 1; if (this.spec.free) low -= Math.abs(low) || 1; }
    const room = 0.05 * (high - low);
    if (high > 0) high = this.spec.share && high <= 1 ? Math.min(1, high + room) : high + room;
    return [low < 0 || this.spec.free ? low - room : low, high];
  }

  axes() {
    const common = { stroke: colour("dim"), font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif" };
    const written = (values, write) => values.map((value) => (value === null ? "" : write(value).replace("e+", "e")));
    return [
      { ...common, size: 24, label: this.data.xName || "step", labelSize: 16, labelGap: 0, gap: 2, incrs: WHOLE, space: 50, grid: { show: false }, ticks: { stroke: colour("line"), size: 4 }, values: (_plot, values) => written(values, (x) => this.label(x)) },
      { ...common, size: 56, gap: 4, grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, values: (_plot, values) => written(values, (y) => pretty(y, 3)) },
    ];
  }

  /** Where stages begin, with their names as far as there is room, and hard resets, with a flag. */
  drawMarks({ ctx, bbox, valToPos }) {
    const ratio = devicePixelRatio;
    let free = -Infinity;
    ctx.save();
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    ctx.textBaseline = "alphabetic";
    ctx.textAlign = "left";
    for (const { x, kind, text } of this.data.marks) {
      const at = Math.round(valToPos(x, "x", true));
      const reset = kind === "reset";
      ctx.strokeStyle = ctx.fillStyle = colour(reset ? "alarm" : "dim");
      ctx.lineWidth = (reset ? 1.2 : 1) * ratio;
      ctx.setLineDash(reset ? [4 * ratio, 3 * ratio] : []);
      ctx.stroke(new Path2D(`M${at} ${bbox.top}v${bbox.height}`));
      if (reset) ctx.fill(new Path2D(`M${at - 4 * ratio} ${bbox.top - ratio}h${8 * ratio}l${-4 * ratio} ${7 * ratio}z`));
      else if (at >= free) {
        const words = legible(text).slice(0, 14);
        ctx.fillText(words, at + 2 * ratio, bbox.top - 6 * ratio);
        free = at + 8 * ratio + ctx.measureText(words).width;
      }
    }
    ctx.restore();
  }

  /** Arrow keys, Home and End move the cursor from step to step, Escape takes it away. */
  walk(event) {
    if (event.key === "Escape") this.point(null);
    const xs = this.plot?.data[0] || [];
    const now = this.cursor === null ? xs.length : xs.indexOf(this.cursor);
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: xs.length - 1 }[event.key];
    if (next === undefined || !xs.length) return;
    event.preventDefault();
    this.point(xs[Math.min(xs.length - 1, Math.max(0, next))]);
    const text = this.shown.map((series) => `${legible(series.name)} ${pretty(this.near(series)?.value)}`).join(", ");
    this.spoken.textContent = `${this.at.textContent}: ${text}`;
  }

  /** Moves the cursor to the step nearest to x, or away. */
  point(x) {
    this.plot?.setCursor(x === null ? { left: -10, top: -10 } : { left: this.plot.valToPos(x, "x"), top: 0 });
  }

  moved(plot) {
    this.cursor = plot.data[0][plot.cursor.idx] ?? null;
    this.tell();
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

  /** Step and values under the cursor, or the last ones, into the legend. */
  tell() {
    const { series, bucket } = this.data;
    const name = this.data.xName || "step";
    const xs = this.plot?.data[0] || [0];
    const far = Math.max(bucket, (xs[xs.length - 1] - xs[0]) / 40);
    let where = "";
    for (const one of series) {
      let value = one.stats ? one.stats.last : [...one.m].reverse().find((y) => y !== null);
      if (this.cursor !== null) {
        const near = this.near(one);
        value = near && near.distance <= far ? near.value : null;
        if (near && !where) where = one.x1 && bucket > 1 ? `mean of steps ${one.x0[near.k]} to ${one.x1[near.k]}` : `${name} ${this.label(one.x[near.k])}`;
      }
      const node = this.valueNodes?.get(one.name);
      if (node) node.textContent = pretty(value, 3);
    }
    this.at.textContent = this.cursor === null ? (series.length ? "last values:" : "\u00a0") : where;
    this.note.textContent = this.notes().join(" ");
    this.note.hidden = !this.note.textContent;
  }

  /** What a reader must know of the picture: bands, running means, steps without a number, points left out. */
  notes() {
    const { series, band } = this.data;
    const ranges = series.some((one) => one.lo);
    const lost = series.filter((one) => one.stats && one.stats.lost);
    const left = Math.max(0, ...series.map((one) => one.left_out || 0));
    return [
      ranges && band,
      this.smoothing > 1 && `Lines: running mean of ${this.smoothing} points${ranges ? "" : "; faint: each point"}.`,
      lost.map((one) => `${legible(one.name)}: ${one.stats.lost} ${one.stats.lost === 1 ? "step" : "steps"} without a finite number`).join("; "),
      left && `${left} points are left out of the picture.`,
    ].filter(Boolean);
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
