"""Frameworks on treeckpt: a module for each, which imports its framework; importing this package imports none.

`transformers`: a Trainer, and load rules between the names of a model's module and those of its checkpoints on the hub.
`peft`: adapters without their base, and the files that PEFT loads.
`lightning`: a plugin and strategies for `Trainer` and `Fabric`.
`accelerate`: an `Accelerator`.
`ray`: saves and restores in the workers of Ray Train.
`torchtitan`: a checkpoint manager for its `Trainer`.
"""
