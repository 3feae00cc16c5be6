"""The bilinear operations as `Product`s: the axes of their operands and their two transposes."""
