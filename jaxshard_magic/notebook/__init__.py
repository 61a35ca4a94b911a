"""Everything that knows IPython: the magics, their lines, the cells they run, and how results are shown."""
