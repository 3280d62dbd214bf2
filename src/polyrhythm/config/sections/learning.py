"""Settings of training: updates, optimizer, evaluation, demonstrations and the supervised warm start."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyrhythm.config.base import Count, Flag, Fraction, NotNegative, Positive, Section, Seed, Whole

Text = Annotated[str, Field(min_length=1)]
Beta = Annotated[float, Field(ge=0, lt=1, strict=True)]


class ParameterGroup(Section):
    """Parameters with a learning rate or a weight decay of their own."""

    match: tuple[str, ...] = Field(min_length=1)
    """Name patterns, such as critic.* or network.*.mlp.*; the first group that matches a parameter has it."""
    lr: Positive | None = None
    """Learning rate at the first update; null for `training.optimizer.lr`."""
    weight_decay: NotNegative | None = None
    """Decoupled weight decay of its matrices; null for `training.optimizer.weight_decay`."""


class OptimizerSettings(Section):
    """AdamW with a linear decay of the learning rate over all updates, and a linear warm-up if asked for."""

    lr: Positive = 1e-3
    """Learning rate at the first update, or at the end of the warm-up but for the decay."""
    value_lr: Positive | None = None
    """Learning rate of the parameters that only the value uses: a last group for critic.*; null for `lr`."""
    groups: tuple[ParameterGroup, ...] = ()
    """Groups of parameters by name pattern, with their own learning rate and weight decay."""
    lr_final_fraction: Fraction = 1.0
    """Learning rates at the last update as a fraction of the first; 1 for constant rates."""
    warmup_updates: Whole = 0
    """First updates, in which learning rates rise linearly: Adam's first steps are large whatever the gradient."""
    warmup_steps: Whole = 0
    """The same by optimizer steps, of which a skipped one counts until its update ends; instead of `warmup_updates`."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Adam's decay rates of the first and second moments."""
    grad_clip: Positive | None = 1.0
    """Largest global gradient norm; null for no clipping."""
    offload: Flag = False
    """Keep the optimizer's moments in (pinned) host memory and move them piece by piece: less GPU memory, more time."""

    @model_validator(mode="after")
    def _one_warmup(self) -> OptimizerSettings:
        if self.warmup_steps and self.warmup_updates:
            why = f"warmup_updates = {self.warmup_updates} is a warm-up already; set one of them to 0"
            raise self.refusal("warmup_steps", why)
        return self


class TrainingSettings(Section):
    """How much is trained and how an update is divided. An update has batch_size = mini_batch_samples x require_batches
    samples; no optimizer step has samples of two of its mini-batches.

    Defaults are those by which small networks learn from random weights; a policy may declare others
    (`training_defaults`), and what a recipe sets is above both.
    """

    versions: Whole
    """Weight publications in total; 0 trains nothing and only evaluates."""
    mini_batch_samples: Count
    """Samples of a mini-batch: of one optimizer step, if `minibatch_steps` does not divide it further."""
    require_batches: Count = 1
    """Such mini-batches in an update, in the order of their samples; advantages and proximal policy are of all."""
    streaming: Flag = True
    """An update begins with its first samples or with its last (docs/freshness.md); false: with its version's last."""
    order: Literal["arrival", "ticket"] = "arrival"
    """Order in which updates take samples: by the time they finished, or by ticket number (reproducible)."""
    epochs: Count = 8
    """Passes over an update's samples."""
    minibatch_steps: Whole = 64
    """Chunk steps per optimizer step, drawn within a mini-batch of samples; 0 for all of these at once."""
    max_kl: Positive | None = 0.02
    """An update ends once its policy is this far, in nats, from a recomputed proximal one; null: never."""
    micro_batch_steps: Whole = 0
    """Chunk steps per forward and backward pass (memory only, same gradient); 0 for the whole mini-batch."""
    micro_batch_tokens: Whole = 0
    """For language models: most tokens of such a pass, prompts included; 0 for any number."""
    critic_warmup_updates: Whole = 0
    """Number of first updates without the policy loss; a trunk shared with an undetached value still changes."""
    on_nonfinite_gradient: Literal["halt", "skip"] = "halt"
    """A step whose gradient is NaN or infinite is skipped; then the run halts after its update, or continues (skip)."""
    max_skipped_steps: Count = 10
    """With skip: most optimizer steps in a row that may be skipped; the run halts after the update that exceeds it."""
    precomputed_mib: Whole = 4096
    """Most on the trainer's device for what a frozen part gives, lent by generators or computed once; 0 lends none."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer."""

    @property
    def batch_size(self) -> int:
        """Samples per update."""
        return self.mini_batch_samples * self.require_batches

    @property
    def step_samples(self) -> int:
        """Number of samples that an optimizer step is limited to; 0: the whole update."""
        return self.mini_batch_samples if self.require_batches > 1 else 0

    @model_validator(mode="after")
    def _micro_in_mini(self) -> TrainingSettings:
        if self.minibatch_steps and self.micro_batch_steps > self.minibatch_steps:
            raise self.refusal(
                "micro_batch_steps",
                f"larger than the mini-batch of {self.minibatch_steps} steps that it divides; lower it, or use 0",
            )
        return self


class EvaluationSettings(Section):
    """Episodes on held-out seeds, before and after training."""

    episodes: Whole = 0
    """Episodes of each evaluation, divided over the tasks; 0 for none."""
    seed: Seed = 1_000_000_000
    """Seed of the held-out episodes: the i-th begins in a state that is a hash of (seed, i), disjoint from training."""
    greedy: Flag = True
    """Evaluate the policy acting without noise."""
    sampled: Flag = False
    """Evaluate sampled actions too."""
    samples: Count = 1
    """Sampled episodes of each initial state, which differ in noise alone; above 1 for mean@samples and pass@k."""
    swapped: Flag = False
    """After training, also give each task another's instruction (greedy): a policy that follows it then fails."""
    conversations: Whole = 4
    """First episodes of each evaluation whose prompts, messages and replies are kept, if there are any; 0 for none."""
    every: Whole = 0
    """Versions between two evaluations during training; 0 for none."""
    every_episodes: Whole = 0
    """Episodes of an evaluation during training; 0: as many as before and after it."""
    weights: Literal["second_copy", "own_generator", "pause"] = "second_copy"
    """What serves them: a second copy in the first generator, an own generator, or all while training waits (pause)."""
    rows: Count = 8
    """Rows reserved for them, in a simulator of their own (not with pause)."""
    priority: Literal["turns", "first", "last"] = "turns"
    """Order of passes with second_copy: in turns, evaluation first, or last (while no training batch is due)."""
    max_wait_s: NotNegative = 1.0
    """With priority last: seconds after which an evaluation's request goes before training's, so that it ends."""
    hedge: Flag = False
    """Run copies of the last episodes, same seed and noise, on rows that would idle; the first to finish counts."""

    @model_validator(mode="after")
    def _some_way_to_act(self) -> EvaluationSettings:
        if self.episodes and not (self.greedy or self.sampled):
            raise self.refusal("episodes", "neither greedy nor sampled is true; set one, or use 0 episodes")
        if self.every and not self.episodes_beside:
            raise self.refusal("every", "it needs episodes; set every_episodes or episodes, or every to 0")
        if self.priority != "turns" and self.weights != "second_copy":
            why = f"with weights {self.weights} no generator serves both at a time; leave it out, or set second_copy"
            raise self.refusal("priority", why)
        if self.priority != "turns" and not self.every:
            why = "no evaluation runs during training; set evaluation.every, or leave it out"
            raise self.refusal("priority", why)
        if self.max_wait_s != EvaluationSettings.model_fields["max_wait_s"].default and self.priority != "last":
            raise self.refusal("max_wait_s", f"it is for priority last, not {self.priority}; leave it out")
        if self.samples > 1 and not self.sampled:
            raise self.refusal("samples", "it is for sampled actions; set sampled to true, or use 1")
        if self.every and not (self.greedy or self.sampled):
            raise self.refusal("every", "neither greedy nor sampled is true; set one, or every to 0")
        return self

    @property
    def episodes_beside(self) -> int:
        """Episodes of each evaluation during training."""
        return self.every_episodes or self.episodes

    @property
    def reserved_rows(self) -> int:
        """Number of rows that are reserved for evaluation."""
        return self.rows if self.every and self.weights != "pause" else 0


class DatasetSettings(Section):
    """A folder of demonstrations, and which of its episodes are imitated."""

    format: Text = "lerobot"
    """Its layout: lerobot is LeRobotDataset v3.0; plugins add others."""
    folder: Text
    """The dataset's folder, the one that has meta/info.json."""
    tasks: tuple[Text, ...] = ()
    """Names or instructions of the environment's tasks to imitate; empty for all that the dataset has."""
    only_success: Flag = False
    """Leave out episodes that did not succeed, by the dataset's next.success."""
    max_episodes: Whole = 0
    """Most episodes for each task, the first of the dataset; 0 for all."""
    every: Count = 1
    """Every n-th frame of an episode begins a chunk step to imitate."""
    keys: dict[str, str] = Field(default_factory=dict)
    """Key of the dataset for an array of the environment, where the names differ: {front: observation.images.top}."""


class DemonstrationSettings(Section):
    """Episodes of the environment's scripted expert, or of a dataset."""

    dataset: DatasetSettings | None = None
    """Episodes that were recorded before; null to record the expert's."""
    episodes_per_task: Count = 8
    """Episodes for each task."""
    noise_std: NotNegative = 0.0
    """Standard deviation of the noise on executed actions; the labels stay clean."""
    noise_every: Count = 2
    """Every n-th episode is noisy; 1 for all."""
    keep_failed: Flag = False
    """Imitate episodes that did not succeed too, of an expert that fails on purpose."""
    seed: Seed = 2_000_000_000
    """Seed of the demonstrations: initial state and noise of each are a hash of (seed, task, number)."""


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
            raise self.refusal(
                "warmup_steps", f"the warm-up does not end in steps = {self.steps}; lower it, or raise those"
            )
        return self
