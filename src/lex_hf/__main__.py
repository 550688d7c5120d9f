"""`python -m lex_hf` is the command line."""

from .cli import main

main()
