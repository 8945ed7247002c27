"""Sizes in bytes: written by people, needed by an experiment, free on this machine."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

MIB = 2**20
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
# torch, a backend and its compiler; CUDA's context and libraries are larger.
_BASE = {"cpu": 1536 * MIB, "cuda": 6144 * MIB}
# What Dynamo's own frames hold beside the buffer, per exception that is pinned.
_PER_EXCEPTION = 2 * MIB


def size(text: str) -> int:
    """Parse `1500MB`, `2GiB` or a number of bytes. An argparse type.

    Raises:
        argparse.ArgumentTypeError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg]i?|)b?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 32MiB, 1500MB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def mib(number: float) -> str:
    return f"{number / MIB:,.0f} MiB"


def needed(exceptions: int, buffer: int, device: str, limit: int | None) -> int:
    """Bytes that one worker may use at most: every exception pinned, or the limit passed."""
    kind = "cpu" if device.startswith("cpu") else "cuda"
    each = _PER_EXCEPTION + (buffer if kind == "cpu" else 0)
    pinned = _BASE[kind] + exceptions * each
    # A worker serves on for a moment until it is stopped.
    return pinned if limit is None else min(pinned, max(limit, _BASE[kind]) + 8 * each)


def free() -> int:
    """Bytes that may still be used: the machine's, or its control group's if that has fewer."""
    import psutil  # of the extra: this module is imported to parse arguments

    room = _control_group_room(Path("/"))
    available = int(psutil.virtual_memory().available)
    return available if room is None else min(available, room)


def _control_group_room(root: Path) -> int | None:
    """Bytes left in the tightest control group (version 1 or 2) that holds this process.

    A container may see its own group at the mount's top, whatever its path says, so a directory
    that does not exist is passed over.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, usage, cache = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, cache = "memory", "total_inactive_file"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        top = root / "sys/fs/cgroup" / mount
        group = top / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory == top.parent:
                break
            try:
                most = (directory / limit).read_text().strip()
                used = int((directory / usage).read_text())
                stat = dict(
                    row.split() for row in (directory / "memory.stat").read_text().splitlines()
                )
            except OSError:
                continue
            if most != "max":
                rooms.append(int(most) - used + int(stat.get(cache, 0)))
    return min(rooms, default=None)
