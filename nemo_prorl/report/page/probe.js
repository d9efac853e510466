// The numbers and samples of prorl probe.
function probeNodes({ samples, rows, estimate, examples }) {
  const heads = ["source", ...["reward", "groups with a signal", "solved", `pass@${samples ?? "n"}`, "no answer in the form", "cut off", "tokens"].map(numeric), "what to change"];
  const cells = rows.map((row) => [{ text: row.source, head: true }, numeric(pretty(row.reward, 3)), ...["keep_rate", "solved", "pass_at_n", "without_form", "cut_off"].map((key) => numeric(percent(row[key], 0))),
    numeric(pretty(row.tokens, 3)), { text: row.advice, wrap: true }]);
  const { tokens_per_step: tokens, generation_s_per_step: seconds, tokens_per_s: rate } = estimate;
  const step = tokens === null ? "No group carries a signal, so no step would train." : `A step: about ${pretty(tokens, 3)} tokens, ${duration(seconds)} of generation at ${pretty(rate, 3)} tokens/s.`;
  return [table("Responses of the starting model, before the run", heads, cells), el("p", {}, step), ...examples.map(probeSample)];
}

function probeSample({ source, kind, score: reward, tokens, finished, text }) {
  const tags = [source, kind, reward === null ? "no verdict" : `score ${pretty(reward, 3)}`, `${pretty(tokens, 5)} tokens`, finished ? null : "cut off"].filter(Boolean);
  return el("details", { class: "sample" }, el("summary", {}, tags.map((tag) => el("span", { class: "tag" }, visible(tag)))), el("pre", { tabindex: 0, role: "region", "aria-label": "Response" }, visible(text || "(empty)")));
}
