"""The package is light: measured in a fresh interpreter, on top of torch and numpy."""

import json
import subprocess
import sys

PROBE = """
import json, sys, time
import numpy, torch
before = set(sys.modules)
seconds = []
for _ in range(3):  # the first import may compile, and the machine may be busy
    for name in set(sys.modules) - before:
        del sys.modules[name]
    start = time.process_time()
    import bateleur.cudagraph
    seconds.append(time.process_time() - start)
print(json.dumps([min(seconds), sorted(set(sys.modules) - before)]))
"""


def test_import_weight() -> None:
    seconds, new = json.loads(subprocess.check_output([sys.executable, "-c", PROBE]))
    assert "bateleur.cudagraph" in new
    assert seconds < 0.1
    assert len(new) < 40, new
    assert not any(name.split(".")[0] in {"triton", "transformers"} for name in new)
