"""Runs a program under an address-space limit: `python -I -S _limited.py BYTES PROGRAM ARGS...`.

A program of its own, because setting a limit between fork and exec of a threaded parent can
deadlock. It replaces itself, so the process id stays that of the program.
"""

import os
import resource
import sys

if __name__ == "__main__":
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the argv is the launch's own
    except OSError as error:
        print(f"sweeper: cannot start {sys.argv[2]}: {error}", file=sys.stderr)
        sys.exit(127)
