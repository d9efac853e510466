// Which charts there are, and which metrics each shows.  Keys are those of docs/reference/formats.md.
const OVERVIEW = [
  { id: "validation", title: "Validation", unit: "mean reward, held-out prompts", share: true, validations: true },
  { id: "benchmarks", title: "Benchmarks", unit: "pass@k", share: true, benchmarks: true, help: "Checkpoints that prorl watch evaluated. Band: one standard error each way, over prompts." },
  { id: "reward", title: "Raw reward by task", unit: "0 to 1", share: true, family: "reward", all: "reward/all", help: "All judged responses, those of dropped groups too." },
  { id: "kl", title: "KL to the reference policy", unit: "nats per token", keys: [["kl", "KL"]], help: "Before the step's updates; 0 right after a hard reset." },
  { id: "entropy", title: "Entropy", unit: "nats per token", keys: [["entropy", "entropy"]], help: "Entropy of the policy at the rollout temperature." },
  { id: "length", title: "Response length", unit: "tokens", keys: [["rollout/response_tokens", "mean length"]] },
];

const REWARDS = [
  { id: "shaped", title: "Shaped reward by task", unit: "reward", family: "reward_shaped", all: "reward/shaped", help: "Only responses trained on; not comparable with the raw reward if groups are dropped." },
  { id: "shaping", title: "What shaping changed", unit: "reward", family: "shaping" },
];

const SIGNAL = [
  { id: "kept", title: "Keep rate by task", unit: "share of groups", share: true, family: "keep_rate", all: "keep_rate/all", help: "Groups that carry a signal and are trained on." },
  { id: "groups", title: "What became of the groups", unit: "share of groups", share: true, keys: [["keep_rate/all", "kept"], ["solved/all", "all right"], ["unsolved/all", "all wrong"], ["tied/all", "tied"]], help: "All right is too easy, all wrong too hard: neither has a signal." },
  { id: "solved", title: "All right by task", unit: "share of groups", share: true, family: "solved", all: "solved/all" },
  { id: "unsolved", title: "All wrong by task", unit: "share of groups", share: true, family: "unsolved", all: "unsolved/all" },
  { id: "drawn", title: "Prompts drawn and groups used", unit: "a step", keys: [["rollout/drawn", "drawn"], ["rollout/groups", "trained on"], ["rollout/carried", "taken over"], ["rollout/surplus", "left over"], ["rollout/stale", "too old"]] },
  { id: "masked", title: "Responses without a verdict", unit: "responses", keys: [["rollout/masked", "infrastructure failed"]], help: "Masked in their groups, never counted as 0." },
];

const LENGTH = [
  { id: "tokens", title: "Response length by task", unit: "tokens", family: "response_tokens", all: "rollout/response_tokens" },
  { id: "truncated", title: "Cut off by task", unit: "share of responses", share: true, family: "truncated", all: "rollout/truncated", help: "Responses without a stop token." },
  { id: "repetition", title: "Repetition by task", unit: "share of n-grams", share: true, family: "repetition", all: "rollout/repetition", help: "0 to 5 % in ordinary text, near 1 in a loop." },
];

const TIME = [
  { id: "phases", title: "Time of a step by phase", unit: "s", phases: true, area: true },
  { id: "rewards-hidden", title: "Rollout: engine and rewards", unit: "s", keys: [["time/rollout/engine_s", "engine works"], ["time/rollout/reward_open_s", "a reward is open"], ["time/rollout/reward_wait_s", "only rewards wait"]], help: "The last one is the time that rewards add to a step: rewards are open, and nothing is generated or computed." },
  { id: "speed", title: "Generated tokens", unit: "tokens/s of the rollout", keys: [["time/rollout/tokens_per_s", "tokens/s"]] },
  { id: "step-speed", title: "Trained tokens", unit: "tokens/s of the step and device", keys: [["time/step/tokens_per_s_per_device", "tokens/s"]], help: "Prompts and responses that the updates train on, by the whole step." },
  { id: "mfu", title: "Share of the peak in updates (MFU)", unit: "share", share: true, keys: [["time/updates/mfu", "MFU"]], help: "Model FLOPs without recomputation, by the card's dense bf16 peak. Only for H100 SXM and H200." },
  { id: "generated", title: "Generated tokens a step", unit: "tokens", keys: [["rollout/generated_tokens", "tokens"]], help: "Dropped groups included." },
  { id: "memory", title: "Memory of the largest process", unit: "GB", keys: [["system/rank_gb", "trainer rank"], ["system/engine_gb", "engine"], ["system/rewards_gb", "reward server"]], help: "Host memory, with the processes that it started. GPU memory is not included." },
  { id: "free", title: "Memory left, and disk used", unit: "GB", keys: [["system/free_gb", "free on the fullest node"], ["system/run_dir_gb", "run directory"]] },
  { id: "kv-cache", title: "KV cache used at most", unit: "share of the cache", share: true, keys: [["system/engine_kv_cache_peak", "fullest engine"]], help: "At 100 %, responses wait for room or are computed again." },
  { id: "preemptions", title: "Responses computed again", unit: "a step", keys: [["time/rollout/preemptions", "all engines"]], help: "They lost their part of a full KV cache to other responses." },
];

const STABILITY = [
  { id: "gap", title: "Gap between engine and trainer, mean", unit: "nats", keys: [["engine_gap/mean_abs", "present weights"], ["stale_gap/mean_abs", "older weights"], ["correction/mean_abs", "all responses"]], help: "Difference of a token's log-probability." },
  { id: "gap-max", title: "Gap between engine and trainer, maximum", unit: "nats", keys: [["engine_gap/max_abs", "present weights"], ["engine_gap/p999", "99.9th percentile"], ["stale_gap/max_abs", "older weights"], ["correction/max_abs", "all responses"]] },
  { id: "gap-place", title: "Gap between engine and trainer, by quarter of the response", unit: "nats", keys: [1, 2, 3, 4].map((k) => [`engine_gap/mean_abs_quarter${k}`, `quarter ${k}`]) },
  { id: "correction", title: "Rollout correction", unit: "share of tokens", share: true, keys: [["correction/fraction_capped", "capped"], ["correction/fraction_masked", "masked"]] },
  { id: "clipped", title: "Clipped", unit: "share of tokens", share: true, keys: [["policy/clipped_high", "upper bound"], ["policy/clipped_low", "lower bound"], ["policy/dual_clipped", "dual clip"]], help: "Tokens without gradient because of the clip bound." },
  { id: "gradient", title: "Gradient norm before clipping", unit: "no unit", keys: [["policy/grad_norm", "mean of updates"], ["policy/max_grad_norm", "greatest"]] },
  { id: "ratio", title: "Ratio of new to old policy", unit: "a token", free: true, keys: [["policy/max_ratio", "greatest"], ["policy/ratio", "mean"], ["policy/min_ratio", "least"]] },
  { id: "moved", title: "Change of the policy by the updates", unit: "nats per token", keys: [["policy/approx_kl", "KL to the old policy"]] },
  { id: "loss", title: "Loss and surrogate", unit: "reward", free: true, keys: [["policy/loss", "loss"], ["policy/surrogate", "surrogate"]] },
  { id: "lr", title: "Learning rate", unit: "no unit", keys: [["policy/lr", "learning rate"]] },
  { id: "kl-task", title: "KL by task", unit: "nats per token", family: "kl", all: "kl" },
  { id: "entropy-task", title: "Entropy by task", unit: "nats per token", family: "entropy", all: "entropy" },
];

const COMPARED = [
  { id: "c-validation", title: "Validation, all prompts", unit: "mean reward", share: true, validation: "all" },
  { id: "c-reward", title: "Raw reward", unit: "0 to 1", share: true, key: "reward/all" },
  { id: "c-kl", title: "KL to the reference policy", unit: "nats per token", key: "kl" },
  { id: "c-entropy", title: "Entropy", unit: "nats per token", key: "entropy" },
  { id: "c-length", title: "Response length", unit: "tokens", key: "rollout/response_tokens" },
  { id: "c-keep", title: "Keep rate", unit: "share of groups", share: true, key: "keep_rate/all" },
  { id: "c-truncated", title: "Cut off", unit: "share of responses", share: true, key: "rollout/truncated" },
  { id: "c-step", title: "Time of a step", unit: "s", key: "time/step" },
];

/** The panels of one curve, without those that it has no values for. */
function updatePanels(panels, curve) {
  for (const { chart, spec } of panels) updatePanel(chart, spec, curve);
  for (const grid of new Set(panels.map(({ chart }) => chart.node.parentElement))) {
    grid.hidden = [...grid.children].every((node) => node.hidden);
  }
}

/** One metric of a curve as a chart draws it; null where the run has no such number. */
function seriesOf(curve, key, name, wide = false) {
  const metric = curve.metrics[key];
  if (!metric) return null;
  const own = metric.x ? { x: metric.x } : { x: curve.x, x0: curve.x0, x1: curve.x1 };
  return { name, wide, m: metric.m, lo: metric.lo, hi: metric.hi, stats: metric.stats, ...own };
}

function validationOf(curve, source, name, wide = false) {
  const found = curve.validations[source];
  return found ? { name, wide, ...found } : null;
}

function bandText(bucket) {
  return bucket > 1 ? `Each point is the mean of up to ${bucket} steps, and the band is their range.` : "";
}

/** The series of a panel for one curve. */
function panelSeries(spec, curve) {
  if (spec.validations) {
    const names = Object.keys(curve.validations).filter((name) => name !== "all");
    return [...names.map((name) => validationOf(curve, name, name)), validationOf(curve, "all", "all", true)];
  }
  if (spec.benchmarks) return Object.entries(curve.benchmarks).map(([name, found]) => ({ name, wide: false, ...found }));
  if (spec.phases) return curve.phases.names.filter((name) => curve.metrics[`time/${name}`]?.stats.count).map((name) => dense(curve, `time/${name}`, name));
  if (spec.keys) return spec.keys.map(([key, name]) => seriesOf(curve, key, name));
  const prefix = `${spec.family}/`;
  const tasks = Object.keys(curve.metrics).filter((key) => key.startsWith(prefix) && !["reward/all", "reward/shaped"].includes(key) && key !== spec.all);
  const found = tasks.map((key) => seriesOf(curve, key, key.slice(prefix.length)));
  return spec.all ? [...found, seriesOf(curve, spec.all, "all", true)] : found;
}

/** A metric on the curve's whole grid, 0 where it is absent: phases are stacked. */
function dense(curve, key, name) {
  const series = seriesOf(curve, key, name);
  const grid = { x: curve.x, x0: curve.x0, x1: curve.x1, lo: undefined, hi: undefined };
  if (series.x === curve.x) return { ...series, ...grid };
  const sums = curve.x.map(() => 0);
  series.x.forEach((x, k) => {
    const at = curve.x.findIndex((_, i) => x <= (curve.x1 || curve.x)[i]);
    if (at >= 0) sums[at] += series.m[k];
  });
  const steps = curve.x.map((_, i) => (curve.x1 ? curve.x1[i] - curve.x0[i] + 1 : 1));
  return { ...series, ...grid, m: sums.map((sum, i) => sum / steps[i]) };
}

function updatePanel(chart, spec, curve) {
  const series = panelSeries(spec, curve).filter(Boolean);
  const band = spec.validations ? "Band: one standard error each way, over prompts." : bandText(curve.bucket);
  chart.node.hidden = !series.length;
  chart.update({ series, marks: curve.marks, bucket: curve.bucket, band });
}

function updateCompared(chart, spec, curves) {
  const series = curves.map((curve) => (spec.validation ? validationOf(curve, spec.validation, curve.name) : seriesOf(curve, spec.key, curve.name))).filter(Boolean);
  const bucket = Math.max(...curves.map((curve) => curve.bucket));
  const resets = curves.flatMap((curve) => (curves.length <= 3 ? curve.marks.filter((mark) => mark.kind === "reset") : []));
  chart.update({ series, marks: resets, bucket, band: spec.validation ? "Band: one standard error each way, over prompts." : bandText(bucket) });
}
