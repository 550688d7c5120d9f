"""The Hub: what of a folder is uploaded, and model cards from records."""

from lex_hf.lazy import exports

__getattr__, __dir__ = exports(
    __name__,
    dict.fromkeys(("FolderFile", "check_push", "examine_folder", "files_to_push", "push_folder"), "push"),
)
