// The page: sections from the data, and, when it is served, new data from time to time.
const REFRESH_MS = 3000;
const ALARMS = new Set(["alarm", "failure"]);
const QUIET = new Set(["validation", "reset_intent"]);

class Report {
  constructor() {
    this.main = document.getElementById("main");
    this.run = document.getElementById("run");
    this.run.addEventListener("change", () => { this.show(); this.showSections(); drawAll(); });
    const smooth = document.getElementById("smooth");
    options(smooth, [["auto", "crowded ones smoothed"], ["1", "as measured"], ["5", "mean of 5 points"], ["15", "mean of 15 points"]]);
    smooth.addEventListener("change", () => {
      Chart.smooth = smooth.value;
      for (const chart of Chart.all) chart.draw();
    });
    this.panels = [];
    this.sections = [];
    this.samples = new Samples();
    this.build();
  }

  section(id, title, text, ...nodes) {
    const node = el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), text ? el("p", {}, text) : null, ...nodes);
    this.main.append(node);
    this.sections.push({ id, title, node });
    return node;
  }

  charts(id, title, text, specs) {
    const grid = el("div", { class: "grid" });
    this.section(id, title, text, grid);
    for (const spec of specs) {
      const chart = new Chart(spec);
      grid.append(chart.node);
      this.panels.push({ chart, spec });
    }
  }

  build() {
    this.section("outcome", "Outcome", "", this.outcome = el("div"));
    this.forkChart = new Chart(FORK);
    this.forked = this.section("fork", "Fork", "", this.arms = el("div"), this.forkChart.node);
    this.charts("overview", "Curves", "Solid grey lines: a stage begins. Dashed lines with a flag: a hard reset of reference policy and optimizer.", OVERVIEW);
    this.buildComparison();
    this.facts = el("div");
    this.section("runs", "Runs", "", this.facts);
    this.diarySection = this.section("diary", "Diary", "For each stage: what changed, why it ended, and what its signals said.", this.diary = el("div"));
    this.charts("rewards", "Shaped rewards", "", REWARDS);
    this.charts("signal", "Signal for learning", "", SIGNAL);
    this.charts("length-truncation", "Length and truncation", "", LENGTH);
    this.charts("time", "Where time goes", "", TIME);
    this.phases = el("div");
    document.getElementById("time").append(this.phases);
    this.charts("stability", "Stability", "Engine gap, clipping and gradient norms are the first to move when something is wrong.", STABILITY);
    this.canaries = el("div");
    document.getElementById("stability").append(this.canaries);
    this.judgedAgain = this.section("second", "Second verifier", "Another verifier judges a sample of the responses; training does not use its verdicts. The newest disagreements come first.", this.second = el("div"));
    this.buildEvents();
    this.probed = this.section("probe", "Probe of the starting model", "", this.probe = el("div"));
    this.section("samples", "Samples", "", ...this.samples.nodes);
    this.evaluations = this.section("evaluation", "Evaluation", "", this.evaluated = el("div"));
    this.section("configuration", "Configuration", "", this.configuration = el("div"));
    this.buildAnyMetric();
  }

  buildComparison() {
    this.comparison = el("div");
    this.comparedCharts = COMPARED.map((spec) => [new Chart(spec), spec]);
    this.compared = this.section("comparison", "Comparison", "", el("div", { class: "grid" }, this.comparedCharts.map(([chart]) => chart.node)), this.comparison);
  }

  buildEvents() {
    this.eventKind = el("select", { onchange: () => this.showEvents() });
    options(this.eventKind, [["telling", "all but validations"], ["alarms", "alarms, failures and resets"], ["all", "all"]]);
    this.eventList = el("div");
    this.section("events", "Alarms and events", "", el("fieldset", {}, el("legend", {}, "Which events"), el("label", {}, "Show", this.eventKind)), this.eventList);
  }

  buildAnyMetric() {
    this.metric = el("select", { onchange: () => { this.showMetric(); drawAll(); } });
    this.metricChart = new Chart({ id: "any", title: "Chosen metric", unit: "as in docs/reference/metrics.md", free: true });
    this.metricTable = el("details", {}, el("summary", {}, "Every metric: first, last, minimum, maximum"));
    this.metricTable.addEventListener("toggle", () => this.fillMetrics());
    this.section("metrics", "Any metric", "", el("fieldset", {}, el("legend", {}, "Which metric"), el("label", {}, "Metric", this.metric)), this.metricChart.node, this.metricTable);
  }

  /** New data, from the file or from the server. */
  update(data) {
    const [x, y] = [window.scrollX, window.scrollY];
    this.data = data;
    options(this.run, data.curves.map((curve, index) => [index, curve.name]));
    document.getElementById("choose-run").hidden = data.curves.length < 2;
    this.compared.hidden = data.curves.length < 2;
    this.evaluations.hidden = !data.evaluations.length;
    this.probed.hidden = data.curves.every((curve) => !curve.probe);
    const steps = data.curves.reduce((sum, curve) => sum + curve.steps, 0);
    document.getElementById("about").textContent = `${data.curves.length === 1 ? "" : `${data.curves.length} runs, `}${steps.toLocaleString("en")} steps. Read ${clock(data.made)}. ${this.problems()}`;
    this.showFacts();
    this.showFork();
    this.showComparison();
    this.showEvaluations();
    this.show();
    this.showSections();
    drawAll();
    if (this.updatedBefore) window.scrollTo(x, y);
    this.updatedBefore = true;
  }

  /** The list of sections; one whose charts all lack values is left out. */
  showSections() {
    for (const { node } of this.sections) {
      const grid = node.querySelector(":scope > .grid");
      if (grid && node !== this.compared) node.hidden = grid.hidden;
    }
    const shown = this.sections.filter((section) => !section.node.hidden);
    const links = shown.map((section) => el("li", {}, el("a", { href: `#${section.id}` }, section.title)));
    const list = document.getElementById("sections");
    const key = shown.map((section) => section.id).join();
    if (list.dataset.shown !== key) list.replaceChildren(...links);
    list.dataset.shown = key;
  }

  /** What a reader should know before any chart. */
  problems() {
    const stages = this.data.curves.flatMap((curve) => curve.stages);
    const alarms = this.data.curves.reduce((sum, curve) => sum + curve.events.alarms, 0);
    const going = stages.filter((stage) => !stage.finished).length;
    const problems = stages.reduce((sum, stage) => sum + stage.problems.length, 0);
    return [going ? `${going} of ${stages.length} run directories not finished.` : "All finished.", `${alarms || "No"} ${alarms === 1 ? "alarm" : "alarms"}.`,
      problems ? "Some files could not be read completely: see Runs." : ""].join(" ");
  }

  get curve() {
    return this.data.curves[Number(this.run.value) || 0];
  }

  /** What depends on the chosen run. */
  show() {
    this.showOutcome();
    this.showDiary();
    updatePanels(this.panels, this.curve);
    this.showConfiguration();
    this.showPhases();
    this.showCanaries();
    this.showSecond();
    this.showEvents();
    this.showProbe();
    this.samples.update(this.curve);
    const keys = [...new Set(this.data.curves.flatMap((curve) => Object.keys(curve.metrics)))].sort();
    options(this.metric, keys.map((key) => [key, key]));
    this.showMetric();
    this.fillMetrics();
  }

  showFacts() {
    const many = this.data.curves.length > 1;
    const rows = this.data.curves.flatMap((curve) => curve.stages.map((stage) => [...(many ? [curve.name] : []), ...factsOf(stage)]));
    const heads = [...(many ? ["run"] : []), "stage", "steps", "state", "held-out mean, before → after", numeric("prompts"), numeric("tokens"), numeric("time of steps"), "began (UTC)", "from", "changes from the previous stage"];
    const problems = this.data.curves.flatMap((curve) => curve.stages.flatMap((stage) => stage.problems.map((text) => `${many ? `${curve.name}, ` : ""}${stage.name}: ${text}`)));
    const nodes = [table("Run directories", heads, rows)];
    if (this.data.curves.every((curve) => curve.steps === 0)) nodes.push(el("p", {}, "No step is done yet."));
    if (problems.length) nodes.push(el("details", { open: problems.length <= 5 }, el("summary", {}, `${problems.length} ${problems.length === 1 ? "thing" : "things"} could not be read`), el("ul", {}, problems.map((text) => el("li", {}, visible(text))))));
    if (this.data.curves.some((curve) => curve.bucket > 1)) nodes.push(el("p", { class: "note" }, "Long runs are drawn with fewer points: each is the mean of several steps, and its band is their range, so that no spike is hidden. First, last, minimum and maximum values in tables are of single steps."));
    this.facts.replaceChildren(...nodes);
  }

  showDiary() {
    const { diary } = this.curve;
    this.diarySection.hidden = !diary.length;
    this.diary.replaceChildren(...diary.map(({ stage, rows }) => table(stage, ["what", "in this stage"], rows.map(([title, text]) => [{ text: title, head: true }, { text, wrap: true }]))));
  }

  showFork() {
    const { fork } = this.data;
    this.forked.hidden = !fork;
    if (!fork) return;
    this.arms.replaceChildren(forkTable(fork), el("p", { class: "note" }, fork.note));
    this.forkChart.update({ series: forkLines(fork), marks: [], bucket: 1, band: "Band: 95 % interval over prompts; with --early that of several looks." });
  }

  showComparison() {
    const { curves, differences } = this.data;
    if (curves.length < 2) return;
    for (const [chart, spec] of this.comparedCharts) updateCompared(chart, spec, curves);
    const last = (curve, key) => curve.metrics[key]?.stats.last;
    const rows = curves.map((curve) => {
      const heldout = curve.validations.all;
      const ends = heldout && heldout.m.length ? `${pretty(heldout.m[0], 3)} → ${pretty(heldout.m[heldout.m.length - 1], 3)}` : "–";
      const seconds = curve.stages.reduce((sum, stage) => sum + stage.seconds, 0);
      return [{ text: curve.name, head: true }, numeric(curve.steps), numeric(ends), ...["reward/all", "entropy", "kl", "rollout/response_tokens", "keep_rate/all"].map((key) => numeric(pretty(last(curve, key), 3))), numeric(duration(seconds))];
    });
    const heads = ["run", ...["steps", "held-out mean", "raw reward", "entropy", "KL", "length", "keep rate", "time of steps"].map(numeric)];
    const nodes = [table("Last values", heads, rows)];
    nodes.push(differences.length ? this.differing(curves, differences) : el("p", { class: "note" }, "The config.yaml files of the runs have the same settings."));
    this.comparison.replaceChildren(...nodes);
  }

  differing(curves, differences) {
    const open = this.comparison.querySelector("details")?.open ?? differences.length <= 12;
    const rows = differences.map((row) => [{ text: row.key, head: true }, ...row.values.map((text) => ({ text, wrap: text.length > 30 }))]);
    return el("details", { open }, el("summary", {}, `${differences.length} settings differ (of a chain: of its first stage)`),
      table("Settings that differ; absent: unknown to the version of that run", ["setting", ...curves.map((curve) => curve.name)], rows));
  }

  showPhases() {
    const { names, seconds, bottleneck, steps } = this.curve.phases;
    const whole = seconds.reduce((sum, value) => sum + value, 0);
    if (!whole) { this.phases.replaceChildren(); return; }
    const bar = (share) => el("span", { class: "bar", "aria-hidden": "true", style: `width: ${(140 * share).toFixed(0)}px` });
    const rows = names.map((name, k) => [{ text: name, head: true }, numeric(duration(seconds[k])), numeric(percent(seconds[k] / whole)), { text: bar(seconds[k] / whole) }]);
    const sums = table("All steps together, and checkpoints of finished runs", ["phase", numeric("time"), numeric("share"), ""], rows);
    this.phases.replaceChildren(sums, bottleneck ? el("p", {}, `The last ${steps === 1 ? "step" : `${steps} steps`}: ${bottleneck}.`) : "");
  }

  showCanaries() {
    const rows = this.curve.canaries.map(({ task, kind, errors, judged, low, high }) => [{ text: task, head: true }, kind, numeric(errors), numeric(judged), numeric(`${percent(low, 2)} to ${percent(high, 2)}`)]);
    const heads = ["task", "error of the verifier", numeric("errors"), numeric("canaries"), numeric("rate, 95 % interval")];
    this.canaries.replaceChildren(rows.length ? table("Responses whose verdict is known", heads, rows) : "");
  }

  showSecond() {
    const { name, second } = this.curve;
    this.judgedAgain.hidden = !second.rows.length;
    const key = JSON.stringify([name, second]);
    if (key === this.secondKey) return;
    this.secondKey = key;
    this.second.replaceChildren(...secondNodes(second));
  }

  showEvents() {
    const { rows, left_out: left, alarms } = this.curve.events;
    const kinds = { all: () => true, telling: (event) => !QUIET.has(event.event), alarms: (event) => ALARMS.has(event.event) || event.event === "reset_commit" };
    const shown = rows.filter(kinds[this.eventKind.value || "telling"]);
    const cells = shown.map((event) => [numeric(event.step ?? "–"), event.stage, clock(event.time), { text: el("span", { class: ALARMS.has(event.event) ? "alarm" : null }, visible(event.event)) }, { text: event.what, wrap: true }]);
    const key = JSON.stringify(cells.length ? [shown, alarms, left] : [alarms, left, this.curve.name]);
    if (key === this.eventKey) return;
    this.eventKey = key;
    const said = el("p", { class: alarms ? "alarm" : null }, `${alarms || "No"} ${alarms === 1 ? "alarm" : "alarms"}.`);
    const list = cells.length ? table("Events by time", [numeric("step"), "stage", "time", "event", "what"], cells, true) : el("p", { class: "note" }, "No such event.");
    this.eventList.replaceChildren(said, list, left ? el("p", { class: "note" }, `${left} older events are left out.`) : "");
  }

  showMetric() {
    const key = this.metric.value;
    const curves = this.data.curves;
    const series = curves.map((curve) => seriesOf(curve, key, curves.length > 1 ? curve.name : key)).filter(Boolean);
    const bucket = Math.max(1, ...curves.map((curve) => curve.bucket));
    this.metricChart.update({ series, marks: curves.length > 1 ? [] : curves[0].marks, bucket, band: bandText(bucket) });
  }

  fillMetrics() {
    this.metricTable.querySelector(".scroll")?.remove();
    if (!this.metricTable.open) return;
    const rows = Object.entries(this.curve.metrics).map(([key, { stats }]) => [{ text: key, head: true },
      ...[stats.first, stats.last, stats.mean, stats.min, stats.max].map((value) => numeric(pretty(value))), numeric(stats.max_step ?? "–"), numeric(stats.count), numeric(stats.lost)]);
    this.metricTable.append(table(`Metrics of ${this.curve.name}`, ["metric", ...["first", "last", "mean", "least", "greatest", "at step", "steps with it", "not finite"].map(numeric)], rows, true));
  }

  showOutcome() {
    const { name, outcome, forecast, metrics, stages } = this.curve;
    const key = JSON.stringify([name, outcome, forecast, metrics["reward/all"]?.stats, stages.map((stage) => stage.failed)]);
    if (key === this.outcomeKey) return; // nothing that is read moves
    this.outcomeKey = key;
    this.outcome.replaceChildren(...outcomeNodes(this.curve));
  }

  showConfiguration() {
    const { name, configuration: { command, settings } } = this.curve;
    const key = JSON.stringify([name, settings]);
    if (key === this.configurationKey) return;
    this.configurationKey = key;
    const rows = settings.map(([setting, value]) => [{ text: setting, head: true }, { text: value, wrap: true }]);
    this.configuration.replaceChildren(...(command ? [el("p", {}, "This command repeats the run, or the first stage of a chain, in another run directory:"), el("pre", {}, visible(command)),
      el("details", {}, el("summary", {}, `All ${settings.length} settings`), table("Settings of config.yaml", ["setting", "value"], rows, true))] : [el("p", { class: "note" }, "The run directory has no readable config.yaml.")]));
  }

  showProbe() {
    const { probe, name } = this.curve;
    const key = JSON.stringify([name, probe]);
    if (key === this.probeKey) return;
    this.probeKey = key;
    this.probe.replaceChildren(...(probe ? probeNodes(probe) : [el("p", { class: "note" }, "prorl probe was not used before this run.")]));
  }

  showEvaluations() {
    const key = JSON.stringify(this.data.evaluations);
    if (key === this.evaluationKey) return;
    this.evaluationKey = key;
    this.evaluated.replaceChildren(...evaluationNodes(this.data.evaluations));
  }
}

function factsOf(stage) {
  const { before, after, before_se: from, after_se: to, prompts } = stage.heldout;
  const error = (value) => (value === null ? "" : ` ± ${value.toFixed(3)}`);
  const heldout = before === null || after === null ? "–" : `${before.toFixed(3)}${error(from)} → ${after.toFixed(3)}${error(to)}`;
  const state = stage.finished ? "finished" : stage.failed ? "failed" : stage.stopped ? "stopped" : stage.step ? "not finished" : "no step yet";
  const changes = Object.entries(stage.changes).map(([key, change]) => `${key}: ${change}`).join("\n");
  return [{ text: stage.name, head: true }, stage.max_steps ? `${stage.step} of ${stage.max_steps}` : stage.step, stage.starts > 1 ? `${state}, ${stage.starts} starts` : state, heldout, numeric(prompts ?? "–"),
    numeric(stage.tokens ? stage.tokens.toLocaleString("en") : "–"), numeric(duration(stage.seconds)), clock(stage.began).replace(/:\d\d UTC/, ""), stage.from || "–", { text: changes || "–", wrap: Boolean(changes) }];
}

// --- new data ---------------------------------------------------------------------------------------------------------

class Live {
  constructor(report, address) {
    this.report = report;
    this.address = address;
    this.text = document.getElementById("live-text");
    this.pause = document.getElementById("pause");
    document.getElementById("live").hidden = false;
    this.pause.addEventListener("click", () => {
      const paused = this.pause.getAttribute("aria-pressed") !== "true";
      this.pause.setAttribute("aria-pressed", String(paused));
      this.say(paused ? "Live, paused." : "Live.");
      if (!paused) this.look();
    });
    document.addEventListener("visibilitychange", () => this.look());
    this.say("Live.");
    setInterval(() => this.look(), REFRESH_MS);
  }

  say(text) {
    if (this.text.textContent !== text) this.text.textContent = text;
  }

  async look() {
    if (this.busy || document.hidden || this.pause.getAttribute("aria-pressed") === "true") return;
    this.busy = true;
    try {
      const answer = await fetch(this.address, { headers: this.tag ? { "If-None-Match": this.tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        const data = await answer.json();
        this.tag = answer.headers.get("ETag");
        this.report.update(data);
        const done = data.curves.every((curve) => curve.stages.every((stage) => stage.finished));
        this.say(done ? "Live: all runs are finished." : `Live: step ${data.curves.map((curve) => curve.steps).join(", ")}.`);
      } else if (answer.status !== 304) this.say(`Live: the server replies ${answer.status}; the page shows data of ${clock(this.report.data.made)}.`);
    } catch {
      this.say(`The server does not reply; the page shows data of ${clock(this.report.data.made)}.`);
    } finally {
      this.busy = false;
    }
  }
}

/** Draws charts in pieces, so that the page answers meanwhile; marks when the first and when all are there. */
function drawAll() {
  const done = Chart.drawSome(document.documentElement.dataset.ready ? 20 : 60);
  document.documentElement.dataset.ready = done ? "yes" : "first";
  if (!done) setTimeout(drawAll);
}

const report = new Report();
const first = JSON.parse(document.getElementById("data").textContent);
report.update(first);
if (first.live) new Live(report, first.live);

function redraw() {
  for (const chart of Chart.all) Chart.waiting.add(chart);
  drawAll();
}

window.addEventListener("beforeprint", () => Chart.drawSome(Infinity));
for (const media of ["print", "(prefers-color-scheme: dark)"]) window.matchMedia(media).addEventListener("change", () => { redraw(); Chart.drawSome(Infinity); });
let widthBefore = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === widthBefore) return;
  widthBefore = window.innerWidth;
  redraw();
});
