"""Settings of learning: how much, in which order, with which loss; and what surrounds the RL phase."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyrhythm.config.base import Count, Flag, Fraction, NotNegative, Positive, Refusal, Section, Seed, Whole

Beta = Annotated[float, Field(ge=0, lt=1, strict=True)]


class OptimizerSettings(Section):
    """AdamW with a linear decay of the learning rate over all updates."""

    lr: Positive = 3e-4
    """Learning rate at the first update."""
    lr_final_fraction: Fraction = 1.0
    """Learning rate at the last update as a fraction of `lr`; 1 for a constant one."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Adam's decay rates of the first and second moments."""
    grad_clip: Positive | None = 1.0
    """Largest global gradient norm; null for no clipping."""


class TrainingSettings(Section):
    """How much is trained and how an update is cut. batch_size = mini_batch_samples x require_batches."""

    versions: Whole
    """Weight publications to train in all; 0 trains nothing and evaluates only."""
    mini_batch_samples: Count
    """Samples that the trainer takes from the buffer at a time."""
    require_batches: Count = 1
    """Such mini-batches that make one update."""
    streaming: Flag = True
    """An update begins as soon as its samples are there; false: the first one waits for all samples of its version."""
    order: Literal["arrival", "ticket"] = "arrival"
    """Which samples an update takes first: by the time they finished, or by ticket number (reproducible)."""
    epochs: Count = 1
    """Passes over an update's samples."""
    minibatch_steps: Whole = 0
    """Chunk steps per optimizer step; 0 for the whole update at once."""
    micro_batch_steps: Whole = 0
    """Chunk steps per forward and backward pass (memory only, same gradient); 0 for the whole mini-batch."""
    critic_warmup_updates: Whole = 0
    """First updates without the policy loss; a trunk that the value shares undetached still moves."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer."""

    @property
    def batch_size(self) -> int:
        """Samples per update."""
        return self.mini_batch_samples * self.require_batches

    @model_validator(mode="after")
    def _micro_in_mini(self) -> TrainingSettings:
        if self.minibatch_steps and self.micro_batch_steps > self.minibatch_steps:
            raise Refusal(
                "micro_batch_steps",
                self.micro_batch_steps,
                f"larger than the mini-batch of {self.minibatch_steps} steps that it divides; lower it, or use 0",
            )
        return self


class LossSettings(Section):
    """The policy loss: PPO, or decoupled PPO for samples of older versions."""

    type: Literal["ppo", "decoupled_ppo"] = "ppo"
    """ppo clips against the old policy; decoupled_ppo clips against the proximal one and weights by its distance."""
    clip_low: Annotated[float, Field(gt=0, lt=1, strict=True)] = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: Positive = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1, strict=True)] | None = None
    """For negative advantages the loss is bounded by this multiple of the advantage; null for no bound."""
    behave_weight_threshold: Positive | None = None
    """Entries whose weight (proximal over behaviour) is larger are masked; null for none (decoupled_ppo only)."""

    @model_validator(mode="after")
    def _threshold_has_a_weight(self) -> LossSettings:
        if self.type == "ppo" and self.behave_weight_threshold is not None:
            raise Refusal(
                "behave_weight_threshold",
                self.behave_weight_threshold,
                "ppo has no behaviour weight; use loss.type decoupled_ppo, or null here",
            )
        return self


class ValueSettings(Section):
    """The value loss."""

    coef: NotNegative = 0.5
    """Its weight in the total loss."""
    clip: Positive | None = None
    """Largest move of the value from the behaviour policy's; null for no clipping."""
    huber: Positive | None = None
    """Huber threshold; null for squared error."""


class AlgorithmSettings(Section):
    """From trajectories to a loss."""

    gamma: Fraction = 0.99
    """Discount per chunk step (reward_level chunk) or per primitive action (action)."""
    gae_lambda: Fraction = 0.95
    """Decay of the generalised advantage estimate."""
    advantage: Literal["gae", "grpo"] = "gae"
    """gae: against the value function; grpo: an episode's return against those of its group (groups.size > 1)."""
    normalize_advantage: Flag = True
    """Whiten advantages over the valid entries of an update; false leaves grpo's as they are by group."""
    bootstrap: Literal["standard", "always"] = "standard"
    """Add the final observation's value where an episode was truncated (standard), or at every end (always)."""
    loss: LossSettings = LossSettings()
    """The policy loss."""
    proximal: Literal["behavior", "recompute"] = "behavior"
    """The policy that the ratio is clipped against: the sample's own, or the one at the start of the update."""
    logprob_level: Literal["token", "action", "chunk"] = "token"
    """What one ratio covers: an action entry, a primitive action, or a whole chunk."""
    reward_level: Literal["chunk", "action"] = "chunk"
    """What one reward covers: a whole chunk, or a primitive action (needs a policy with a value per action)."""
    aggregation: Literal["token_mean", "trajectory_mean"] = "token_mean"
    """The mean of the loss: over valid entries, or over trajectories of equal weight."""
    value: ValueSettings = ValueSettings()
    """The value loss."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""

    @model_validator(mode="after")
    def _levels_and_proximal_agree(self) -> AlgorithmSettings:
        if self.loss.type == "decoupled_ppo" and self.proximal == "behavior":
            raise Refusal(
                "proximal",
                "behavior",
                "decoupled_ppo needs a proximal policy of its own; set algorithm.proximal recompute",
            )
        if self.reward_level == "action" and self.logprob_level == "chunk":
            raise Refusal(
                "reward_level", "action", "a ratio per chunk cannot carry advantages per action; use reward_level chunk"
            )
        return self


class EvaluationSettings(Section):
    """Episodes on held-out seeds, before and after training."""

    episodes: Whole = 0
    """Episodes of each evaluation, dealt over the tasks; 0 for none."""
    seed: Seed = 1_000_000_000
    """Which held-out episodes: the i-th begins in a state that is a hash of (seed, i), in a domain of their own."""
    greedy: Flag = True
    """Evaluate the policy acting without noise."""
    sampled: Flag = False
    """Evaluate sampled actions too."""
    swapped: Flag = False
    """After training, show each task another's instruction too (greedily): a policy that listens then fails."""
    every: Whole = 0
    """Versions between two evaluations while training goes on; 0 for none."""
    every_episodes: Whole = 0
    """Episodes of each of those; 0: as many as before and after training."""
    weights: Literal["second_copy", "own_generator", "pause"] = "second_copy"
    """Who answers them: a second copy in the first generator, a generator of its own, or all, while training waits."""
    rows: Count = 8
    """Rows reserved for them, in a simulator of their own (not with pause)."""
    priority: Literal["turns", "first", "last"] = "turns"
    """Whose pass is next with second_copy: in turns, evaluation's first, or last (while no training batch is due)."""
    max_wait_s: NotNegative = 1.0
    """Seconds after which a request of an evaluation that is last goes before training's, so that it ends."""

    @model_validator(mode="after")
    def _some_way_to_act(self) -> EvaluationSettings:
        if self.episodes and not (self.greedy or self.sampled):
            raise Refusal("episodes", self.episodes, "neither greedy nor sampled is true; set one, or use 0 episodes")
        if self.every and not self.episodes_beside:
            raise Refusal("every", self.every, "it needs episodes; set every_episodes or episodes, or every to 0")
        if self.priority != "turns" and self.weights != "second_copy":
            why = f"with weights {self.weights} no generator serves both at a time; leave it out, or set second_copy"
            raise Refusal("priority", self.priority, why)
        if self.every and not (self.greedy or self.sampled):
            raise Refusal("every", self.every, "neither greedy nor sampled is true; set one, or every to 0")
        return self

    @property
    def episodes_beside(self) -> int:
        """Episodes of each evaluation during training."""
        return self.every_episodes or self.episodes

    @property
    def reserved_rows(self) -> int:
        """Rows that training does not get."""
        return self.rows if self.every and self.weights != "pause" else 0


class DemonstrationSettings(Section):
    """Episodes of the environment's scripted expert."""

    episodes_per_task: Count = 8
    """Episodes for each task."""
    noise_std: NotNegative = 0.0
    """Standard deviation of the noise on executed actions; the labels stay clean."""
    noise_every: Count = 2
    """Every n-th episode is noisy; 1 for all."""
    seed: Seed = 2_000_000_000
    """Which demonstrations: initial state and noise of each are a hash of (seed, task, number)."""


class SupervisedSettings(Section):
    """Supervised warm start on the demonstrations: AdamW with warm-up and cosine decay."""

    steps: Count = 90
    """Optimizer steps."""
    batch_size: Count = 64
    """Chunk steps per optimizer step."""
    lr: Positive = 2e-3
    """Highest learning rate."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay."""
    warmup_steps: Whole = 0
    """Steps of linear warm-up."""
    grad_clip: Positive | None = 1.0
    """Largest global gradient norm; null for no clipping."""

    @model_validator(mode="after")
    def _warmup_ends(self) -> SupervisedSettings:
        if self.warmup_steps >= self.steps:
            raise Refusal(
                "warmup_steps", self.warmup_steps, f"the warm-up does not end in {self.steps} steps; lower it"
            )
        return self
