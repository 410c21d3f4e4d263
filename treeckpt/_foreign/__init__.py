"""Files of other programs, read in place: torch.save, PyTorch DCP, safetensors, hfai, Paddle.

It imports `_arrays`, `_io`, `_core` and `errors`; never `_loading`. A reader for each format (`*_read`) returns the
tree with its arrays left in the files (`files`); nothing that a file holds is executed (`pickle_reader`). Start with
`foreign_checkpoint`: it is the checkpoint that holds this tree, for a conversion and, by an index that is made of it,
for all else that reads checkpoints. The room `convert` writes them anew.
"""
