"""Code in a process of its own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def run_without_lex_hf(code: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process where `import lex_hf` fails, whatever is installed."""
    guard = """
    import sys

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "lex_hf":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Absent())
    """
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    source = textwrap.dedent(guard) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", source],
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
