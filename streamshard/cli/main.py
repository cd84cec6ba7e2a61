"""``streamshard COMMAND``: a file for each command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from streamshard.cli import order, state
from streamshard.errors import StreamshardError


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 for a difference that was asked for, 2 for what cannot be done."""
    parser = argparse.ArgumentParser(prog="streamshard", description="Look at datasets and at the states of runs.")
    commands = parser.add_subparsers(title="commands", required=True)
    for command in (order, state):
        command.add_to(commands)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except StreamshardError as error:
        print(f"streamshard: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, head say, has seen enough
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
