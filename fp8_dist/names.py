"""Names of modules and parameters."""

# Path segments that wrappers add and ``state_dict`` keys leave out.
_WRAPPER_SEGMENTS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")


def without_wrappers(fqn: str) -> str:
    """Return the name that a module or parameter has in the keys of ``state_dict()``."""
    return ".".join(s for s in fqn.split(".") if s not in _WRAPPER_SEGMENTS)


def is_part(name: str, fqn: str) -> bool:
    """Whether the path segments of ``name`` occur in ``fqn``, one after the other."""
    return f".{name}." in f".{fqn}."
