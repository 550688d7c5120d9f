"""Code in a process where lex_hf cannot be imported."""

import os
import subprocess
import textwrap
from pathlib import Path

from helpers.forks import LIBRARIES

# Whatever is installed. The server that forks the process has not imported what could know lex_hf either.
WITHOUT_LEX_HF = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "lex_hf":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

assert not {"lex_hf", "transformers", "huggingface_hub"}.intersection(sys.modules)
sys.meta_path.insert(0, Absent())
"""


def run_without_lex_hf(code: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process where `import lex_hf` fails, whatever is installed."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return LIBRARIES.run("-c", WITHOUT_LEX_HF + textwrap.dedent(code), env=environment)
