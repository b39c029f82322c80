"""Every error this package raises for a caller's fault."""


class PenaltySchedError(Exception):
    """Root of the package's errors; each is also the built-in kind it stands for."""


class ConfigError(PenaltySchedError, ValueError):
    """A setting or an argument breaks its rule; the message states name, rule and value."""


class ModelFileError(PenaltySchedError, ValueError):
    """A saved model cannot be used; the message names the file and the field."""


class NotFittedError(PenaltySchedError, RuntimeError):
    """A prediction was asked of a model that has seen no step yet."""


class MissingDependencyError(PenaltySchedError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class ServerError(PenaltySchedError, RuntimeError):
    """A vLLM server did not start, or stopped answering; the message names its log."""
