"""The package is light: what it loads on top of torch and numpy is counted, since seconds are the machine's."""

from collections.abc import Callable


def test_import_weight(modules_of: Callable[[str], list[str]]) -> None:
    new = modules_of("eagle")
    assert "bateleur.eagle" in new
    assert len(new) < 43, new
    assert not any(name.split(".")[0] in {"triton", "transformers"} for name in new)
