"""The tables and figures of the two papers, made again at the scale that a machine allows, and tiny experiments.

`experiment` is the engine: it trains the models that are missing (`models`) and measures them (`measuring`, on the
texts of `corpora`). `running` makes a table of a paper with it: `tables` says what each is, `presets` at which scales,
`published` holds the printed figures, `statements` compares with them, and `report` turns the record into text and
pictures. `everything` makes all of them, and `summary` a page about them. `extrapolation` compares position schemes
with the same engine; `recall` is a study of its own; `demo` tells the story of one tiny model (`tiny`).
"""
