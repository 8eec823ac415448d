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


class Command(TyperCommand):
    """A command that answers what the user can mend with one line on stderr; ``--verbose`` adds the traceback.

    Anything else that is raised is a fault of BeaconScope and keeps its traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command; exit code 2 for options that cannot hold together, 1 for any other mendable problem."""
        try:
            return super().invoke(ctx)
        except BeaconScopeError as error:
            line, code = str(error), WRONG_USAGE if isinstance(error, UsageError) else FAILED
        except OSError as error:
            if error.errno == errno.EPIPE or error.filename is None:
                raise
            line, code = f"{error.filename}: {error.strerror}", FAILED
        if ctx.params.get("verbose"):
            traceback.print_exc()
        typer.echo("error: " + " ".join(line.split()), err=True)
        raise typer.Exit(code)
