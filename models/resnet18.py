"""ResNet-18 (He, Zhang, Ren and Sun 2016) for small images: a 3 x 3 stem without pooling, as is usual on CIFAR-10."""

from torch import Tensor, nn

from models.shape import Shape, require

_STAGES = (1, 2, 4, 8)  # times the width; every stage but the first halves the sides


class Block(nn.Module):
    """[b, i, h, w] -> [b, o, h / stride, w / stride]: two convolutions beside a shortcut.

    Args:
        i: channels in.
        o: channels out.
        stride: of the first convolution and of the shortcut.
    """

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_convolution(i, o, 3, stride), nn.ReLU(), *_convolution(o, o, 3))
        self.shortcut = nn.Sequential(*_convolution(i, o, 1, stride)) if (i, stride) != (o, 1) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Their sum, rectified."""
        y: Tensor = self.body(x) + self.shortcut(x)
        return y.relu()


def resnet18(classes: int, in_shape: Shape, *, width: int = 64) -> nn.Sequential:
    """[b, c, h, w] -> [b, classes].

    Args:
        classes: number of classes.
        in_shape: (c, h, w), at least 8 x 8.
        width: channels of the first stage; the paper's 64 makes 11 million parameters.

    Raises:
        ModelError: images smaller than 8 x 8.
    """
    c, h, w = in_shape
    require("resnet18", in_shape, "at least 8 x 8 pixels", min(h, w) >= 8)
    blocks: list[nn.Module] = []
    i = width
    for stage, factor in enumerate(_STAGES):
        o = factor * width
        blocks += [Block(i, o, stride=2 if stage else 1), Block(o, o, stride=1)]
        i = o
    stem = [*_convolution(c, width, 3), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, classes))


def _convolution(i: int, o: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(i, o, size, stride=stride, padding=size // 2, bias=False), nn.BatchNorm2d(o)
