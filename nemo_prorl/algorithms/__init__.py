"""The mathematics of a training step: pure functions of tensors, and the few states that steps add up.

Imports torch and the standard library; of this package `config`, `errors`, `own_functions` and `schema`.
"paper" is "Scaling Up RL" (arXiv 2507.12507).

| formula | where | source |
|---|---|---|
| advantage, (R - mean) / std of a group | `advantages.group_norm` | paper eq. 2 |
| advantage, leave-one-out baseline | `advantages.leave_one_out` | RLOO, arXiv 2402.14740 |
| advantage, group mean and batch-wide std | `advantages.reinforce_pp_baseline` | arXiv 2501.03262 |
| advantage, difference to the mean | `advantages.mean_only` | Dr. GRPO, arXiv 2503.20783 |
| advantage, (R - mean) / mean | `advantages.maxrl` | arXiv 2602.02710 |
| ratio of new to old policy, per token | `objectives.token_ratio` | paper sec. 3.1 |
| clipped surrogate, two bounds | `objectives.clip` | paper eq. 1, 3 |
| dual clip | `objectives.clipped_surrogate` | arXiv 1912.09729 eq. 5 |
| other objectives of a token | `objectives.cispo`, `gspo`, `dppo` | arXiv 2506.13585, 2507.18071, 2602.04879 |
| KL to the reference: k1, k2, k3 | `losses.kl_estimate` | k3: paper eq. 5; k1, k2: Schulman 2020 |
| whole loss | `losses.grpo_loss` | paper eq. 4 |
| its global denominator | `losses.denominator_terms` | arXiv 2503.14476, 2503.20783; prompt: 2510.13786 |
| log-softmax(hidden W^T / T) at the target, entropy | `logprobs.chunked_logprobs` | paper sec. 5.1 (temperature) |
| trainer/engine importance weights | `correction.rollout_correction` | TIS, IcePop, sequence mask: see there |
| dynamic sampling | `dynamic_sampling.carries_signal`, `dynamic_sampling.DynamicSampler` | paper sec. 3.3 |
| missing eos, overlong and cosine shaping | `shaping` | paper sec. 4.2; DAPO eq. 13; arXiv 2502.03373 |
| adaptive entropy coefficient | `entropy` | paper sec. 5.4; arXiv 2505.22312 |
| when a hard reset is due | `reset_rules` (standard library only) | paper sec. 3.3.1, 4.2, 5.3; numbers are ours |
| clip fractions, gaps, lengths | `diagnostics` | - |

Shape suffixes, in every file: B responses of a (micro-)batch, T token positions, G groups, N samples per group,
V words (of this rank's shard), H hidden size.  In `logprobs`, where neither G nor B occurs, N is a number of tokens.

Diagnostics are dicts of 0-dimensional float64 tensors without gradient.  Their keys say how they are reduced over
micro-batches and ranks: `mean_*` and `fraction_*` by a mean weighted with the dict's own `tokens`, `max_*` and
`min_*` by maximum and minimum, all others by a sum.  `diagnostics.merge` merges dicts in this way.
"""
