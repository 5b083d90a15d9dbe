"""The fields of a message: declarations of what travels, from which everything else about traffic derives.

A method declares fields; it never touches bytes. A field takes its payload from a sender's tensors, puts it into a
receiver's, writes and reads it as bytes, and says how long it is. Payloads are tensors; a `Selection` where only some links
are named; a `Short` where values travel in fewer bits.
"""

from __future__ import annotations

from fedrts.wire.fields.coded import arms_size, changes_size, read_arms, write_arms
from fedrts.wire.fields.contract import (
    RESIDUAL,
    FeedsBack,
    Field,
    Frame,
    Message,
    OwnValues,
    Payload,
    Selection,
    Short,
    SideBySide,
    Steps,
    carried,
    changed,
)
from fedrts.wire.fields.indices import Indices
from fedrts.wire.fields.largest import Largest
from fedrts.wire.fields.maps import Masks, Signs
from fedrts.wire.fields.missed import Missed
from fedrts.wire.fields.own_mask import OnOwnMask
from fedrts.wire.fields.values import Values

__all__ = [
    "RESIDUAL",
    "FeedsBack",
    "Field",
    "Frame",
    "Indices",
    "Largest",
    "Masks",
    "Message",
    "Missed",
    "OnOwnMask",
    "OwnValues",
    "Payload",
    "Selection",
    "Short",
    "SideBySide",
    "Signs",
    "Steps",
    "Values",
    "arms_size",
    "carried",
    "changed",
    "changes_size",
    "read_arms",
    "write_arms",
]
