"""Policy-gradient algorithms as three words: an advantage, an objective and a reduction, freely combined.

    advantage   rewards of one group [G]                      -> one number a sample [G]        (advantages.py, NumPy)
    objective   log-probs and advantages of tokens            -> one loss a token, un-reduced   (objectives.py, JAX)
    reduction   trained tokens of each sequence of a step [N] -> weight of each of its tokens   (reductions.py, NumPy)

    loss of a step = sum_i weight_i * sum_t loss_it

No family knows the others. The weights are computed once, over the whole step, before it is cut into micro-batches; so
the loss is a plain sum, and no micro-batch split and no packing can change it.

    published as                        advantage  objective        reduction
    REINFORCE (Williams, 1992)          reinforce  policy_gradient  sequence_mean_token_sum_norm, up to the norm
    RLOO (arXiv 2402.14740)             rloo       policy_gradient  sequence_mean_token_sum_norm, up to the norm
    GRPO (arXiv 2402.03300, eq. 3)      grpo       ppo_clip         sequence_mean_token_mean
    Dr. GRPO (arXiv 2503.20783)         dr_grpo    ppo_clip         sequence_mean_token_sum_norm
    DAPO's loss (arXiv 2503.14476)      grpo       ppo_clip         token_mean, clip_high 0.28
    CISPO (arXiv 2506.13585)            grpo       cispo            token_mean, clip_low >= 1

A sample whose advantage is 0 has no gradient under any objective. So a group has nothing to teach exactly when all its
advantages are 0; under `reinforce`, a group of equal rewards other than 0 does teach.

Left out on purpose: KL penalties and reference policies, critics and GAE, sequence-level ratios (GSPO), preference
losses. An entropy bonus is no member of these families: the trainer takes it off each token's loss.
"""

from jax_core.algorithms.advantages import ADVANTAGES, advantages_of
from jax_core.algorithms.objectives import OBJECTIVES, importance_ratio, is_clipped
from jax_core.algorithms.reductions import REDUCTIONS

__all__ = ["ADVANTAGES", "OBJECTIVES", "REDUCTIONS", "advantages_of", "importance_ratio", "is_clipped"]
