"""What halfbyte raises. Every message is one sentence: what was wrong, what came, what is allowed, what to do."""


class HalfbyteError(Exception):
    """The base of everything that halfbyte raises on purpose."""


class FormatError(HalfbyteError, ValueError):
    """A format that does not exist or cannot hold the tensor at hand."""


class ArgumentError(HalfbyteError, ValueError):
    """A tensor or setting of the wrong shape, dtype, device or value."""


class CheckpointError(HalfbyteError):
    """A model on disk that is missing, damaged, hostile or of another kind, or that could not be written."""


class UnsupportedError(HalfbyteError, NotImplementedError):
    """A sound request that this machine or this version has no kernel for."""


class KernelError(HalfbyteError, RuntimeError):
    """A kernel that could not be compiled, cached or linked."""
