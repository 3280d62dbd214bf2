"""Workers with tensors, for tests, importable by their processes; they need seconds to import torch."""

from __future__ import annotations

import numpy as np
import torch

from polyrhythm.plugins.workflow import Channel, Worker

#: Groups that have been closed, and what their workers had then; with `inline`.
CLOSED: list[tuple[str, float]] = []


class Tenant(Worker):
    """Has a module and an optimizer on its device, and does there what each test needs."""

    def __init__(self, size: int = 50_000) -> None:
        torch.manual_seed(self.rank)
        self.layer = torch.nn.Linear(size, 1).to(self.device)
        self.optimizer = torch.optim.Adam(self.layer.parameters())
        self.kept = {"list": [torch.arange(float(size), device=self.device)]}
        self.moved = [0, 0]

    def offload(self) -> int:
        self.moved[0] += 1
        return super().offload()

    def onload(self) -> None:
        self.moved[1] += 1
        super().onload()

    def state(self) -> float:
        """Of everything that it has."""
        state = self.optimizer.state.get(self.layer.weight, {})
        tensors = [*self.layer.parameters(), *state.values(), *self.kept["list"]]
        return sum(float(tensor.detach().double().sum()) for tensor in tensors)

    def moves(self) -> list[int]:
        return self.moved

    def close(self) -> None:
        CLOSED.append((self.group, self.state()))

    def step_away(self) -> tuple[int, int, float, float]:
        """Bytes freed by two `offload` in a row, and what there was before and is afterwards."""
        before = self.step()
        first, second = self.offload(), self.offload()
        self.onload()
        self.onload()
        return first, second, before, self.state()

    def step(self) -> float:
        self.optimizer.zero_grad()
        self.layer(self.kept["list"][0]).sum().backward()
        self.optimizer.step()
        return self.state()

    def alternate(self, own: Channel, other: Channel, rounds: int) -> bool:
        """Give and take in turn with another worker; whether every bit came back each time."""
        unchanged = True
        for number in range(rounds):
            self.step()
            before = self.state()
            other.put(number)
            unchanged &= own.get() == number and self.state() == before
        return unchanged

    def give(self, out: Channel, count: int, size: int) -> float:
        """Put tensors, with numbers beside them, and overwrite each once it is put."""
        total = 0.0
        for number in range(count):
            tensor = torch.full((size,), float(number + 1), device=self.device)
            out.put(
                {
                    "number": number,
                    "tensors": (tensor, torch.tensor([number], device=self.device)),
                    "array": np.full(3, number),
                }
            )
            total += float(tensor.sum())
            tensor.zero_()
        return total

    def take(self, items: Channel, count: int) -> float:
        total = 0.0
        for number in range(count):
            item = items.get()
            tensor, small = item["tensors"]
            assert (item["number"], int(small), item["array"].tolist()) == (number, number, [number] * 3)
            total += float(tensor.sum())
            tensor.add_(1)
        return total

    def send_on(self, size: int, rank: int, group: str | None = None) -> None:
        self.send(torch.ones(size, device=self.device), rank, group)

    def receive(self, rank: int, group: str | None = None) -> float:
        return float(self.recv(rank, group).sum())

    def spread(self, size: int) -> float:
        return float(self.broadcast(torch.ones(size, device=self.device) if self.rank == 0 else None).sum())
