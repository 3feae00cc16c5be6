"""The trainer: a configuration, a step and a loop."""
