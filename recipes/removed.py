"""Keys that recipes once had, each with what to write instead. One line a key: an old recipe is easy to mend."""

REMOVED: dict[str, str] = {
    "train.schedule": "remove it: after the warm-up the learning rate falls as a cosine",
    "train.weight_decay": "remove it: heads train without weight decay",
    "train.ema_decay": "remove it: the newest weights are measured and exported",
    "train.unroll_weights": "write train.unroll_decay, the weight of each depth relative to the one before",
    "train.depth_weights": "write train.unroll_decay, the weight of each depth relative to the one before",
    "train.text_weight": "remove it: the head's paper gives the weight of the cross-entropy to the text",
    "train.confidence_weight": "remove it: the loss of a confidence head has weight 1",
    "train.keep_checkpoints": "remove it: training keeps the two newest checkpoints",
    "train.eval_every": "write train.checkpoint_every: every checkpoint is measured",
    "train.export": "remove it: the newest weights are exported",
    "train.log_every": "remove it: metrics are logged every 10 steps",
    "log.project": "set the variable WANDB_PROJECT, or remove it for the project headstart",
}
