"""Communication-efficient distributed training: quantize the factors of the gradient, not the gradient."""

import lazy_loader

# the names are listed in __init__.pyi; importing isgq itself takes no time
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
