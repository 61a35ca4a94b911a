"""How what an automatic search chose is shown: as text, and as HTML without script."""
