"""Studies: grids of runs read from a file, done one after another or in parallel, with
one table.
"""
