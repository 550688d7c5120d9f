"""`python -m lex_hf` is the command line."""

from .cli.app import main

main()
