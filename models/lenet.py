"""The LeNet of the experiments, wider than LeCun's: two convolutions, then 3136-512-10 on 28 x 28 digits."""

from torch import nn

from models.shape import Shape, require


def lenet(classes: int, in_shape: Shape) -> nn.Sequential:
    """[b, c, h, w] -> [b, classes]: conv 5x5x32, pool, conv 5x5x64, pool, linear 512.

    Args:
        classes: number of classes.
        in_shape: (c, h, w), at least 4 x 4; convolutions keep the size, each pool halves it, rounding down.

    Raises:
        ModelError: images smaller than 4 x 4.
    """
    c, h, w = in_shape
    require("lenet", in_shape, "at least 4 x 4 pixels", min(h, w) >= 4)
    return nn.Sequential(
        *(nn.Conv2d(c, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(64 * (h // 4) * (w // 4), 512), nn.ReLU()),
        nn.Linear(512, classes),
    )
