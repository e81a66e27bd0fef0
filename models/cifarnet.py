"""CifarNet, the network of TensorFlow's CIFAR-10 tutorial: 24 x 24 crops, dense part 2304-384-192-10.

The tutorial trains on random crops. Here every image, in training too, is cut to its centre, so that a run is a
function of its seed alone.
"""

from torch import Tensor, nn

from models.shape import Shape, require

CROP = 24


class CenterCrop(nn.Module):
    """[b, c, h, w] -> [b, c, size, size], the middle; odd margins leave one more pixel at the bottom and right."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """A view; no copy."""
        top, left = ((side - self.size) // 2 for side in x.shape[-2:])
        return x[..., top : top + self.size, left : left + self.size]

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return str(self.size)


def cifarnet(classes: int, in_shape: Shape) -> nn.Sequential:
    """[b, c, h, w] -> [b, classes]: conv 5x5x64, pool, LRN, conv 5x5x64, LRN, pool, linear 384, linear 192.

    Args:
        classes: number of classes.
        in_shape: (c, h, w), at least 24 x 24.

    Raises:
        ModelError: images smaller than the crop.
    """
    c, h, w = in_shape
    require("cifarnet", in_shape, f"at least {CROP} x {CROP} pixels", min(h, w) >= CROP)
    return nn.Sequential(
        CenterCrop(CROP),
        *(nn.Conv2d(c, 64, 5, padding=2), nn.ReLU(), _pool(), _normalize()),
        *(nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), _normalize(), _pool()),
        nn.Flatten(),
        *(nn.Linear(64 * 6 * 6, 384), nn.ReLU()),
        *(nn.Linear(384, 192), nn.ReLU()),
        nn.Linear(192, classes),
    )


def _pool() -> nn.Module:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)  # the last window hangs over the edge: 24 -> 12 -> 6


def _normalize() -> nn.Module:
    return nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)  # torch divides alpha by the size, 9
