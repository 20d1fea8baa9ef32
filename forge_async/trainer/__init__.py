"""The torchtitan trainer: model, packing, advantages, losses, checkpoints, and the actor around them."""
