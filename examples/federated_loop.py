"""Federated averaging under torchrun: eight steps alone, then one exchange of what they changed.

    torchrun --nproc-per-node 2 examples/federated_loop.py

Each rank has classes of its own, so none could learn all of them alone.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset

import isgq
from task import accuracy, network, points

LOCAL_STEPS = 8


def main() -> None:
    """Train as one of torchrun's processes."""
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train, test = points()
    labels = train.tensors[1]
    mine = (labels % world_size == rank).nonzero().flatten().tolist()
    loader = DataLoader(Subset(train, mine), batch_size=32, shuffle=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    # Only a twentieth of the changes is sent in a round; error_feedback keeps the rest for later ones.
    rounds = isgq.Federated(model, "error_feedback(top_k:k=0.05)")
    start = rounds.exchange.sent
    for _ in range(6):
        for step, (x, y) in enumerate(loader, start=1):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % LOCAL_STEPS == 0:  # on all ranks alike
                rounds.average()
    if rank == 0:
        sent = (rounds.exchange.sent - start) / rounds.round
        whole = sum(p.numel() * p.element_size() for p in model.parameters())
        print(f"accuracy {accuracy(model, test):.3f}, {whole / sent:.0f} times fewer bytes a round")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
