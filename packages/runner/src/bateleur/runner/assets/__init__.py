"""The model that comes with this package, and the draft head made for it."""

from pathlib import Path

_HERE = Path(__file__).parent


def shipped_model() -> Path:
    """The folder of the model."""
    return _HERE / "model"


def shipped_draft() -> Path:
    """The folder of its draft head."""
    return _HERE / "draft"
