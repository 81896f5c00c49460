class VgpuError(Exception):
    """A mistake the user can correct; its text says how."""
