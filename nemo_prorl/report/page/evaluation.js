// Tables and pass@k curves of prorl evaluate.
function score(value, digits = 1) {
  if (!value) return "–";
  return `${(100 * value.mean).toFixed(digits)}${value.se === null ? "" : ` ± ${(100 * value.se).toFixed(digits)}`}`;
}

function evaluationNodes(evaluations) {
  const nodes = evaluations.filter((one) => one.rows).map((one) => evaluationTable(one));
  const curves = passCurves(evaluations.filter((one) => one.rows));
  if (curves.length) nodes.push(el("h3", {}, "pass@k"), el("div", { class: "grid" }, curves));
  return nodes;
}

function evaluationTable(one) {
  const largest = Math.max(1, ...one.rows.flatMap((row) => Object.keys(row["pass@k"]).map(Number)));
  const heads = ["benchmark", ...["prompts", "samples", "pass@1, %", "mean reward, %", ...(largest > 1 ? [`pass@${largest}, %`] : []), "tokens", "cut off", "unjudged"].map(numeric)];
  const ordered = [...one.rows.filter((row) => !row.outside), ...one.rows.filter((row) => row.outside)];
  const rows = ordered.map((row) => [{ text: `${row.title}${row.outside && !row.is_mean ? " (out of distribution)" : ""}`, head: true },
    numeric(pretty(row.prompts, 6)), numeric(pretty(row.samples, 6)), numeric(score(row["pass@1"])), numeric(score(row.reward)),
    ...(largest > 1 ? [numeric(score(row["pass@k"][largest]))] : []), numeric(row.tokens ? pretty(row.tokens.mean, 4) : "–"), numeric(percent(row.truncated)), numeric(pretty(row.unjudged, 6))]);
  return el("div", {}, el("h3", {}, visible(one.name)), el("p", {}, visible(`Model: ${one.model}.`), one.complete ? "" : el("span", { class: "alarm" }, " Not complete: samples or verdicts are missing.")),
    table("± is one standard error over prompts", heads, rows));
}

/** One chart a benchmark, a curve a model, where there is more than one k. */
function passCurves(evaluations) {
  const names = [...new Set(evaluations.flatMap((one) => one.rows.filter((row) => !row.is_mean && Object.keys(row["pass@k"]).length > 1).map((row) => row.name)))];
  return names.map((name) => {
    const rows = evaluations.map((one) => [one.name, one.rows.find((row) => row.name === name && !row.is_mean)]).filter(([, row]) => row);
    const chart = new Chart({ id: `pass-${Chart.all.length}`, title: rows[0][1].title, unit: "pass@k, share of prompts", share: true });
    const series = rows.map(([model, row]) => {
      const ks = Object.keys(row["pass@k"]).map(Number).sort((a, b) => a - b);
      const of = (part) => ks.map((k) => part(row["pass@k"][k]));
      const known = ks.every((k) => row["pass@k"][k].se !== null);
      return { name: model, x: ks.map(Math.log2), m: of((v) => v.mean), lo: known ? of((v) => v.mean - v.se) : undefined, hi: known ? of((v) => v.mean + v.se) : undefined };
    });
    setTimeout(() => chart.update({ series, marks: [], bucket: 0, band: "Band: one standard error each way, over prompts.", xName: "k (logarithmic)", steps: (x) => String(Math.round(2 ** x)) }));
    return chart.node;
  });
}
