"""The modules of `qwix.contrib.kernels`: their matmuls by `octavo.dot_general`, on any platform."""
