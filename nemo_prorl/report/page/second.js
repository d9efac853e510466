// Second verdicts: how often they differ from those of training, and the responses on which they do.
function secondNodes({ rows, items }) {
  const heads = ["task", ...["disagreements", "second verdicts", "rate", "95 % interval"].map(numeric)];
  const cells = rows.map(({ task, judged, errors: disagreed, low, high }) => [{ text: task, head: true }, numeric(disagreed), numeric(judged), numeric(percent(disagreed / judged, 2)), numeric(`${percent(low, 2)} to ${percent(high, 2)}`)]);
  return [table("A sample of the responses, judged again", heads, cells), ...items.map(disagreement)];
}

function disagreement({ step, id, task, second_task: other, prompt, response, truth, first, second }) {
  const part = (title, text) => (text ? [el("h3", {}, title), el("pre", { tabindex: 0, role: "region", "aria-label": title }, visible(text))] : []);
  const tags = [`step ${step}`, task, `training: ${result(first)}`, `${other}: ${result(second)}`];
  const verdicts = [["training", first], [other, second]].map(([name, verdict]) => [{ text: name, head: true }, { text: [result(verdict), verdict.detail].filter(Boolean).join(": "), wrap: true }]);
  return el("details", { class: "sample" },
    el("summary", {}, tags.map((tag) => el("span", { class: "tag" }, visible(tag))), el("span", { class: "dim" }, visible(id))),
    ...part("Prompt", prompt), ...part("Response", response || "(empty)"), table("Verdicts", ["verifier", "verdict"], verdicts), ...part("Truth", truth));
}
