"""The traced step as data, once for everybody."""
