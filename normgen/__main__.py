"""The command `normgen`, and `python -m normgen`."""

import gc
import os
import sys


def main() -> int:
    """The command line. Most of a build's time are imports, so they are spared what they have no use for."""
    gc.disable()  # what is imported stays
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # to look for them takes longer than to load a spec
    from normgen.cli import main as command

    gc.freeze()
    gc.enable()
    return command()


if __name__ == "__main__":
    sys.exit(main())
