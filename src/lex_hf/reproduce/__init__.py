"""The tables and figures of the two papers, made again at the scale that a machine allows.

`tables` says what each table is, `published` holds the printed figures, `presets` the scales. `running` trains what is
missing (`models`), measures it (`measuring`, on the texts of `corpora`), compares it with the paper (`statements`) and
writes a record, which `report` turns into text and pictures.
"""
