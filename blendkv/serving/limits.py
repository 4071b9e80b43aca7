"""What a gateway lets its clients do, in bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Limits of one gateway; all are positive.

    Attributes:
        slots: transfers that are sent at a time.
        piece_bytes: after so many bytes of a transfer somebody else may be next.
        hold_seconds: a client that does not take its piece so soon gives its slot back, and goes on without.
        stall_seconds: a client that takes less than `stall_bytes` in so long is cut off.
        stall_bytes: see there.
        head_seconds: for the line and the headers of a request.
        head_bytes: of the line and the headers of a request.
        idle_seconds: that a connection stays without a request.
        least_rate: bytes a second that a body must come with, after `head_seconds`.
        entry_bytes: of the largest entry that may be put.
        upload_bytes: of all bodies that are being received, together.
        connections: at a time.
        waiting: transfers of one client that may wait for a slot.
    """

    slots: int = 16
    piece_bytes: int = MIB
    hold_seconds: float = 1.0
    stall_seconds: float = 20.0
    stall_bytes: int = 16 << 10
    head_seconds: float = 10.0
    head_bytes: int = 32 << 10
    idle_seconds: float = 30.0
    least_rate: float = 64 << 10
    entry_bytes: int = 1 << 30
    upload_bytes: int = 2 << 30
    connections: int = 1024
    waiting: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name}={getattr(self, field.name)}: give a positive number")

    def body_seconds(self, size: int) -> float:
        """Seconds in which a body of so many bytes must have come."""
        return self.head_seconds + size / self.least_rate
