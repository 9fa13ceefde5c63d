"""`actor`: the trained model, its engine and its objective."""

from __future__ import annotations

from dataclasses import dataclass

from pekoe.pipeline.config.fields import setting
from pekoe.pipeline.config.optimizer import OptimizerConfig


@dataclass
class MicroBatchConfig:
    """How a batch is cut; AReaL's `mb_spec`."""

    max_tokens_per_mb: int = setting(8192, "most tokens in a micro-batch; no sequence may be longer", minimum=1)
    max_sequences_per_mb: int | None = setting(None, "most sequences in a micro-batch", minimum=1)
    granularity: int = setting(1, "sequences that stay together (2 for pairs)", minimum=1)


@dataclass
class NormConfig:
    """Normalisation of rewards or advantages: `(x - mean) / (std + eps)`."""

    mean_level: str | None = setting("group", "over what the mean is taken", choices=("batch", "group", None))
    std_level: str | None = setting(
        "group", "over what the std is taken; null divides by 1", choices=("batch", "group", None)
    )
    mean_leave1out: bool = setting(False, "leave the row itself out of its mean")
    std_unbiased: bool = setting(True, "Bessel's correction")
    eps: float = setting(1e-5, "added to the std", above=0)


@dataclass
class RejectionConfig:
    """What happens to tokens whose behaviour policy is far from the proximal one (decoupled objective)."""

    level: str = setting("token", "unit that is judged", choices=("token", "sequence"))
    action: str = setting("mask", "mask removes from the numerator, clamp bounds the weight", choices=("mask", "clamp"))
    metric: str = setting("ratio", "what is measured", choices=("ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"))
    agg: str = setting("mean", "how a sequence's tokens are aggregated", choices=("mean", "sum", "max"))
    upper: float | None = setting(5.0, "inclusive upper bound")
    lower: float | None = setting(None, "inclusive lower bound")


@dataclass
class FsdpConfig:
    """Options of the `fsdp` engine."""

    offload_params: bool = setting(False, "keep parameters and optimiser state in host memory between uses")
    attention: str = setting(
        "auto",
        "packed attention: auto takes flash-attn's varlen kernel on CUDA, else per-sequence SDPA",
        choices=("auto", "sdpa", "flash"),
    )


@dataclass
class ModelConfig:
    """A model on the trainer ranks."""

    path: str = setting("", "model folder (Hugging Face format)")
    dtype: str = setting(
        "bfloat16", "compute dtype; master weights are float32", choices=("float32", "float64", "bfloat16")
    )
    gradient_checkpointing: bool = setting(False, "recompute activations in backward")
    disable_dropout: bool = setting(True, "set every dropout to 0")
    optimizer: OptimizerConfig = setting(OptimizerConfig, "optimiser and schedule")
    fsdp: FsdpConfig = setting(FsdpConfig, "options of the fsdp engine")


@dataclass
class ActorConfig(ModelConfig):
    """The policy: model, trainer and PPO-family objective; AReaL's names."""

    backend: str = setting(
        "", "trainer part of the allocation, e.g. fsdp:d4; composes `allocation` when that is absent"
    )
    mb_spec: MicroBatchConfig = setting(MicroBatchConfig, "micro-batches")
    enable_tree_training: bool = setting(
        False, "prefix sharing: compute the samples of a prompt once over the tokens with which they begin alike"
    )
    objective: str = setting("ppo", "token losses of the policy: ppo (clipped ratio), sapo, cispo, or module:function")
    eps_clip: float | None = setting(0.2, "lower ratio clip; null = no clip", above=0)
    eps_clip_higher: float | None = setting(None, "upper ratio clip; null = eps_clip", above=0)
    c_clip: float | None = setting(None, "dual clip for negative advantages; > 1", above=1)
    sapo_tau_pos: float = setting(1.0, "temperature of SAPO's gate where the advantage is positive", above=0)
    sapo_tau_neg: float = setting(1.05, "temperature of SAPO's gate elsewhere", above=0)
    loss_aggregation: str = setting(
        "token_mean", "how token losses become one", choices=("token_mean", "sequence_mean", "constant")
    )
    importance_sampling_level: str = setting("token", "ratio per token or per sequence", choices=("token", "sequence"))
    use_decoupled_loss: bool = setting(True, "ratio against the proximal policy, weighted by proximal / behaviour")
    prox_logp_method: str = setting(
        "recompute", "how proximal log-probs are found", choices=("recompute", "loglinear", "reuse", "metrics")
    )
    rejection_sampling: RejectionConfig | None = setting(
        RejectionConfig, "bounds on the behaviour weight; null = unbounded"
    )
    m2_threshold: float | None = setting(
        None, "M2PO: bound on the second moment of proximal / behaviour log-ratios; null = none", above=0
    )
    ppo_n_minibatches: int = setting(1, "minibatches of a step, each an optimiser update", minimum=1)
    ppo_epochs: int = setting(1, "passes of a step over its minibatches", minimum=1)
    entropy_coef: float = setting(0.0, "weight of the entropy bonus", minimum=0)
    kl_ctl: float = setting(0.0, "weight of the KL reward against `ref`, per token; > 0 needs a ref section", minimum=0)
    kl_estimator: str = setting("k1", "estimator of the KL reward", choices=("k1", "k2", "k3"))
    kl_loss_coef: float = setting(0.0, "weight of the KL in the loss against `ref`; > 0 needs a ref section", minimum=0)
    kl_loss_estimator: str = setting("k3", "estimator of the KL in the loss", choices=("k2", "k3"))
    overlong_reward_penalty: bool = setting(False, "lower the reward of completions near the length limit (DAPO)")
    overlong_tokens: int = setting(
        0, "tokens before gconfig.max_new_tokens over which the penalty grows; 0 = a fifth of them (DAPO)", minimum=0
    )
    overlong_penalty_factor: float = setting(1.0, "largest overlong penalty", above=0)
    reward_scaling: float = setting(1.0, "factor on rewards (after the bias)")
    reward_bias: float = setting(0.0, "added to rewards")
    reward_clip: float = setting(20.0, "largest |reward| after bias and scaling", above=0)
    reward_norm: NormConfig | None = setting(NormConfig, "reward normalisation; null = none")
    adv_norm: NormConfig | None = setting(None, "advantage normalisation over tokens; null = none")
    advantage_estimator: str = setting(
        "gae", "from token rewards to advantages: gae (without a critic: discounted returns), or module:function"
    )
    gae_unit: str = setting("token", "timestep of the estimator", choices=("token", "turn"))
    discount: float = setting(1.0, "gamma, per timestep", minimum=0, maximum=1)
    gae_lambda: float = setting(1.0, "lambda, per timestep", minimum=0, maximum=1)
    gae_lambda_by_length: str | None = setting(
        None, "lambda from the number L of timesteps: vapo = max(0, 1 - 1 / (alpha L)), relative = q^(1/(L-1)); null = "
        "gae_lambda", choices=("vapo", "relative", None)
    )  # fmt: skip
    gae_lambda_alpha: float = setting(0.05, "alpha of `vapo`", above=0)
    gae_lambda_q: float = setting(
        0.5, "q of `relative`: weight of the last timestep at the first", minimum=0, maximum=1
    )
    mask_truncated: bool = setting(False, "leave truncated sequences out of statistics, loss and denominators")
    weight_update_mode: str = setting("collective", "how weights travel to engines", choices=("collective", "disk"))
