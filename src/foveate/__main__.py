"""`python -m foveate` is the `foveate` command."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the `foveate` command, or say what to install for it."""
    try:
        from foveate.apps import cli
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    cli.main()


if __name__ == "__main__":
    main()
