"""`python -m foveate` is the `foveate` command."""

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the `foveate` command, or say what to install for it."""
    serves = sys.argv[1:2] == ["serve"] or sys.argv[1:3] == ["rag", "serve"]
    if serves and "OMP_WAIT_POLICY" not in os.environ:
        # idle threads that spin slow down a busy machine; they read their policy once, when torch is loaded
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})
    try:
        from foveate.apps import cli
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
