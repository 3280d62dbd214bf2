"""Composes π0.5's prompts with the state's bins on the device, without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.plugins.vla.prompts import StatePrompts


def state_bins(state: Tensor) -> Tensor:
    """The bin of each entry of a normalised state, float64 [...]: 0..255 within −1..1, −1 below, 255 above.

    The 256 edges are −1, −1 + 1/128, ...; an entry on an edge is in the bin above.
    """
    edges = torch.arange(256, dtype=torch.float64, device=state.device) / 128.0 - 1.0
    return torch.bucketize(state.double().contiguous(), edges, right=True) - 1


class StatePrompt(nn.Module):
    """Prompts by task and state. A prompt longer than L is cut, as in the release."""

    heads: Tensor
    head_present: Tensor
    numbers: Tensor
    number_present: Tensor
    tail: Tensor

    def __init__(self, prompts: StatePrompts) -> None:
        super().__init__()
        self.length, self.entries, self.whole = prompts.length, prompts.entries, prompts.whole
        self.known: dict[tuple[int, ...], list[int]] = {}
        tables = {
            "heads": prompts.heads.ids,
            "head_present": prompts.heads.present,
            "numbers": prompts.numbers.ids,
            "number_present": prompts.numbers.present,
        }
        for name, array in tables.items():
            dtype = torch.bool if name.endswith("present") else torch.int64
            self.register_buffer(name, torch.tensor(array.tolist(), dtype=dtype), persistent=False)
        self.register_buffer("tail", torch.tensor(prompts.tail, dtype=torch.int64), persistent=False)

    def forward(self, tasks: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """tasks int64 [B], state normalised float64 [B,D] -> ids int64 [B,L], present bool [B,L]."""
        bins = state_bins(functional.pad(state, (0, self.entries - state.shape[1])))
        if self.whole is not None:
            return self._encoded(tasks, bins)
        rows = len(tasks)
        ids = torch.cat((self.heads[tasks], self.numbers[bins + 1].flatten(1), self.tail.expand(rows, -1)), dim=1)
        there = self.tail.new_ones((rows, len(self.tail)), dtype=torch.bool)
        there = torch.cat((self.head_present[tasks], self.number_present[bins + 1].flatten(1), there), dim=1)
        place = (there.cumsum(1) - 1).clamp(max=self.length)
        place = torch.where(there, place, self.length)  # what does not exist or fit goes to a place beyond the end
        packed = ids.new_zeros(rows, self.length + 1).scatter_(1, place, ids)
        used = there.sum(1, keepdim=True)
        present = torch.arange(self.length, device=ids.device).unsqueeze(0) < used
        return packed[:, : self.length] * present, present

    def _encoded(self, tasks: Tensor, bins: Tensor) -> tuple[Tensor, Tensor]:
        """Whole prompts, encoded on the CPU; each is kept."""
        assert self.whole is not None
        ids = torch.zeros(len(tasks), self.length, dtype=torch.int64)
        used = torch.zeros(len(tasks), 1, dtype=torch.int64)
        for row, key in enumerate(torch.cat((tasks.unsqueeze(1), bins), dim=1).tolist()):
            found = self.known.get(tuple(key))
            if found is None:
                if len(self.known) >= _MOST_KNOWN:
                    self.known.clear()
                found = self.known[tuple(key)] = self.whole(key[0], key[1:])[: self.length]
            ids[row, : len(found)] = torch.tensor(found)
            used[row] = len(found)
        ids, used = ids.to(tasks.device), used.to(tasks.device)
        return ids, torch.arange(self.length, device=tasks.device).unsqueeze(0) < used


#: Prompts that are kept, for tokenizers whose prompts are not composed.
_MOST_KNOWN = 65536
