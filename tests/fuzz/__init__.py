"""Random train steps, run plain and sharded: `run.py` is the command, `programs.py` says what a program is."""
