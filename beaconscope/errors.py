"""The one error that BeaconScope raises for what a user can mend."""


class BeaconScopeError(Exception):
    """A problem that the user can mend; its text is one line: what is wrong, then what to do."""


class UsageError(BeaconScopeError):
    """Options that cannot hold together; the command line answers it with exit code 2."""
