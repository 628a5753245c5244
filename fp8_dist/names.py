"""Names of modules and parameters."""

# Path segments that wrappers add and ``state_dict`` keys leave out.
_WRAPPER_SEGMENTS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")


def without_wrappers(fqn: str) -> str:
    """The name of a module or a parameter in the keys of ``state_dict()``."""
    return ".".join(s for s in fqn.split(".") if s not in _WRAPPER_SEGMENTS)


def is_part(name: str, fqn: str) -> bool:
    """Whether ``fqn`` contains the parts of ``name`` one after the other."""
    return f".{name}." in f".{fqn}."
