"""A Lightning Fabric loop: Fabric starts the processes and feeds them, isgq synchronises the model.

    python examples/fabric_loop.py

Needs the extra: pip install '.[examples]'
"""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

import isgq
from task import accuracy, network, points


def main() -> None:
    """Train as one of Fabric's processes."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    train, test = points()
    # Not fabric.setup: that would wrap the model in DistributedDataParallel, which sends whole gradients.
    model = fabric.to_device(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = fabric.setup_dataloaders(DataLoader(train, batch_size=32, shuffle=True))
    session = isgq.instrument(model)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            with fabric.autocast():  # the precision that Fabric was asked for
                loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    fabric.print(f"accuracy {accuracy(model, test):.3f}, {session.traffic.compression:.0f} times fewer bytes sent")
    session.close()


if __name__ == "__main__":
    main()
