// The sample browser: stored responses with their verdicts, by stage, task, step, score and words.
const PAGE = 20;
const SCORES = {
  any: ["any score", () => true],
  right: ["right (1)", (item) => item.score !== null && item.score >= 1 - 1e-9],
  partial: ["between 0 and 1", (item) => item.score !== null && item.score > 1e-9 && item.score < 1 - 1e-9],
  wrong: ["wrong (0)", (item) => item.score !== null && item.score <= 1e-9],
  none: ["no verdict", (item) => item.score === null],
};

class Samples {
  constructor() {
    const field = (name, control) => el("label", {}, name, control);
    this.stage = el("select");
    this.task = el("select");
    this.score = el("select");
    this.ended = el("select");
    this.from = el("input", { type: "number", min: 0, step: 1, size: 6 });
    this.to = el("input", { type: "number", min: 0, step: 1, size: 6 });
    this.words = el("input", { type: "search", size: 16 });
    options(this.score, Object.entries(SCORES).map(([key, [name]]) => [key, name]));
    options(this.ended, [["any", "ended or cut off"], ["yes", "ended by itself"], ["no", "cut off"]]);
    const clear = el("button", { type: "button", onclick: () => this.clear() }, "Clear");
    this.form = el("fieldset", {}, el("legend", {}, "Which responses"), field("Stage", this.stage), field("Task", this.task),
      field("From step", this.from), field("to step", this.to), field("Score", this.score), field("End", this.ended), field("Words", this.words), clear);
    for (const control of this.form.querySelectorAll("select, input")) control.addEventListener("input", () => { this.page = 0; this.show(); });
    this.count = el("p", { role: "status" });
    this.list = el("div");
    this.back = el("button", { type: "button", onclick: () => this.turn(-1) }, "Newer");
    this.next = el("button", { type: "button", onclick: () => this.turn(1) }, "Older");
    this.place = el("span");
    this.note = el("p", { class: "note" });
    this.nodes = [this.note, this.form, this.count, this.list, el("div", { class: "pager" }, this.back, this.place, this.next)];
    this.page = 0;
    this.data = { groups: [], items: [] };
    this.open = new Set();
  }

  update(curve) {
    this.data = curve.samples;
    const unique = (key) => [...new Set(this.data.groups.map((group) => group[key]))];
    options(this.stage, [["", "all"], ...unique("stage").map((name) => [name, name])]);
    options(this.task, [["", "all"], ...unique("task").sort().map((name) => [name, name])]);
    const { stored, read, left_out: left, items } = this.data;
    const summary = `${items.length.toLocaleString("en")} responses of ${read} of the ${stored} steps with stored responses; ${left.toLocaleString("en")} more of these steps are omitted. `;
    this.note.replaceChildren(...(stored === 0 ? ["The run stored no responses (", el("code", {}, "trainer.grpo.save_rollout_groups"), ")."]
      : [summary, el("code", {}, "prorl report --samples N"), " shows more, -1 all that fit."]));
    this.show();
  }

  clear() {
    for (const control of [this.stage, this.task, this.from, this.to, this.words]) control.value = "";
    this.score.value = "any";
    this.ended.value = "any";
    this.page = 0;
    this.show();
  }

  turn(by) {
    this.page += by;
    this.show();
    this.count.scrollIntoView({ block: "nearest" });
  }

  wanted() {
    const words = this.words.value.toLowerCase();
    const [from, to] = [this.from, this.to].map((input) => (input.value === "" ? null : Number(input.value)));
    return this.data.items.filter((item) => {
      const group = this.data.groups[item.g];
      return (!this.stage.value || group.stage === this.stage.value) && (!this.task.value || group.task === this.task.value)
        && (from === null || group.step >= from) && (to === null || group.step <= to)
        && SCORES[this.score.value || "any"][1](item)
        && (this.ended.value === "any" || item.finished === (this.ended.value === "yes"))
        && (!words || [item.response, group.prompt, group.id, item.detail].some((text) => text.toLowerCase().includes(words)));
    });
  }

  show() {
    const found = this.wanted();
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    this.page = Math.min(Math.max(0, this.page), pages - 1);
    const said = found.length === this.data.items.length ? `${found.length} responses` : `${found.length} of ${this.data.items.length} responses`;
    if (this.count.textContent !== said) this.count.textContent = said;
    this.place.textContent = `page ${this.page + 1} of ${pages}`;
    this.back.disabled = this.page === 0;
    this.next.disabled = this.page >= pages - 1;
    const shown = found.slice(this.page * PAGE, (this.page + 1) * PAGE);
    const key = JSON.stringify([shown, shown.map((item) => this.data.groups[item.g])]);
    if (key === this.key) return; // nothing that is read moves
    this.key = key;
    this.list.replaceChildren(...shown.map((item) => this.sample(item)));
  }

  sample(item) {
    const group = this.data.groups[item.g];
    const key = JSON.stringify([group.stage, group.own_step, group.id, item.response]);
    const result = item.score === null ? `no verdict${item.failure ? ` (${item.failure})` : ""}` : `score ${pretty(item.score, 3)}`;
    const tags = [`step ${group.step}`, group.task, result, item.finished === false ? "cut off" : null, group.trained === false ? "group dropped" : null].filter(Boolean);
    const box = el("details", { class: "sample", open: this.open.has(key) },
      el("summary", {}, tags.map((tag) => el("span", { class: "tag" }, visible(tag))), el("span", { class: "dim" }, visible(group.id))));
    const fill = () => { if (box.children.length === 1) box.append(...this.inside(item, group)); };
    if (box.open) fill();
    box.addEventListener("toggle", () => {
      if (box.open) { this.open.add(key); fill(); } else this.open.delete(key);
    });
    return box;
  }

  inside(item, group) {
    const part = (title, text) => (text ? [el("h3", {}, title), el("pre", { tabindex: 0, role: "region", "aria-label": title }, visible(text))] : []);
    const facts = [
      ["Verdict", [result(item), item.detail].filter(Boolean).join(": ")],
      ["Reward in training", item.shaped === null ? `not known (${item.shaping})` : `${pretty(item.shaped, 3)} (shaping: ${item.shaping})`],
      ["Group", `${group.n} ${group.n === 1 ? "response" : "responses"} stored to this prompt, mean score ${pretty(group.mean, 3)}`],
      ["Where", `${group.stage}, step ${group.own_step}${group.source ? `, source ${group.source}` : ""}${item.version === null ? "" : `, weights of after step ${item.version}`}`],
      ["Length", `${item.characters.toLocaleString("en")} characters, ${item.finished === false ? "cut off" : item.finished ? "ended by itself" : "end unknown"}`],
    ];
    if (item.parts) facts.splice(1, 0, ["Parts", item.parts]);
    const rows = facts.map(([name, text]) => [{ text: name, head: true }, { text, wrap: true }]);
    return [...part("Prompt", group.prompt), ...part("Response", item.response || "(empty)"), table("What was made of it", ["what", "value"], rows), ...part("Truth", group.truth)];
  }
}

function result(item) {
  if (item.score === null) return item.failure ? `none, ${item.failure}` : "none";
  const right = item.correct === null ? "" : item.correct ? ", correct" : ", not correct";
  return `score ${pretty(item.score, 3)}${right}${item.failure ? `, ${item.failure}` : ""}`;
}
