"""The exceptions a caller of P3 can tell apart.

Until a job runs, opening it fails with one of the types below. From then on every failure is one `P3Error` (defined
in the core, which the scheduler never loads), whose text names the node, the key and the round where they are known.
"""


class ConfigError(ValueError):
    """A setting is missing, malformed or out of range. The text names the variable, its value and what is allowed."""


class RendezvousError(RuntimeError):
    """The job never came together: a node is missing, superfluous or unreachable, or settings differ between nodes."""


class AuthenticationError(RendezvousError):
    """The other end of a connection did not prove that it knows the job's secret, or did not accept our proof."""


class ProtocolError(RuntimeError):
    """A peer sent something that the control protocol does not allow."""


class DisagreementError(RuntimeError):
    """Workers contradict each other about a key or an optimizer. The text names both workers and both values."""


class NotBuilt(ModuleNotFoundError):
    """The C++ core is not there for this Python. The text says where, and the command that builds it."""
