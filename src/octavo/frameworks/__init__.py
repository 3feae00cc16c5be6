"""How are models quantized? Flax and Equinox models, by the rules that functions are quantized by."""
