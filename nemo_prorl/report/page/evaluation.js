// Tables and pass@k curves of prorl evaluate.
function score(value, digits = 1) {
  if (!value) return "–";
  return `${(100 * value.mean).toFixed(digits)}${value.se === null ? "" : ` ± ${(100 * value.se).toFixed(digits)}`}`;
}

/** The difference from a base with its interval, in percent. */
function gain(value) {
  if (!value) return "–";
  const signed = (number) => `${number > 0 ? "+" : ""}${(100 * number).toFixed(1)}`;
  return value.low === null || value.high === null ? signed(value.difference) : `${signed(value.difference)} [${signed(value.low)}, ${signed(value.high)}]`;
}

function evaluationNodes(evaluations) {
  const judged = evaluations.filter((one) => one.rows);
  const nodes = judged.map((one) => evaluationTable(one));
  for (const { name, comparison } of evaluations) if (comparison) nodes.push(comparisonTable(name, comparison));
  const titles = [...new Set(judged.flatMap((one) => one.rows.filter((row) => !row.is_mean).map((row) => row.title)))];
  const given = titles.map((title) => ({ title, models: judged.map((one) => ({ name: one.name, row: one.rows.find((row) => row.title === title && !row.is_mean) })).filter((one) => one.row).map((one) => ({ name: one.name, "pass@k": one.row["pass@k"] })) }));
  const compared = evaluations.flatMap((one) => (one.comparison ? one.comparison.curves : []));
  const charts = (compared.length ? compared : given).filter((one) => one.models.some((model) => Object.keys(model["pass@k"]).length > 1)).map(passChart);
  if (charts.length) nodes.push(el("h3", {}, "pass@k"), el("p", { class: "note" }, "The share of prompts solved at least once in k tries: a curve that starts higher and ends at the same height finds the same solutions more reliably; one that ends higher finds new solutions."), el("div", { class: "grid" }, charts));
  return nodes;
}

function comparisonTable(name, comparison) {
  const heads = ["benchmark", "model", ...["prompts", "pass@1", "mean reward", "pass@k", "k", "gained", "lost", "base needs k"].map(numeric), "reading"];
  const rows = comparison.rows.map((row) => [{ text: `${row.title}${row.out_of_distribution ? " (out of distribution)" : ""}`, head: true }, row.model, numeric(pretty(row.prompts, 6)), numeric(gain(row["pass@1"])),
    numeric(gain(row.reward)), numeric(gain(row.largest)), numeric(row.k ?? "–"), numeric(pretty(row.gained, 6)), numeric(pretty(row.lost, 6)), numeric(row.base_k ?? "–"), { text: row.reading, wrap: true }]);
  const level = comparison.level ? `${Math.round(100 * comparison.level)} % ` : "";
  return el("div", {}, el("h3", {}, visible(`${name}: against ${comparison.base}`)), table(`Differences in percent, with ${level}paired bootstrap intervals over prompts`, heads, rows),
    comparison.skipped.length ? el("p", { class: "note" }, visible(`Not in all evaluations, left out: ${comparison.skipped.join(", ")}.`)) : "");
}

function evaluationTable(one) {
  const largest = Math.max(1, ...one.rows.flatMap((row) => Object.keys(row["pass@k"]).map(Number)));
  const heads = ["benchmark", ...["prompts", "samples", "pass@1, %", "mean reward, %", ...(largest > 1 ? [`pass@${largest}, %`] : []), "tokens", "cut off", "no form", "unjudged"].map(numeric)];
  const ordered = [...one.rows.filter((row) => !row.out_of_distribution), ...one.rows.filter((row) => row.out_of_distribution)];
  const rows = ordered.map((row) => [{ text: `${row.title}${row.out_of_distribution && !row.is_mean ? " (out of distribution)" : ""}`, head: true },
    numeric(pretty(row.prompts, 6)), numeric(pretty(row.samples, 6)), numeric(score(row["pass@1"])), numeric(score(row.reward)),
    ...(largest > 1 ? [numeric(score(row["pass@k"][largest]))] : []), numeric(row.tokens ? pretty(row.tokens.mean, 4) : "–"), numeric(percent(row.truncated)), numeric(percent(row.without_form)), numeric(pretty(row.unjudged, 6))]);
  return el("div", {}, el("h3", {}, visible(one.name)), el("p", {}, visible(`Model: ${one.model}.`), one.complete ? "" : el("span", { class: "alarm" }, " Not complete: samples or verdicts are missing.")),
    table("± is one standard error over prompts", heads, rows));
}

/** A benchmark's chart, a curve a model. */
function passChart({ title, models }) {
  const chart = new Chart({ id: `pass-${Chart.all.length}`, title, unit: "pass@k, share of prompts", share: true });
  const series = models.map((model) => {
    const passes = model["pass@k"];
    const ks = Object.keys(passes).map(Number).sort((a, b) => a - b);
    const of = (part) => ks.map((k) => part(passes[k]));
    const known = ks.every((k) => passes[k].se !== null);
    return { name: model.name, x: ks.map(Math.log2), m: of((v) => v.mean), lo: known ? of((v) => v.mean - v.se) : undefined, hi: known ? of((v) => v.mean + v.se) : undefined };
  });
  chart.update({ series, marks: [], bucket: 0, band: "Band: one standard error each way, over prompts.", xName: "k (logarithmic)", steps: (x) => String(Math.round(2 ** x)) });
  return chart.node;
}
