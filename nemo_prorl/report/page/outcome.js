// The outcome: held-out reward before and after, all prompts together in large, and by source.
const signed = (value) => `${value > 0 ? "+" : ""}${value.toFixed(3)}`;
const withError = (value, error) => (value === null ? "–" : `${value.toFixed(3)}${error === null ? "" : ` ± ${error.toFixed(3)}`}`);

function outcomeNodes({ outcome, forecast, metrics, steps, stages }) {
  const { scores, words, note, updated } = outcome;
  const nodes = stages.filter((stage) => stage.failed).map((stage) => el("p", { class: "alarm" }, "The run ", stages.length > 1 ? visible(`${stage.name} `) : "", visible(`failed ${stage.failed}`)));
  if (steps && !updated) nodes.push(el("p", { class: "alarm" }, "No update was made: the responses of every group had equal rewards, so no step had a gradient."));
  if (!scores.length) {
    const reward = metrics["reward/all"]?.stats;
    if (reward?.count) nodes.push(el("p", { class: "big" }, `${reward.first.toFixed(3)} → ${reward.last.toFixed(3)}`), el("p", {}, "Reward in training, first and last step."));
    nodes.push(el("p", { class: "note" }, "Fewer than two validations so far: no held-out reward before and after."));
    return nodes;
  }
  const [first, last] = outcome.steps;
  if (scores[0].name === "all" && scores[0].before !== null && scores[0].after !== null) {
    const { before, after, before_se: from, after_se: to, prompts } = scores[0];
    const error = from === null || to === null ? "" : ` ± ${Math.hypot(from, to).toFixed(3)}`;
    nodes.push(el("p", { class: "big" }, `${before.toFixed(3)} → ${after.toFixed(3)} `, el("span", { class: "change" }, `${signed(after - before)}${error}`)),
      el("p", {}, `Mean reward on ${pretty(prompts, 6)} held-out prompts, at step ${first} and step ${last}. ${words}`));
  }
  const rows = scores.map((row) => [{ text: row.name, head: true }, numeric(row.before === null || row.after === null ? "–" : signed(row.after - row.before)),
    numeric(withError(row.before, row.before_se)), numeric(withError(row.after, row.after_se)), numeric(pretty(row.prompts, 6))]);
  nodes.push(table("Held-out mean reward by source; ± is one standard error over prompts", ["source", ...["change", `step ${first}`, `step ${last}`, "prompts"].map(numeric)], rows));
  if (note) nodes.push(el("p", { class: "note" }, note));
  nodes.push(...forecast.map((text) => el("p", {}, text)));
  return nodes;
}
