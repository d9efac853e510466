// The arms of prorl fork: their table, and the difference from the first arm at each validation.
const FORK = { id: "fork", title: "Difference from the first arm", unit: "mean reward, held-out prompts", help: "An arm's score minus that of the first arm, prompt by prompt.", empty: "No validation that both arms have." };

function forkTable({ heads, rows }) {
  const cells = rows.map(([arm, ...values]) => [{ text: arm, head: true }, ...values.map((text) => numeric(text || "–"))]);
  return table("Arms, as prorl fork prints them", [heads[0], ...heads.slice(1).map(numeric)], cells);
}

/** The lines of the chart; that of the first arm, which is 0, has no band. */
function forkLines({ series }) {
  return series.map((one, k) => (k ? one : { ...one, lo: undefined, hi: undefined }));
}
