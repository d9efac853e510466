# %% [markdown]
# # A run in a notebook
#
# Editors open this file as a notebook (each `# %%` begins a cell); `jupytext --to ipynb` converts it, and
# `python examples/read_run.py RUN` runs it.

# %%
import sys

import nemo_prorl

run = nemo_prorl.load_run(sys.argv[1] if len(sys.argv) > 1 else "runs/laptop")
print(f"{run.path}: {len(run.metrics)} steps, finished: {run.finished}")

# %% Metrics are a table with the step as its index.
frame = run.frame()
print(frame[["reward/all", "kl", "entropy"]].describe().round(3))

# %% Curves (needs matplotlib, which the train environment has).
axes = frame[["reward/all", "kl", "entropy"]].plot(subplots=True, figsize=(8, 8))
axes[0].figure.savefig(run.path / "three-curves.png")

# %% Validations, resets and alarms are in the journal.
for event in run.journal:
    if event["event"] == "validation":
        print(f"step {event['step']:4d}  held-out mean reward {event['all']['mean']:.3f} +- {event['all']['se']:.3f}")

# %% The worst and the best stored response of the last step.
samples = sorted(run.samples(run.steps[-1]), key=lambda sample: sample["verdict"]["score"] or 0.0)
for sample in (samples[0], samples[-1]):
    print(f"score {sample['verdict']['score']}: {sample['prompt']!r} -> {sample['response']!r}")
