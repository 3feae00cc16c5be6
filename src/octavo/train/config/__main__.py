"""`python -m octavo.train.config`, in a clone of the repository: regenerate configs/base.yml and docs/config.md."""

from pathlib import Path

from octavo.train.config.files import CONFIGS
from octavo.train.config.text import base_yaml, with_tables

if __name__ == "__main__":
    (CONFIGS / "base.yml").write_text(base_yaml(), encoding="utf-8")
    page = Path("docs/config.md")
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
