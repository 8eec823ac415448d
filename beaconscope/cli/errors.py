"""Where a command's errors become one line and an exit code. The only place that catches them."""

from __future__ import annotations

import errno
import traceback
from typing import Any

import typer
from typer.core import TyperCommand

from beaconscope.cli.terminal import printable
from beaconscope.errors import BeaconScopeError, UsageError, no_memory
from beaconscope.files import os_reason, remedy

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130


class Command(TyperCommand):
    """A command that answers what the user can mend with one line on stderr; ``--verbose`` adds the traceback.

    Anything else that is raised is a fault of BeaconScope and keeps its traceback.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read options; what is wrong with a value is said without the name of the library's own error."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise

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
            # A broken pipe is typer's to handle; what is no matter of the system is a fault.
            if error.errno in (errno.EPIPE, None):
                raise
            code = FAILED
            where = "" if error.filename is None else f"{error.filename}: "
            _say(error, f"{where}{os_reason(error)}; {remedy(error)}", verbose=ctx.params.get("verbose", False))
        except (MemoryError, RuntimeError) as error:
            if not no_memory(error):
                raise
            code = FAILED
            line = "no memory is left; ask for less at a time, or free some"
            _say(error, line, verbose=ctx.params.get("verbose", False))
        except KeyboardInterrupt as interrupt:
            code = INTERRUPTED
            line = str(interrupt) or "stopped before it was done"
            _say(interrupt, line, verbose=ctx.params.get("verbose", False))
        raise typer.Exit(code)


def _say(error: BaseException, line: str, *, verbose: bool) -> None:
    if verbose:
        traceback.print_exception(error)
    # It may quote what stands in a file.
    typer.echo(f"error: {printable(line)}", err=True)
