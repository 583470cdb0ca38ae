"""`python -m foveate` is the `foveate` command."""

from foveate.apps.cli import main

main()
