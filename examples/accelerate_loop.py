"""A Hugging Face accelerate loop: accelerate prepares all but the model, which isgq synchronises.

    accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py

Needs the extra: pip install '.[examples]'
"""

from contextlib import nullcontext

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import isgq
from task import accuracy, network, points


def main() -> None:
    """Train as one of the launcher's processes."""
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    train, test = points()
    model = network().to(accelerator.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    # Not the model: accelerate would wrap it in DistributedDataParallel, which sends whole gradients.
    loader, optimizer = accelerator.prepare(DataLoader(train, batch_size=16, shuffle=True), optimizer)
    session = isgq.instrument(model)
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate():
                loss = nn.functional.cross_entropy(model(x), y)
                with nullcontext() if accelerator.sync_gradients else session.no_sync():
                    accelerator.backward(loss)
                optimizer.step()  # does nothing while gradients accumulate, as zero_grad
                optimizer.zero_grad()
    compression = session.traffic.compression
    accelerator.print(f"accuracy {accuracy(model, test):.3f}, {compression:.0f} times fewer bytes sent")
    session.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
