"""Short programs to read from top to bottom; run one with `python -m octavo.examples.<name>`."""
