"""How the metrics of a run are shown: while it trains, in its report, and two runs over each other."""
