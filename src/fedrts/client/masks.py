"""The last masks, as the server and the clients remember them, so that a download carries only what is new."""

from __future__ import annotations

import torch

from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.wire import codec
from fedrts.wire.codec import Header
from fedrts.wire.errors import MaskMissingError
from fedrts.wire.packing import Reader

REMEMBERED = 8
"""Masks that either side keeps; a client with an older one gets the whole mask."""


class LastMasks(dict[bytes, Mask]):
    """The last masks by fingerprint, the newest last."""

    def keep(self, mask: Mask) -> list[bytes]:
        """Make a mask the newest; return the fingerprints of those dropped for it."""
        name = mask.fingerprint
        self[name] = self.pop(name) if name in self else Mask(mask.bits, mask.sizes)  # without the indices that it has cached
        forgotten = list(self)[:-REMEMBERED]
        for oldest in forgotten:
            del self[oldest]
        return forgotten

    def open(self, data: bytes, layout: Layout, device: torch.device | str = "cpu") -> tuple[Header, Mask, Reader]:
        """Return header, mask and field reader of a download that assumes one of these masks, or none; keep its mask.

        `MaskMissingError` where it counts on another: then the client asks for the whole.
        """
        wanted = codec.peek(data).mask
        likely = sorted(self, key=lambda name: name == wanted)
        for held in [*(self[name] for name in reversed(likely)), None]:
            try:
                header, mask, reader = codec.open_download(data, layout, held)
            except MaskMissingError:
                continue
            mask = mask.to(device)
            self.keep(mask)
            return header, mask, reader
        raise MaskMissingError("the mask that the message is on is not here: ask for the whole")
