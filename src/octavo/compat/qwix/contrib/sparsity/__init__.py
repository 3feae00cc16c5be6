"""The modules of `qwix.contrib.sparsity`."""
