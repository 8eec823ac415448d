"""Where a command's errors become one line and an exit code. The only place that catches them."""

from __future__ import annotations

import errno
import traceback
from typing import Any

import typer
from typer.core import TyperCommand

from beaconscope.errors import BeaconScopeError, UsageError

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130


class Command(TyperCommand):
    """A command that answers what the user can mend with one line on stderr; ``--verbose`` adds the traceback.

    Anything else that is raised is a fault of BeaconScope and keeps its traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command; exit code 2 for options that cannot hold together, 1 for any other mendable problem.

        130 is that of Ctrl-C.
        """
        try:
            return super().invoke(ctx)
        except BeaconScopeError as error:
            code = WRONG_USAGE if isinstance(error, UsageError) else FAILED
            _say(error, str(error), verbose=ctx.params.get("verbose", False))
        except OSError as error:
            # A broken pipe is typer's to handle; without a file name the system's words alone would not help.
            if error.errno == errno.EPIPE or error.filename is None:
                raise
            code = FAILED
            _say(error, f"{error.filename}: {error.strerror}", verbose=ctx.params.get("verbose", False))
        except KeyboardInterrupt as interrupt:
            # Ctrl-C says nothing, unless something was left that the user should know of.
            if not interrupt.args:
                raise
            code = INTERRUPTED
            _say(interrupt, str(interrupt), verbose=ctx.params.get("verbose", False))
        raise typer.Exit(code)


def _say(error: BaseException, line: str, *, verbose: bool) -> None:
    if verbose:
        traceback.print_exception(error)
    typer.echo("error: " + " ".join(line.split()), err=True)
