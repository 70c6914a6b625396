"""The version, by itself: building the package reads it without importing the rest."""

__version__ = "0.1.0"
