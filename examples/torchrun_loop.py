"""A plain loop under torchrun: isgq is one line of it.

    torchrun --nproc-per-node 2 examples/torchrun_loop.py

Prints which way each parameter takes, the accuracy, and how many bytes that saved.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import isgq
from task import accuracy, network, points


def main() -> None:
    """Train as one of torchrun's processes."""
    torch.manual_seed(0)
    dist.init_process_group("gloo")  # with GPUs: "nccl", and model, x and y on this rank's
    train, test = points()
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session = isgq.instrument(model)  # after init_process_group; all ranks now have rank 0's parameters
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()  # when it returns, p.grad is the mean over all ranks
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(session.plan)
        print(f"accuracy {accuracy(model, test):.3f}, {session.traffic.compression:.0f} times fewer bytes sent")
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
