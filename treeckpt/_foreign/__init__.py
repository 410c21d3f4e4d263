"""Files of other programs, read in place: torch.save, PyTorch DCP, safetensors, hfai, Paddle.

It imports `_arrays`, `_io`, `_core` and `errors`; never `_loading`. A reader for each format (`*_read`) returns the
tree with its arrays left in the files (`files`); nothing that a file holds is executed (`pickle_reader`). Start with
`foreign_checkpoint`: it has such files read as a checkpoint of ours, by an index that is made of them
(`foreign_index`). The room `convert` writes them anew.
"""
