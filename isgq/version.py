"""The version of the package, in one place that needs no import of torch."""

__version__ = "0.1.0"
