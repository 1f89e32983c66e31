"""Importing the package loads few modules. The test counts modules, because times depend on the machine."""

from collections.abc import Callable


def test_import_weight(modules_of: Callable[[str], list[str]]) -> None:
    new = modules_of("cudagraph")
    assert "bateleur.cudagraph" in new
    assert len(new) < 40, new
    assert not any(name.split(".")[0] in {"triton", "transformers"} for name in new)
