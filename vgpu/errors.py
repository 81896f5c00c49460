class VgpuError(Exception):
    """A mistake the user can correct; its text says how."""


class IllegalAddress(RuntimeError):
    """Of a kernel that the host computes, as a card raises it."""

    def __init__(self) -> None:
        super().__init__("an illegal memory access was encountered")
