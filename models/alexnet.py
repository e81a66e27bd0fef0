"""AlexNet (Krizhevsky, Sutskever and Hinton 2012) with its two groups and LRN; dense part 9216-4096-4096-1000."""

from torch import nn

from models.shape import Shape, require


def alexnet(classes: int, in_shape: Shape, *, dropout: float = 0.0) -> nn.Sequential:
    """[b, c, h, w] -> [b, classes].

    Args:
        classes: number of classes.
        in_shape: (c, h, w), 224 x 224 or 227 x 227.
        dropout: probability of zeroing an input of the two first dense layers; the paper has 0.5. Any value but 0 draws
            from torch's global generator during training.

    Raises:
        ModelError: images of another size.
    """
    c, h, w = in_shape
    require("alexnet", in_shape, "224 x 224 or 227 x 227 pixels", h == w and h in {224, 227})
    return nn.Sequential(
        *(nn.Conv2d(c, 96, 11, stride=4, padding=2), nn.ReLU(), _normalize(), nn.MaxPool2d(3, stride=2)),
        *(nn.Conv2d(96, 256, 5, padding=2, groups=2), nn.ReLU(), _normalize(), nn.MaxPool2d(3, stride=2)),
        *(nn.Conv2d(256, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 384, 3, padding=1, groups=2), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1, groups=2), nn.ReLU(), nn.MaxPool2d(3, stride=2)),
        nn.Flatten(),
        *(nn.Dropout(dropout), nn.Linear(256 * 6 * 6, 4096), nn.ReLU()),
        *(nn.Dropout(dropout), nn.Linear(4096, 4096), nn.ReLU()),
        nn.Linear(4096, classes),
    )


def _normalize() -> nn.Module:
    return nn.LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0)  # the paper's alpha is 1e-4; torch divides by the size
