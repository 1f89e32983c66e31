"""Modules that importing the package loads in addition to torch and numpy."""

from collections.abc import Callable


def test_import_adds_little_to_torch_and_numpy(modules_of: Callable[[str], list[str]]) -> None:
    new = modules_of("metadata")
    assert len(new) < 40, new
    assert "triton" not in new
    assert "bateleur.metadata.ops" not in new, "operators are defined when a backend is asked for"
