"""IPython front end: magics, parsing of their lines, running of cells, and display of results."""
