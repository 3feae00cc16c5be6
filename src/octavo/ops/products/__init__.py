"""The bilinear operations: for each the axes of its operands and its two transposes."""
