"""Other libraries' objects in terms of treeckpt's public names; each module needs its library, and only when called.

`transformers`: load rules between the names of a model's module and those of its checkpoints on the hub.
`torchtitan`: the checkpoint manager of its trainer.
"""
