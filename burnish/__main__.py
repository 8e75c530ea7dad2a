"""``python -m burnish`` is ``burnish``."""

from burnish.cli.main import run

run()
